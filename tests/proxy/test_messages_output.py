"""Answers in the Messages dialect, whole and streamed: the same blocks, and the same message when they come back."""

from __future__ import annotations

import base64
import json
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from polarq.contracts.completion import Usage
from polarq_proxy.call import Answer, Choice, ChoiceDelta, Piece
from polarq_proxy.dialects.base import ServedModel
from polarq_proxy.dialects.messages_arguments import UNPARSED
from polarq_proxy.faults import CallFault, FaultKind
from polarq_proxy.gather import Gatherer, pieces_of

from .messages_client import DIALECT, HEAD, HELLO, Events, as_whole, asked, stream


def call_of(arguments: Any, name: str = "bash", call_id: str = "c1") -> dict[str, Any]:
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}


def answer(finish: str = "stop", stop: Any = None, usage: Usage | None = None, **message: Any) -> Answer:
    message = {"role": "assistant", "content": None, **message}
    usage = usage or Usage(prompt_tokens=10, completion_tokens=3, cached_tokens=None)
    return Answer([Choice(0, message, [1, 2, 3], None, finish, stop)], [1] * 10, usage, "served")


def whole(answer: Answer, **fields: Any) -> dict[str, Any]:
    tree = json.loads(DIALECT.render(asked(**fields), answer, HEAD).body)
    assert isinstance(tree, dict)
    return tree


def said(*deltas: dict[str, Any]) -> list[Piece]:
    return [Piece([ChoiceDelta(0, delta)]) for delta in deltas]


def tool(index: int, arguments: str = "", name: str | None = None, call_id: str | None = None) -> dict[str, Any]:
    part: dict[str, Any] = {"index": index, "function": {"arguments": arguments}}
    if name is not None:
        part["function"]["name"] = name
    if call_id is not None:
        part["id"] = call_id
    return {"tool_calls": [part]}


def streamed(pieces: list[Piece], finish: str = "stop", stop: Any = None, **fields: Any) -> Events:
    """What a harness reads of pieces that an engine's stream was made of."""
    writer, gatherer = stream(asked(**fields)), Gatherer(1)
    out = b"".join([writer.piece(piece) for piece in pieces])
    last = Piece([ChoiceDelta(0, {}, [1], None, finish, stop)], usage=Usage(prompt_tokens=10, completion_tokens=3))
    for piece in (*pieces, last):
        gatherer.add(piece)
    return Events.of(out + writer.end([last], gatherer.answer()))


def test_a_whole_message() -> None:
    calls = [call_of('{"command":  "ls"}'), call_of("{}", call_id="c2")]
    message = answer("tool_calls", reasoning_content="hm", content="Let me look.", tool_calls=calls)
    assert whole(message) == {
        "id": "msg_c0ffee",
        "type": "message",
        "role": "assistant",
        "model": "asked",
        "content": [
            {"type": "thinking", "thinking": "hm", "signature": whole(message)["content"][0]["signature"]},
            {"type": "text", "text": "Let me look."},
            {"type": "tool_use", "id": "c1", "name": "bash", "input": {"command": "ls"}},
            {"type": "tool_use", "id": "c2", "name": "bash", "input": {}},
        ],
        "stop_reason": "tool_use",
        "stop_sequence": None,
        "usage": {
            "input_tokens": 10,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": 0,
            "output_tokens": 3,
        },
    }
    # Arguments keep the spelling that was sampled.
    assert b'"input":{"command":  "ls"}' in DIALECT.render(asked(), message, HEAD).body


def test_a_signature_is_opaque_and_the_same_for_the_same_thinking() -> None:
    first, again, other = (whole(answer(reasoning_content=text))["content"][0] for text in ("hm", "hm", "ah"))
    assert first == again
    assert first["signature"] != other["signature"]
    assert base64.b64decode(first["signature"], validate=True)
    assert streamed(said({"reasoning_content": "h"}, {"reasoning_content": "m"})).blocks == [first]


def test_tokens_from_the_cache_are_counted_apart() -> None:
    usage = whole(answer(usage=Usage(prompt_tokens=10, completion_tokens=3, cached_tokens=8)))["usage"]
    assert (usage["input_tokens"], usage["cache_read_input_tokens"], usage["output_tokens"]) == (2, 8, 3)


def test_tokens_of_thinking_are_shown_where_the_engine_counts_them() -> None:
    usage = whole(answer(usage=Usage(prompt_tokens=10, completion_tokens=3, reasoning_tokens=2)))["usage"]
    assert (usage["output_tokens"], usage["output_tokens_details"]) == (3, {"thinking_tokens": 2})


