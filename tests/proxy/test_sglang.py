"""SGLang behind the proxy: every release's way to give up ids ends in the same record, which is what was sampled."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from redis.asyncio import Redis

from polarq.contracts.completion import Completion, VersionSpan
from polarq.ledger.keys import Keys
from polarq.testing.inference import Scenario, ScriptedInference, expected_logprobs
from polarq.testing.inference.faults import Abort, HttpStatus, StreamError
from polarq.testing.inference.scenario import Script, ToolCall, Turn

from .rig import HELLO, Rig, Sse, running, until
from .test_exact import READING, breaks, exact_now, work

TURNS = (
    Turn(reasoning="the user says hello", content="go 🧪 ह"),
    Turn(content="I look.", tool_calls=(ToolCall(name="bash", arguments={"command": "ls 'é'"}),)),
    Turn(content="done"),
)
SCENARIO = Scenario(name="calls", scripts=(Script(name="a", turns=TURNS), Script(name="b", turns=TURNS[2:])))
TOOLS = [{"type": "function", "function": {"name": "bash", "parameters": {"type": "object"}}}]
BANDS = ("0.5.13", "0.5.17", "0.5.19", "0.5.23")

every_band = pytest.mark.parametrize("version", BANDS)
both_ways = pytest.mark.parametrize("streamed", [False, True], ids=["unary", "streamed"])


@asynccontextmanager
async def sglang(
    redis: Redis,
    keys: Keys,
    version: str = "0.5.23",
    scenario: Scenario = SCENARIO,
    *,
    examined: bool = True,
    **options: Any,
) -> AsyncIterator[tuple[ScriptedInference, Rig]]:
    """A scripted SGLang and a proxy that has looked at it (unless its faults meet that look too)."""
    section = {name: options.pop(name) for name in ("stream_upstream", "grant", "context") if name in options}
    async with (
        ScriptedInference(scenario=scenario, engine="sglang", version=version, drift_seed=3, **options) as inference,
        running(redis, keys, inference.base_url, endpoint={"engine": "sglang"}, **section) as rig,
    ):
        if examined:
            await until(lambda: all(endpoint.state.gives_ids is not None for endpoint in rig.proxy.fleet.endpoints))
        yield inference, rig


async def asked(rig: Rig, streamed: bool, messages: list[dict[str, Any]] | None = None, **fields: Any) -> Any:
    """The assistant's message as the harness reads it."""
    if not streamed:
        return (await rig.ask(messages or HELLO, **fields))["choices"][0]["message"]
    sse = await rig.stream(messages or HELLO, **fields)
    assert sse.ended
    assert not sse.errors
    return {"role": "assistant", "content": sse.text()}


async def alike(inference: ScriptedInference, rig: Rig) -> list[Completion]:
    """The records, each compared with the server's own ledger."""
    sampled = [call for call in inference.ledger if call.session_id == "task.0"]
    records = await rig.records()
    assert len(records) == len(sampled)
    for record, call in zip(records, sampled, strict=True):
        assert record.prompt_ids == list(call.prompt_ids)
        assert record.sampled_ids == call.sampled_ids
        assert record.logprobs == call.logprobs == expected_logprobs(call.prompt_ids, call.sampled_ids)
        assert record.usage.prompt_tokens == len(call.prompt_ids)
        assert record.usage.completion_tokens == len(call.sampled_ids)
        assert record.untrainable is None
        assert record.engine == "sglang"
    return records


@every_band
@both_ways
async def test_the_record_is_what_the_engine_sampled(
    redis_client: Redis, keys: Keys, version: str, streamed: bool
) -> None:
    async with sglang(redis_client, keys, version) as (inference, rig):
        messages: list[dict[str, Any]] = list(HELLO)
        for _ in range(3):
            messages += [await asked(rig, streamed, messages, tools=TOOLS), {"role": "user", "content": "go on"}]
        records = await alike(inference, rig)
    assert [record.finish_reason for record in records] == ["stop", "tool_calls", "stop"]
    assert [record.streamed for record in records] == [streamed] * 3
    first, called_last, last = (record.sampled_ids[-1] for record in records)
    told = called_last if streamed and version == "0.5.23" else None  # a whole answer with calls does not say it
    assert [record.stop_reason for record in records] == [first, told, last]
    assert [bool(record.usage.reasoning_tokens) for record in records] == [True, False, False]
    thought, called, done = (record.reply for record in records)
    assert thought == {"role": "assistant", "reasoning_content": "the user says hello", "content": "go 🧪 ह"}
    [call] = called["tool_calls"]
    assert (call["function"]["name"], call["function"]["arguments"]) == ("bash", '{"command": "ls \'é\'"}')
    assert "index" not in call
    assert done == {"role": "assistant", "content": "done"}


