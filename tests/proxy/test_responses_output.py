"""Responses answers: whole and streamed, the same items, one after the other, and no end before it is time."""

from __future__ import annotations

from typing import Any

import pytest

from polarq.contracts.completion import Usage
from polarq_proxy.call import Answer, Choice, Piece
from polarq_proxy.dialects.responses_parts import unseal
from polarq_proxy.faults import CallFault, FaultKind
from polarq_proxy.gather import Gatherer, pieces_of

from .responses_client import (
    ANSWER_ID,
    HEAD,
    Events,
    answered,
    asked,
    call_part,
    messages,
    rendered,
    said,
    stream_of,
    streamed,
)

CUSTOM = {"type": "custom", "name": "patch"}
FUNCTION = {"type": "function", "name": "f"}
NAMESPACE = {"type": "namespace", "name": "agents", "tools": [{"type": "function", "name": "wait"}]}
SEALED = {"include": ["reasoning.encrypted_content"]}


def piece_of_call(index: int, name: str = "", arguments: str = "", call_id: str = "") -> Piece:
    function = {key: value for key, value in (("name", name), ("arguments", arguments)) if value}
    part: dict[str, Any] = {"index": index, "function": function}
    return said(tool_calls=[{**part, "id": call_id} if call_id else part])


def ended(finish: str = "stop") -> Piece:
    piece = said()
    piece.choices[0].finish_reason = finish
    return piece


def both(call: Any, *pieces: Piece, finish: str = "stop") -> dict[str, Any]:
    """The response of a stream of these pieces, which says what the whole answer says, however it is held back."""
    gatherer = Gatherer(1)
    whole = [*pieces, ended(finish)]
    for piece in whole:
        gatherer.add(piece)
    answer = gatherer.answer()
    live = streamed(call, whole, answer, held=1).response()
    assert streamed(call, pieces_of(answer), answer, held=1).response() == rendered(call, answer)
    assert messages(*live["output"], tools=call.native.echo["tools"]) == messages(
        *rendered(call, answer)["output"], tools=call.native.echo["tools"]
    )
    return live


def test_a_response_object_says_what_was_asked_and_what_it_cost() -> None:
    call = asked(
        instructions="be good", temperature=0.5, metadata={"a": "b"}, tools=[FUNCTION], max_output_tokens=9, top_p=1
    )
    answer = answered(content="hi")
    answer.usage = Usage(prompt_tokens=5, completion_tokens=2, cached_tokens=4, reasoning_tokens=1)
    response = rendered(call, answer)
    assert response["id"] == f"resp_{ANSWER_ID}"
    assert (response["object"], response["created_at"], response["model"]) == ("response", HEAD.created, "asked")
    assert (response["status"], response["error"], response["incomplete_details"]) == ("completed", None, None)
    assert response["usage"] == {
        "input_tokens": 5,
        "input_tokens_details": {"cached_tokens": 4, "cache_write_tokens": 0},
        "output_tokens": 2,
        "output_tokens_details": {"reasoning_tokens": 1},
        "total_tokens": 7,
    }
    assert (response["instructions"], response["temperature"], response["metadata"]) == ("be good", 0.5, {"a": "b"})
    assert (response["tools"], response["tool_choice"], response["parallel_tool_calls"]) == ([FUNCTION], "auto", True)
    assert (response["max_output_tokens"], response["store"], response["text"]["format"]["type"]) == (9, False, "text")
    assert response["output"] == [
        {
            "id": f"msg_{ANSWER_ID}_0",
            "type": "message",
            "status": "completed",
            "role": "assistant",
            "content": [{"type": "output_text", "text": "hi", "annotations": [], "logprobs": []}],
        }
    ]


def test_unknown_usage_is_null_and_the_served_model_is_named_for_want_of_another() -> None:
    response = rendered(asked(model=None), answered(content="hi"))
    assert (response["usage"], response["model"]) == (None, "served")


def test_thinking_is_sealed_only_for_who_asks() -> None:
    answer = answered(content="hi", reasoning_content="hm \U0001f9ea")
    item = rendered(asked(), answer)["output"][0]
    assert (item["type"], item["summary"], item["encrypted_content"]) == ("reasoning", [], None)
    assert item["content"] == [{"type": "reasoning_text", "text": "hm \U0001f9ea"}]
    assert unseal(rendered(asked(**SEALED), answer)["output"][0]["encrypted_content"]) == "hm \U0001f9ea"


