"""What polarq asks of SGLang, release by release, and how it reads what it may answer."""

from __future__ import annotations

import json
from typing import Any

import pytest

from polarq.contracts.completion import Usage, VersionSpan
from polarq_proxy.call import ModelCall
from polarq_proxy.engines.base import EngineFacts, Features
from polarq_proxy.engines.sglang import SglangEngine
from polarq_proxy.faults import CallFault, FaultKind
from polarq_proxy.gather import Gatherer
from polarq_proxy.sse import SseEvent

NEW = SglangEngine("0.5.23")
TOOL: dict[str, Any] = {"type": "function", "function": {"name": "f"}}


def call(**fields: Any) -> ModelCall:
    values: dict[str, Any] = {
        "messages": [{"role": "user", "content": "hi"}],
        "tools": None,
        "options": {},
        "model": "m",
    }
    return ModelCall(**{**values, **fields})


def body_of(version: str, *, stream: bool = False, **fields: Any) -> dict[str, Any]:
    return SglangEngine(version).request(call(**fields), "served", stream=stream).body


def wanted(body: dict[str, Any]) -> set[str]:
    return {name for name, value in body.items() if name.startswith("return_") and value is True}


def pairs(*ids: int) -> list[list[Any]]:
    return [[-0.5 - at, token_id, "t"] for at, token_id in enumerate(ids)]


def whole(*, sglext: Any = None, metadata: Any = None, usage: Any = None, **choice: Any) -> bytes:
    item = {"index": 0, "message": {"role": "assistant", "content": "ok"}, "finish_reason": "stop", **choice}
    tree = {"model": "m", "choices": [item], "usage": usage, "metadata": metadata, "sglext": sglext}
    return json.dumps(tree).encode()


@pytest.mark.parametrize(
    ("version", "names"),
    [
        ("0.5.13", {"return_meta_info", "return_prompt_token_ids"}),
        ("0.5.16.post1", {"return_meta_info", "return_prompt_token_ids"}),
        ("0.5.17", {"return_meta_info", "return_token_ids"}),
        ("0.5.19", {"return_meta_info", "return_token_ids"}),
        ("0.5.20", {"return_meta_info", "return_input_ids_in_sglext", "return_output_ids_in_sglext"}),
        ("0.6.0rc1", {"return_meta_info", "return_input_ids_in_sglext", "return_output_ids_in_sglext"}),
        ("", {"return_meta_info", "return_input_ids_in_sglext", "return_output_ids_in_sglext"}),
    ],
)
def test_a_whole_answer_is_asked_for_ids_as_the_release_gives_them(version: str, names: set[str]) -> None:
    body = body_of(version, options={"temperature": 0.5})
    assert wanted(body) == names
    assert (body["logprobs"], body["top_logprobs"], body["stream"]) == (True, 0, False)
    assert (body["model"], body["temperature"]) == ("served", 0.5)


def test_a_stream_asks_for_nothing_that_streams_refuse() -> None:
    body = body_of("0.5.20", stream=True, options={"stream_options": {"include_usage": False}})
    assert wanted(body) == {"return_input_ids_in_sglext", "return_output_ids_in_sglext"}
    assert (body["stream"], body["stream_options"]) == (True, {"include_usage": True})


@pytest.mark.parametrize("version", ["0.5.13", "0.5.17", "0.5.19"])
def test_a_release_that_refuses_to_stream_ids_is_never_asked_to(version: str) -> None:
    assert body_of(version, stream=True)["stream"] is False
    assert not SglangEngine(version).features().streams_ids


def test_an_engine_is_fitted_to_the_release_that_the_server_names() -> None:
    fitted = SglangEngine().configured(EngineFacts(version="0.5.18"))
    assert fitted.features() == Features(streams_ids=False, versions_in_answer=False)
    assert SglangEngine().configured(EngineFacts()).features().streams_ids


def test_thinking_in_the_history_keeps_its_name_and_ids_go_in_beside_the_messages() -> None:
    messages: list[dict[str, Any]] = [{"role": "assistant", "content": "a", "reasoning_content": "because"}]
    body = NEW.request(call(messages=messages, tools=[TOOL]), "m", stream=False, prompt_ids=[5, 6]).body
    assert (body["messages"], body["input_ids"], body["tools"]) == (messages, [5, 6], [TOOL])


