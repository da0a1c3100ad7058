"""Responses requests: what the model gets to read of every item and part that harnesses send."""

from __future__ import annotations

import base64
from typing import Any

import pytest

from polarq_proxy.dialects.responses_parts import seal
from polarq_proxy.faults import CallFault, FaultKind

from .responses_client import ANSWER_ID, asked, call_part, messages, parsed

PNG = "data:image/png;base64,iVBORw0KGgo="
USER: dict[str, Any] = {"role": "user", "content": "hi"}
CALL: dict[str, Any] = {"type": "function_call", "call_id": "c1", "name": "bash", "arguments": '{"x": 1}'}
RESULT: dict[str, Any] = {"type": "function_call_output", "call_id": "c1", "output": "done"}
CHAT_CALL = call_part("bash", '{"x": 1}')


def thought(text: str, **fields: Any) -> dict[str, Any]:
    return {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": text}], **fields}


def spoken(text: str, **fields: Any) -> dict[str, Any]:
    part = {"type": "output_text", "text": text, "annotations": []}
    return {"type": "message", "role": "assistant", "content": [part], **fields}


def own(kind: str, place: int, answer_id: str = ANSWER_ID) -> str:
    return f"{kind}_{answer_id}_{place}"


def refusal(*items: Any, **fields: Any) -> CallFault:
    with pytest.raises(CallFault) as caught:
        messages(*items, **fields)
    assert (caught.value.kind, caught.value.status) == (FaultKind.BAD_REQUEST, 400)
    return caught.value


def test_a_string_is_a_users_message() -> None:
    assert asked("hello").messages == [{"role": "user", "content": "hello"}]


def test_messages_may_be_easy_or_typed_and_roles_are_the_templates() -> None:
    assert messages(
        {"role": "developer", "content": "be good"},
        {"type": "message", "id": "msg_1", "role": "user", "content": [{"type": "input_text", "text": "hi"}]},
        {"role": "assistant", "content": "yes?"},
        {"role": "system", "content": "later"},
        {"type": "message", "role": "critic", "content": None},
    ) == [
        {"role": "system", "content": "be good"},
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": "yes?"},
        {"role": "system", "content": "later"},
        {"role": "user", "content": ""},
    ]


def test_instructions_and_the_messages_that_open_are_one_system_message() -> None:
    developer = {"role": "developer", "content": [{"type": "input_text", "text": part} for part in ("a", "b")]}
    assert messages({"role": "system", "content": "sys"}, developer, USER, instructions="first") == [
        {"role": "system", "content": "first\n\nsys\n\na\nb"},
        {"role": "user", "content": "hi"},
    ]


def test_one_answers_items_are_one_message() -> None:
    second = {**CALL, "call_id": "c2", "arguments": "{ }"}
    assert messages(USER, thought("hm"), spoken("let me see"), CALL, second, RESULT, {**RESULT, "call_id": "c2"}) == [
        {"role": "user", "content": "hi"},
        {
            "role": "assistant",
            "content": "let me see",
            "reasoning_content": "hm",
            "tool_calls": [CHAT_CALL, call_part("bash", "{ }", "c2")],
        },
        {"role": "tool", "tool_call_id": "c1", "content": "done"},
        {"role": "tool", "tool_call_id": "c2", "content": "done"},
    ]


def test_calls_without_words_have_null_content_and_thinking_alone_is_an_answer() -> None:
    assert messages(USER, CALL, RESULT, thought("hm"), USER)[1:] == [
        {"role": "assistant", "content": None, "tool_calls": [CHAT_CALL]},
        {"role": "tool", "tool_call_id": "c1", "content": "done"},
        {"role": "assistant", "content": "", "reasoning_content": "hm"},
        {"role": "user", "content": "hi"},
    ]


def test_without_ids_thinking_or_a_second_message_begins_another_answer() -> None:
    found = messages(USER, spoken("one"), spoken("two"), thought("hm"), spoken("three"))
    assert [message["content"] for message in found] == ["hi", "one", "two", "three"]
    assert found[3]["reasoning_content"] == "hm"


def test_words_after_calls_that_have_no_result_yet_belong_to_the_same_answer() -> None:
    [_, answer, _] = messages(USER, CALL, spoken("\n"), RESULT)
    assert answer == {"role": "assistant", "content": "\n", "tool_calls": [CHAT_CALL]}


def test_ids_tell_a_cut_answers_items_from_those_of_the_next() -> None:
    first, second = "a" * 24, "b" * 24
    cut = spoken("half", id=own("msg", 1, first))
    found = messages(USER, cut, {**CALL, "id": own("fc", 0, second)}, RESULT)
    assert found[1:3] == [
        {"role": "assistant", "content": "half"},
        {"role": "assistant", "content": None, "tool_calls": [CHAT_CALL]},
    ]


def test_ids_bring_calls_of_one_answer_together_across_results() -> None:
    later = {**CALL, "id": own("fc", 2), "call_id": "c2"}
    found = messages(
        USER, spoken("a", id=own("msg", 0)), {**CALL, "id": own("fc", 1)}, RESULT, later, {**RESULT, "call_id": "c2"}
    )
    assert [message["role"] for message in found] == ["user", "assistant", "tool", "tool"]
    assert [call["id"] for call in found[1]["tool_calls"]] == ["c1", "c2"]


def test_thinking_comes_back_from_wherever_the_harness_left_it() -> None:
    sealed = thought("ignored", encrypted_content=seal("von \U0001f9ea"))
    assert messages(USER, sealed)[1]["reasoning_content"] == "von \U0001f9ea"
    assert messages(USER, {**sealed, "content": None})[1]["reasoning_content"] == "von \U0001f9ea"
    summary = [{"type": "summary_text", "text": "short"}]
    assert messages(USER, {"type": "reasoning", "summary": summary})[1]["reasoning_content"] == "short"


@pytest.mark.parametrize("foreign", ["gAAAAABcapture0000", "pq1.!!", "pq1.gICA", 7, None])
def test_thinking_that_only_another_server_can_read_is_left_out(foreign: Any) -> None:
    item = {"type": "reasoning", "summary": [], "content": None, "encrypted_content": foreign}
    assert messages(USER, item, CALL, RESULT)[1] == {"role": "assistant", "content": None, "tool_calls": [CHAT_CALL]}


def test_custom_and_shell_calls_come_back_as_the_functions_that_they_were_offered_as() -> None:
    tools = [{"type": "custom", "name": "apply_patch"}, {"type": "local_shell"}]
    action: dict[str, Any] = {"type": "exec", "command": ["ls", "-l"], "env": {}, "timeout_ms": None}
    found = messages(
        {"type": "custom_tool_call", "id": "ctc_1", "call_id": "c1", "name": "apply_patch", "input": "*** Begin"},
        {"type": "custom_tool_call_output", "call_id": "c1", "output": "ok"},
        {"type": "local_shell_call", "id": "lsc_1", "call_id": "c2", "status": "completed", "action": action},
        {"type": "local_shell_call_output", "id": "c2", "output": "{}"},
        tools=tools,
    )
    assert found == [
        {"role": "assistant", "content": None, "tool_calls": [call_part("apply_patch", '{"input":"*** Begin"}')]},
        {"role": "tool", "tool_call_id": "c1", "content": "ok"},
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [call_part("local_shell", '{"command":["ls","-l"]}', "c2")],
        },
        {"role": "tool", "tool_call_id": "c2", "content": "{}"},
    ]


