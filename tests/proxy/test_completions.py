"""Legacy completions: a bare prompt as text or ids, and the same record and checks behind it as behind chat."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
from redis.asyncio import Redis

from polarq.contracts.completion import CompletionLabel
from polarq.ledger.keys import Keys
from polarq.testing.inference import Scenario, Script, ScriptedInference, Turn, expected_logprobs
from polarq.testing.inference.faults import BadLogprob, LogprobCount, Omit, OtherModel, WrongUsage
from polarq_proxy.call import ModelCall
from polarq_proxy.engines.vllm import VllmEngine
from polarq_proxy.gather import Gatherer
from polarq_proxy.sse import SseParser

from . import captures
from .raw_engine import RawCall, event, raw_engine
from .rig import Rig, Sse, running

PATH = "/v1/completions"
SAID = "one two \U0001f9ea \u0939 three"
MODES = pytest.mark.parametrize("stream_upstream", [True, False], ids=["passed_on", "made_up"])
FORMS = pytest.mark.parametrize("streamed", [True, False], ids=["streamed", "whole"])
ENGINE = VllmEngine()


async def stream(rig: Rig, **body: Any) -> Sse:
    status, headers, raw = await rig.raw({"model": "asked", "stream": True, **body}, PATH)
    assert status == 200, raw
    sse = Sse.of(status, headers, raw)
    assert sse.ended
    return sse


async def choice(rig: Rig, *, streamed: bool, **body: Any) -> dict[str, Any]:
    """The one choice, put together if it came in pieces."""
    if not streamed:
        status, tree = await rig.post({"model": "asked", **body}, PATH)
        assert status == 200, tree
        assert (tree["object"], tree["model"]) == ("text_completion", "asked")
        [found] = tree["choices"]
        assert isinstance(found, dict)
        return found
    together: dict[str, Any] = {"text": "", "logprobs": None}
    for piece in (await stream(rig, **body)).choices:
        together["text"] += piece["text"]
        for key in ("finish_reason", "prompt_token_ids"):
            together[key] = piece.get(key) or together.get(key)
        if piece.get("token_ids") is not None:
            together["token_ids"] = together.get("token_ids", []) + piece["token_ids"]
        for key, values in (piece["logprobs"] or {}).items():
            together["logprobs"] = together["logprobs"] or {}
            together["logprobs"][key] = together["logprobs"].get(key, []) + values
    return together


@MODES
@FORMS
@pytest.mark.parametrize("form", ["text", "texts", "ids", "lists"])
async def test_the_record_is_what_the_engine_sampled(
    redis_client: Redis, keys: Keys, stream_upstream: bool, streamed: bool, form: str
) -> None:
    async with (
        ScriptedInference(scenario=Scenario.of(SAID, drift_seed=3)) as inference,
        running(redis_client, keys, inference.base_url, stream_upstream=stream_upstream) as rig,
    ):
        ids = [5, 6, 7, 8]
        prompt: Any = {"text": "say it", "texts": ["say it"], "ids": ids, "lists": [ids]}[form]
        found = await choice(rig, streamed=streamed, prompt=prompt, max_tokens=64, temperature=0.5)
        assert (found["text"], found["finish_reason"]) == (SAID, "stop")
        [call] = [call for call in inference.ledger if call.session_id == "task.0"]
        [record] = await rig.records()
        assert record.prompt_ids == list(call.prompt_ids)
        assert record.sampled_ids == call.sampled_ids
        assert record.logprobs == expected_logprobs(call.prompt_ids, call.sampled_ids)
        assert (record.label, record.untrainable, record.incomplete) == (CompletionLabel.TRAIN, None, False)
        assert record.trainable
        assert record.messages == ([{"role": "user", "content": "say it"}] if form in {"text", "texts"} else [])
        assert record.reply == {"role": "assistant", "content": SAID}
        assert record.sampling["temperature"] == 0.5
        assert (record.dialect, record.streamed, record.tools) == ("openai_completions", streamed, None)
        assert record.usage.completion_tokens == len(call.sampled_ids)
        if form in {"ids", "lists"}:
            assert record.prompt_ids == ids


@MODES
@FORMS
async def test_ids_and_logprobs_go_only_to_who_asked(
    redis_client: Redis, keys: Keys, stream_upstream: bool, streamed: bool
) -> None:
    async with (
        ScriptedInference(scenario=Scenario.of(SAID)) as inference,
        running(redis_client, keys, inference.base_url, stream_upstream=stream_upstream) as rig,
    ):
        plain = await choice(rig, streamed=streamed, prompt="x", max_tokens=64)
        assert plain["logprobs"] is None
        assert not plain.get("token_ids")
        asked = await choice(rig, streamed=streamed, prompt="y", max_tokens=64, logprobs=2, return_token_ids=True)
        record = (await rig.records())[1]
        assert asked["token_ids"] == record.sampled_ids
        assert asked["prompt_token_ids"] == record.prompt_ids
        lists = asked["logprobs"]
        assert lists["token_logprobs"] == record.logprobs
        assert len(lists["tokens"]) == len(lists["top_logprobs"]) == len(record.sampled_ids)
        offsets = [sum(map(len, lists["tokens"][:at])) for at in range(len(lists["tokens"]))]
        assert lists["text_offset"] == offsets
        assert all(len(top) == 3 for top in lists["top_logprobs"])


@FORMS
async def test_several_answers_are_several_records(redis_client: Redis, keys: Keys, streamed: bool) -> None:
    scripts = tuple(Script(name=name, turns=(Turn(content=f"it is {name}"),)) for name in ("a", "b"))
    async with (
        ScriptedInference(scenario=Scenario(name="two", scripts=scripts)) as inference,
        running(redis_client, keys, inference.base_url) as rig,
    ):
        if streamed:
            sse = await stream(rig, prompt="x", n=2, max_tokens=64)
            texts = ["".join(c["text"] for c in sse.choices if c["index"] == index) for index in (0, 1)]
            assert sse.finish_reasons == ["stop", "stop"]
        else:
            _, tree = await rig.post({"prompt": "x", "n": 2, "max_tokens": 64}, PATH)
            texts = [found["text"] for found in tree["choices"]]
        assert texts == ["it is a", "it is b"]
        records = await rig.records()
        assert [record.reply["content"] for record in records] == texts
        assert all(record.trainable for record in records)


async def test_a_stream_ends_with_usage_only_if_asked(redis_client: Redis, keys: Keys) -> None:
    async with (
        ScriptedInference(scenario=Scenario.of(SAID)) as inference,
        running(redis_client, keys, inference.base_url) as rig,
    ):
        assert not any("usage" in one for one in (await stream(rig, prompt="x")).events)
        counted = await stream(rig, prompt="y", stream_options={"include_usage": True})
        record = (await rig.records())[1]
        assert counted.events[-1]["choices"] == []
        assert counted.events[-1]["usage"]["completion_tokens"] == len(record.sampled_ids)


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, "prompt"),
        ({"prompt": ""}, "prompt"),
        ({"prompt": []}, "prompt"),
        ({"prompt": ["a", "b"]}, "prompt"),
        ({"prompt": [[1], [2]]}, "prompt"),
        ({"prompt": [1, "a"]}, "prompt"),
        ({"prompt": [1, -1]}, "prompt"),
        ({"prompt": [True]}, "prompt"),
        ({"prompt": {"text": "a"}}, "prompt"),
        ({"prompt": "a", "echo": True}, "echo"),
        ({"prompt": "a", "suffix": "b"}, "suffix"),
        ({"prompt": "a", "n": 0}, "n"),
    ],
)
async def test_what_cannot_be_answered_is_refused_by_name(
    redis_client: Redis, keys: Keys, body: dict[str, Any], param: str
) -> None:
    async with (
        ScriptedInference(scenario=Scenario.of("x")) as inference,
        running(redis_client, keys, inference.base_url) as rig,
    ):
        status, tree = await rig.post(body, PATH)
        assert (status, tree["error"]["param"]) == (400, param)
        assert f"'{param}'" in tree["error"]["message"]
        assert await rig.records() == []


async def test_other_fields_are_never_refused(redis_client: Redis, keys: Keys) -> None:
    async with (
        ScriptedInference(scenario=Scenario.of("x")) as inference,
        running(redis_client, keys, inference.base_url) as rig,
    ):
        body = {
            "prompt": "a", "echo": False, "suffix": None, "user": "u", "best_of": 1, "metadata": {}, "stop": ["zzz"],
            "logprobs": None, "unheard_of": [1], "logit_bias": {}, "max_tokens": None, "stream": False,
        }  # fmt: skip
        status, _ = await rig.post(body, PATH)
        assert status == 200
        [record] = await rig.records()
        assert (record.sampling["stop"], record.sampling["max_tokens"]) == (["zzz"], 16)


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        (Omit(kind="omit", fields=("prompt_token_ids",)), "no prompt ids"),
        (Omit(kind="omit", fields=("token_ids",)), "no token ids"),
        (Omit(kind="omit", fields=("logprobs",)), "no log-probabilities"),
        (Omit(kind="omit", fields=("usage",)), "no usage"),
        (LogprobCount(kind="logprob_count"), "log-probabilities"),
        (BadLogprob(kind="bad_logprob", value="NaN", position=1), "position 1"),
        (BadLogprob(kind="bad_logprob", value="-9999.0"), "unknown"),
        (WrongUsage(kind="wrong_usage"), "usage says"),
        (OtherModel(kind="other_model"), "answered by"),
    ],
)
@FORMS
async def test_an_answer_that_cannot_be_believed_is_not_trained_on(
    redis_client: Redis, keys: Keys, fault: Any, words: str, streamed: bool
) -> None:
    turn = Turn(content="one two three", fault=fault)
    async with (
        ScriptedInference(scenario=Scenario(name="odd", scripts=(Script(name="a", turns=(turn,)),))) as inference,
        running(redis_client, keys, inference.base_url) as rig,
    ):
        found = await choice(rig, streamed=streamed, prompt="x", max_tokens=64, logprobs=0)
        assert found["text"] == "one two three"
        [record] = await rig.records()
        assert words in (record.untrainable or "")


async def test_a_character_cut_by_a_read_is_whole(redis_client: Redis, keys: Keys) -> None:
    logprobs = {"tokens": ["a", "b"], "token_logprobs": [-0.1, -0.2], "top_logprobs": [{}, {}], "text_offset": [0, 1]}
    change = {"index": 0, "text": "go \U0001f9ea", "token_ids": [11, 12], "prompt_token_ids": [1, 2, 3]}
    head = {"object": "text_completion", "model": "raw"}
    end = {"index": 0, "text": "", "finish_reason": "stop", "logprobs": {"token_logprobs": []}, "token_ids": []}
    usage = {"prompt_tokens": 3, "completion_tokens": 2}
    data = event(json.dumps({**head, "choices": [{**change, "logprobs": logprobs}]}, ensure_ascii=False).encode())
    rest = event({**head, "choices": [end]}) + event({**head, "choices": [], "usage": usage}) + b"data: [DONE]\n\n"
    cuts = iter(range(1, len(data)))

    async def act(call: RawCall) -> None:
        cut = next(cuts)
        await call.head()
        await call.chunk(data[:cut])
        await asyncio.sleep(0)
        await call.chunk(data[cut:] + rest)
        await call.end()

    async with raw_engine(act) as engine, running(redis_client, keys, engine.url) as rig:
        for _ in range(1, len(data)):
            assert (await choice(rig, streamed=True, prompt="x"))["text"] == "go \U0001f9ea"
        assert all(record.trainable and record.sampled_ids == [11, 12] for record in await rig.records())


async def test_an_error_inside_a_stream_is_an_event_of_its_own(redis_client: Redis, keys: Keys) -> None:
    change = {"index": 0, "text": "half", "token_ids": [1, 2], "logprobs": {"token_logprobs": [-0.1, -0.1]}}

    async def act(call: RawCall) -> None:
        await call.head()
        await call.chunk(event({"object": "text_completion", "choices": [change]}))
        await call.chunk(event({"error": {"message": "queue full", "type": "overloaded", "code": 503}}))
        await call.end()

    async with raw_engine(act) as engine, running(redis_client, keys, engine.url) as rig:
        status, headers, raw = await rig.raw({"prompt": "x", "stream": True}, PATH)
        sse = Sse.of(status, headers, raw)
        assert [one["text"] for one in sse.choices] == ["half"]
        assert "queue full" in sse.errors[0]["message"]
        [record] = await rig.records()
        assert (record.sampled_ids, record.incomplete, record.trainable) == ([1, 2], True, False)


async def test_an_overflow_names_the_prompt(redis_client: Redis, keys: Keys) -> None:
    async with (
        ScriptedInference(scenario=Scenario.of("x"), max_model_len=32) as inference,
        running(redis_client, keys, inference.base_url) as rig,
    ):
        status, tree = await rig.post({"prompt": [5] * 100}, PATH)
        error = tree["error"]
        assert (status, error["code"], error["param"]) == (400, "context_length_exceeded", "prompt")
        assert error["message"].startswith("This model's maximum context length is 32 tokens.")


def test_a_real_answer_is_read() -> None:
    captured = captures.whole("vllm_completions_token_prompt_logprobs1")
    answer = ENGINE.read(captured.data)
    [choice] = answer.choices
    told = captured.tree["choices"][0]
    assert (answer.prompt_ids, choice.ids) == ([1, 318, 198, 100, 200], told["token_ids"])
    assert choice.message == {"role": "assistant", "content": told["text"]}
    assert [entry["logprob"] for entry in choice.logprobs or ()] == told["logprobs"]["token_logprobs"]
    assert choice.logprobs is not None
    assert {entry["token"]: entry["logprob"] for entry in choice.logprobs[0]["top_logprobs"]} == (
        told["logprobs"]["top_logprobs"][0]
    )


def test_a_real_stream_is_put_together() -> None:
    gatherer = Gatherer(1)
    for one in SseParser(1 << 20).feed(captures.stream("vllm_completions_token_prompt_stream")):
        gatherer.add(ENGINE.read_event(one))
    answer = gatherer.answer()
    [choice] = answer.choices
    assert gatherer.done
    assert answer.prompt_ids == [1, 318, 198, 100, 200]
    assert (choice.ids, choice.message["content"], choice.finish_reason) == (
        [3723, 654, 350],
        "parametersstrname",
        "length",
    )
    assert len(choice.logprobs or ()) == 3


def test_ids_that_the_proxy_made_take_the_place_of_a_prompt() -> None:
    call = ModelCall([], None, {"temperature": 1.0, "top_logprobs": 3}, "m", prompt="x")
    request = ENGINE.request(call, "served", stream=True, prompt_ids=[1, 2])
    assert request.path == PATH
    assert request.body == {
        "temperature": 1.0, "model": "served", "prompt": [1, 2], "stream": True, "logprobs": 3,
        "return_token_ids": True, "return_weight_versions": True, "stream_options": {"include_usage": True},
    }  # fmt: skip


def test_a_prompt_of_ids_needs_no_rendering() -> None:
    assert ENGINE.rendering(ModelCall([], None, {}, "m", prompt=[1, 2]), "m") is None
    request = ENGINE.rendering(ModelCall([], None, {"add_special_tokens": False}, "m", prompt="x"), "m")
    assert request is not None
    assert (request.path, request.body) == ("/tokenize", {"model": "m", "prompt": "x", "add_special_tokens": False})