@pytest.mark.parametrize(
    ("asked", "sent"),
    [("low", "low"), ("xhigh", "high"), ("max", "high"), ("Minimal", "low"), ("turbo", None), (3, None), (None, None)],
)
def test_an_effort_that_would_be_refused_is_sent_as_the_nearest(asked: Any, sent: str | None) -> None:
    options = {"reasoning_effort": asked}
    assert body_of("0.5.23", options=options).get("reasoning_effort") == sent
    rendering = NEW.rendering(call(options=options), "m")
    assert rendering is not None
    assert rendering.body.get("reasoning_effort") == sent
    assert options == {"reasoning_effort": asked}


def test_a_tool_choice_without_tools_is_dropped() -> None:
    assert "tool_choice" not in body_of("0.5.23", options={"tool_choice": "auto"})


def test_a_bare_prompt_goes_to_completions() -> None:
    options = {"max_tokens": 7, "top_logprobs": 3, "tool_choice": "none"}
    request = NEW.request(call(prompt="once", options=options), "m", stream=True)
    assert request.path == "/v1/completions"
    assert request.body == {
        "model": "m",
        "prompt": "once",
        "max_tokens": 7,
        "logprobs": 3,
        "return_token_ids": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    assert NEW.request(call(prompt="once"), "m", stream=False, prompt_ids=[1]).body["prompt"] == [1]


def test_a_chat_is_rendered_by_tokenize() -> None:
    options = {"chat_template_kwargs": {"enable_thinking": False}, "tool_choice": "auto", "temperature": 1.0}
    request = NEW.rendering(call(tools=[TOOL], options=options), "m")
    assert request is not None
    assert request.path == "/tokenize"
    assert request.body == {
        "model": "m",
        "messages": [{"role": "user", "content": "hi"}],
        "tools": [TOOL],
        "chat_template_kwargs": {"enable_thinking": False},
        "tool_choice": "auto",
    }
    assert NEW.rendering(call(), "m", generation_prompt=False) is None
    bare = NEW.rendering(call(prompt="once", options={"add_special_tokens": False}), "m")
    assert bare is not None
    assert bare.body == {"model": "m", "prompt": "once", "add_special_tokens": False}
    assert NEW.rendering(call(prompt=[1, 2]), "m") is None
    assert NEW.read_rendering(b'{"tokens": [1, 2], "count": 2}') == [1, 2]
    with pytest.raises(CallFault):
        NEW.read_rendering(b'{"tokens": [[1], [2]]}')


@pytest.mark.parametrize("name", ["token_ids", "response_token_ids"])
def test_ids_are_read_under_both_of_their_names(name: str) -> None:
    choice = {name: [7, 8], "prompt_token_ids": [1, 2], "meta_info": {"output_token_logprobs": pairs(7, 8)}}
    answer = NEW.read(whole(**choice))
    assert (answer.prompt_ids, answer.choices[0].ids) == ([1, 2], [7, 8])
    assert [entry["logprob"] for entry in answer.choices[0].logprobs or ()] == [-0.5, -1.5]


def test_meta_info_alone_gives_ids_and_log_probabilities() -> None:
    meta = {"output_token_logprobs": pairs(7, 8), "finish_reason": {"type": "length", "length": 2}}
    answer = NEW.read(whole(meta_info=meta, finish_reason=None, logprobs={"content": [{"logprob": -0.5}]}))
    [choice] = answer.choices
    assert (choice.ids, choice.finish_reason) == ([7, 8], "length")
    assert [entry["logprob"] for entry in choice.logprobs or ()] == [-0.5, -1.5]


def test_sglext_gives_ids_and_the_answer_the_log_probabilities() -> None:
    entries = [{"token": "a", "logprob": -0.25, "bytes": [97], "top_logprobs": []}]
    answer = NEW.read(whole(sglext={"input_ids": [1], "output_ids": [[9]]}, logprobs={"content": entries}))
    assert (answer.prompt_ids, answer.choices[0].ids, answer.choices[0].logprobs) == ([1], [9], entries)


def test_alternatives_of_the_answer_stay_beside_meta_infos_values() -> None:
    entry = {"token": "a", "logprob": -7.0, "bytes": [97], "top_logprobs": [{"token": "b", "logprob": -1.0}]}
    answer = NEW.read(whole(meta_info={"output_token_logprobs": pairs(7)}, logprobs={"content": [entry]}))
    assert answer.choices[0].logprobs == [{**entry, "logprob": -0.5}]


def test_a_log_probability_of_another_id_is_none_of_the_sampled_one() -> None:
    answer = NEW.read(whole(response_token_ids=[7, 9], meta_info={"output_token_logprobs": pairs(7, 8)}))
    assert [entry["logprob"] for entry in answer.choices[0].logprobs or ()] == [-0.5, None]


def test_an_answer_without_anything_about_tokens_has_none() -> None:
    [choice] = NEW.read(whole()).choices
    assert (choice.ids, choice.logprobs, choice.weight_versions) == (None, None, None)


def test_an_unknown_shape_of_pairs_is_no_id() -> None:
    [choice] = NEW.read(whole(meta_info={"output_token_logprobs": [None, [-1.0]]})).choices
    assert choice.ids == [None, None]


def test_the_message_has_the_form_of_every_other_engine() -> None:
    calls = [{"id": "c", "index": 0, "type": "function", "function": {"name": "f", "arguments": "{}"}}]
    said = {"role": "assistant", "content": "", "reasoning_content": "why", "tool_calls": calls}
    message = NEW.read(whole(message=said)).choices[0].message
    assert message == {
        "role": "assistant",
        "content": None,
        "reasoning_content": "why",
        "tool_calls": [{"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}],
    }
    empty = {"role": "assistant", "content": "", "reasoning_content": None, "tool_calls": None}
    assert NEW.read(whole(message=empty)).choices[0].message == {"role": "assistant", "content": ""}


def test_policy_versions_are_spans_and_a_lone_version_is_none() -> None:
    spans = [{"version": "1", "start": 0, "end": 1}, {"version": "2", "start": 1, "end": 2}]
    told = [VersionSpan(version="1", start=0, end=1), VersionSpan(version="2", start=1, end=2)]
    assert NEW.read(whole(meta_info={"weight_versions": spans})).choices[0].weight_versions == told
    assert (
        NEW.read(whole(metadata={"weight_version": "2", "weight_versions": spans})).choices[0].weight_versions == told
    )
    lone = NEW.read(whole(metadata={"weight_version": "2"}, meta_info={"weight_version": "2"}))
    assert lone.choices[0].weight_versions is None


def test_the_counts_are_read() -> None:
    usage = {"prompt_tokens": 5, "completion_tokens": 2, "prompt_tokens_details": {"cached_tokens": 4}}
    assert NEW.read(whole(usage=usage)).usage == Usage(prompt_tokens=5, completion_tokens=2, cached_tokens=4)
    plain = {"prompt_tokens": 5, "completion_tokens": 2, "prompt_tokens_details": None}
    assert NEW.read(whole(usage=plain)).usage == Usage(prompt_tokens=5, completion_tokens=2)
    thinking = {**plain, "reasoning_tokens": 1}
    assert NEW.read(whole(usage=thinking)).usage == Usage(prompt_tokens=5, completion_tokens=2, reasoning_tokens=1)


def test_ids_that_come_late_in_a_stream_belong_to_their_choices() -> None:
    gatherer = Gatherer(2)
    events: list[dict[str, Any]] = [
        {"choices": [{"index": n, "delta": {"role": "assistant", "content": "ab"[n], "tool_calls": None}}]}
        for n in (0, 1)
    ]
    events += [{"choices": [{"index": n, "delta": {}, "finish_reason": "stop", "matched_stop": 3}]} for n in (0, 1)]
    events += [{"choices": [], "sglext": {"input_ids": [1], "output_ids": [[7], [8, 9]]}}]
    events += [{"choices": [], "usage": {"prompt_tokens": 1, "completion_tokens": 3}}]
    for event in events:
        gatherer.add(NEW.read_event(SseEvent(json.dumps(event).encode())))
    gatherer.add(NEW.read_event(SseEvent(b"[DONE]")))
    answer = gatherer.answer()
    assert gatherer.done
    assert (answer.prompt_ids, [choice.ids for choice in answer.choices]) == ([1], [[7], [8, 9]])
    assert [choice.stop_reason for choice in answer.choices] == [3, 3]
    assert [choice.message["content"] for choice in answer.choices] == ["a", "b"]


def test_ids_in_the_parts_of_a_chat_stream_are_not_counted_twice() -> None:
    gatherer = Gatherer(1)
    parts = [{"choices": [{"index": 0, "delta": {"content": "a"}, "token_ids": [7], "finish_reason": "stop"}]}]
    for event in [*parts, {"choices": [], "sglext": {"output_ids": [[7]]}}]:
        gatherer.add(NEW.read_event(SseEvent(json.dumps(event).encode())))
    assert gatherer.answer().choices[0].ids == [7]


def error(message: str, status: int, **more: Any) -> bytes:
    return json.dumps({"object": "error", "message": message, "type": "T", "code": status, **more}).encode()


@pytest.mark.parametrize(
    ("message", "limit", "tokens"),
    [
        ("The input (204281 tokens) is longer than the model's context length (202752 tokens).", 202752, 204281),
        (
            "Requested token count exceeds the model's maximum context length of 64000 tokens. You requested a total "
            "of 71897 tokens: 7897 tokens from the input messages and 64000 tokens for the completion.",
            64000,
            7897,
        ),
        ("Requested token count exceeds the model's maximum context length of 131072 tokens.", 131072, None),
        ("Input length (10 tokens) exceeds the maximum allowed length (8 tokens). Use a shorter input.", 8, 10),
    ],
)
def test_an_overflow_is_known_by_its_words(message: str, limit: int, tokens: int | None) -> None:
    fault = NEW.fault(400, {}, error(message, 400))
    assert (fault.kind, fault.max_context, fault.prompt_tokens) == (FaultKind.CONTEXT_OVERFLOW, limit, tokens)


@pytest.mark.parametrize(
    ("status", "kind"),
    [
        (400, FaultKind.REFUSED),
        (404, FaultKind.MISCONFIGURED),
        (413, FaultKind.TOO_LARGE),
        (429, FaultKind.OVERLOADED),
        (500, FaultKind.ENGINE_FAULT),
        (503, FaultKind.OVERLOADED),
    ],
)
def test_an_error_status_has_its_meaning(status: int, kind: FaultKind) -> None:
    fault = NEW.fault(status, {"Retry-After": "7"}, error("no", status))
    assert fault.kind is kind
    assert "no" in fault.message


def test_a_missing_key_is_the_operators_affair() -> None:
    fault = NEW.fault(401, {}, b'{"error": "Unauthorized"}')
    assert fault.kind is FaultKind.MISCONFIGURED
    assert "api_key_env" in fault.message


@pytest.mark.parametrize("data", [b"<html>", b"[1]", b'{"detail": "Not Found"}', b'{"detail": [{"loc": []}]}'])
def test_an_error_of_any_shape_is_a_fault(data: bytes) -> None:
    assert NEW.fault(500, {}, data).kind is FaultKind.ENGINE_FAULT


@pytest.mark.parametrize(
    ("code", "kind"), [(503, FaultKind.OVERLOADED), ("503", FaultKind.OVERLOADED), (None, FaultKind.ENGINE_FAULT)]
)
def test_an_abort_in_a_stream_of_status_200_is_read_as_its_own_status(code: Any, kind: FaultKind) -> None:
    inner = {"object": "error", "message": "Abort before prefill", "type": "SERVICE_UNAVAILABLE", "code": code}
    with pytest.raises(CallFault) as raised:
        NEW.read_event(SseEvent(json.dumps({"error": inner}).encode()))
    assert raised.value.kind is kind
    with pytest.raises(CallFault) as raised:
        NEW.read(json.dumps(inner).encode())
    assert raised.value.kind is kind


@pytest.mark.parametrize("data", [b"[]", b"nope", b'{"choices": []}', b"{}"])
def test_an_answer_that_is_none_is_a_fault_of_the_engine(data: bytes) -> None:
    with pytest.raises(CallFault):
        NEW.read(data)


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ({"tool_choice": "required"}, "tool_choice: required"),
        ({"tool_choice": {"type": "function"}}, "tool_choice: named"),
        ({"response_format": {"type": "json_schema"}}, "response_format: json_schema"),
        ({"regex": "a+"}, "regex"),
        ({"tools": [{"type": "function", "function": {"name": "f", "strict": True}}]}, "strict tools"),
        ({"tools": [TOOL], "tool_choice": "auto", "response_format": {"type": "text"}}, None),
    ],
)
def test_what_constrains_sampling_is_named(body: dict[str, Any], words: str | None) -> None:
    assert NEW.grammar(body) == words


def test_only_what_decides_the_sample_is_sampling() -> None:
    body = {**body_of("0.5.23", options={"top_k": 4, "seed": 1, "user": "u", "stop": None})}
    assert NEW.sampling(body) == {"top_k": 4, "seed": 1}


def test_the_servers_own_words_are_read() -> None:
    facts = NEW.read_facts({"version": "0.5.19"}, {"data": [{"id": "m", "max_model_len": 4096}]})
    assert facts == EngineFacts("0.5.19", {"m": 4096})
    assert NEW.read_facts(None, None) == EngineFacts()
    assert NEW.read_weights({"weight_version": "default"}) == "default"
    assert NEW.read_weights({}) is None
