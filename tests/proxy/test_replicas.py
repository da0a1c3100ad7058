"""Several inference servers behind one node: a session stays with one, and loses nothing when it fails."""

from __future__ import annotations

import asyncio

import pytest
from redis.asyncio import Redis

from polarq.ledger.keys import Keys
from polarq.store.grants import close_grant
from polarq.testing.inference import Scenario, ScriptedInference
from polarq_proxy.endpoints import UNANSWERED_LOOKS, Endpoint
from polarq_proxy.faults import CallFault, FaultKind

from .raw_engine import FIRST, RawCall, answer, delta, event, last, raw_engine
from .rig import HELLO, Rig, running, until


async def free(call: RawCall) -> None:
    """A server that has room for all."""
    if call.body.get("stream"):
        await call.head()
        await call.chunk(FIRST + delta("ok", (11, 12)) + delta(finish="stop") + last(2))
        await call.end()
    else:
        await call.whole(answer())


async def known(rig: Rig) -> None:
    await until(lambda: all(e.state.reachable is not None for e in rig.proxy.fleet.endpoints))


async def test_a_session_stays_where_its_prefixes_are_cached_and_new_ones_go_where_there_is_room(
    redis_client: Redis, keys: Keys
) -> None:
    async with (
        ScriptedInference(scenario=Scenario.of("a")) as one,
        ScriptedInference(scenario=Scenario.of("b")) as two,
        running(redis_client, keys, one.base_url, two.base_url) as rig,
    ):
        await known(rig)
        sessions = [await rig.session(index) for index in range(6)]
        for _ in range(3):
            for session in sessions:
                await session.ask()
        for session in sessions:
            asked = [sum(call.session_id == session.spec.rollout_id for call in server.ledger) for server in (one, two)]
            assert sorted(asked) == [0, 3]
        assert [endpoint.sessions for endpoint in rig.proxy.fleet.endpoints] == [3, 3]


async def test_a_weight_shares_the_sessions_out(redis_client: Redis, keys: Keys) -> None:
    async with (
        ScriptedInference(scenario=Scenario.of("a")) as one,
        ScriptedInference(scenario=Scenario.of("b")) as two,
        running(redis_client, keys, one.base_url, two.base_url) as rig,
    ):
        await known(rig)
        first, second = rig.proxy.fleet.endpoints
        first.spec = first.spec.model_copy(update={"weight": 3.0})
        for index in range(8):
            await (await rig.session(index)).ask()
        assert (first.sessions, second.sessions) == (6, 2)


@pytest.mark.parametrize("stream", [False, True])
async def test_a_server_that_is_full_passes_a_call_on_before_its_first_token(
    redis_client: Redis, keys: Keys, stream: bool
) -> None:
    async def full(call: RawCall) -> None:
        await call.whole({"error": {"message": "queue full", "type": "overloaded", "code": 503}}, status=503)

    async with (
        raw_engine(full) as one,
        raw_engine(free) as two,
        running(redis_client, keys, one.url, two.url) as rig,
    ):
        await known(rig)
        session = await rig.proxy.sessions.find(rig.secret)
        session.use(rig.proxy.fleet.endpoints[0])
        if stream:
            assert (await rig.stream()).finish_reasons == ["stop"]
        else:
            await rig.ask()
        assert (len(one.calls), len(two.calls)) == (1, 1)
        [record] = await rig.records()
        assert record.trainable


async def test_an_error_in_the_stream_before_anything_was_sampled_is_passed_on_too(
    redis_client: Redis, keys: Keys
) -> None:
    async def full(call: RawCall) -> None:
        await call.head()
        await call.chunk(event({"error": {"message": "queue full", "type": "overloaded", "code": 503}}))
        await call.end()

    async with (
        raw_engine(full) as one,
        raw_engine(free) as two,
        running(redis_client, keys, one.url, two.url) as rig,
    ):
        await known(rig)
        session = await rig.proxy.sessions.find(rig.secret)
        session.use(rig.proxy.fleet.endpoints[0])
        sse = await rig.stream()
        assert (sse.text(), sse.finish_reasons, sse.errors) == ("ok", ["stop"], [])


async def test_when_every_server_is_full_each_was_asked_once_and_the_harness_is_told_to_wait(
    redis_client: Redis, keys: Keys
) -> None:
    async def full(call: RawCall) -> None:
        await call.whole({"error": {"message": "queue full"}}, status=503, Retry_After="7")

    async with (
        raw_engine(full) as one,
        raw_engine(full) as two,
        running(redis_client, keys, one.url, two.url) as rig,
    ):
        await known(rig)
        status, headers, _ = await rig.raw({"model": "m", "messages": HELLO})
        assert (status, headers["retry-after"]) == (503, "7")
        assert (len(one.calls), len(two.calls)) == (1, 1)
        assert await rig.records() == []