def test_ids_and_logprobs_go_only_to_who_asks() -> None:
    entries = [{"token": "hi", "logprob": -0.5, "bytes": [104, 105], "top_logprobs": []}, {"logprob": float("nan")}]
    answer = answered(content="hi")
    answer.prompt_ids, answer.choices[0].ids, answer.choices[0].logprobs = [1, 2], [3, 4], entries
    plain = rendered(asked(), answer)
    assert {"token_ids", "prompt_token_ids"}.isdisjoint(plain)
    assert plain["output"][0]["content"][0]["logprobs"] == []
    call = asked(return_token_ids=True, include=["message.output_text.logprobs"])
    assert (call.wants_ids, call.wants_logprobs) == (True, True)
    response = rendered(call, answer)
    assert (response["prompt_token_ids"], response["token_ids"]) == ([1, 2], [3, 4])
    assert response["output"][0]["content"][0]["logprobs"] == [
        entries[0],
        {"token": "", "bytes": [], "logprob": -9999.0, "top_logprobs": []},
    ]
    assert streamed(call, pieces_of(answer), answer, held=1).response() == response
    thinking = answered(content="hi", reasoning_content="hm")
    thinking.choices[0].logprobs = entries
    assert rendered(call, thinking)["output"][1]["content"][0]["logprobs"] == []


def test_calls_go_back_in_the_form_of_their_tools_with_arguments_verbatim() -> None:
    call = asked(tools=[FUNCTION, CUSTOM, NAMESPACE, {"type": "local_shell"}])
    odd = '{"x":  "\\u0065"}'
    response = both(
        call,
        piece_of_call(0, "f", odd, "c1"),
        piece_of_call(1, "patch", '{"input": "*** \\n"}', "c2"),
        piece_of_call(2, "wait", "", "c3"),
        piece_of_call(3, "local_shell", '{"command": ["ls"], "timeout_ms": 5}', "c4"),
        piece_of_call(4, "unheard_of", "{", "c5"),
        finish="tool_calls",
    )
    shown = [{key: value for key, value in item.items() if key != "id"} for item in response["output"]]
    done = {"status": "completed"}
    assert shown == [
        {**done, "type": "function_call", "call_id": "c1", "name": "f", "arguments": odd},
        {**done, "type": "custom_tool_call", "call_id": "c2", "name": "patch", "input": "*** \n"},
        {**done, "type": "function_call", "call_id": "c3", "name": "wait", "namespace": "agents", "arguments": ""},
        {
            **done,
            "type": "local_shell_call",
            "call_id": "c4",
            "action": {"type": "exec", "env": {}, "command": ["ls"], "timeout_ms": 5},
        },
        {**done, "type": "function_call", "call_id": "c5", "name": "unheard_of", "arguments": "{"},
    ]


@pytest.mark.parametrize("arguments", ["*** Begin", '{"text": "x"}', '{"input": 5}', ""])
def test_a_custom_call_without_its_argument_goes_back_and_comes_back_as_it_was_written(arguments: str) -> None:
    call = asked(tools=[CUSTOM])
    [item] = both(call, piece_of_call(0, "patch", arguments, "c1"), finish="tool_calls")["output"]
    assert (item["type"], item["input"]) == ("custom_tool_call", arguments)
    assert messages(item, tools=[CUSTOM])[0]["tool_calls"] == [call_part("patch", arguments)]


def test_a_shell_call_without_a_command_is_a_function_call() -> None:
    call = asked(tools=[{"type": "local_shell"}])
    [item] = both(call, piece_of_call(0, "local_shell", "ls", "c1"), finish="tool_calls")["output"]
    assert (item["type"], item["name"], item["arguments"]) == ("function_call", "local_shell", "ls")


def test_calls_without_an_id_of_their_own_are_given_one() -> None:
    pieces = [piece_of_call(0, "f", "{}"), piece_of_call(1, "f", "{}", "same"), piece_of_call(2, "f", "{}", "same")]
    response = both(asked(tools=[FUNCTION]), *pieces, finish="tool_calls")
    call_ids = [item["call_id"] for item in response["output"]]
    assert len(set(call_ids)) == 3
    assert call_ids[1] == "same"


@pytest.mark.parametrize(
    ("finish", "reason"), [("length", "max_output_tokens"), ("content_filter", "content_filter"), ("stop", None)]
)
def test_an_answer_that_was_cut_is_incomplete_and_so_is_its_last_item(finish: str, reason: str | None) -> None:
    response = both(asked(), said(reasoning_content="hm"), said(content="ha"), finish=finish)
    status = "incomplete" if reason else "completed"
    assert response["status"] == status
    assert response["incomplete_details"] == (None if reason is None else {"reason": reason})
    assert [item["status"] for item in response["output"]] == ["completed", status]


def test_thinking_that_was_cut_is_all_there_is() -> None:
    response = both(asked(), said(reasoning_content="hm"), finish="length")
    assert [(item["type"], item["status"]) for item in response["output"]] == [("reasoning", "incomplete")]


@pytest.mark.parametrize(
    ("pieces", "kinds"), [([], ["message"]), ([said(reasoning_content="h")], ["reasoning", "message"])]
)
def test_an_answer_without_words_is_an_empty_message(pieces: list[Piece], kinds: list[str]) -> None:
    response = both(asked(), said(content=""), *pieces)
    assert [item["type"] for item in response["output"]] == kinds
    assert response["output"][-1]["content"][0]["text"] == ""


