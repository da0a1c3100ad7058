"""An engine that drops idle connections by its own clock, or takes a request and closes without a byte of an answer.

`POLARQ_IDLE_SESSIONS=200` makes the first test as large as the case that it is made after, with its longest waits."""

from __future__ import annotations

import asyncio
import json
import os
from collections import Counter
from dataclasses import replace
from itertools import cycle

import aiohttp
import pytest
from redis.asyncio import Redis

from polarq.ledger.keys import Keys

from .raw_engine import FIRST, RawCall, answer, delta, last, raw_engine
from .rig import Rig, Sse, running

SESSIONS = int(os.environ.get("POLARQ_IDLE_SESSIONS", "40"))
LONG_WAITS = [10.0, 14.0] if SESSIONS >= 200 else []
both = pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])


async def answered(call: RawCall) -> None:
    """With what was asked, so that an answer that went to another call is seen."""
    asked = call.body["messages"][-1]["content"]
    if not call.body.get("stream"):
        await call.whole(answer(f"to {asked}"))
        return
    await call.head()
    await call.chunk(FIRST + delta(f"to {asked}", (11, 12)) + delta("", (), finish="stop") + last(2))
    await call.end()


async def ask(rig: Rig, text: str, *, stream: bool) -> str:
    messages = [{"role": "user", "content": text}]
    if stream:
        sse = await rig.stream(messages)
        assert (sse.status, sse.errors, sse.ended) == (200, [], True), sse.raw
        return sse.text()
    return str((await rig.ask(messages))["choices"][0]["message"]["content"])


async def waits_between(session: Rig, index: int, waits_s: list[float]) -> None:
    """Calls of one session with these waits between them."""
    stream = bool(index % 2)
    for turn, wait_s in enumerate([0.0, *waits_s]):
        await asyncio.sleep(wait_s)
        text = f"{index}.{turn}"
        assert await ask(session, text, stream=stream) == f"to {text}"


async def no_call_is_lost(redis_url: str, keys: Keys, idle_s: float, waits_s: list[list[float]]) -> None:
    arrived = asyncio.Barrier(len(waits_s))  # the first calls are under way together: each has its own connection

    async def act(call: RawCall) -> None:
        if call.body["messages"][-1]["content"].endswith(".0"):
            await arrived.wait()
        await answered(call)

    async with (
        raw_engine(act, idle_s=idle_s) as engine,
        Redis.from_url(redis_url, max_connections=1000) as redis,
        running(redis, keys, engine.url) as rig,
        aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as http,
    ):
        sessions = [replace(await rig.session(index + 1), http=http) for index in range(len(waits_s))]
        await asyncio.gather(*map(waits_between, sessions, range(len(waits_s)), waits_s))
        for index, session in enumerate(sessions):
            said = [record.reply["content"] for record in await session.records()]
            assert said == [f"to {index}.{turn}" for turn in range(len(waits_s[index]) + 1)]
        sampled = Counter(call.body["messages"][-1]["content"] for call in engine.calls)
        assert len(sampled) == sum(len(waits) + 1 for waits in waits_s)
        assert set(sampled.values()) == {1}
        assert rig.proxy.counters.errors == {}


@pytest.mark.timeout(300)
async def test_a_call_after_a_wait_as_long_as_the_engines_patience_is_answered(redis_url: str, keys: Keys) -> None:
    """An engine closes a connection after 5 s, and that is when the next calls come."""
    around = [4.8 + 0.4 * index / (SESSIONS - 1) for index in range(SESSIONS)]
    longer = cycle([[wait_s] for wait_s in LONG_WAITS] or [[]])
    waits_s = [[wait_s, *next(longer)] for wait_s in around]
    await no_call_is_lost(redis_url, keys, 5.0, waits_s)


async def test_calls_that_meet_their_connection_as_the_engine_closes_it_are_answered(
    redis_url: str, keys: Keys
) -> None:
    """An engine with less patience than the proxy's: its connections are still in the pool when it closes them."""
    waits_s = [[0.28 + 0.04 * index / 29] * 4 for index in range(30)]
    await no_call_is_lost(redis_url, keys, 0.3, waits_s)


@both
async def test_an_engine_that_takes_calls_and_closes_is_a_retryable_error_and_nothing_is_recorded(
    redis_client: Redis, keys: Keys, stream: bool
) -> None:
    broken = True

    async def act(call: RawCall) -> None:
        if broken:
            call.close()
        else:
            await answered(call)

    async with raw_engine(act) as engine, running(redis_client, keys, engine.url) as rig:
        for turn in range(3):
            before = len(engine.calls)
            body = {"model": "m", "messages": [{"role": "user", "content": f"{turn}"}], "stream": stream}
            status, headers, data = await rig.raw(body)
            assert (status, json.loads(data)["error"]["code"]) == (503, "engine_down")
            assert int(headers["retry-after"]) > 0
            tries = engine.calls[before:]
            assert 1 <= len(tries) <= 2
            assert len({call.connection for call in tries}) == len(tries)
        assert await rig.records() == []
        broken = False
        status, _, data = await rig.raw(body, headers={"X-Stainless-Retry-Count": "1"})
        assert status == 200
        said = Sse.of(status, {}, data).text() if stream else json.loads(data)["choices"][0]["message"]["content"]
        assert said == "to 2"
        [record] = await rig.records()
        assert record.reply["content"] == "to 2"


@both
async def test_a_kept_connection_that_is_closed_without_a_byte_costs_one_fresh_attempt(
    redis_client: Redis, keys: Keys, stream: bool
) -> None:
    dropped: list[RawCall] = []

    async def act(call: RawCall) -> None:
        if call.body["messages"][-1]["content"] == "second" and not dropped:
            dropped.append(call)
            call.close()
        else:
            await answered(call)

    async with raw_engine(act) as engine, running(redis_client, keys, engine.url) as rig:
        assert await ask(rig, "first", stream=stream) == "to first"
        assert await ask(rig, "second", stream=stream) == "to second"
        _, lost, fresh = engine.calls
        assert lost in dropped
        assert lost.order > 0
        assert (fresh.order, fresh.body) == (0, lost.body)
        assert fresh.connection != lost.connection
        assert [record.reply["content"] for record in await rig.records()] == ["to first", "to second"]
        assert rig.proxy.counters.errors == {}


@both
@pytest.mark.parametrize(
    "bytes_of_it",
    [b"H", b"HTTP/1.1 200 OK\r\nContent-Type: appl", b"<html>what?</html>\r\n\r\n"],
    ids=["a letter", "half a head", "no HTTP"],
)
async def test_an_answer_of_which_a_byte_has_come_is_not_asked_for_again(
    redis_client: Redis, keys: Keys, stream: bool, bytes_of_it: bytes
) -> None:
    async def act(call: RawCall) -> None:
        if call.body["messages"][-1]["content"] == "second":
            await call.send(bytes_of_it)
            call.close()
        else:
            await answered(call)

    async with raw_engine(act) as engine, running(redis_client, keys, engine.url) as rig:
        assert await ask(rig, "first", stream=stream) == "to first"
        status, _, data = await rig.raw({"messages": [{"role": "user", "content": "second"}], "stream": stream})
        assert status >= 500, data
        assert len(await rig.records()) == 1
        assert [call.body["messages"][-1]["content"] for call in engine.calls] == ["first", "second"]
        assert engine.calls[1].order > 0