def test_an_engine_without_usage_is_counted_by_its_ids() -> None:
    usage = whole(answer(usage=Usage()))["usage"]
    assert "output_tokens_details" not in usage
    assert (usage["input_tokens"], usage["output_tokens"]) == (10, 3)


@pytest.mark.parametrize(
    ("finish", "stop", "message", "reason", "sequence"),
    [
        ("stop", None, {"content": "x"}, "end_turn", None),
        ("stop", "END", {"content": "x"}, "stop_sequence", "END"),
        ("stop", "</other>", {"content": "x"}, "end_turn", None),
        ("stop", 151645, {"content": "x"}, "end_turn", None),
        ("length", None, {"content": "x"}, "max_tokens", None),
        ("length", None, {"tool_calls": [call_of("{}")]}, "max_tokens", None),
        ("tool_calls", None, {"tool_calls": [call_of("{}")]}, "tool_use", None),
        ("stop", None, {"tool_calls": [call_of("{}")]}, "tool_use", None),
        ("tool_calls", None, {"content": "x"}, "end_turn", None),
        ("content_filter", None, {"content": "x"}, "refusal", None),
    ],
)
def test_stop_reasons(finish: str, stop: Any, message: dict[str, Any], reason: str, sequence: str | None) -> None:
    tree = whole(answer(finish, stop, **message), stop_sequences=["END"])
    assert (tree["stop_reason"], tree["stop_sequence"]) == (reason, sequence)
    one = answer(finish, stop, **message)
    [delta] = Events.of(stream(asked(stop_sequences=["END"])).end(pieces_of(one), one)).named("message_delta")
    assert delta["delta"] == {"stop_reason": reason, "stop_sequence": sequence}


def test_an_empty_answer_has_no_blocks() -> None:
    assert whole(answer(content=""))["content"] == []
    assert streamed([]).types == ["message_start", "message_delta", "message_stop"]


def test_arguments_that_are_no_object_are_kept_as_text() -> None:
    assert whole(answer(tool_calls=[call_of("ls -la")]))["content"][0]["input"] == {UNPARSED: "ls -la"}
    assert whole(answer(tool_calls=[call_of({"a": 1})]))["content"][0]["input"] == {"a": 1}
    assert whole(answer(tool_calls=[call_of(None, call_id="")]))["content"][0] == {
        "type": "tool_use",
        "id": "toolu_c0ffee_0",
        "name": "bash",
        "input": {},
    }


def test_a_stream_begins_with_the_message_whatever_comes_first() -> None:
    writer = stream()
    first = Events.of(writer.piece(Piece(prompt_ids=[1, 2, 3], model="served")))
    assert first.types == ["message_start"]
    message = first.all[0]["message"]
    assert (message["content"], message["stop_reason"], message["model"]) == ([], None, "asked")
    assert message["usage"]["input_tokens"] == 3
    assert writer.piece(Piece()) == b""
    assert Events.of(writer.wait()).types == ["ping"]


def test_a_ping_before_anything_else_is_led_by_the_message() -> None:
    writer = stream()
    assert Events.of(writer.wait()).types == ["message_start", "ping"]
    one = answer(content="hi")
    assert Events.of(writer.end(pieces_of(one), one)).types == [
        "content_block_start",
        "content_block_delta",
        "content_block_stop",
        "message_delta",
        "message_stop",
    ]


def test_blocks_follow_each_other_while_their_text_comes() -> None:
    events = streamed(
        said(
            {"role": "assistant", "content": ""},
            {"reasoning_content": "h"},
            {"reasoning_content": "m"},
            {"content": "Let "},
            {"content": "me."},
            tool(0, name="bash", call_id="c1"),
            tool(0, '{"comm'),
            tool(0, 'and": "ls"}'),
        ),
        "tool_calls",
    )
    assert events.types == [
        "message_start",
        *["content_block_start", *["content_block_delta"] * 3, "content_block_stop"],
        *["content_block_start", *["content_block_delta"] * 2, "content_block_stop"],
        *["content_block_start", *["content_block_delta"] * 3, "content_block_stop"],
        "message_delta",
        "message_stop",
    ]
    assert [block["type"] for block in events.blocks] == ["thinking", "text", "tool_use"]
    assert events.blocks[2] == {
        "type": "tool_use",
        "id": "c1",
        "name": "bash",
        "input": {},
        "json": '{"command": "ls"}',
    }
    assert events.named("message_delta")[0] == {
        "type": "message_delta",
        "delta": {"stop_reason": "tool_use", "stop_sequence": None},
        "usage": {
            "input_tokens": 10,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": 0,
            "output_tokens": 3,
        },
    }


