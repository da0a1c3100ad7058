"""The event stream: framing, resuming, slow readers, outages."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import httpx
import pytest

from polarq.http import events, feed
from polarq.http.feed import Feed, position
from polarq.ledger import AsyncLedger, Calls, Keys
from polarq.testing.redis import EmbeddedRedis
from tests.http.rig import Rig, a_task, running_shim, said

Frame = dict[str, Any]


async def frames_of(response: httpx.Response) -> AsyncIterator[Frame]:
    fields: dict[str, str] = {}
    async for line in response.aiter_lines():
        if line:
            name, _, value = line.partition(": ")
            fields[name] = value
        elif fields:
            yield {"id": fields.get("id"), **json.loads(fields["data"])}
            fields = {}


@asynccontextmanager
async def listening(shim: Rig, path: str = "/events", **headers: str) -> AsyncIterator[AsyncIterator[Frame]]:
    async with shim.http.stream("GET", path, headers=headers) as response:
        assert response.status_code == 200
        assert response.headers["content-type"] == "text/event-stream; charset=utf-8"
        assert response.headers["x-accel-buffering"] == "no"
        assert response.headers["cache-control"] == "no-cache"
        yield frames_of(response)


async def until(frames: AsyncIterator[Frame], kind: str) -> list[Frame]:
    seen = []
    async for frame in frames:
        seen.append(frame)
        if frame["type"] == kind:
            return seen
    raise AssertionError(f"the stream ended without {kind}: {seen}")


async def test_a_rollouts_life_is_told_in_polars_words_with_ids(shim: Rig) -> None:
    async with listening(shim) as frames:
        hello = await anext(frames)
        assert (hello["type"], hello["data"]) == ("hello", {})
        await shim.submit(a_task())
        await shim.end("t.0", reward=0.5)
        seen = await until(frames, "task.completed")
    created, preparing, done, ended = seen
    assert (created["type"], created["data"]["num_samples"], created["data"]["harness"]) == (
        "task.created",
        1,
        "mini_swe_agent",
    )
    assert (preparing["data"]["status"], preparing["data"]["state"]) == ("INITIALIZING", "preparing")
    assert (done["type"], done["data"]["status"], done["data"]["reward"]) == ("session.state_changed", "COMPLETED", 0.5)
    assert done["data"]["session_id"] == "t.0"
    assert (ended["data"]["status"], ended["data"]["completed_sessions"]) == ("completed", 1)
    assert [position(frame["id"]) for frame in [hello, *seen]] == sorted(position(f["id"]) for f in [hello, *seen])
    assert all(frame["ts"].endswith("+00:00") for frame in seen)


async def test_a_client_that_comes_back_gets_what_it_missed_and_nothing_twice(shim: Rig) -> None:
    async with listening(shim) as frames:
        await anext(frames)
        await shim.submit(a_task())
        last = (await anext(frames))["id"]
    await shim.end("t.0")
    async with listening(shim, **{"Last-Event-ID": last}) as frames:
        assert (await anext(frames))["type"] == "hello"
        seen = await until(frames, "task.completed")
    assert [frame["data"].get("status") for frame in seen] == ["INITIALIZING", "COMPLETED", "completed"]
    async with listening(shim, f"/events?after={last}&task_id=other") as frames:
        assert (await anext(frames))["type"] == "hello"
        await shim.submit(a_task("other"))
        assert (await anext(frames))["data"]["task_id"] == "other"


async def test_a_client_is_told_when_what_it_missed_is_no_longer_kept(shim: Rig) -> None:
    await shim.submit(a_task())
    ledger = shim.client.ledger
    oldest = (await ledger.do(ledger.calls.events("0", 1)))[0].event_id
    for index in range(3):
        await shim.submit(a_task(f"more-{index}"))
    await ledger.redis.xtrim(ledger.calls.keys.events, maxlen=1, approximate=False)
    async with (
        running_shim(shim.client.url, ledger.calls.keys) as late,
        listening(late, f"/events?after={oldest}") as f,
    ):
        assert [(await anext(f))["type"] for _ in range(3)] == ["hello", "gap", "task.created"]


async def test_an_idle_stream_is_pinged_with_the_id_to_resume_from(shim: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(events, "PING_S", 0.05)
    async with listening(shim) as frames:
        hello, ping = await anext(frames), await anext(frames)
    assert (ping["type"], ping["id"]) == ("ping", hello["id"])


async def test_a_reader_far_behind_is_served_from_redis_and_catches_up(
    redis_url: str, keys: Keys, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(feed, "KEPT", 10)
    async with running_shim(redis_url, keys) as shim, listening(shim) as frames:
        await anext(frames)
        for index in range(50):
            await shim.submit(a_task(f"t{index}"))
        # Nothing was read meanwhile; the shim itself kept ten events at most.
        seen = [await anext(frames) for _ in range(50)]
    assert [frame["data"]["task_id"] for frame in seen] == [f"t{index}" for index in range(50)]


async def test_a_stream_goes_on_after_an_outage_of_redis(keys: Keys, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(events, "PING_S", 0.1)
    with EmbeddedRedis() as server:
        async with running_shim(server.url, keys) as shim, listening(shim) as frames:
            await shim.submit(a_task())
            await until(frames, "task.created")
            with said(feed.__name__, "cannot be read") as away:
                server.stop()
                await away.wait()
            await until(frames, "ping")
            server.start()
            await shim.submit(a_task("after"))
            seen = await until(frames, "task.created")
    assert seen[-1]["data"]["task_id"] == "after"


async def test_a_reader_far_behind_waits_while_redis_refuses_and_misses_nothing(
    keys: Keys, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(feed, "KEPT", 1)
    with EmbeddedRedis() as server:
        async with running_shim(server.url, keys) as shim:
            for index in range(3):
                await shim.submit(a_task(f"t{index}"))
            redis = shim.client.ledger.redis
            await redis.execute_command("ACL", "SETUSER", "default", "-xrange")
            async with listening(shim, "/events?after=0") as frames:
                assert [(await anext(frames))["type"] for _ in range(2)] == ["hello", "ping"]
                await redis.execute_command("ACL", "SETUSER", "default", "+xrange")
                seen = [frame async for frame in taken(frames, 3)]
    assert [frame["data"]["task_id"] for frame in seen] == ["t0", "t1", "t2"]


async def taken(frames: AsyncIterator[Frame], count: int) -> AsyncIterator[Frame]:
    """So many frames that are not pings."""
    async for frame in frames:
        if frame["type"] != "ping":
            yield frame
            count -= 1
            if count == 0:
                return


async def test_streams_end_when_the_shim_stops(redis_url: str, keys: Keys) -> None:
    async with httpx.AsyncClient(trust_env=False) as http:
        async with running_shim(redis_url, keys) as shim:
            stream = http.stream("GET", f"{shim.url}/events")
            response = await stream.__aenter__()
        rest = [frame async for frame in frames_of(response)]
        await stream.__aexit__(None, None, None)
    assert [frame["type"] for frame in rest] == ["hello"]


async def test_two_hundred_waiting_requests_need_one_reader_of_the_stream(shim: Rig) -> None:
    """The ledger's pool has 64 connections; a listener that held one would starve the rest."""
    await shim.submit(a_task())
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(base_url=shim.url, trust_env=False, timeout=60, limits=limits) as http:
        path = "/rollout/task/t?wait=60&trajectories=none"
        waiting = [asyncio.create_task(http.get(path)) for _ in range(200)]
        assert (await shim.http.get("/tasks")).status_code == 200
        await shim.end("t.0")
        answers = await asyncio.gather(*waiting)
    assert {answer.json()["status"] for answer in answers} == {"completed"}


async def test_a_feed_gives_the_same_events_from_memory_and_from_redis(redis_url: str, keys: Keys) -> None:
    async with running_shim(redis_url, keys) as shim, AsyncLedger(redis_url, Calls(keys)) as ledger:
        cold = Feed(ledger)
        warm = Feed(ledger)
        reading = asyncio.create_task(warm.run())
        start = await ledger.do(ledger.calls.last_event_id())
        assert not await warm.news(start, 0.05)
        await shim.submit(a_task(samples=3))
        await shim.http.delete("/rollout/task/t")
        assert await warm.news(start, 30)
        last = await ledger.do(ledger.calls.last_event_id())
        while await warm.newest() != last:
            assert await warm.news(await warm.newest(), 30)
        assert await warm.after(start) == await cold.after(start)
        assert await warm.after(last) == []
        assert len(await warm.after(start, 2)) == 2
        reading.cancel()


def test_an_event_id_is_two_numbers() -> None:
    assert position("5-7") == (5, 7)
    assert position("5") == (5, 0)
    for text in ("", "a", "5-", "-1", "5-7-9", "\u0665"):
        with pytest.raises(ValueError, match="not an event id"):
            position(text)