def test_deltas_are_shown_at_once_and_nothing_that_ends_the_answer() -> None:
    writer = stream_of(asked(tools=[FUNCTION]))
    steps = [
        (said(role="assistant", content=""), ["response.created", "response.in_progress"]),
        (
            said(reasoning_content="h"),
            ["response.output_item.added", "response.content_part.added", "response.reasoning_text.delta"],
        ),
        (said(reasoning_content="m"), ["response.reasoning_text.delta"]),
        (
            said(content="a"),
            [
                "response.reasoning_text.done",
                "response.content_part.done",
                "response.output_item.done",
                "response.output_item.added",
                "response.content_part.added",
                "response.output_text.delta",
            ],
        ),
        (said(content="b"), ["response.output_text.delta"]),
        (piece_of_call(0, "f", call_id="c1"), []),
        (
            piece_of_call(0, arguments='{"x"'),
            [
                "response.output_text.done",
                "response.content_part.done",
                "response.output_item.done",
                "response.output_item.added",
                "response.function_call_arguments.delta",
            ],
        ),
        (piece_of_call(0, arguments=": 1}"), ["response.function_call_arguments.delta"]),
        # A harness runs a call as soon as its item is done: that waits for the record.
        (piece_of_call(1, "f", "{}", "c2"), []),
        (said(content="late"), []),
    ]
    sent = b""
    for piece, kinds in steps:
        more = writer.piece(piece)
        before, sent = len(Events.of(sent).all), sent + more
        assert Events.of(sent).kinds[before:] == kinds
    sent += writer.end([ended("tool_calls")], answered("tool_calls"))
    response = Events.of(sent).response()
    assert [item["type"] for item in response["output"]] == [
        "reasoning", "message", "function_call", "function_call", "message",
    ]  # fmt: skip
    [answer] = messages(*response["output"])
    assert answer == {
        "role": "assistant",
        "content": "ablate",
        "reasoning_content": "hm",
        "tool_calls": [call_part("f", '{"x": 1}', "c1"), call_part("f", "{}", "c2")],
    }


def test_a_failure_is_the_end_and_names_no_item_that_was_not_whole() -> None:
    writer = stream_of(asked(tools=[FUNCTION]))
    sent = writer.piece(said(content="a")) + writer.piece(piece_of_call(0, "f", "{", "c1"))
    sent += writer.fail(CallFault(FaultKind.ENGINE_FAULT, "it died"))
    events = Events.of(sent)
    response = events.response()
    assert response["status"] == "failed"
    assert response["error"] == {"code": "server_error", "message": "it died"}
    assert [item["type"] for item in response["output"]] == ["message"]
    assert "function_call" not in [event["item"]["type"] for event in events.all if event["type"].endswith("item.done")]


@pytest.mark.parametrize(
    ("fault", "code"),
    [
        (CallFault(FaultKind.CONTEXT_OVERFLOW, "x", max_context=9, prompt_tokens=10), "context_length_exceeded"),
        (CallFault(FaultKind.NO_SESSION, "x"), "invalid_prompt"),
        (CallFault(FaultKind.REFUSED, "x"), "invalid_prompt"),
        (CallFault(FaultKind.OVERLOADED, "x"), "server_error"),
        (CallFault(FaultKind.STORE_DOWN, "x"), "server_error"),
    ],
)
def test_a_failure_has_the_code_that_makes_codex_do_the_right_thing(fault: CallFault, code: str) -> None:
    events = Events.of(stream_of(asked()).fail(fault))
    assert events.kinds == ["response.created", "response.in_progress", "response.failed"]
    assert events.response()["error"]["code"] == code


def test_waiting_is_told_by_events_that_count_as_life() -> None:
    writer = stream_of(asked())
    sent = writer.wait() + writer.wait() + writer.piece(said(content="a")) + writer.wait()
    assert Events.of(sent).kinds == [
        "response.created",
        "response.in_progress",
        "response.in_progress",
        "response.output_item.added",
        "response.content_part.added",
        "response.output_text.delta",
        "response.in_progress",
    ]
    sent += writer.end([ended()], answered(content="a"))
    assert Events.of(sent).kinds[-1] == "response.completed"
    # What is sent while the end is on its way must not come after it as an event.
    assert writer.wait().startswith(b":")


def test_only_the_first_choice_is_shown() -> None:
    other = Choice(1, {"role": "assistant", "content": "other"}, finish_reason="stop")
    answer = Answer([Choice(0, {"role": "assistant", "content": "one"}, finish_reason="stop"), other])
    assert streamed(asked(), pieces_of(answer), answer, held=1).deltas() == "one"
    assert len(rendered(asked(), answer)["output"]) == 1
    assert rendered(asked(), Answer())["output"][0]["type"] == "message"