def test_calls_of_unknown_types_that_the_harness_ran_are_shown() -> None:
    operation = {"type": "delete_file", "path": "a"}
    found = messages(
        {"type": "apply_patch_call", "id": "apc_1", "call_id": "c1", "status": "completed", "operation": operation},
        {"type": "apply_patch_call_output", "call_id": "c1", "output": [{"stdout": "ok"}]},
    )
    assert found[0]["tool_calls"] == [call_part("apply_patch", '{"operation":{"type":"delete_file","path":"a"}}')]
    assert found[1]["content"] == '[{"stdout":"ok"}]'


@pytest.mark.parametrize(
    "item",
    [
        {"type": "web_search_call", "id": "ws_1", "status": "completed", "action": {"type": "search", "query": "x"}},
        {"type": "file_search_call", "id": "fs_1", "queries": ["x"], "results": None},
        {"type": "image_generation_call", "id": "ig_1", "result": "aGk="},
        {"type": "mcp_list_tools", "id": "m", "server_label": "x", "tools": []},
        {"type": "mcp_call", "id": "m", "server_label": "x", "name": "y", "arguments": "{}"},
        {"type": "compaction", "encrypted_content": "gAAAA"},
        {"type": "compaction_trigger"},
        {"type": "something_new", "whatever": [1, None]},
        {"type": None, "role": None, "content": None},
    ],
)
def test_what_the_model_never_saw_is_never_refused(item: dict[str, Any]) -> None:
    assert [message for message in messages(USER, item) if message["content"]] == [{"role": "user", "content": "hi"}]


def test_null_keys_change_nothing() -> None:
    nulls = {"id": None, "async_": None, "caller": None, "namespace": None, "status": "completed"}
    assert messages(USER, {**CALL, **nulls}, {**RESULT, **nulls}) == messages(USER, CALL, RESULT)


def test_a_picture_stands_beside_its_text_in_order() -> None:
    parts = [
        {"type": "input_text", "text": "before"},
        {"type": "input_image", "image_url": PNG, "detail": "low", "file_id": None},
        {"type": "input_text", "text": "after"},
    ]
    assert messages({"role": "user", "content": parts})[0]["content"] == [
        {"type": "text", "text": "before"},
        {"type": "image_url", "image_url": {"url": PNG, "detail": "low"}},
        {"type": "text", "text": "after"},
    ]


