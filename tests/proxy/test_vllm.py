"""What polarq asks of vLLM and reads from its real answers."""

from __future__ import annotations

import math
from typing import Any

import pytest

from polarq.contracts.completion import Usage, VersionSpan
from polarq_proxy.call import Answer, ModelCall
from polarq_proxy.engines.vllm import VllmEngine
from polarq_proxy.faults import CallFault, FaultKind
from polarq_proxy.gather import Gatherer, pieces_of
from polarq_proxy.jsons import encode
from polarq_proxy.sse import SseEvent, SseParser

from . import captures

ENGINE = VllmEngine()


def call(**fields: Any) -> ModelCall:
    values: dict[str, Any] = {
        "messages": [{"role": "user", "content": "hi"}],
        "tools": None,
        "options": {},
        "model": "m",
    }
    return ModelCall(**{**values, **fields})


def gathered(data: bytes, choices: int = 1) -> Answer:
    gatherer = Gatherer(choices)
    for event in SseParser(1 << 20).feed(data):
        gatherer.add(ENGINE.read_event(event))
    assert gatherer.done
    return gatherer.answer()


def test_every_request_asks_for_ids_logprobs_versions_and_thinking() -> None:
    request = ENGINE.request(call(options={"temperature": 0.5, "include_reasoning": False}), "served", stream=False)
    assert request.path == "/v1/chat/completions"
    assert request.body == {
        "model": "served",
        "messages": [{"role": "user", "content": "hi"}],
        "stream": False,
        "temperature": 0.5,
        "logprobs": True,
        "top_logprobs": 0,
        "return_token_ids": True,
        "return_weight_versions": True,
        "include_reasoning": True,
    }


@pytest.mark.parametrize(("asked", "sent"), [(None, 0), (0, 0), (5, 5), (-1, 0), ("x", 0), (True, 0)])
def test_more_alternatives_are_asked_for_if_the_harness_wants_them(asked: Any, sent: int) -> None:
    assert ENGINE.request(call(options={"top_logprobs": asked}), "m", stream=False).body["top_logprobs"] == sent


def test_stream_options_go_only_with_a_stream() -> None:
    options = {"stream_options": {"include_usage": False}}
    assert "stream_options" not in ENGINE.request(call(options=options), "m", stream=False).body
    assert ENGINE.request(call(options=options), "m", stream=True).body["stream_options"] == {"include_usage": True}


def test_a_tool_choice_without_tools_is_dropped() -> None:
    assert "tool_choice" not in ENGINE.request(call(options={"tool_choice": "auto"}), "m", stream=False).body
    tools: list[dict[str, Any]] = [{"type": "function", "function": {"name": "f"}}]
    body = ENGINE.request(call(tools=tools, options={"tool_choice": "auto"}), "m", stream=False).body
    assert body["tools"] == tools
    assert body["tool_choice"] == "auto"


def test_thinking_in_the_history_goes_by_the_engines_name() -> None:
    messages: list[dict[str, Any]] = [
        {"role": "assistant", "content": "a", "reasoning_content": "because"},
        {"role": "assistant", "content": "b", "reasoning_content": None},
        {"role": "assistant", "content": "c", "reasoning": "kept"},
    ]
    sent = ENGINE.request(call(messages=messages), "m", stream=False).body["messages"]
    assert sent == [
        {"role": "assistant", "content": "a", "reasoning": "because"},
        {"role": "assistant", "content": "b"},
        {"role": "assistant", "content": "c", "reasoning": "kept"},
    ]
    assert messages[0]["reasoning_content"] == "because"


def test_a_whole_answer_is_read() -> None:
    captured = captures.whole("vllm_chat_nonstream_tokenids_logprobs")
    answer = ENGINE.read(captured.data)
    [choice] = answer.choices
    tree = captured.tree
    assert answer.prompt_ids == tree["prompt_token_ids"]
    assert choice.ids == tree["choices"][0]["token_ids"]
    assert choice.logprobs == tree["choices"][0]["logprobs"]["content"]
    sampled = len(choice.ids or ())
    assert answer.usage == Usage(prompt_tokens=23, completion_tokens=sampled, cached_tokens=0, reasoning_tokens=sampled)
    assert answer.model == "tiny"
    assert choice.message["role"] == "assistant"
    assert choice.message["reasoning_content"] == tree["choices"][0]["message"]["reasoning"]
    assert set(choice.message) == {"role", "content", "reasoning_content"}