def test_a_piece_is_shown_when_it_comes() -> None:
    writer = stream()
    for delta, shown in (({"content": "one"}, "one"), (tool(0, '{"a": "two', "f"), "two"), (tool(0, "three"), "three")):
        assert shown.encode() in writer.piece(said(delta)[0])


def test_parallel_calls_that_come_in_turns_are_shown_one_after_the_other() -> None:
    events = streamed(
        said(
            tool(0, name="a", call_id="c0"),
            tool(0, '{"x": '),
            tool(1, '{"y": ', name="b", call_id="c1"),
            {"content": "late"},
            tool(0, "1}"),
            tool(1, "2"),
            tool(1, "}"),
        ),
        "tool_calls",
    )
    assert [(block["type"], block.get("json"), block.get("text")) for block in events.blocks] == [
        ("tool_use", '{"x": 1}', None),
        ("tool_use", '{"y": 2}', None),
        ("text", None, "late"),
    ]


def test_a_call_that_never_ends_loses_nothing_that_follows_it() -> None:
    events = streamed(said(tool(0, '{"x": ', name="a"), tool(1, '{"y": 2}', name="b"), {"content": "late"}))
    first, second, text = as_whole(events.blocks)
    assert (first["name"], first["input"]) == ("a", {"x": None, UNPARSED: '{"x": '})
    assert (second["name"], second["input"], text["text"]) == ("b", {"y": 2}, "late")


def test_a_call_that_was_cut_off_by_the_length_stays_half() -> None:
    events = streamed(said(tool(0, '{"command": "rm -r', name="a")), "length")
    assert events.blocks[0]["json"] == '{"command": "rm -r'
    assert events.named("message_delta")[0]["delta"]["stop_reason"] == "max_tokens"


def test_a_name_in_parts_is_whole() -> None:
    [block] = streamed(said(tool(0, name="ba"), tool(0, name="sh"), tool(0, "{}"))).blocks
    assert (block["name"], block["id"], block["json"]) == ("bash", "toolu_c0ffee_0", "{}")


def test_an_error_inside_a_stream_is_its_last_event() -> None:
    writer = stream()
    events = Events.of(
        writer.piece(said({"content": "half"})[0]) + writer.fail(CallFault(FaultKind.OVERLOADED, "full"))
    )
    assert events.types == ["message_start", "content_block_start", "content_block_delta", "error"]
    assert events.all[-1] == {
        "type": "error",
        "error": {"type": "overloaded_error", "message": "full"},
        "request_id": "req_c0ffee",
    }


@pytest.mark.parametrize(
    ("fault", "status", "kind"),
    [
        (CallFault(FaultKind.BAD_REQUEST, "x"), 400, "invalid_request_error"),
        (CallFault(FaultKind.REFUSED, "x"), 400, "invalid_request_error"),
        (CallFault(FaultKind.TOO_MANY_CALLS, "x"), 404, "invalid_request_error"),
        (CallFault(FaultKind.ENGINE_FAULT, "x", status=400), 400, "invalid_request_error"),
        (CallFault(FaultKind.NO_SUCH_ROUTE, "x"), 404, "not_found_error"),
        (CallFault(FaultKind.NO_SESSION, "x"), 404, "not_found_error"),
        (CallFault(FaultKind.MISCONFIGURED, "x"), 404, "not_found_error"),
        (CallFault(FaultKind.TOO_SLOW, "x"), 408, "timeout_error"),
        (CallFault(FaultKind.TOO_FAST, "x"), 429, "rate_limit_error"),
        (CallFault(FaultKind.PAUSED, "x"), 503, "overloaded_error"),
        (CallFault(FaultKind.TOO_LARGE, "x"), 413, "request_too_large"),
        (CallFault(FaultKind.UNSUPPORTED_ENCODING, "x"), 415, "invalid_request_error"),
        (CallFault(FaultKind.OVERLOADED, "x", status=429), 429, "rate_limit_error"),
        (CallFault(FaultKind.INTERNAL, "x"), 500, "api_error"),
        (CallFault(FaultKind.ENGINE_FAULT, "x"), 502, "api_error"),
        (CallFault(FaultKind.OVERLOADED, "x"), 503, "overloaded_error"),
        (CallFault(FaultKind.ABORTED, "x"), 503, "overloaded_error"),
        (CallFault(FaultKind.TIMED_OUT, "x"), 504, "timeout_error"),
    ],
)
def test_errors_have_their_type_and_say_whether_to_try_again(fault: CallFault, status: int, kind: str) -> None:
    reply = DIALECT.fault(fault)
    error = {"type": kind, "message": "x"}
    assert (reply.status, json.loads(reply.body)) == (status, {"type": "error", "error": error, "request_id": None})
    retried = status in {408, 429, 500, 502, 503, 504}
    assert (reply.headers or {}).get("x-should-retry") == (None if retried else "false")
    assert ("Retry-After" in (reply.headers or {})) == (fault.retry_after_s is not None)


