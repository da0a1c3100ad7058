"""Engines that refuse, break, lie, hang or are not there: one clear answer in the dialect's shape, nothing lost."""

from __future__ import annotations

import asyncio
import gzip
import json
from typing import Any

import pytest
from redis.asyncio import Redis

from polarq.contracts.completion import CompletionLabel
from polarq.ledger.keys import Keys
from polarq.store.grants import close_grant
from polarq.testing.inference import Scenario, Script, ScriptedInference, Turn

from .raw_engine import FIRST, RawCall, answer, delta, event, last, raw_engine
from .rig import HELLO, running, until

OVERLOADED = event({"error": {"message": "queue full", "type": "overloaded", "code": 503}})
BODY = {"messages": HELLO}
STREAM = {"messages": HELLO, "stream": True}


async def test_an_engine_that_is_not_there_is_a_retryable_error(redis_client: Redis, keys: Keys) -> None:
    async with running(redis_client, keys, "http://127.0.0.1:1") as rig:
        for body in (BODY, STREAM):
            status, headers, data = await rig.raw(body)
            assert (status, headers["retry-after"]) == (503, "2")
            error = json.loads(data)["error"]
            assert error["code"] == "engine_down"
            assert "http://127.0.0.1:1 does not answer" in error["message"]
        async with rig.http.get(rig.url + "/health") as answered:
            health = await answered.json()
        assert health["status"] == "degraded"
        assert health["inference"][0]["reachable"] is False
        assert health["errors"] == {"engine_down": 2}
        assert await rig.records() == []
        await rig.proxy.recorder.drain()
        use = await close_grant(redis_client, keys, rig.secret)
        assert use.faults == 2
        assert use.last_fault.startswith("engine_down: ")


async def test_an_engine_that_comes_later_is_found(redis_client: Redis, keys: Keys) -> None:
    server = ScriptedInference(scenario=Scenario.of("hi"))
    await server.start()
    port = server.port
    await server.stop()
    async with running(redis_client, keys, f"http://127.0.0.1:{port}") as rig:
        status, _ = await rig.post(BODY)
        assert status == 503
        async with ScriptedInference(scenario=Scenario.of("hi"), port=port):
            status, _ = await rig.post(BODY)
            assert status == 200
            await until(lambda: rig.proxy.health()["status"] == "ok")


@pytest.mark.parametrize(
    ("rest", "words"),
    [
        ("error", "queue full"),
        ("reset", "broke off"),
        ("close", "broke off"),
        ("end", "before the answer's end"),
        ("done", "before the answer's end"),
        ("junk", "not answer with JSON"),
    ],
)
async def test_an_error_after_status_200(redis_client: Redis, keys: Keys, rest: str, words: str) -> None:
    async def act(call: RawCall) -> None:
        await call.head()
        await call.chunk(FIRST)
        half = event({"choices": [{"index": 0, "delta": {"content": "half"}, "token_ids": [1, 2]}]})
        if rest == "error":
            await call.chunk(half + OVERLOADED)  # in one read
            await call.end()
        elif rest == "reset":
            await call.chunk(half + b'data: {"choices":[{"ind')
            await asyncio.sleep(0.05)  # the reset must not overtake what was sent before it
            call.reset()
        elif rest == "close":
            await call.chunk(half)
            call.close()
        elif rest == "done":
            await call.chunk(half + b"data: [DONE]\n\n")
            await call.end()
        elif rest == "junk":
            await call.chunk(half + b"data: {nonsense\n\n")
            await call.end()
        else:
            await call.chunk(half)
            await call.end()

    async with raw_engine(act) as engine, running(redis_client, keys, engine.url) as rig:
        sse = await rig.stream(stream_options={"include_usage": True})
        assert sse.status == 200
        assert (sse.text(), sse.finish_reasons, sse.ended) == ("half", [], False)
        [error] = sse.errors
        assert words in error["message"]
        assert int(error["message"].partition(": ")[0]) in {502, 503}
        assert "usage" not in sse.raw.decode()
        [record] = await rig.records()
        assert record.sampled_ids == [1, 2]
        assert record.prompt_ids == [1, 2, 3]
        assert (record.incomplete, record.label) == (True, CompletionLabel.ABORTED)
        assert not record.trainable
        assert words in (record.untrainable or "")
        assert record.usage.completion_tokens is None
        assert record.reply["content"] == "half"
        assert rig.proxy.counters.in_flight == 0


