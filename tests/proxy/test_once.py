"""Nothing is sampled twice that was asked once, and what was asked twice is sampled twice."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import aiohttp
import pytest
from redis.asyncio import Redis

from polarq.contracts.completion import CompletionLabel
from polarq.ledger.keys import Keys
from polarq.store.grants import close_grant
from polarq.testing.inference import SampledCall, Scenario, Script, ScriptedInference, Turn

from .rig import HELLO, Rig, Sse, running, until

WORDS = "one two three four five six seven eight nine ten"
SLOW = Scenario(name="slow", scripts=(Script(name="a", turns=(Turn(content=WORDS, tokens_per_s=20.0),)),))
SLOWER = Scenario(name="slower", scripts=(Script(name="a", turns=(Turn(content=WORDS, tokens_per_s=5.0),)),))
"""Slow enough to be cut in the middle on a busy machine."""
QUICK = Scenario.of("one two three")
BODY: dict[str, Any] = {"model": "asked", "messages": HELLO}
RETRY = {"X-Stainless-Retry-Count": "1"}


def sampled(inference: ScriptedInference) -> list[SampledCall]:
    return [call for call in inference.ledger if call.session_id == "task.0"]


def said(status: int, data: bytes) -> str:
    assert status == 200, data
    if data.startswith(b"data:"):
        sse = Sse.of(status, {}, data)
        assert sse.finish_reasons == ["stop"]
        assert sse.ended
        return sse.text()
    return str(json.loads(data)["choices"][0]["message"]["content"])


async def ask(rig: Rig, *, stream: bool = False, **options: Any) -> str:
    status, _, data = await rig.raw({**BODY, "stream": stream}, **options)
    return said(status, data)


async def cut_after_some(rig: Rig, *, stream: bool, inference: ScriptedInference) -> None:
    """Asks, and hangs up when some tokens are sampled and, of a stream, read."""
    before = len(sampled(inference))
    async with aiohttp.ClientSession() as http:
        asking = asyncio.create_task(http.post(rig.base_url + "/v1/chat/completions", json={**BODY, "stream": stream}))
        await inference.ledger.wait_until(
            lambda _: len(sampled(inference)) > before and len(sampled(inference)[-1].sampled_ids) >= 2
        )
        if stream:
            answer = await asking
            await answer.content.readany()
            answer.close()
        asking.cancel()
        await asyncio.wait({asking})


both = pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
then_both = pytest.mark.parametrize("again", [False, True], ids=["again whole", "again streamed"])


@both
@then_both
async def test_a_marked_retry_of_a_delivered_answer_is_answered_from_the_record(
    redis_client: Redis, keys: Keys, stream: bool, again: bool
) -> None:
    async with ScriptedInference(scenario=QUICK) as inference, running(redis_client, keys, inference.base_url) as rig:
        first = await ask(rig, stream=stream)
        assert await ask(rig, stream=again, headers=RETRY) == first
        [record], [call] = await rig.records(), sampled(inference)
        assert record.sampled_ids == call.sampled_ids
        assert rig.proxy.counters.replays == 1
        await rig.proxy.recorder.drain()
        assert (await close_grant(redis_client, keys, rig.secret)).replays == 1


@both
@then_both
async def test_who_hangs_up_and_asks_again_joins_the_call_under_way(
    redis_client: Redis, keys: Keys, stream: bool, again: bool
) -> None:
    async with (
        ScriptedInference(scenario=SLOW) as inference,
        running(redis_client, keys, inference.base_url, retry_grace_s=60) as rig,
    ):
        await cut_after_some(rig, stream=stream, inference=inference)
        await until(lambda: not any(f.awaited for f in rig.proxy.sessions.under_way()))
        assert await ask(rig, stream=again) == WORDS
        [record], [call] = await rig.records(), sampled(inference)
        assert record.sampled_ids == call.sampled_ids
        assert record.trainable
        assert not call.aborted


@both
async def test_who_hangs_up_and_does_not_come_back_frees_the_engine_and_leaves_a_partial_sample(
    redis_client: Redis, keys: Keys, stream: bool
) -> None:
    async with (
        ScriptedInference(scenario=SLOWER) as inference,
        running(redis_client, keys, inference.base_url, retry_grace_s=0.05) as rig,
    ):
        await cut_after_some(rig, stream=stream, inference=inference)
        await inference.ledger.wait_until(lambda _: sampled(inference)[0].aborted)
        await until(rig.records)
        [record], [call] = await rig.records(), sampled(inference)
        assert (record.label, record.incomplete, record.trainable) == (CompletionLabel.ABORTED, True, False)
        assert record.sampled_ids == call.sampled_ids[: len(record.sampled_ids)]
        assert len(record.sampled_ids) >= (1 if stream else 0)
        # Its repeat has nothing to be answered from: it is sampled, and says what it is a repeat of.
        assert await ask(rig) == WORDS
        assert (await rig.records())[1].retry_of == record.seq


@both
async def test_an_answer_that_nobody_read_is_given_to_who_asks_again(
    redis_client: Redis, keys: Keys, stream: bool
) -> None:
    async with (
        ScriptedInference(scenario=SLOW) as inference,
        running(redis_client, keys, inference.base_url, retry_grace_s=60) as rig,
    ):
        await cut_after_some(rig, stream=stream, inference=inference)
        await until(rig.records)
        assert await ask(rig) == WORDS
        assert len(sampled(inference)) == len(await rig.records()) == 1
        # Now it is read: the same request once more is another call.
        assert await ask(rig) == WORDS
        assert len(sampled(inference)) == len(await rig.records()) == 2


async def test_a_stream_and_the_same_asked_whole_overlap_and_are_sampled_once(redis_client: Redis, keys: Keys) -> None:
    async with (
        ScriptedInference(scenario=SLOW) as inference,
        running(redis_client, keys, inference.base_url) as rig,
    ):
        streaming = asyncio.create_task(ask(rig, stream=True))
        await inference.ledger.wait_until(lambda _: bool(sampled(inference) and sampled(inference)[0].sampled_ids))
        assert await ask(rig) == WORDS
        assert await streaming == WORDS
        assert len(sampled(inference)) == len(await rig.records()) == 1


async def test_two_who_ask_the_same_at_the_same_time_get_two_samples(redis_client: Redis, keys: Keys) -> None:
    async with ScriptedInference(scenario=SLOW) as inference, running(redis_client, keys, inference.base_url) as rig:
        first, second = await asyncio.gather(ask(rig), ask(rig))
        assert first == second == WORDS
        assert len(sampled(inference)) == len(await rig.records()) == 2


async def test_the_same_asked_again_after_its_answer_is_another_call(redis_client: Redis, keys: Keys) -> None:
    async with ScriptedInference(scenario=QUICK) as inference, running(redis_client, keys, inference.base_url) as rig:
        await ask(rig)
        await ask(rig, stream=True)
        assert len(sampled(inference)) == len(await rig.records()) == 2


async def test_another_history_with_the_same_last_message_is_another_call(redis_client: Redis, keys: Keys) -> None:
    def talk(text: str) -> dict[str, Any]:
        history = [{"role": "user", "content": text}, {"role": "assistant", "content": "x"}]
        return {"model": "asked", "messages": [*history, {"role": "user", "content": "go on"}]}

    async with ScriptedInference(scenario=QUICK) as inference, running(redis_client, keys, inference.base_url) as rig:
        for text in ("a", "b"):
            status, _, data = await rig.raw(talk(text), headers=RETRY)
            said(status, data)
        assert len(sampled(inference)) == len(await rig.records()) == 2


@both
async def test_a_proxy_that_was_restarted_answers_from_the_record(
    redis_client: Redis, keys: Keys, stream: bool
) -> None:
    async with ScriptedInference(scenario=QUICK) as inference:
        async with running(redis_client, keys, inference.base_url) as before:
            first = await ask(before)
        async with running(redis_client, keys, inference.base_url) as after:
            rig = Rig(after.proxy, after.url, redis_client, keys, before.spec, before.secret, after.http)
            assert await ask(rig, stream=stream) == first
            assert len(sampled(inference)) == len(await rig.records()) == 1
            assert await ask(rig, stream=stream) == first
            assert len(sampled(inference)) == len(await rig.records()) == 2
            assert [record.seq for record in await rig.records()] == [0, 1]


async def test_several_choices_are_replayed_together(redis_client: Redis, keys: Keys) -> None:
    async with ScriptedInference(scenario=QUICK) as inference, running(redis_client, keys, inference.base_url) as rig:
        asked: dict[str, Any] = {"n": 3, "logprobs": True, "return_token_ids": True}
        first = await rig.ask(**asked)
        status, again = await rig.post({**BODY, **asked}, headers=RETRY)
        assert status == 200
        for key in ("message", "finish_reason", "token_ids", "index"):
            assert [c[key] for c in again["choices"]] == [c[key] for c in first["choices"]]
        values = [[entry["logprob"] for entry in c["logprobs"]["content"]] for c in again["choices"]]
        assert values == [[pytest.approx(e["logprob"]) for e in c["logprobs"]["content"]] for c in first["choices"]]
        assert again["usage"]["completion_tokens"] == first["usage"]["completion_tokens"]
        assert again["prompt_token_ids"] == first["prompt_token_ids"]
        assert len(sampled(inference)) == len(await rig.records()) == 3


async def test_a_session_that_is_closed_frees_the_engine_at_its_next_call(redis_client: Redis, keys: Keys) -> None:
    async with (
        ScriptedInference(scenario=SLOWER) as inference,
        running(redis_client, keys, inference.base_url, retry_grace_s=600) as rig,
    ):
        await cut_after_some(rig, stream=True, inference=inference)
        await close_grant(redis_client, keys, rig.secret)
        rig.proxy.sessions.drop(rig.secret)
        await inference.ledger.wait_until(lambda _: sampled(inference)[0].aborted)