@pytest.mark.parametrize(
    ("tokens", "limit", "message"),
    [
        (5000, 4096, "prompt is too long: 5000 tokens > 4096 maximum"),
        (None, 4096, "prompt is too long: it does not fit into 4096 tokens"),
        (5000, None, "prompt is too long for this model"),
    ],
)
def test_an_overflow_is_told_in_the_words_that_make_harnesses_compact(
    tokens: int | None, limit: int | None, message: str
) -> None:
    reply = DIALECT.fault(CallFault(FaultKind.CONTEXT_OVERFLOW, "x", prompt_tokens=tokens, max_context=limit))
    assert reply.status == 400
    assert json.loads(reply.body)["error"] == {"type": "invalid_request_error", "message": message}


def test_models_and_counts() -> None:
    listed = json.loads(DIALECT.models([ServedModel("a", 10), ServedModel("b")]).body)
    assert (listed["first_id"], listed["last_id"], listed["has_more"]) == ("a", "b", False)
    assert [(model["type"], model["id"], model.get("max_input_tokens")) for model in listed["data"]] == [
        ("model", "a", 10),
        ("model", "b", None),
    ]
    assert json.loads(DIALECT.models([]).body)["first_id"] is None
    assert json.loads(DIALECT.model(ServedModel("a")).body)["id"] == "a"
    assert json.loads(DIALECT.counted(asked(), 7).body) == {"input_tokens": 7}


TEXTS = st.none() | st.text(max_size=12)
ARGUMENTS = st.dictionaries(st.text(max_size=3), st.integers() | st.text(max_size=3), max_size=3).map(json.dumps) | (
    st.text(alphabet='{}":,1a ', max_size=10)
)
CALLS = st.lists(st.builds(call_of, ARGUMENTS, st.text(min_size=1, max_size=4), st.uuids().map(str)), max_size=3)
ANSWERS = st.builds(lambda **message: message, reasoning_content=TEXTS, content=TEXTS, tool_calls=CALLS)


def meaning(message: dict[str, Any]) -> Any:
    calls = []
    for call in message.get("tool_calls") or ():
        function = call["function"]
        try:
            arguments = json.loads(function["arguments"].strip(" \t\n\r") or "{}")
        except ValueError:
            arguments = None
        arguments = arguments if isinstance(arguments, dict) else function["arguments"]
        calls.append((call["id"], function["name"], arguments))
    return message.get("reasoning_content") or "", message.get("content") or "", calls


@given(ANSWERS)
@example({"reasoning_content": None, "content": "", "tool_calls": [call_of('{"a": 1} x')]})
def test_an_answer_comes_back_as_what_it_meant(message: dict[str, Any]) -> None:
    one = answer(**message)
    blocks = whole(one)["content"]
    events = Events.of(stream().end(pieces_of(one), one))
    for content in (blocks, as_whole(events.blocks)):
        back = asked([*HELLO, {"role": "assistant", "content": content}]).messages[1]
        assert meaning(back) == meaning(message)


@given(ANSWERS, st.randoms(use_true_random=False))
def test_an_answer_in_pieces_comes_back_as_what_it_meant(message: dict[str, Any], dice: Any) -> None:
    """Calls in turns, texts between them, everything cut anywhere."""
    strands = [[{key: sign} for sign in message[key] or ""] for key in ("reasoning_content", "content")]
    strands += [
        [
            tool(index, name=call["function"]["name"], call_id=call["id"]),
            *[tool(index, sign) for sign in call["function"]["arguments"]],
        ]
        for index, call in enumerate(message["tool_calls"])
    ]
    deltas = [strand.pop(0) for strand in strands[2:]]
    while any(strands):
        deltas.append(dice.choice([strand for strand in strands if strand]).pop(0))
    events = streamed(said(*deltas))
    back = asked([*HELLO, {"role": "assistant", "content": as_whole(events.blocks)}]).messages[1]
    shown, meant = meaning(back), meaning(message)
    assert shown[:2] == meant[:2]
    assert [call[:2] for call in shown[2]] == [call[:2] for call in meant[2]]
    for (_, _, got), (_, _, sampled) in zip(shown[2], meant[2], strict=True):
        # Only what follows a whole object, after the next block began, is not shown any more.
        assert got == sampled or (isinstance(sampled, str) and isinstance(got, dict))