async def test_an_error_before_anything_was_sampled_is_a_plain_error(redis_client: Redis, keys: Keys) -> None:
    async def act(call: RawCall) -> None:
        await call.head()
        await call.chunk(OVERLOADED)
        await call.end()

    async with raw_engine(act) as engine, running(redis_client, keys, engine.url) as rig:
        status, headers, data = await rig.raw(STREAM)
        assert (status, json.loads(data)["error"]["code"]) == (503, "overloaded")
        assert headers["retry-after"] == "2"
        assert await rig.records() == []


@pytest.mark.parametrize("body", [BODY, STREAM])
@pytest.mark.parametrize(
    ("fault", "status", "code", "retry"),
    [
        ({"kind": "http_status", "status": 429, "retry_after_s": 7}, 429, "overloaded", "7"),
        ({"kind": "http_status", "status": 503}, 503, "overloaded", "2"),
        ({"kind": "http_status", "status": 500}, 500, "engine_fault", None),
        ({"kind": "http_status", "status": 400}, 400, "refused", None),
        ({"kind": "http_status", "status": 401}, 404, "misconfigured", None),
        ({"kind": "not_json"}, 502, "engine_fault", None),
        ({"kind": "close_before"}, 503, "engine_down", "2"),
    ],
)
async def test_a_fault_of_the_engine_keeps_its_meaning(
    redis_client: Redis, keys: Keys, body: Any, fault: dict[str, Any], status: int, code: str, retry: str | None
) -> None:
    async with (
        ScriptedInference(scenario=Scenario.of("hi", fault=fault)) as inference,
        running(redis_client, keys, inference.base_url) as rig,
    ):
        answered, headers, data = await rig.raw(body)
        error = json.loads(data)["error"]
        assert (answered, error["code"], headers.get("retry-after")) == (status, code, retry)
        assert "\n" not in error["message"]
        assert await rig.records() == []


async def test_an_engine_that_goes_on_aborting_is_a_retryable_error_and_not_shown_as_done(
    redis_client: Redis, keys: Keys
) -> None:
    turn = Turn.model_validate({"content": "one two three", "fault": {"kind": "abort", "after_tokens": 2, "times": 5}})
    async with (
        ScriptedInference(scenario=Scenario(name="a", scripts=(Script(name="a", turns=(turn,)),))) as inference,
        running(redis_client, keys, inference.base_url) as rig,
    ):
        status, headers, data = await rig.raw(BODY)
        assert (status, json.loads(data)["error"]["code"], headers["retry-after"]) == (503, "aborted", "2")
        sse = await rig.stream()
        assert sse.finish_reasons == []
        assert sse.errors[0]["code"] == "aborted"
        await rig.ask()
        *broken, third = await rig.records()
        assert len(broken) == 5  # a whole answer is asked for again before the harness is told; a shown one cannot be
        for record in broken:
            assert len(record.sampled_ids) == len(record.logprobs) == 2
            assert (record.label, record.incomplete, record.trainable) == (CompletionLabel.ABORTED, True, False)
        assert third.trainable


async def test_an_overflow_is_told_in_the_words_that_harnesses_know(redis_client: Redis, keys: Keys) -> None:
    async with (
        ScriptedInference(scenario=Scenario.of("hi"), max_model_len=64) as inference,
        running(redis_client, keys, inference.base_url) as rig,
    ):
        for stream in (False, True):
            long = {"messages": [{"role": "user", "content": "word " * 500}], "stream": stream}
            status, answered = await rig.post(long)
            error = answered["error"]
            assert (status, error["code"], error["type"]) == (400, "context_length_exceeded", "invalid_request_error")
            assert error["message"].startswith("This model's maximum context length is 64 tokens. However, ")
        assert await rig.records() == []


