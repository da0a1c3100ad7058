"""Responses, whatever comes: a request is read or refused, and what was said comes back as what was said."""

from __future__ import annotations

import json
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from polarq_proxy.call import Answer, Choice, ChoiceDelta, ModelCall, Piece
from polarq_proxy.dialects.responses_output import Asked
from polarq_proxy.faults import CallFault
from polarq_proxy.gather import Gatherer
from polarq_proxy.jsons import encode

from .responses_client import Events, asked, messages, parsed, rendered, stream_of

WORDS = [
    "message", "reasoning", "function_call", "function_call_output", "custom_tool_call", "custom_tool_call_output",
    "local_shell_call", "local_shell_call_output", "item_reference", "web_search_call", "namespace", "custom",
    "function", "local_shell", "allowed_tools", "input_text", "input_image", "input_file", "output_text", "refusal",
    "user", "assistant", "developer", "system", "tool", "auto", "required", "json_schema", "data:image/png;base64,aGk=",
    "data:text/plain;base64,aGk=", "pq1.aGk=", "rs_0123456789abcdef01234567_0", "msg_0123456789abcdef01234567_1",
    "ctcraw_0123456789abcdef01234567_0", "reasoning.encrypted_content", "message.output_text.logprobs",
]  # fmt: skip
KEYS = [
    "type", "role", "content", "id", "call_id", "name", "namespace", "arguments", "input", "output", "action", "text",
    "image_url", "file_id", "file_data", "filename", "detail", "summary", "encrypted_content", "tools", "parameters",
    "format", "definition", "function", "mode", "url", "tool_call_id", "effort", "description", "status",
]  # fmt: skip
FIELDS = [
    "model", "input", "instructions", "tools", "tool_choice", "stream", "include", "text", "reasoning", "metadata",
    "max_output_tokens", "parallel_tool_calls", "temperature", "top_p", "top_logprobs", "return_token_ids", "store",
]  # fmt: skip

leaves = st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=6), st.sampled_from(WORDS))
trees = st.recursive(
    leaves,
    lambda inner: st.one_of(
        st.lists(inner, max_size=4),
        st.dictionaries(st.one_of(st.sampled_from(KEYS), st.text(max_size=3)), inner, max_size=6),
    ),
    max_leaves=25,
)
items = st.dictionaries(st.sampled_from(KEYS), trees, max_size=7)
bodies = st.dictionaries(st.sampled_from(FIELDS), st.one_of(trees, st.lists(items, max_size=5)), max_size=8)


def read(body: bytes) -> ModelCall | None:
    try:
        return parsed(body)
    except CallFault as fault:
        assert fault.message
        assert 400 <= fault.status < 500
        return None


@settings(max_examples=400)
@given(bodies)
def test_any_object_is_read_or_refused(body: dict[str, Any]) -> None:
    call = read(json.dumps(body).encode())
    if call is None:
        return
    assert call.messages
    assert all(message["role"] in {"system", "user", "assistant", "tool"} for message in call.messages)
    encode([call.messages, call.tools, call.options])
    assert isinstance(call.native, Asked)
    answer = Answer([Choice(0, {"role": "assistant", "content": "ok"}, finish_reason="stop")])
    assert rendered(call, answer)["status"] == "completed"
    writer = stream_of(call)
    Events.of(writer.wait() + writer.end([], answer)).response()


@given(st.one_of(trees.map(lambda tree: json.dumps(tree).encode()), st.binary(max_size=40)))
def test_any_bytes_are_read_or_refused(body: bytes) -> None:
    read(body)


TOOLS: list[dict[str, Any]] = [
    {"type": "function", "name": "f"},
    {"type": "custom", "name": "patch"},
    {"type": "local_shell"},
    {"type": "namespace", "name": "agents", "tools": [{"type": "function", "name": "wait"}]},
    {"type": "namespace", "name": "more", "tools": [{"type": "custom", "name": "patch"}]},
]
words = st.text(min_size=1, max_size=12)
objects = st.dictionaries(st.text(max_size=3), st.text(max_size=3), max_size=2)
custom = st.one_of(st.builds(lambda text: json.dumps({"input": text}), words), words, objects.map(json.dumps))
shell = st.one_of(st.builds(lambda found: json.dumps({"command": found}), st.lists(words, max_size=3)), words)
calls = st.one_of(
    st.tuples(st.sampled_from(["f", "wait", "unheard"]), st.one_of(words, st.just(""), objects.map(json.dumps))),
    st.tuples(st.sampled_from(["patch", "more__patch"]), custom),
    st.tuples(st.just("local_shell"), shell),
)


@st.composite
def pieces(draw: st.DrawFn) -> list[Piece]:
    """A stream in the order that engines keep: thinking, words, calls, each in parts of any size."""
    found: list[dict[str, Any]] = []
    for key in ("reasoning_content", "content"):
        found += [{key: part} for part in draw(st.lists(st.text(max_size=4), max_size=3))]
    for index, (name, arguments) in enumerate(draw(st.lists(calls, max_size=4))):
        cut = draw(st.integers(0, len(arguments)))
        first = {"index": index, "id": f"c{index}", "type": "function", "function": {"name": name, "arguments": ""}}
        found.append({"tool_calls": [first]})
        for part in (arguments[:cut], arguments[cut:]):
            found.append({"tool_calls": [{"index": index, "function": {"arguments": part}}]})
    late = draw(st.text(max_size=2))
    return [Piece([ChoiceDelta(0, delta)]) for delta in [*found, {"content": late}]]


def meaning(message: dict[str, Any]) -> Any:
    told = [
        (call["id"], call["function"]["name"], spelt(call["function"]["arguments"]))
        for call in message.get("tool_calls") or []
    ]
    return message["role"], message.get("content") or "", message.get("reasoning_content") or "", told


def spelt(arguments: str) -> Any:
    """A custom tool's or shell's call keeps its meaning, not its spelling."""
    try:
        return json.loads(arguments)
    except ValueError:
        return arguments


@settings(max_examples=300)
@given(
    pieces(), st.sampled_from(["stop", "tool_calls", "length"]), st.booleans(), st.sampled_from(["whole", "id", "bare"])
)
def test_what_was_said_comes_back_as_what_was_said(found: list[Piece], finish: str, seals: bool, hand: str) -> None:
    gatherer = Gatherer(1)
    for piece in [*found, Piece([ChoiceDelta(0, {}, finish_reason=finish)])]:
        gatherer.add(piece)
    answer = gatherer.answer()
    call = asked(tools=TOOLS, include=["reasoning.encrypted_content"] if seals else [])
    writer = stream_of(call)
    sent = b"".join(writer.piece(piece) for piece in found) + writer.end([], answer)
    for response in (rendered(call, answer), Events.of(sent).response()):
        output = response["output"]
        if seals:
            output = [{**item, "content": None} if item["type"] == "reasoning" else item for item in output]
        if hand == "id":  # with nulls for all that may be null
            output = [{"namespace": None, "caller": None, **item} for item in output]
        elif hand == "bare":  # without ids, as some harnesses send it
            if any(str(item["id"]).startswith("ctcraw") for item in output):
                continue
            output = [{key: value for key, value in item.items() if key != "id"} for item in output]
        after = {"type": "function_call_output", "call_id": "c0", "output": "done"}
        history = messages({"role": "user", "content": "hi"}, *output, after, tools=TOOLS)
        answers = [message for message in history if message["role"] == "assistant"]
        said = meaning(answer.choices[0].message)
        assert [meaning(message) for message in answers] == ([said] if output else [])