def test_several_choices_are_read() -> None:
    answer = ENGINE.read(captures.whole("vllm_chat_n2").data)
    assert [choice.ids for choice in answer.choices] == [[1397, 3917, 2767], [1632, 2284, 2936]]


@pytest.mark.parametrize("name", ["vllm_chat_stream_tokenids_logprobs", "vllm_chat_stream_interval3"])
def test_a_streamed_answer_is_put_together(name: str) -> None:
    answer = gathered(captures.stream(name))
    [choice] = answer.choices
    assert choice.ids == [1397, 3917, 2767, 3777, 3968, 235]
    assert len(choice.logprobs or ()) == 6
    assert len(answer.prompt_ids or ()) == 23
    assert choice.finish_reason == "length"


def test_the_counts_of_a_streamed_answer_are_those_of_its_ids() -> None:
    answer = gathered(captures.stream("vllm_chat_stream_tokenids_logprobs"))
    assert answer.usage == Usage(prompt_tokens=23, completion_tokens=6, cached_tokens=0, reasoning_tokens=5)


def test_a_stream_gives_what_the_whole_answer_gives() -> None:
    answer = ENGINE.read(captures.whole("vllm_chat_nonstream_tokenids_logprobs").data)
    same = gathered(captures.stream("vllm_chat_stream_tokenids_logprobs"))
    assert same.prompt_ids == answer.prompt_ids
    assert same.choices[0].ids == answer.choices[0].ids
    assert same.choices[0].logprobs == answer.choices[0].logprobs
    assert same.choices[0].message == answer.choices[0].message


def test_a_streamed_tool_call_keeps_the_ids_of_empty_events() -> None:
    streamed = gathered(captures.stream("vllm_chat_toolcall_stream")).choices[0]
    whole = ENGINE.read(captures.whole("vllm_chat_toolcall_nonstream").data).choices[0]
    assert streamed.ids is not None
    assert len(streamed.ids) == len(streamed.logprobs or ())
    [ours], [theirs] = streamed.message["tool_calls"], whole.message["tool_calls"]
    assert ours["function"] == theirs["function"] == {"name": "get_weather", "arguments": '{"city": "Paris"}'}
    assert ours["id"]
    assert streamed.finish_reason == whole.finish_reason == "tool_calls"


@pytest.mark.parametrize("streamed", [False, True])
def test_an_aborted_answer_is_known_as_such(streamed: bool) -> None:
    if streamed:
        answer = gathered(captures.stream("vllm_chat_stream_aborted_by_pause"))
    else:
        answer = ENGINE.read(captures.whole("vllm_chat_aborted_by_pause").data)
    assert answer.aborted
    assert answer.choices[0].ids


def test_an_answer_as_pieces_is_the_same_answer() -> None:
    for name in ("vllm_chat_n2", "vllm_chat_toolcall_nonstream", "vllm_chat_reasoning_forced"):
        answer = ENGINE.read(captures.whole(name).data)
        gatherer = Gatherer(len(answer.choices))
        for piece in pieces_of(answer):
            gatherer.add(piece)
        assert gatherer.answer().choices == answer.choices


def test_missing_ids_are_missing_and_not_empty() -> None:
    answer = ENGINE.read(captures.whole("vllm_chat_include_reasoning_false").data)
    assert answer.choices[0].ids is None
    assert answer.choices[0].logprobs is None


def test_version_spans_are_read_and_odd_ones_are_not() -> None:
    spans: Any = [{"version": 7, "start": 0, "end": 3}]
    choice = {"index": 0, "message": {"content": "a"}, "finish_reason": "stop", "weight_versions": spans}
    assert ENGINE.read(encode({"choices": [choice]})).choices[0].weight_versions == [
        VersionSpan(version="7", start=0, end=3)
    ]
    for odd in ([{"version": "a"}], [{"version": "a", "start": -1, "end": 2}], "a", [1], None):
        assert ENGINE.read(encode({"choices": [{**choice, "weight_versions": odd}]})).choices[0].weight_versions is None


@pytest.mark.parametrize(
    "data",
    [b"<html>", b"[]", b"null", b"{}", b'{"choices": []}', b'{"choices": [3]}', b"", b'{"error": {"code": 500}}'],
)
def test_what_is_no_answer_is_the_engines_fault(data: bytes) -> None:
    with pytest.raises(CallFault) as raised:
        ENGINE.read(data)
    assert raised.value.kind is FaultKind.ENGINE_FAULT


