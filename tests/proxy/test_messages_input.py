"""What a Messages request says, as the chat messages that an engine gets."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from polarq_proxy.dialects.messages_input import TOOL_ERROR
from polarq_proxy.faults import CallFault, FaultKind

from .messages_client import DIALECT, asked, native, parsed

PIXEL = "iVBORw0KGgo="
IMAGE = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": PIXEL}}
SHOWN_IMAGE = {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{PIXEL}"}}
USE = {"type": "tool_use", "id": "t1", "name": "bash", "input": {"command": "ls"}}
CALL = {"id": "t1", "type": "function", "function": {"name": "bash", "arguments": '{"command": "ls"}'}}


def text(value: str, **fields: Any) -> dict[str, Any]:
    return {"type": "text", "text": value, **fields}


def user(*blocks: Any) -> dict[str, Any]:
    return {"role": "user", "content": list(blocks)}


def result(content: Any, **fields: Any) -> dict[str, Any]:
    return {"type": "tool_result", "tool_use_id": "t1", "content": content, **fields}


def chat(*messages: Any, **fields: Any) -> list[dict[str, Any]]:
    return asked(list(messages), **fields).messages


def refusal(*messages: Any, **fields: Any) -> CallFault:
    with pytest.raises(CallFault) as caught:
        asked(list(messages), **fields)
    assert caught.value.kind is FaultKind.BAD_REQUEST
    return caught.value


def test_a_string_and_a_list_of_one_text_block_are_the_same() -> None:
    plain = chat({"role": "user", "content": "hi"}, {"role": "assistant", "content": "yo"}, system="be brief")
    blocks = chat(
        user(text("hi", cache_control={"type": "ephemeral"}, citations=None)),
        {"role": "assistant", "content": [text("yo")], "output_config": {"effort": "low"}},
        system=[text("be brief", cache_control={"type": "ephemeral"})],
    )
    assert plain == blocks
    assert plain == [
        {"role": "system", "content": "be brief"},
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": "yo"},
    ]


def test_the_billing_header_never_reaches_the_prompt() -> None:
    header = "x-anthropic-billing-header: cc_version=2.1; cch=%s;"
    prompts = [chat(user("hi"), system=[text(header % digest), text("You help.")]) for digest in ("aa", "bb")]
    assert prompts[0] == prompts[1]
    assert prompts[0][0] == {"role": "system", "content": "You help."}
    assert chat(user("hi"), system=header % "aa") == [{"role": "user", "content": "hi"}]
    assert chat(user("hi"), system=header % "aa" + "\nYou help.")[0]["content"] == "You help."


def test_system_messages_before_the_first_answer_join_the_leading_one() -> None:
    messages = [user("hi"), {"role": "system", "content": [text("here"), text("now")]}]
    assert chat(*messages, system=[text("a"), text("b")]) == [
        {"role": "system", "content": "a\n\nb\n\nhere\nnow"},
        {"role": "user", "content": "hi"},
    ]


def test_later_system_messages_stay_in_their_place_as_user_messages() -> None:
    messages = [user("hi"), {"role": "assistant", "content": "yo"}, {"role": "system", "content": "hurry"}, user("go")]
    before = chat(*messages[:2])
    assert chat(*messages) == [
        *before,
        {"role": "user", "content": "<system>\nhurry\n</system>"},
        {"role": "user", "content": "go"},
    ]


def test_consecutive_messages_of_one_role_stay_apart() -> None:
    assert chat(user("a"), user("b")) == [{"role": "user", "content": "a"}, {"role": "user", "content": "b"}]


def test_results_of_tools_come_before_the_text_of_their_turn() -> None:
    messages = chat(
        user("hi"),
        {"role": "assistant", "content": [text("Let me look."), USE, {**USE, "id": "t2"}]},
        user(text("and hurry"), result("a"), {**result([text("b"), text("c")]), "tool_use_id": "t2"}),
    )
    assert messages[1:] == [
        {"role": "assistant", "content": "Let me look.", "tool_calls": [CALL, {**CALL, "id": "t2"}]},
        {"role": "tool", "tool_call_id": "t1", "content": "a"},
        {"role": "tool", "tool_call_id": "t2", "content": "b\nc"},
        {"role": "user", "content": "and hurry"},
    ]


def test_a_result_alone_makes_no_user_message() -> None:
    assert [message["role"] for message in chat(user(result(None)), user(result([])))] == ["tool", "tool"]


def test_an_error_of_a_tool_says_so() -> None:
    [message] = chat(user(result("no such file", is_error=True)))
    assert message["content"] == f"{TOOL_ERROR}\nno such file"
    assert chat(user(result("fine", is_error=False)))[0]["content"] == "fine"


def test_a_picture_in_a_result_stays_a_picture_beside_its_text() -> None:
    [beside] = chat(user(result([text("shot"), IMAGE, text("after")])))
    assert beside["content"] == [text("shot"), SHOWN_IMAGE, text("after")]
    [alone] = chat(user(result([IMAGE])))
    assert (alone["role"], alone["content"]) == ("tool", [SHOWN_IMAGE])


def test_pictures_of_a_user_stay_where_they_were() -> None:
    assert chat(user(text("one"), IMAGE, text("two")))[0]["content"] == [text("one"), SHOWN_IMAGE, text("two")]
    inline = {"type": "image", "source": {"type": "url", "url": SHOWN_IMAGE["image_url"]["url"]}}  # type: ignore[index]
    assert chat(user(inline))[0]["content"] == [SHOWN_IMAGE]


@pytest.mark.parametrize(
    "source",
    [
        {"type": "url", "url": "https://pictures.invalid/a.png"},
        {"type": "file", "file_id": "file_1"},
        {"type": "base64", "media_type": "image/png"},
        {"type": "base64", "media_type": "image/png", "data": ""},
        None,
    ],
)
def test_a_picture_that_would_have_to_be_fetched_is_refused_by_its_place(source: Any) -> None:
    fault = refusal(user("hi"), user(result([text("shot"), {"type": "image", "source": source}])))
    assert fault.param == "messages.1.content.0.content.1.source"
    assert fault.message.startswith(f"{fault.param}: ")
    assert refusal(user({"type": "image", "source": source})).param == "messages.0.content.0.source"


def test_documents_of_text_are_read_and_others_refused() -> None:
    notes = {"type": "document", "title": "Notes", "source": {"type": "text", "media_type": "text/plain", "data": "x"}}
    parts = {"type": "document", "source": {"type": "content", "content": [text("y"), IMAGE]}}
    assert chat(user(notes))[0]["content"] == "Notes\nx"
    assert chat(user(parts))[0]["content"] == [text("y"), SHOWN_IMAGE]
    fault = refusal(user({"type": "document", "source": {"type": "base64", "media_type": "application/pdf"}}))
    assert fault.param == "messages.0.content.0.source"
    assert "document of type 'base64'" in fault.message


def test_thinking_comes_back_as_reasoning_and_redacted_thinking_not_at_all() -> None:
    content = [
        {"type": "thinking", "thinking": "hm", "signature": "x"},
        {"type": "redacted_thinking", "data": "secret"},
        text("yo"),
        USE,
    ]
    assert chat(user("hi"), {"role": "assistant", "content": content})[1] == {
        "role": "assistant",
        "content": "yo",
        "reasoning_content": "hm",
        "tool_calls": [CALL],
    }


def test_blocks_without_a_chat_form_are_shown_as_their_json() -> None:
    use = {"type": "server_tool_use", "id": "s1", "name": "web_search", "input": {"query": "x"}}
    found = {
        "type": "web_search_tool_result",
        "tool_use_id": "s1",
        "content": [{"type": "web_search_result", "title": "T", "encrypted_content": "zzz", "page_age": None}],
        "cache_control": {"type": "ephemeral"},
    }
    [message] = chat({"role": "assistant", "content": [use, found, text("done")]}, user("go"))[:1]
    assert message["content"] == (
        '{"id": "s1", "input": {"query": "x"}, "name": "web_search", "type": "server_tool_use"}'
        '{"content": [{"title": "T", "type": "web_search_result"}], "tool_use_id": "s1",'
        ' "type": "web_search_tool_result"}done'
    )
    [shown] = chat(user(result([{"tool_name": "Grep", "type": "tool_reference"}])))
    assert shown["content"] == '{"tool_name": "Grep", "type": "tool_reference"}'
    assert chat(user({"type": ["odd"], "new": 1}))[0]["content"] == '{"new": 1, "type": ["odd"]}'


def test_empty_and_missing_contents_are_empty_messages() -> None:
    messages = chat({"role": "user"}, {"role": "assistant", "content": None}, user(), {"content": ""})
    assert messages == [
        {"role": "user", "content": ""},
        {"role": "assistant", "content": ""},
        {"role": "user", "content": ""},
        {"role": "user", "content": ""},
    ]


def test_a_last_message_of_the_assistant_is_gone_on_with() -> None:
    started = asked([*[user("hi")], {"role": "assistant", "content": "The answer is"}]).options
    assert (started["continue_final_message"], started["add_generation_prompt"]) == (True, False)
    for content in ([USE], "", []):
        assert "continue_final_message" not in asked([user("hi"), {"role": "assistant", "content": content}]).options


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, "messages"),
        ({"messages": []}, "messages"),
        ({"messages": "hi"}, "messages"),
        ({"messages": [1]}, "messages.0"),
        ({"messages": [{"role": "user", "content": 1}]}, "messages.0.content"),
        ({"messages": [{"role": "user", "content": [None]}]}, "messages.0.content.0"),
        ({"messages": [{"role": "user", "content": "x"}], "system": 1}, "system"),
        ({"messages": [{"role": "user", "content": "x"}], "max_tokens": 0}, "max_tokens"),
        ({"messages": [{"role": "user", "content": "x"}], "max_tokens": "9"}, "max_tokens"),
        ({"messages": [{"role": "user", "content": "x"}], "temperature": "hot"}, "temperature"),
        ({"messages": [{"role": "user", "content": "x"}], "stop_sequences": [1]}, "stop_sequences"),
    ],
)
def test_what_cannot_be_asked_is_refused_by_its_place(body: Any, param: str) -> None:
    with pytest.raises(CallFault) as caught:
        parsed(body)
    assert (caught.value.status, caught.value.param) == (400, param)


DEEP = b'{"messages":[{"role":"user","content":[{"type":"new","x":' + b"[" * 600 + b"]" * 600 + b"}]}]}"


@pytest.mark.parametrize("body", [b"", b"{", b"[]", b"\xff", b"[" * 100_000, DEEP])
def test_a_body_that_is_no_request_is_refused(body: bytes) -> None:
    with pytest.raises(CallFault) as caught:
        parsed(body)
    assert caught.value.status == 400


def test_sampling_is_passed_on_under_the_engines_names() -> None:
    call = asked(temperature=0, top_p=0.9, top_k=20, stop_sequences=["END", ""], seed=7, stream=True, max_tokens=9)
    expected = {"temperature": 0, "top_p": 0.9, "top_k": 20, "stop": ["END"], "seed": 7, "max_tokens": 9}
    assert (call.options, call.stream, call.model) == (expected, True, "asked")
    assert parsed({"messages": [user("hi")], "temperature": None, "stop_sequences": None, "tools": None}).options == {}


def test_what_steers_another_vendors_models_goes_nowhere() -> None:
    call = asked(
        metadata={"user_id": "u"},
        service_tier="auto",
        context_management={"edits": []},
        output_config={"effort": "high"},
        thinking={"type": "enabled", "budget_tokens": 7168, "display": "summarized"},
        mcp_servers=[],
        container="c",
        betas=["x"],
        speed="fast",
        something_new=1,
    )
    assert call.options == {"max_tokens": 64}


def test_thinking_is_switched_off_and_never_rationed() -> None:
    off = asked(thinking={"type": "disabled"}).options
    assert off["chat_template_kwargs"] == {"enable_thinking": False}
    own = asked(thinking={"type": "disabled"}, chat_template_kwargs={"x": 1, "enable_thinking": True}).options
    assert own["chat_template_kwargs"] == {"x": 1, "enable_thinking": True}
    for kind in ("enabled", "adaptive", "between_tools"):
        assert "chat_template_kwargs" not in asked(thinking={"type": kind, "budget_tokens": 2000}).options


def test_a_schema_for_the_answer_is_asked_of_the_engine() -> None:
    schema = {"type": "object", "properties": {"a": {"type": "string"}}}
    for fields in (
        {"output_format": {"type": "json_schema", "schema": schema}},
        {"output_config": {"effort": "low", "format": {"type": "json_schema", "schema": schema}}},
    ):
        assert asked(**fields).options["response_format"]["json_schema"]["schema"] == schema


TOOLS = [
    {"name": "bash", "type": "custom", "description": "runs", "input_schema": {"type": "object"}},
    {"name": "edit", "input_schema": {"type": "object"}, "eager_input_streaming": True, "defer_loading": True},
    {"name": "bare", "description": None},
    {"type": "bash_20250124", "name": "shell"},
    {"type": "text_editor_20250728", "name": "str_replace_based_edit_tool", "max_characters": 100},
    {"type": "computer_20251124", "name": "computer", "display_width_px": 80, "display_height_px": 60},
    {"type": "memory_20250818", "name": "memory"},
    {"type": "web_search_20250305", "name": "web_search", "max_uses": 5},
    {"type": "code_execution_20250825", "name": "code_execution"},
    {"type": "mcp_toolset", "mcp_server_name": "x"},
    {"type": "tool_search_tool_regex_20251119", "name": "tool_search_tool_regex"},
    "junk",
    {"input_schema": {}},
]


def test_tools_are_offered_where_they_have_a_meaning_and_left_out_elsewhere() -> None:
    tools = asked(tools=TOOLS).tools
    assert tools is not None
    functions = {tool["function"]["name"]: tool["function"] for tool in tools}
    assert list(functions) == ["bash", "edit", "bare", "shell", "str_replace_based_edit_tool", "computer", "memory"]
    assert functions["bash"] == {"name": "bash", "description": "runs", "parameters": {"type": "object"}}
    assert "80 x 60" in functions["computer"]["description"]
    assert set(functions["shell"]["parameters"]["properties"]) == {"command", "restart"}
    assert asked(tools=[TOOLS[7]]).tools is None
    assert asked(tools={"no": "list"}).tools is None


@pytest.mark.parametrize(
    ("choice", "options"),
    [
        ({"type": "auto"}, {"tool_choice": "auto"}),
        ({"type": "any"}, {"tool_choice": "required"}),
        ({"type": "none"}, {"tool_choice": "none"}),
        ({"type": "tool", "name": "bash"}, {"tool_choice": {"type": "function", "function": {"name": "bash"}}}),
        ({"type": "tool", "name": "web_search"}, {}),
        ({"type": "auto", "disable_parallel_tool_use": True}, {"tool_choice": "auto", "parallel_tool_calls": False}),
        ({"type": "new"}, {}),
        ({"type": []}, {}),
        (None, {}),
    ],
)
def test_the_choice_of_a_tool(choice: Any, options: dict[str, Any]) -> None:
    assert asked(tools=TOOLS, tool_choice=choice).options == {"max_tokens": 64, **options}
    assert asked(tool_choice=choice).options == {"max_tokens": 64}


def test_paths_and_headers_that_are_claimed() -> None:
    assert DIALECT.claims(native({}, "messages/batches"))
    assert DIALECT.claims(native({}, "models", {"anthropic-version": "2031-01-01"}))
    assert not DIALECT.claims(native({}, "chat/messages"))
    generate, count = DIALECT.routes
    assert generate.match("POST", "messages/count_tokens") is None
    assert count.match("POST", "messages/count_tokens") is not None


WORDS = st.sampled_from(
    ["type", "text", "role", "content", "user", "assistant", "system", "image", "source", "base64", "url", "data",
     "tool_use", "tool_result", "tool_use_id", "input", "name", "thinking", "document", "messages", "tools",
     "tool_choice", "max_tokens", "stop_sequences", "x-anthropic-billing-header", "search_result", "input_schema"]
)  # fmt: skip
LEAVES = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8) | WORDS
TREES = st.recursive(
    LEAVES,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(WORDS | st.text(max_size=4), inner, max_size=5),
    max_leaves=30,
)
BLOCKS = st.fixed_dictionaries({"type": WORDS}, optional=dict.fromkeys(("text", "source", "content", "input"), TREES))
MESSAGES = st.fixed_dictionaries(
    {"role": st.sampled_from(["user", "assistant", "system", "odd"]), "content": TREES | st.lists(BLOCKS, max_size=4)}
)
BODIES = TREES | st.fixed_dictionaries(
    {"messages": st.lists(MESSAGES, max_size=5)},
    optional=dict.fromkeys(
        ("system", "tools", "tool_choice", "thinking", "output_config", "stop_sequences", "temperature"), TREES
    ),
)


@settings(max_examples=400)
@given(BODIES)
def test_any_json_is_read_or_refused(body: Any) -> None:
    try:
        call = parsed(json.dumps(body).encode())
    except CallFault as fault:
        assert fault.status == 400
        DIALECT.fault(fault)
    else:
        assert all(set(message) >= {"role", "content"} for message in call.messages)
        assert not any(message["role"] == "system" for message in call.messages[1:])