@every_band
async def test_only_a_release_that_streams_ids_is_asked_for_a_stream(
    redis_client: Redis, keys: Keys, version: str
) -> None:
    async with sglang(redis_client, keys, version) as (_, rig):
        [endpoint] = rig.proxy.fleet.endpoints
        sse = await rig.stream()
    assert endpoint.state.version == version
    assert endpoint.features.streams_ids is (version == "0.5.23")
    said = [choice["delta"] for choice in sse.choices if choice["delta"].get("content")]
    assert (len(said) > 1) is endpoint.features.streams_ids


@every_band
@both_ways
async def test_two_choices_are_two_records_with_their_own_ids(
    redis_client: Redis, keys: Keys, version: str, streamed: bool
) -> None:
    async with sglang(redis_client, keys, version) as (inference, rig):
        if streamed:
            await rig.stream(n=2)
        else:
            await rig.ask(n=2)
        calls = [call for call in inference.ledger if call.session_id == "task.0"]
        records = await rig.records()
    assert [record.sampled_ids for record in records] == [call.sampled_ids for call in calls]
    assert [record.logprobs for record in records] == [call.logprobs for call in calls]
    assert [record.untrainable for record in records] == [None, None]
    assert records[0].sampled_ids != records[1].sampled_ids


@every_band
async def test_a_logprobs_list_that_lacks_an_entry_does_not_cost_the_sample(
    redis_client: Redis, keys: Keys, version: str
) -> None:
    async with sglang(redis_client, keys, version, short_logprobs=True) as (inference, rig):
        await rig.ask()
        await alike(inference, rig)


@every_band
@both_ways
async def test_the_policy_version_is_recorded(redis_client: Redis, keys: Keys, version: str, streamed: bool) -> None:
    async with sglang(redis_client, keys, version) as (_, rig):
        await rig.ask()  # an answer that names its version does not make the proxy trust streams to
        await asked(rig, streamed)
        records = await rig.records()
    for record in records:
        assert record.weight_versions == [VersionSpan(version="default", start=0, end=len(record.sampled_ids))]


@pytest.mark.parametrize(("version", "told"), [("0.5.17", False), ("0.5.19", True)])
async def test_a_change_of_the_policy_in_the_middle_is_placed_or_marks_the_call(
    redis_client: Redis, keys: Keys, version: str, told: bool
) -> None:
    slow = Scenario.of("one two three four five six seven eight nine ten", tokens_per_s=30)
    async with sglang(redis_client, keys, version, slow) as (inference, rig):
        call = asyncio.create_task(rig.ask())
        await inference.ledger.wait_until(lambda ledger: len(ledger) > 1 and len(ledger[-1].sampled_ids) >= 3)
        change = {"new_version": "v2", "abort_all_requests": False}
        async with rig.http.post(f"{inference.base_url}/update_weight_version", json=change) as answer:
            assert answer.status == 200
        await call
        [record] = await rig.records()
        versions = inference.ledger[-1].weight_versions
    if told:
        cut = versions.index("v2")
        assert record.weight_versions == [
            VersionSpan(version="default", start=0, end=cut),
            VersionSpan(version="v2", start=cut, end=len(versions)),
        ]
        assert record.trainable
    else:
        assert record.weight_versions == []
        assert record.untrainable == "the policy version changed during the call (from default to v2)"