async def test_a_model_that_is_not_served_is_told_to_both_sides(
    redis_client: Redis, keys: Keys, caplog: pytest.LogCaptureFixture
) -> None:
    async with (
        ScriptedInference(scenario=Scenario.of("hi"), served_model_name="demo") as inference,
        running(redis_client, keys, inference.base_url, endpoint={"model": "other"}) as rig,
    ):
        status, answered = await rig.post(BODY)
        assert (status, answered["error"]["code"]) == (404, "misconfigured")
        assert "inference.model" in answered["error"]["message"]
        await until(lambda: rig.proxy.health()["inference"][0]["problem"])
        report = rig.proxy.health()["inference"][0]
        assert (report["model"], report["served"], report["reachable"]) == ("other", ["demo"], True)
        assert "does not serve 'other' (it serves demo)" in report["problem"]
        assert "does not serve 'other'" in caplog.text


async def test_a_request_that_breaks_the_engine_again_and_again_is_told_to_stop(
    redis_client: Redis, keys: Keys
) -> None:
    fault = {"kind": "http_status", "status": 500, "message": "Out of range float values are not JSON compliant"}
    async with (
        ScriptedInference(scenario=Scenario.of("hi", fault=fault)) as inference,
        running(redis_client, keys, inference.base_url) as rig,
    ):
        statuses = [(await rig.post(BODY))[0] for _ in range(4)]
        assert statuses == [500, 500, 400, 400]
        status, _ = await rig.post({"messages": HELLO, "seed": 2})
        assert status == 500
        await rig.proxy.recorder.drain()
        use = await close_grant(redis_client, keys, rig.secret)
        assert use.faults == 5
        assert "not JSON compliant" in use.last_fault


@pytest.mark.parametrize("stream", [False, True])
async def test_an_engine_that_falls_silent_is_given_up(redis_client: Redis, keys: Keys, stream: bool) -> None:
    async with (
        ScriptedInference(scenario=Scenario.of("one two", fault={"kind": "hang", "after_tokens": 1})) as inference,
        running(redis_client, keys, inference.base_url, endpoint={"timeout_s": 1.5}) as rig,
    ):
        if stream:
            sse = await rig.stream()
            assert (sse.errors[0]["code"], sse.finish_reasons) == ("timed_out", [])
            [record] = await rig.records()
            assert len(record.sampled_ids) == 1
            assert "1.5 s" in (record.untrainable or "")
        else:
            status, answered = await rig.post(BODY)
            assert (status, answered["error"]["type"]) == (504, "timeout_error")
        await inference.ledger.wait_until(lambda calls: any(c.session_id == "task.0" and c.aborted for c in calls))
        assert rig.proxy.fleet.endpoints[0].in_flight == 0


@pytest.mark.parametrize("stream", [False, True])
async def test_an_idle_connection_that_the_engine_closed_is_not_noticed(
    redis_client: Redis, keys: Keys, stream: bool
) -> None:
    async def act(call: RawCall) -> None:
        if call.order and call.connection not in stale:
            stale.add(call.connection)
            call.close()  # as if it had been closed just before
            return
        if stream:
            await call.head()
            await call.chunk(FIRST + delta("ok", (11, 12), "stop") + last(2))
            await call.end()
        else:
            await call.whole(answer())

    stale: set[int] = set()
    async with raw_engine(act) as engine, running(redis_client, keys, engine.url) as rig:
        await until(lambda: rig.proxy.fleet.endpoints[0].state.gives_ids)
        for _ in range(5):
            if stream:
                assert (await rig.stream()).finish_reasons == ["stop"]
            else:
                await rig.ask()
        records = await rig.records()
        assert len(records) == 5
        assert stale
        by_id = [call.headers["x-request-id"] for call in engine.calls]
        assert max(by_id.count(name) for name in by_id) == 2
        assert all(record.trainable for record in records)


async def test_an_engine_that_closes_idle_connections_by_its_own_clock_is_not_noticed(
    redis_client: Redis, keys: Keys
) -> None:
    async with (
        raw_engine(lambda call: call.whole(answer()), idle_s=0.3) as engine,
        running(redis_client, keys, engine.url) as rig,
    ):
        sessions = [await rig.session(index) for index in range(1, 41)]
        for pause_s in (0.28, 0.295, 0.3, 0.305, 0.32):
            await asyncio.gather(*(session.ask() for session in sessions))
            await asyncio.sleep(pause_s)
        assert rig.proxy.counters.errors == {}
        assert rig.proxy.counters.calls == 200
        assert len({call.headers["x-request-id"] for call in engine.calls}) == 200