@pytest.mark.parametrize(
    ("output", "content"),
    [
        ("text", "text"),
        (None, ""),
        ([{"type": "input_text", "text": "a"}, {"type": "output_text", "text": "b"}], "a\nb"),
        ([{"type": "input_image", "image_url": PNG}], [{"type": "image_url", "image_url": {"url": PNG}}]),
        ({"type": "computer_screenshot", "image_url": PNG}, [{"type": "image_url", "image_url": {"url": PNG}}]),
        ({"stdout": "x"}, '{"stdout":"x"}'),
        ([{"type": "resource", "uri": "x"}], '{"type":"resource","uri":"x"}'),
    ],
)
def test_a_tools_output_may_be_text_parts_or_json(output: Any, content: Any) -> None:
    assert messages(USER, CALL, {**RESULT, "output": output})[-1]["content"] == content


@pytest.mark.parametrize(
    ("part", "said"),
    [
        ({"type": "input_image", "file_id": "file-1"}, "file_id"),
        ({"type": "input_image", "image_url": "https://example.com/a.png"}, "fetches nothing"),
        ({"type": "input_image", "image_url": "file:///etc/passwd"}, "fetches nothing"),
        ({"type": "input_image", "image_url": None, "file_id": None}, "no picture"),
        ({"type": "input_file", "file_id": "file-1"}, "file_data"),
        ({"type": "input_file", "file_url": "https://example.com/a.txt"}, "file_data"),
        ({"type": "input_file", "file_data": "data:application/pdf;base64,JVBERg=="}, "application/pdf"),
        ({"type": "input_file", "file_data": "data:text/plain;base64,/w=="}, "not text"),
    ],
)
@pytest.mark.parametrize("in_output", [False, True])
def test_what_cannot_be_shown_is_refused_by_its_place(part: dict[str, Any], said: str, in_output: bool) -> None:
    parts = [{"type": "input_text", "text": "x"}, part]
    item = {**RESULT, "output": parts} if in_output else {"role": "user", "content": parts}
    fault = refusal(USER, item)
    assert fault.param == ("input[1].output[1]" if in_output else "input[1].content[1]")
    assert fault.message.startswith(fault.param)
    assert said in fault.message


def test_files_of_text_and_of_pictures_are_shown() -> None:
    text = "data:text/x-python;base64," + base64.b64encode("print('ü')".encode()).decode()
    content = messages(
        {
            "role": "user",
            "content": [
                {"type": "input_file", "filename": "a.py", "file_data": text},
                {"type": "input_file", "file_data": PNG},
            ],
        }
    )[0]["content"]
    assert content == [{"type": "text", "text": "a.py\nprint('ü')"}, {"type": "image_url", "image_url": {"url": PNG}}]


@pytest.mark.parametrize("key", ["previous_response_id", "conversation", "prompt"])
def test_what_would_have_to_be_stored_is_refused_with_what_to_do(key: str) -> None:
    fault = refusal(USER, **{key: "resp_1"})
    assert fault.param == key
    assert "send the" in fault.message


@pytest.mark.parametrize("form", [{"type": "item_reference"}, {"type": None}, {}])
def test_a_reference_to_an_item_is_refused_because_its_absence_would_change_the_prompt(form: dict[str, Any]) -> None:
    """No harness that is known to work sends one: they set `store` to false and send whole items."""
    with pytest.raises(CallFault) as caught:
        messages(USER, {**form, "id": "msg_1"}, RESULT)
    assert (caught.value.status, caught.value.param) == (404, "input")
    assert "Item with id 'msg_1' not found" in caught.value.message
    assert "send the item itself" in caught.value.message


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"input": []}, "input"),
        ({}, "input"),
        ({"input": 5}, "input"),
        ({"input": [5]}, "input[0]"),
        ({"input": [{"role": "user", "content": 5}]}, "input[0].content"),
        ({"input": [{"type": "function_call", "call_id": "c", "arguments": "{}"}]}, "input[0].name"),
        ({"input": "x", "tools": {}}, "tools"),
        ({"input": "x", "tools": [{"type": "function"}]}, "tools[0].name"),
        ({"input": "x", "tools": [{"type": "namespace", "name": "n", "tools": [5]}]}, "tools[0].tools[0]"),
        ({"input": "x", "tool_choice": "sometimes"}, "tool_choice"),
        ({"input": "x", "tool_choice": {"type": "function", "name": "nobody"}}, "tool_choice"),
        (b"{", None),
        (b"[]", None),
    ],
)
def test_what_cannot_be_read_is_refused_by_its_place(body: Any, param: str | None) -> None:
    with pytest.raises(CallFault) as caught:
        parsed(body)
    assert (caught.value.kind, caught.value.param) == (FaultKind.BAD_REQUEST, param)
