"""While the policy's weights change, no call passes, none is lost, and a forgotten pause ends."""

from __future__ import annotations

import asyncio
import json

import pytest
from redis.asyncio import Redis

from polarq.contracts.completion import CompletionLabel
from polarq.ledger.keys import Keys
from polarq.store.grants import close_grant
from polarq.store.pauses import PRESENCE_S, PauseMode
from polarq.testing.inference import Scenario, Script, ScriptedInference, Turn
from polarq_proxy import pausing
from tests.pauses import clear_pause, read_acks, read_presence, set_pause

from .rig import HELLO, Rig, Sse, running, until

WORDS = "one two three four five six seven eight nine ten"
SLOW = Scenario(name="slow", scripts=(Script(name="a", turns=(Turn(content=WORDS, tokens_per_s=4.0),)),))
QUICK = Scenario.of(WORDS)


async def acknowledged(rig: Rig, in_flight: int = 0) -> None:
    async def said() -> bool:
        acks = await read_acks(rig.redis, rig.keys)
        return any(ack.pause_id and ack.in_flight == in_flight for ack in acks)

    await until(said)


async def pause(rig: Rig, mode: PauseMode = "drain", lease_s: float = 60.0, in_flight: int = 0) -> None:
    await set_pause(rig.redis, rig.keys, lease_s=lease_s, mode=mode)
    await acknowledged(rig, in_flight)


async def test_a_stream_that_comes_while_paused_hears_that_somebody_is_there(redis_client: Redis, keys: Keys) -> None:
    async with (
        ScriptedInference(scenario=QUICK) as inference,
        running(redis_client, keys, inference.base_url, keepalive_s=0.05) as rig,
    ):
        await pause(rig)
        body = {"model": "m", "messages": HELLO, "stream": True}
        async with rig.http.post(rig.base_url + "/v1/chat/completions", json=body) as early:
            assert (await early.content.readline()).startswith(b": ")
            assert rig.proxy.gate.waiting == 1
            assert [call for call in inference.ledger if call.session_id == "task.0"] == []
            await clear_pause(redis_client, keys)
            assert Sse.of(200, {}, await early.read()).text() == WORDS


async def test_a_call_that_comes_while_paused_waits_and_is_answered_after(redis_client: Redis, keys: Keys) -> None:
    async with ScriptedInference(scenario=QUICK) as inference, running(redis_client, keys, inference.base_url) as rig:
        await pause(rig)
        asking = asyncio.create_task(rig.ask())
        await until(lambda: rig.proxy.gate.waiting == 1)
        await clear_pause(redis_client, keys)
        assert (await asking)["choices"][0]["message"]["content"] == WORDS


async def test_a_pause_lets_calls_in_flight_end_and_says_when_they_have(redis_client: Redis, keys: Keys) -> None:
    async with ScriptedInference(scenario=SLOW) as inference, running(redis_client, keys, inference.base_url) as rig:
        asking = asyncio.create_task(rig.ask())
        await inference.ledger.wait_until(lambda calls: any(c.session_id == "task.0" and c.sampled_ids for c in calls))
        await pause(rig, in_flight=1)
        assert not asking.done()
        assert (await asking)["choices"][0]["message"]["content"] == WORDS
        await acknowledged(rig, in_flight=0)


async def test_a_call_is_told_to_come_again_when_the_pause_outlasts_it(redis_client: Redis, keys: Keys) -> None:
    async with (
        ScriptedInference(scenario=QUICK) as inference,
        running(redis_client, keys, inference.base_url, pause_hold_s=0.1) as rig,
    ):
        await pause(rig)
        status, headers, data = await rig.raw({"messages": HELLO})
        assert (status, headers["retry-after"], json.loads(data)["error"]["code"]) == (503, "5", "paused")
        assert await rig.records() == []