async def test_an_engine_that_always_closes_is_asked_once_more_at_most(redis_client: Redis, keys: Keys) -> None:
    async def act(call: RawCall) -> None:
        call.close()

    async with raw_engine(act) as engine, running(redis_client, keys, engine.url) as rig:
        await until(lambda: rig.proxy.fleet.endpoints[0].state.gives_ids)
        for _ in range(3):
            status, answered = await rig.post(BODY)
            assert (status, answered["error"]["code"]) == (503, "engine_down")
        attempts: dict[str, list[RawCall]] = {}
        for call in engine.calls:
            attempts.setdefault(call.headers["x-request-id"], []).append(call)
        assert len(attempts) == 3
        for made in attempts.values():
            on_a_new_connection = made[0].order == 0
            assert len(made) == (1 if on_a_new_connection else 2)
        assert await rig.records() == []


async def test_a_packed_answer_that_nobody_asked_for_is_read(redis_client: Redis, keys: Keys) -> None:
    async def act(call: RawCall) -> None:
        assert call.headers["accept-encoding"] == "identity"
        await call.whole(gzip.compress(json.dumps(answer("packed")).encode()), Content_Encoding="gzip")

    async with raw_engine(act) as engine, running(redis_client, keys, engine.url) as rig:
        status, headers, data = await rig.raw(BODY)
        assert (status, json.loads(data)["choices"][0]["message"]["content"]) == (200, "packed")
        assert "content-encoding" not in headers
        assert int(headers["content-length"]) == len(data)
        assert (await rig.records())[0].trainable


async def test_an_engine_that_answers_a_stream_as_a_whole_is_understood(redis_client: Redis, keys: Keys) -> None:
    async with (
        raw_engine(lambda call: call.whole(answer("all at once"))) as engine,
        running(redis_client, keys, engine.url) as rig,
    ):
        sse = await rig.stream()
        assert (sse.text(), sse.finish_reasons, sse.ended) == ("all at once", ["stop"], True)
        assert (await rig.records())[0].trainable


async def test_another_replica_takes_over_when_one_is_gone(redis_client: Redis, keys: Keys) -> None:
    first = ScriptedInference(scenario=Scenario.of("hi"))
    await first.start()
    async with (
        ScriptedInference(scenario=Scenario.of("hi")) as second,
        running(redis_client, keys, first.base_url, second.base_url) as rig,
    ):
        one, two = rig.proxy.fleet.endpoints
        await until(lambda: one.state.gives_ids and two.state.gives_ids)
        await rig.ask()
        assert one.sessions == 1
        await first.stop()
        await rig.ask()
        assert (await rig.stream()).finish_reasons == ["stop"]
        assert (one.sessions, two.sessions) == (0, 1)
        assert len(await rig.records()) == 3


async def test_sessions_stay_and_spread(redis_client: Redis, keys: Keys) -> None:
    async with (
        ScriptedInference(scenario=Scenario.of("hi")) as first,
        ScriptedInference(scenario=Scenario.of("hi")) as second,
        running(redis_client, keys, first.base_url, second.base_url) as rig,
    ):
        await until(lambda: all(endpoint.state.gives_ids for endpoint in rig.proxy.fleet.endpoints))
        sessions = [await rig.session(index) for index in range(1, 5)]
        for _ in range(3):
            for session in sessions:
                await session.ask()
        for index in range(1, 5):
            name = f"task.{index}"
            places = [sum(call.session_id == name for call in server.ledger) for server in (first, second)]
            assert sorted(places) == [0, 3]
        assert [endpoint.sessions for endpoint in rig.proxy.fleet.endpoints] == [2, 2]


async def test_no_more_calls_than_allowed_are_in_flight(redis_client: Redis, keys: Keys) -> None:
    busy = most = 0

    async def act(call: RawCall) -> None:
        nonlocal busy, most
        busy += 1
        most = max(most, busy)
        await asyncio.sleep(0.01)
        busy -= 1
        await call.whole(answer())

    async with (
        raw_engine(act) as engine,
        running(redis_client, keys, engine.url, endpoint={"max_concurrency": 3}) as rig,
    ):
        await asyncio.gather(*(rig.ask() for _ in range(12)))
        assert most == 3
        assert sorted(record.seq for record in await rig.records()) == list(range(12))
