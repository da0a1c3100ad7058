"""What a chat request means, in all the forms that harnesses send."""

from __future__ import annotations

import json
from typing import Any

import pytest

from polarq_proxy.call import ModelCall
from polarq_proxy.dialects.base import NativeRequest
from polarq_proxy.dialects.openai_chat import OpenAIChatDialect
from polarq_proxy.faults import CallFault, FaultKind

DIALECT = OpenAIChatDialect()
HELLO: list[dict[str, Any]] = [{"role": "user", "content": "hello"}]
PIXEL = "data:image/png;base64,iVBORw0KGgo="
PICTURE = {"type": "image_url", "image_url": {"url": PIXEL}}
FUNCTION = {"name": "f", "description": "does", "parameters": {"type": "object"}}
TOOL = {"type": "function", "function": FUNCTION}
CALL = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": '{"a":  1}'}}


def parsed(body: Any) -> ModelCall:
    match = DIALECT.routes[0].match("POST", "chat/completions")
    assert match is not None
    return DIALECT.parse(NativeRequest("chat/completions", {}, {}, json.dumps(body).encode()), match)


def asked(*messages: Any, **fields: Any) -> ModelCall:
    return parsed({"model": "asked", "messages": list(messages) or HELLO, **fields})


@pytest.mark.parametrize(
    ("given", "meant"),
    [
        ({"role": "developer", "content": "x"}, {"role": "system", "content": "x"}),
        ({"role": "user", "content": None}, {"role": "user", "content": ""}),
        ({"role": "system"}, {"role": "system", "content": ""}),
        ({"content": "x"}, {"role": "user", "content": "x"}),
        ({"role": "user", "content": "x", "name": "Ann"}, {"role": "user", "content": "x", "name": "Ann"}),
        ({"role": "user", "content": "x", "name": None, "id": 7}, {"role": "user", "content": "x"}),
        ({"role": "user", "content": [], "cache_control": {"type": "ephemeral"}}, {"role": "user", "content": ""}),
        (
            {"role": "system", "content": [{"type": "text", "text": "x", "cache_control": {"type": "ephemeral"}}]},
            {"role": "system", "content": [{"type": "text", "text": "x"}]},
        ),
        (
            {"role": "user", "content": ["a", {"type": "input_text", "text": "b"}, {"text": "c"}]},
            {"role": "user", "content": [{"type": "text", "text": text} for text in "abc"]},
        ),
        (
            {"role": "user", "content": {"type": "text", "text": "x"}},
            {"role": "user", "content": [{"type": "text", "text": "x"}]},
        ),
        ({"role": "assistant"}, {"role": "assistant", "content": ""}),
        ({"role": "assistant", "content": None, "refusal": "no"}, {"role": "assistant", "content": "no"}),
        (
            {"role": "assistant", "content": "x", "audio": None, "annotations": [], "function_call": None,
             "tool_calls": None, "refusal": None},
            {"role": "assistant", "content": "x"},
        ),
        ({"role": "assistant", "content": "x", "tool_calls": []}, {"role": "assistant", "content": "x"}),
        ({"role": "assistant", "tool_calls": [CALL]}, {"role": "assistant", "content": None, "tool_calls": [CALL]}),
        (
            {"role": "assistant", "content": "", "tool_calls": [{**CALL, "index": 0, "cache_control": {}}]},
            {"role": "assistant", "content": "", "tool_calls": [CALL]},
        ),
    ],
)  # fmt: skip
def test_a_message_means_the_same_in_every_form(given: Any, meant: Any) -> None:
    assert asked(given).messages == [meant]


@pytest.mark.parametrize(
    "fields",
    [
        {"reasoning_content": "hm"},
        {"reasoning": "hm"},
        {"reasoning_content": "hm", "reasoning": "other"},
        {"reasoning_content": None, "reasoning": "hm"},
        {"content": [{"type": "thinking", "thinking": "hm"}, {"type": "text", "text": "x"}]},
    ],
)
def test_thinking_is_taken_back_under_every_name(fields: dict[str, Any]) -> None:
    [message] = asked({"role": "assistant", "content": "x", **fields}).messages
    assert message["reasoning_content"] == "hm"
    assert "reasoning" not in message
    assert message["content"] in ("x", [{"type": "text", "text": "x"}])


@pytest.mark.parametrize(
    ("call", "arguments"),
    [
        ({"function": {"name": "f", "arguments": '{"a":  1}'}}, '{"a":  1}'),
        ({"function": {"name": "f", "arguments": '{"a": '}}, '{"a": '),
        ({"function": {"name": "f", "arguments": {"a": 1}}}, '{"a":1}'),
        ({"function": {"name": "f", "arguments": None}}, "{}"),
        ({"function": {"name": "f"}}, "{}"),
        ({"type": "custom", "custom": {"name": "f", "input": "ls"}}, '{"input":"ls"}'),
    ],
)
def test_arguments_stay_as_they_were_written(call: dict[str, Any], arguments: str) -> None:
    [message] = asked({"role": "assistant", "tool_calls": [call]}).messages
    assert message["tool_calls"] == [
        {"id": "call_0", "type": "function", "function": {"name": "f", "arguments": arguments}}
    ]