async def test_a_forgotten_pause_ends_with_its_lease(redis_client: Redis, keys: Keys) -> None:
    async with ScriptedInference(scenario=QUICK) as inference, running(redis_client, keys, inference.base_url) as rig:
        await pause(rig, lease_s=1.0)
        await rig.ask()
        assert rig.proxy.gate.pause is None


async def test_a_proxy_that_starts_during_a_pause_holds_it(redis_client: Redis, keys: Keys) -> None:
    await set_pause(redis_client, keys, lease_s=60)
    async with ScriptedInference(scenario=QUICK) as inference, running(redis_client, keys, inference.base_url) as rig:
        assert rig.proxy.gate.pause is not None
        await acknowledged(rig)


async def test_what_no_harness_has_seen_is_sampled_anew_after_an_abort(redis_client: Redis, keys: Keys) -> None:
    async with ScriptedInference(scenario=SLOW) as inference, running(redis_client, keys, inference.base_url) as rig:
        asking = asyncio.create_task(rig.ask())
        await inference.ledger.wait_until(lambda calls: any(c.session_id == "task.0" and c.sampled_ids for c in calls))
        await pause(rig, mode="abort")
        await inference.ledger.wait_until(lambda calls: any(call.aborted for call in calls))
        await until(lambda: rig.proxy.gate.waiting == 1)
        await clear_pause(redis_client, keys)
        assert (await asking)["choices"][0]["message"]["content"] == WORDS
        [record] = await rig.records()  # the first try left nothing: nobody could have read it
        assert (record.trainable, record.retry_of, record.seq) == (True, None, 0)
        await rig.proxy.recorder.drain()
        assert (await close_grant(redis_client, keys, rig.secret)).faults == 0


async def test_what_a_harness_has_seen_of_an_aborted_call_is_kept_and_it_is_told(
    redis_client: Redis, keys: Keys
) -> None:
    async with ScriptedInference(scenario=SLOW) as inference, running(redis_client, keys, inference.base_url) as rig:
        body = {"model": "m", "messages": HELLO, "stream": True}
        async with rig.http.post(rig.base_url + "/v1/chat/completions", json=body) as answer:
            seen = await answer.content.readuntil(b"one")
            await set_pause(redis_client, keys, lease_s=60, mode="abort")
            rest = await answer.read()
        sse = Sse.of(200, {}, seen + rest)
        assert sse.finish_reasons == []
        assert sse.errors[0]["code"] == "aborted"
        [record] = await rig.records()
        assert (record.label, record.incomplete) == (CompletionLabel.ABORTED, True)
        [call] = [call for call in inference.ledger if call.session_id == "task.0"]
        assert record.sampled_ids == call.sampled_ids[: len(record.sampled_ids)] != []


async def test_a_proxy_says_that_it_is_there_before_it_serves_and_until_it_ends(
    redis_client: Redis, keys: Keys
) -> None:
    async with ScriptedInference(scenario=QUICK) as inference:
        async with running(redis_client, keys, inference.base_url) as rig:
            assert await read_presence(redis_client, keys, [("node0", 0)]) == {("node0", 0): 1}
            left_ms = await redis_client.pttl(keys.proxy_present("node0", 0))
            assert 0 < left_ms <= PRESENCE_S * 1000
            assert [ack.node_id for ack in await read_acks(rig.redis, keys)] == ["node0"]
        assert await read_presence(redis_client, keys, [("node0", 0)]) == {}
        assert await read_acks(redis_client, keys) == []


async def test_a_proxy_that_has_nothing_new_to_say_keeps_saying_that_it_is_there(
    redis_client: Redis, keys: Keys, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pausing, "PRESENT_EVERY_S", 0.0)
    async with ScriptedInference(scenario=QUICK) as inference, running(redis_client, keys, inference.base_url):
        await redis_client.delete(keys.proxy_present("node0", 0), keys.pause_acks)

        async def there() -> bool:
            return bool(await read_presence(redis_client, keys, [("node0", 0)]) and await read_acks(redis_client, keys))

        await until(there)