def test_a_number_that_is_none_is_read() -> None:
    data = b'{"choices":[{"logprobs":{"content":[{"logprob":NaN},{"logprob":-Infinity}]},"token_ids":[1,2]}]}'
    logprobs = ENGINE.read(data).choices[0].logprobs
    assert logprobs is not None
    assert math.isnan(logprobs[0]["logprob"])


@pytest.mark.parametrize("code", [503, 429])
def test_an_error_event_is_a_fault_of_its_kind(code: int) -> None:
    event = SseEvent(encode({"error": {"message": "queue full", "type": "overloaded", "code": code}}))
    with pytest.raises(CallFault, match="queue full") as raised:
        ENGINE.read_event(event)
    assert raised.value.kind is FaultKind.OVERLOADED
    assert raised.value.status == code
    assert raised.value.retry_after_s


def test_an_overflow_is_known_by_its_parameter_and_carries_its_numbers() -> None:
    captured = captures.whole("vllm_err_context_overflow")
    fault = ENGINE.fault(captured.status, captured.headers, captured.data)
    assert fault.kind is FaultKind.CONTEXT_OVERFLOW
    assert (fault.max_context, fault.prompt_tokens) == (2048, 2049)


def test_an_overflow_of_an_older_server_is_known_by_its_sentence() -> None:
    text = (
        "This model's maximum context length is 4096 tokens. However, you requested 5100 tokens (100 in the messages, "
        "5000 in the completion). Please reduce the length of the messages or completion."
    )
    fault = ENGINE.fault(400, {}, encode({"object": "error", "message": text, "type": "BadRequestError", "code": 400}))
    assert fault.kind is FaultKind.CONTEXT_OVERFLOW
    assert (fault.max_context, fault.prompt_tokens) == (4096, 100)


def test_too_many_tokens_asked_for_is_a_refusal_with_its_parameter() -> None:
    captured = captures.whole("vllm_chat_maxtokens_overflow")
    fault = ENGINE.fault(captured.status, captured.headers, captured.data)
    assert (fault.kind, fault.param, fault.status) == (FaultKind.REFUSED, "max_tokens", 400)


@pytest.mark.parametrize(
    ("status", "kind", "answered"),
    [
        (401, FaultKind.MISCONFIGURED, 404),
        (403, FaultKind.MISCONFIGURED, 404),
        (404, FaultKind.MISCONFIGURED, 404),
        (413, FaultKind.TOO_LARGE, 413),
        (422, FaultKind.REFUSED, 400),
        (429, FaultKind.OVERLOADED, 429),
        (500, FaultKind.ENGINE_FAULT, 500),
        (503, FaultKind.OVERLOADED, 503),
        (599, FaultKind.ENGINE_FAULT, 599),
    ],
)
def test_statuses_keep_their_meaning(status: int, kind: FaultKind, answered: int) -> None:
    fault = ENGINE.fault(status, {"Retry-After": "7"}, b"<html>gone</html>")
    assert (fault.kind, fault.status) == (kind, answered)
    # Who refuses a key repeats it: of that nothing goes on.
    assert ("gone" in fault.message) is (status not in {401, 403})
    if kind is FaultKind.OVERLOADED:
        assert fault.retry_after_s == 7


def test_a_server_says_what_it_is() -> None:
    facts = ENGINE.read_facts(captures.whole("vllm_version").tree, captures.whole("vllm_models").tree)
    assert facts.version.startswith("0.32")
    assert facts.models == {"tiny": 2048}
    assert ENGINE.read_facts(None, None).models == {}
    assert ENGINE.read_weights(captures.whole("vllm_weight_info_default").tree) == "default"
    assert ENGINE.read_weights(None) is None


@pytest.mark.parametrize(
    ("options", "grammar"),
    [
        ({}, None),
        ({"tool_choice": "auto"}, None),
        ({"tool_choice": "required"}, "tool_choice: required"),
        ({"tool_choice": {"type": "function"}}, "tool_choice: named"),
        ({"response_format": {"type": "text"}}, None),
        ({"response_format": {"type": "json_schema"}}, "response_format: json_schema"),
        ({"guided_json": {}}, "guided_json"),
    ],
)
def test_what_constrains_sampling_is_named(options: dict[str, Any], grammar: str | None) -> None:
    assert ENGINE.grammar(options) == grammar