@both_ways
async def test_an_aborted_call_is_kept_with_its_ids_and_not_shown_as_an_answer(
    redis_client: Redis, keys: Keys, streamed: bool
) -> None:
    scenario = Scenario.of("one two three four", fault=Abort(kind="abort", after_tokens=2))
    async with sglang(redis_client, keys, scenario=scenario) as (inference, rig):
        status, headers, data = await rig.raw({"model": "m", "messages": HELLO, "stream": streamed})
        records = await rig.records()
        calls = [call for call in inference.ledger if call.session_id == "task.0"]
    if streamed:
        sse = Sse.of(status, headers, data)
        assert sse.errors
        assert sse.finish_reasons == []
    else:
        assert status == 503
    assert [record.sampled_ids for record in records] == [call.sampled_ids for call in calls]
    assert all(record.incomplete and not record.trainable for record in records)


async def test_a_stream_that_breaks_off_has_no_ids_and_is_not_trained_on(redis_client: Redis, keys: Keys) -> None:
    scenario = Scenario.of("one two three four", fault=StreamError(kind="stream_error", after_tokens=2))
    async with sglang(redis_client, keys, scenario=scenario, examined=False) as (_, rig):
        sse = await rig.stream()
        [record] = await rig.records()
    assert sse.errors
    assert record.incomplete
    assert not record.trainable
    assert record.sampled_ids == []
    assert record.reply["content"].startswith("one")


@both_ways
async def test_a_context_that_is_too_long_is_told_in_the_words_that_harnesses_compact_on(
    redis_client: Redis, keys: Keys, streamed: bool
) -> None:
    async with sglang(redis_client, keys, max_model_len=64) as (_, rig):
        long = [{"role": "user", "content": "word " * 200}]
        status, answer = await rig.post({"model": "m", "messages": long, "stream": streamed})
        assert (status, answer["error"]["code"]) == (400, "context_length_exceeded")
        assert await rig.records() == []


async def test_an_overloaded_engine_is_an_answer_to_come_back_to(redis_client: Redis, keys: Keys) -> None:
    scenario = Scenario.of("one", fault=HttpStatus(kind="http_status", status=503, retry_after_s=3))
    async with sglang(redis_client, keys, scenario=scenario, examined=False) as (_, rig):
        status, headers, _ = await rig.raw({"model": "m", "messages": HELLO})
    assert (status, headers["retry-after"]) == (503, "3")


async def test_the_report_says_what_the_engine_is(redis_client: Redis, keys: Keys) -> None:
    async with sglang(redis_client, keys, "0.5.19", served_model_name="tiny", max_model_len=4096) as (_, rig):
        [report] = [endpoint.report() for endpoint in rig.proxy.fleet.endpoints]
    assert (report["engine"], report["version"], report["ids"]) == ("sglang", "0.5.19", True)
    assert (report["model"], report["max_model_len"]) == ("tiny", 4096)


@every_band
async def test_log_probabilities_are_said_to_be_scaled_by_the_temperature(
    redis_client: Redis, keys: Keys, version: str
) -> None:
    async with sglang(redis_client, keys, version) as (_, rig):
        for temperature in (1.0, 0.7, None):
            await rig.ask(temperature=temperature)
        modes = [record.logprobs_mode for record in await rig.records()]
    assert modes == ["raw_logprobs", "temperature_scaled_logprobs", "unknown"]


@pytest.mark.parametrize("version", ["0.5.17", "0.5.23"])
@both_ways
async def test_a_bare_prompt_is_recorded_with_its_ids(
    redis_client: Redis, keys: Keys, version: str, streamed: bool
) -> None:
    async with sglang(redis_client, keys, version) as (inference, rig):
        body = {"model": "m", "prompt": "Once upon a time", "max_tokens": 4, "stream": streamed}
        status, _, _ = await rig.raw(body, "/v1/completions")
        assert status == 200
        records = await alike(inference, rig)
    assert records[0].reply["content"]
    assert records[0].finish_reason == "length"


@every_band
async def test_in_exact_mode_a_conversation_goes_on_from_what_was_sampled(
    redis_client: Redis, keys: Keys, version: str
) -> None:
    async with sglang(redis_client, keys, version, READING, keep_thinking=False, context="exact") as (inference, rig):
        await exact_now(rig)
        await work(rig, [*HELLO], 6)
        records = await alike(inference, rig)
    assert breaks(records) == 0
    assert [record.exact for record in records] == [False] + [True] * 5
    assert [record.exact_missed for record in records] == [None] * 6
