"""Nothing that was not recorded reaches a harness."""

from __future__ import annotations

import asyncio
import json

import pytest
from redis.asyncio import Redis

from polarq.ledger.keys import Keys
from polarq.testing.inference import SampledCall, Scenario, ScriptedInference
from polarq.testing.redis import EmbeddedRedis

from .rig import HELLO, Sse, running, until

SCENARIO = Scenario.of("one two three")
BODY = {"model": "asked", "messages": HELLO}


@pytest.mark.parametrize("stream", [False, True])
async def test_the_end_of_an_answer_waits_for_the_record(keys: Keys, stream: bool) -> None:
    with EmbeddedRedis() as server:
        async with (
            Redis.from_url(server.url) as redis,
            Redis.from_url(server.url) as other,
            ScriptedInference(scenario=SCENARIO) as inference,
            running(redis, keys, inference.base_url) as rig,
        ):
            await rig.ask()  # the session is known from here on
            await other.client_pause(60_000, all=False)  # writes wait
            answering = asyncio.create_task(
                rig.http.post(rig.base_url + "/v1/chat/completions", json={**BODY, "stream": stream})
            )
            await inference.ledger.wait_until(lambda calls: sum(c.delivered for c in calls) >= 2)
            if stream:
                answered = await answering
                seen = b""
                while b'ree"' not in seen:  # the last of its tokens, alone or with others
                    assert not answered.content.at_eof()
                    seen += await answered.content.readuntil(b"\n\n")
                with pytest.raises(TimeoutError):
                    async with asyncio.timeout(0.2):
                        await answered.content.readuntil(b"\n\n")
                assert b'"finish_reason":"' not in seen
            else:
                with pytest.raises(TimeoutError):
                    async with asyncio.timeout(0.2):
                        await asyncio.shield(answering)
            assert len(await rig.records()) == 1
            await other.client_unpause()
            answered = await answering
            rest = await answered.content.read()
            if stream:
                assert Sse.of(200, {}, seen + rest).finish_reasons == ["stop"]
            else:
                assert json.loads(rest)["choices"][0]["finish_reason"] == "stop"
            assert len(await rig.records()) == 2


def sampled_of(inference: ScriptedInference) -> list[SampledCall]:
    return [call for call in inference.ledger if call.session_id == "task.0"]


@pytest.mark.parametrize("stream", [False, True])
async def test_a_store_that_is_gone_is_a_retryable_error(keys: Keys, stream: bool) -> None:
    with EmbeddedRedis(appendonly=True) as server:
        async with (
            Redis.from_url(server.url, retry=None) as redis,
            ScriptedInference(scenario=SCENARIO) as inference,
            running(redis, keys, inference.base_url) as rig,
        ):
            await rig.ask()
            server.kill()
            if stream:
                sse = await rig.stream()
                assert sse.finish_reasons == []
                assert sse.errors[0]["code"] == "store_down"
                assert not sse.ended
            else:
                status, headers, data = await rig.raw(BODY)
                error = json.loads(data)["error"]
                assert (status, headers["retry-after"], error["code"]) == (503, "2", "store_down")
                assert "three" not in error["message"]
            fresh = await rig.raw(BODY, base=rig.url + "/s/pq-never-seen")  # not even a session can be looked up
            assert (fresh[0], json.loads(fresh[2])["error"]["code"]) == (503, "store_down")
            server.start()
            await rig.ask()
            records = await rig.records()
            assert len(records) == 2
            assert records[1].trainable
            assert rig.proxy.counters.calls == 2
            # What the engine sampled while the store was gone is what was recorded and shown: not sampled again.
            assert [call.sampled_ids for call in sampled_of(inference)] == [r.sampled_ids for r in records]


async def test_who_leaves_while_its_call_is_recorded_and_asks_again_is_not_sampled_again(keys: Keys) -> None:
    with EmbeddedRedis() as server:
        async with (
            Redis.from_url(server.url) as redis,
            Redis.from_url(server.url) as other,
            ScriptedInference(scenario=SCENARIO) as inference,
            running(redis, keys, inference.base_url, retry_grace_s=0) as rig,
        ):
            await rig.ask()
            await other.client_pause(60_000, all=False)
            asking = asyncio.create_task(rig.post({**BODY, "temperature": 0.5}))
            await inference.ledger.wait_until(lambda calls: sum(c.delivered for c in calls) >= 2)
            await until(lambda: any(flight.settling for flight in rig.proxy.sessions.under_way()))
            asking.cancel()
            await asyncio.wait({asking})
            await until(lambda: not any(flight.awaited for flight in rig.proxy.sessions.under_way()))
            again = asyncio.create_task(rig.post({**BODY, "temperature": 0.5}))
            await until(lambda: any(flight.awaited for flight in rig.proxy.sessions.under_way()))
            await other.client_unpause()
            status, _ = await again
            assert status == 200
            assert len(sampled_of(inference)) == len(await rig.records()) == 2


async def test_a_store_that_is_full_is_a_retryable_error(keys: Keys) -> None:
    with EmbeddedRedis() as server:
        async with (
            Redis.from_url(server.url) as redis,
            ScriptedInference(scenario=SCENARIO) as inference,
            running(redis, keys, inference.base_url) as rig,
        ):
            await redis.config_set("maxmemory", 1)
            status, answered = await rig.post(BODY)
            assert (status, answered["error"]["code"]) == (503, "store_down")
            await redis.config_set("maxmemory", 0)
            await rig.ask()
            assert len(await rig.records()) == 1


async def test_a_harness_that_leaves_while_its_call_is_recorded_has_it_recorded(keys: Keys) -> None:
    with EmbeddedRedis() as server:
        async with (
            Redis.from_url(server.url) as redis,
            Redis.from_url(server.url) as other,
            ScriptedInference(scenario=SCENARIO) as inference,
            running(redis, keys, inference.base_url) as rig,
        ):
            await rig.ask()
            await other.client_pause(60_000, all=False)
            answering = asyncio.create_task(rig.post(BODY))
            await inference.ledger.wait_until(lambda calls: sum(c.delivered for c in calls) >= 2)
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0.2):
                    await asyncio.shield(answering)
            answering.cancel()
            await asyncio.wait({answering})
            await other.client_unpause()
            await rig.proxy.recorder.drain()
            records = await rig.records()
            assert len(records) == 2
            assert records[1].trainable
            assert rig.proxy.counters.calls == 2