def test_calls_and_results_in_the_form_of_2023_are_calls_and_results() -> None:
    call = asked(
        *HELLO,
        {"role": "assistant", "content": None, "function_call": {"name": "f", "arguments": "{}"}},
        {"role": "function", "name": "f", "content": "done"},
        {"role": "assistant", "content": None, "function_call": {"name": "f", "arguments": "{}"}},
        {"role": "function", "name": "f", "content": "again"},
        functions=[FUNCTION],
        function_call="auto",
    )
    assert [message["role"] for message in call.messages] == ["user", "assistant", "tool", "assistant", "tool"]
    ids = [message["tool_calls"][0]["id"] for message in call.messages if message["role"] == "assistant"]
    assert ids == [message["tool_call_id"] for message in call.messages if message["role"] == "tool"]
    assert len(set(ids)) == 2
    assert call.tools == [TOOL]
    assert call.options == {"tool_choice": "auto"}
    assert call.native.functions


def test_results_that_do_not_say_of_what_answer_by_name_and_order() -> None:
    calls = [{"id": name, "function": {"name": name, "arguments": "{}"}} for name in ("f", "g", "h")]
    call = asked(
        {"role": "assistant", "tool_calls": calls},
        {"role": "tool", "name": "g", "content": "of g"},
        {"role": "tool", "content": "of f"},
        {"role": "tool", "tool_call_id": "h", "content": "of h"},
    )
    assert [message["tool_call_id"] for message in call.messages[1:]] == ["g", "f", "h"]


@pytest.mark.parametrize("role", ["user", "tool", "system", "assistant"])
def test_pictures_reach_the_engine_beside_the_text(role: str) -> None:
    parts = [{"type": "text", "text": "shot"}, {**PICTURE, "cache_control": {"type": "ephemeral"}}]
    [message] = asked({"role": role, "tool_call_id": "c1", "content": parts}).messages
    assert message["content"] == [{"type": "text", "text": "shot"}, PICTURE]


@pytest.mark.parametrize(
    ("part", "shown"),
    [
        ({"type": "image_url", "image_url": PIXEL}, {"url": PIXEL}),
        ({"type": "input_image", "image_url": PIXEL, "detail": "low"}, {"url": PIXEL, "detail": "low"}),
        (
            {"type": "image_url", "image_url": {"url": PIXEL, "detail": "high", "x": 1}},
            {"url": PIXEL, "detail": "high"},
        ),
    ],
)
def test_a_picture_may_be_spelt_in_several_ways(part: Any, shown: Any) -> None:
    [message] = asked({"role": "user", "content": [part]}).messages
    assert message["content"] == [{"type": "image_url", "image_url": shown}]


@pytest.mark.parametrize(
    "part",
    [
        {"type": "image_url", "image_url": {"url": "https://example.com/a.png"}},
        {"type": "image_url", "image_url": {"url": "file:///etc/passwd"}},
        {"type": "input_image", "file_id": "file-1"},
        {"type": "image_url", "image_url": {}},
        {"type": "file", "file": {"file_id": "file-1"}},
        {"type": "input_audio", "input_audio": {"data": "AAAA", "format": "wav"}},
        {"type": "video_url", "video_url": {"url": "data:video/mp4;base64,AAAA"}},
        {"type": "hologram"},
        {"type": 7},
        7,
    ],
)
@pytest.mark.parametrize("role", ["user", "tool"])
def test_a_part_that_cannot_be_shown_is_refused_by_name(part: Any, role: str) -> None:
    with pytest.raises(CallFault) as caught:
        asked(*HELLO, {"role": role, "tool_call_id": "c", "content": [{"type": "text", "text": "a"}, part]})
    assert caught.value.kind is FaultKind.BAD_REQUEST
    assert caught.value.param == "messages[1].content[1]"
    assert "messages[1].content[1]" in caught.value.message


def test_content_of_another_kind_is_refused_by_name() -> None:
    with pytest.raises(CallFault) as caught:
        asked({"role": "user", "content": 7})
    assert caught.value.param == "messages[0].content"


