"""What cannot be believed is recorded as it is, with the reason, and the harness still gets its answer."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from redis.asyncio import Redis

from polarq.contracts.completion import CompletionLabel
from polarq.ledger.keys import Keys
from polarq.testing.inference import Scenario, Script, ScriptedInference, Turn

from .raw_engine import FIRST, RawCall, answer, delta, event, last, raw_engine
from .rig import running, until


def faulty(**fault: Any) -> Scenario:
    return Scenario.of("one two three", fault=fault)


@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize(
    ("value", "words"),
    [
        ("-Infinity", "position 1 is not a finite number"),
        ("NaN", "position 1 is not a finite number"),
        ("null", "position 1 is missing"),
        ("-9999.0", "position 1 is -9999.0, the engine's sign for unknown"),
    ],
)
async def test_a_log_probability_that_is_none(
    redis_client: Redis, keys: Keys, streamed: bool, value: str, words: str
) -> None:
    turns = (
        Turn.model_validate({"content": "one two", "fault": {"kind": "bad_logprob", "value": value, "position": 1}}),
        Turn(content="fine"),
    )
    async with (
        ScriptedInference(scenario=Scenario(name="t03", scripts=(Script(name="a", turns=turns),))) as inference,
        running(redis_client, keys, inference.base_url) as rig,
    ):
        if streamed:
            sse = await rig.stream(logprobs=True)
            assert (sse.text(), sse.finish_reasons, sse.ended) == ("one two", ["stop"], True)
        else:
            said = await rig.ask(logprobs=True)
            assert said["choices"][0]["message"]["content"] == "one two"
            assert said["choices"][0]["logprobs"]["content"][1]["logprob"] == -9999.0
        follow_up = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
        await rig.ask([*follow_up, {"role": "user", "content": "c"}])
        bad, good = await rig.records()
        sampled = next(call for call in inference.ledger if call.session_id == "task.0")
        assert bad.sampled_ids == sampled.sampled_ids
        assert bad.logprobs[1] is None
        assert bad.logprobs[0] == sampled.logprobs[0]
        assert bad.logprobs[2:] == sampled.logprobs[2:]
        assert bad.untrainable is not None
        assert words in bad.untrainable
        assert (bad.label, bad.incomplete, bad.trainable) == (CompletionLabel.TRAIN, False, False)
        assert good.trainable


@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize(
    ("fault", "words"),
    [
        ({"kind": "omit", "fields": ["token_ids"]}, "no token ids"),
        ({"kind": "omit", "fields": ["prompt_token_ids"]}, "no prompt ids"),
        ({"kind": "omit", "fields": ["logprobs"]}, "no log-probabilities"),
        ({"kind": "omit", "fields": ["usage"]}, "no usage"),
        ({"kind": "logprob_count", "delta": -1}, "log-probabilities"),
        ({"kind": "logprob_count", "delta": 1}, "log-probabilities"),
        ({"kind": "wrong_usage"}, "but usage says"),
        ({"kind": "wrong_echo"}, "prompt ids, but usage says"),
        ({"kind": "other_model"}, "answered by 'some-other-model'"),
    ],
)
async def test_an_answer_whose_parts_do_not_agree(
    redis_client: Redis, keys: Keys, streamed: bool, fault: dict[str, Any], words: str
) -> None:
    async with (
        ScriptedInference(scenario=faulty(**fault)) as inference,
        running(redis_client, keys, inference.base_url) as rig,
    ):
        if streamed:
            sse = await rig.stream()
            assert (sse.text(), sse.finish_reasons, sse.ended) == ("one two three", ["stop"], True)
        else:
            assert (await rig.ask())["choices"][0]["message"]["content"] == "one two three"
        [record] = await rig.records()
        assert record.untrainable is not None
        assert words in record.untrainable
        assert not record.trainable
        assert rig.proxy.counters.untrainable == 1


async def test_a_server_without_ids_is_told_of_at_once_and_on_health(
    redis_client: Redis, keys: Keys, caplog: pytest.LogCaptureFixture
) -> None:
    async with (
        ScriptedInference(scenario=Scenario.of("hi"), token_ids=False) as inference,
        running(redis_client, keys, inference.base_url) as rig,
    ):
        await rig.ask()
        async with rig.http.get(rig.url + "/health") as answered:
            health = await answered.json()
        assert (health["status"], health["ids"]) == ("degraded", False)
        assert health["inference"][0]["ids"] is False
        assert "token ids" in caplog.text
        [record] = await rig.records()
        assert record.untrainable == "the engine gave no prompt ids"


@pytest.mark.parametrize("ids", [[1, "a"], [1, None], [1.5, 2], [True, 2], [-1, 2], [2**40, 2], "ab", {}])
async def test_ids_that_are_none(redis_client: Redis, keys: Keys, ids: Any) -> None:
    async def act(call: RawCall) -> None:
        tree = answer()
        tree["choices"][0]["token_ids"] = ids
        await call.whole(tree)

    async with raw_engine(act) as engine, running(redis_client, keys, engine.url) as rig:
        await rig.ask()
        [record] = await rig.records()
        assert record.untrainable
        assert record.sampled_ids == []


async def test_a_stream_that_ends_without_counts_is_an_answer_and_no_sample(redis_client: Redis, keys: Keys) -> None:
    async def act(call: RawCall) -> None:
        await call.head()
        await call.chunk(FIRST + delta("a", (11,)) + delta("b", (12,), "stop"))
        await call.end()

    async with raw_engine(act) as engine, running(redis_client, keys, engine.url) as rig:
        sse = await rig.stream(stream_options={"include_usage": True})
        assert (sse.text(), sse.finish_reasons, sse.ended, sse.errors) == ("ab", ["stop"], True, [])
        assert sse.events[-1] == {**sse.events[-1], "choices": [], "usage": None}
        [record] = await rig.records()
        assert record.sampled_ids == [11, 12]
        assert record.untrainable == "the engine gave no usage, so that the ids cannot be counted"
        assert record.usage.completion_tokens is None


@pytest.mark.parametrize(
    ("spans", "doubt"),
    [
        ([{"version": "7", "start": 0, "end": 2}], None),
        ([{"version": "7", "start": 0, "end": 1}, {"version": "8", "start": 1, "end": 2}], None),
        ([{"version": "7", "start": 0, "end": 1}], "spans"),
        ([{"version": "7", "start": 1, "end": 2}], "spans"),
        ([], "spans"),
    ],
)
@pytest.mark.parametrize("streamed", [False, True])
async def test_version_spans_must_cover_what_was_sampled(
    redis_client: Redis, keys: Keys, spans: list[dict[str, Any]], doubt: str | None, streamed: bool
) -> None:
    async def act(call: RawCall) -> None:
        if not call.body["stream"]:
            tree = answer()
            tree["choices"][0]["weight_versions"] = spans
            await call.whole(tree)
            return
        end = {"index": 0, "delta": {}, "finish_reason": "stop", "weight_versions": spans}
        await call.head()
        await call.chunk(FIRST + delta("a", (11, 12)) + event({"model": "raw", "choices": [end]}) + last(2))
        await call.end()

    async with raw_engine(act) as engine, running(redis_client, keys, engine.url) as rig:
        await (rig.stream() if streamed else rig.ask())
        [record] = await rig.records()
        assert [span.model_dump() for span in record.weight_versions] == spans
        assert (record.untrainable is None) == (doubt is None)
        if doubt:
            assert doubt in (record.untrainable or "")


async def test_a_server_that_counts_versions_by_token_is_believed(redis_client: Redis, keys: Keys) -> None:
    async with (
        ScriptedInference(scenario=Scenario.of("one two three", tokens_per_s=50)) as inference,
        running(redis_client, keys, inference.base_url) as rig,
    ):
        call = asyncio.create_task(rig.ask())
        await inference.ledger.wait_until(
            lambda ledger: any(c.session_id == "task.0" and c.sampled_ids for c in ledger)
        )
        async with rig.http.post(f"{inference.base_url}/update_weight_version", json={"new_version": "v2"}):
            await call
        [record] = await rig.records()
        [sampled] = [call for call in inference.ledger if call.session_id == "task.0"]
        by_token = [span.version for span in record.weight_versions for _ in range(span.start, span.end)]
        assert by_token == sampled.weight_versions
        assert set(by_token) == {"default", "v2"}
        assert record.trainable
        assert not rig.proxy.fleet.endpoints[0].asks_versions


async def test_a_policy_that_changes_during_a_call_is_noticed(redis_client: Redis, keys: Keys) -> None:
    async with raw_engine(lambda call: call.whole(answer())) as engine:
        engine.weights = "v1"
        async with running(redis_client, keys, engine.url) as rig:
            await rig.ask()
            engine.weights = "v2"
            await rig.ask()
            await rig.ask()
            first, mixed, after = await rig.records()
            assert [(span.version, span.start, span.end) for span in first.weight_versions] == [("v1", 0, 2)]
            assert [(span.version, span.start, span.end) for span in after.weight_versions] == [("v2", 0, 2)]
            assert mixed.untrainable == "the policy version changed during the call (from v1 to v2)"
            assert mixed.weight_versions == []


async def test_a_call_whose_policy_version_cannot_be_read_is_not_trained_on(redis_client: Redis, keys: Keys) -> None:
    async with raw_engine(lambda call: call.whole(answer())) as engine:
        engine.weights = "v1"
        async with running(redis_client, keys, engine.url) as rig:
            await rig.ask()
            engine.weights_fail = True
            await rig.ask()
            engine.weights_fail = False
            await rig.ask()
            await rig.ask()
            first, unread, _, later = await rig.records()
            assert first.trainable
            assert unread.untrainable == "the policy version could not be read around the call"
            assert later.trainable


async def test_reads_of_the_version_are_shared(redis_client: Redis, keys: Keys) -> None:
    together = asyncio.Event()

    async def act(call: RawCall) -> None:
        if len(engine.calls) == 32:
            together.set()
        await together.wait()
        await call.whole(answer())

    async with raw_engine(act) as engine:
        engine.weights = "v1"
        async with running(redis_client, keys, engine.url) as rig:
            await asyncio.gather(*(rig.ask() for _ in range(32)))
            assert engine.weight_reads < 16
            assert all(record.weight_versions[0].version == "v1" for record in await rig.records())


async def test_a_server_that_says_nothing_of_versions_is_not_asked_each_time(redis_client: Redis, keys: Keys) -> None:
    async with (
        raw_engine(lambda call: call.whole(answer())) as engine,
        running(redis_client, keys, engine.url) as rig,
    ):
        await until(lambda: rig.proxy.fleet.endpoints[0].state.reachable)
        for _ in range(5):
            await rig.ask()
        assert engine.weight_reads == 1
        for record in await rig.records():
            assert record.weight_versions == []
            assert record.trainable


async def test_beam_search_is_no_sample(redis_client: Redis, keys: Keys) -> None:
    async def act(call: RawCall) -> None:
        await call.whole(answer())

    async with raw_engine(act) as engine, running(redis_client, keys, engine.url) as rig:
        await rig.ask(use_beam_search=True)
        [record] = await rig.records()
        assert "beam search" in (record.untrainable or "")