async def test_a_server_that_dies_gives_its_sessions_to_the_other(redis_client: Redis, keys: Keys) -> None:
    one = ScriptedInference(scenario=Scenario.of("a"))
    await one.start()
    async with (
        ScriptedInference(scenario=Scenario.of("b")) as two,
        running(redis_client, keys, one.base_url, two.base_url) as rig,
    ):
        await known(rig)
        first = rig.proxy.fleet.endpoints[0]
        sessions = [await rig.session(index) for index in range(4)]
        await asyncio.gather(*(session.ask() for session in sessions))
        moved = [session for session in sessions if any(c.session_id == session.spec.rollout_id for c in one.ledger)]
        assert moved
        await one.stop()
        said = await asyncio.gather(*(session.ask([*HELLO, *HELLO]) for session in sessions))
        assert {reply["choices"][0]["message"]["content"] for reply in said} == {"b"}
        assert first.state.reachable is False
        assert rig.proxy.health()["status"] == "ok"
        for session in sessions:
            assert [record.trainable for record in await session.records()] == [True, True]


def falls_silent(endpoint: Endpoint) -> None:
    """From now on the server answers no look at it, as one whose process stands still."""

    async def silent(path: str, timeout_s: float) -> None:
        raise CallFault(FaultKind.TIMED_OUT, f"did not answer {path} in {timeout_s:g} s")

    endpoint.spec = endpoint.spec.model_copy(update={"unanswered_s": 0.001})
    endpoint.upstream.get_json = silent  # type: ignore[method-assign]
    endpoint._wake.set()


@pytest.mark.parametrize("stream", [False, True])
async def test_a_call_at_a_server_that_answers_nothing_any_more_is_asked_of_another(
    redis_client: Redis, keys: Keys, stream: bool
) -> None:
    asked, never = asyncio.Event(), asyncio.Event()

    async def stands_still(call: RawCall) -> None:
        asked.set()
        await never.wait()

    async with (
        raw_engine(stands_still) as one,
        raw_engine(free) as two,
        running(redis_client, keys, one.url, two.url) as rig,
    ):
        await known(rig)
        session = await rig.proxy.sessions.find(rig.secret)
        session.use(rig.proxy.fleet.endpoints[0])
        asking = asyncio.create_task(rig.stream() if stream else rig.ask())
        await asked.wait()
        falls_silent(rig.proxy.fleet.endpoints[0])
        await asking
        [record] = await rig.records()
        assert record.trainable


async def test_where_there_is_no_other_the_call_fails_and_the_worker_is_told(redis_client: Redis, keys: Keys) -> None:
    asked, never = asyncio.Event(), asyncio.Event()

    async def stands_still(call: RawCall) -> None:
        await call.head()
        await call.chunk(FIRST + delta("o", (11,)))
        asked.set()
        await never.wait()

    async with raw_engine(stands_still) as one, running(redis_client, keys, one.url) as rig:
        await known(rig)
        [endpoint] = rig.proxy.fleet.endpoints
        asking = asyncio.create_task(rig.stream())
        await asked.wait()
        await until(lambda: any(call.heard_at > 0 for call in endpoint.waiting.values()))
        # It was heard before the server's last answer.
        endpoint._answered()
        falls_silent(endpoint)
        [error] = (await asking).errors
        assert "has answered nothing for 0.001 s" in error["message"]
        await rig.proxy.recorder.drain()
        use = await close_grant(redis_client, keys, rig.secret)
        assert (use.faults, use.last_problem.partition(":")[0]) == (1, "engine_down")
        assert not endpoint.waiting


async def test_a_call_that_is_being_answered_is_not_given_up_whatever_becomes_of_looks(
    redis_client: Redis, keys: Keys
) -> None:
    asked, go_on = asyncio.Event(), asyncio.Event()

    async def answers(call: RawCall) -> None:
        asked.set()
        await go_on.wait()
        await call.head()
        await call.chunk(FIRST + delta("o", (11,)))
        await until(lambda: endpoint._unanswered > UNANSWERED_LOOKS)
        await call.chunk(delta("k", (12,)) + delta(finish="stop") + last(2))
        await call.end()

    async with raw_engine(answers) as one, running(redis_client, keys, one.url) as rig:
        await known(rig)
        [endpoint] = rig.proxy.fleet.endpoints
        asking = asyncio.create_task(rig.stream())
        await asked.wait()
        endpoint._answered()
        go_on.set()
        await until(lambda: any(call.heard_at > 0 for call in endpoint.waiting.values()))
        falls_silent(endpoint)
        assert (await asking).text() == "ok"