@pytest.mark.parametrize(
    ("tools", "meant"),
    [
        ([{**TOOL, "cache_control": {}}, {"type": "web_search"}, {"type": "mcp", "server_label": "x"}], [TOOL]),
        ([{"type": "function", "function": {**FUNCTION, "cache_control": {}, "strict": None}}], [TOOL]),
        ([{"type": "function", **FUNCTION}], [TOOL]),
        ([{"type": "web_search"}], None),
        ([], None),
        ([{"type": "function", "function": {"name": ""}}], None),
        ([{"type": "function", "function": {**FUNCTION, "strict": True}}],
         [{"type": "function", "function": {**FUNCTION, "strict": True}}]),
    ],
)  # fmt: skip
def test_tools_that_the_model_can_call_are_offered(tools: Any, meant: Any) -> None:
    assert asked(tools=tools).tools == meant


def test_a_parameter_that_is_called_like_a_cache_mark_stays() -> None:
    parameters = {"type": "object", "properties": {"cache_control": {"type": "string"}}}
    tool = {"type": "function", "function": {"name": "f", "parameters": parameters}}
    assert asked(tools=[tool]).tools == [tool]


def test_a_tool_of_free_text_is_a_function_of_one_text() -> None:
    [tool] = asked(tools=[{"type": "custom", "custom": {"name": "patch", "description": "edits"}}]).tools or []
    assert (tool["function"]["name"], tool["function"]["description"]) == ("patch", "edits")
    assert list(tool["function"]["parameters"]["properties"]) == ["input"]


@pytest.mark.parametrize(
    ("choice", "sent"),
    [
        ("auto", "auto"),
        ("required", "required"),
        ("any", "required"),
        ("none", "none"),
        ("whatever", None),
        ({"type": "function", "function": {"name": "f"}}, {"type": "function", "function": {"name": "f"}}),
        ({"type": "function", "name": "f"}, {"type": "function", "function": {"name": "f"}}),
        ({"type": "tool", "name": "f"}, {"type": "function", "function": {"name": "f"}}),
        ({"type": "function", "function": {"name": "unknown"}}, None),
        ({"type": "auto"}, "auto"),
        ({"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": [TOOL]}}, "required"),
        (7, None),
    ],
)
def test_a_tool_choice_is_said_in_the_one_form_of_engines(choice: Any, sent: Any) -> None:
    assert asked(tools=[TOOL], tool_choice=choice).options.get("tool_choice") == sent


def test_allowed_tools_are_all_that_is_offered() -> None:
    other = {"type": "function", "function": {"name": "g"}}
    choice = {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": [{"type": "function", "name": "g"}]}}
    assert asked(tools=[TOOL, other], tool_choice=choice).tools == [other]


def test_fields_for_a_vendors_service_end_here() -> None:
    call = asked(
        store=True, metadata={"a": 1}, prompt_cache_key="k", service_tier="auto", session_id="s", safety_identifier="x",
        user="u", verbosity="low", modalities=["text"], prediction={}, web_search_options={}, audio={},
        kv_transfer_params={"prompt_token_ids": [1]}, echo=True, include_reasoning=False, logprobs=False,
        return_token_ids=True, stream_options={"include_usage": True}, unheard_of=[1], temperature=0.5, stop=None,
    )  # fmt: skip
    assert call.options == {"temperature": 0.5}
    assert (call.wants_ids, call.wants_usage) == (True, True)


def test_what_engines_understand_goes_to_them() -> None:
    options = {
        "temperature": 0.5, "top_p": 0.9, "max_tokens": 5, "n": 2, "seed": 1, "stop": ["x"], "presence_penalty": 0.1,
        "frequency_penalty": 0.1, "logit_bias": {"1": 2}, "top_k": 5, "min_p": 0.1, "repetition_penalty": 1.1,
        "stop_token_ids": [1], "ignore_eos": True, "chat_template_kwargs": {"enable_thinking": False},
        "response_format": {"type": "json_object"}, "structured_outputs": {"regex": "a"}, "reasoning_effort": "high",
    }  # fmt: skip
    assert asked(**options).options == options


@pytest.mark.parametrize(
    ("fields", "options"),
    [
        ({"max_completion_tokens": 7}, {"max_tokens": 7}),
        ({"max_completion_tokens": 7, "max_tokens": 9}, {"max_tokens": 7}),
        ({"max_completion_tokens": None, "max_tokens": 9}, {"max_tokens": 9}),
        ({"reasoning_effort": "minimal"}, {"reasoning_effort": "low"}),
        ({"reasoning_effort": "xhigh"}, {"reasoning_effort": "high"}),
        ({"reasoning_effort": "unheard_of"}, {}),
        ({"reasoning_effort": {"a": 1}}, {}),
        ({"logprobs": True, "top_logprobs": 50}, {"top_logprobs": 20}),
        ({"top_logprobs": 5}, {}),
        ({"parallel_tool_calls": False}, {}),
        ({"parallel_tool_calls": False, "tools": [TOOL]}, {"parallel_tool_calls": False}),
    ],
)
def test_settings_have_one_name_and_values_that_engines_take(fields: Any, options: Any) -> None:
    assert asked(**fields).options == options
