"""Streams: any cut, any length, while waiting, and when somebody leaves."""

from __future__ import annotations

import asyncio
import json
import resource
from typing import Any

import aiohttp
import pytest
from redis.asyncio import Redis

from polarq.contracts.completion import CompletionLabel
from polarq.ledger.keys import Keys
from polarq.testing.inference import Scenario, Script, ScriptedInference, Turn

from .raw_engine import FIRST, RawCall, answer, delta, event, last, raw_engine
from .rig import HELLO, Sse, running, until

TEXT = "go \U0001f9ea \u0939"


def text_event(*, ascii_only: bool) -> bytes:
    entries = [{"token": token, "logprob": value} for token, value in (("a", -0.1), ("b", -0.2), ("c", -0.3))]
    choice = {"index": 0, "delta": {"content": TEXT}, "token_ids": [11, 12, 13], "logprobs": {"content": entries}}
    return b"data: " + json.dumps({"choices": [choice]}, ensure_ascii=ascii_only).encode() + b"\n\n"


@pytest.mark.parametrize("ascii_only", [False, True])
async def test_a_character_cut_by_a_chunk_stays_whole(redis_client: Redis, keys: Keys, ascii_only: bool) -> None:
    data = text_event(ascii_only=ascii_only)
    cuts = iter([*range(1, len(data)), 0])

    async def act(call: RawCall) -> None:
        cut = next(cuts)
        await call.head()
        await call.chunk(FIRST)
        if cut:
            await call.chunk(data[:cut])
            await asyncio.sleep(0.001)  # two reads, not one
            await call.chunk(data[cut:])
        else:
            for place in range(len(data)):
                await call.chunk(data[place : place + 1])
                await asyncio.sleep(0)
        await call.chunk(delta(finish="stop") + last(3))
        await call.end()

    async with raw_engine(act) as engine, running(redis_client, keys, engine.url) as rig:
        for _ in range(len(data)):
            sse = await rig.stream()
            assert (sse.text(), sse.ended) == (TEXT, True)
            assert "\ufffd" not in sse.raw.decode()
        records = await rig.records()
        assert len(records) == len(data)
        for record in records:
            assert record.sampled_ids == [11, 12, 13]
            assert record.reply["content"] == TEXT
            assert record.trainable


async def test_very_long_events_are_relayed_whole(redis_client: Redis, keys: Keys) -> None:
    prompt = [index % 150_000 for index in range(131_072)]
    argument = json.dumps({"text": "x" * (2 << 20)})
    call_part = {"index": 0, "id": "c1", "type": "function", "function": {"name": "f", "arguments": argument}}

    async def act(call: RawCall) -> None:
        choice = {"index": 0, "delta": {"tool_calls": [call_part]}, "token_ids": [7]}
        choice["logprobs"] = {"content": [{"token": "t", "logprob": -1.0}]}
        usage = event({"choices": [], "usage": {"prompt_tokens": len(prompt), "completion_tokens": 1}})
        await call.head()
        await call.chunk(delta("", prompt_token_ids=prompt))
        await call.chunk(event({"choices": [choice]}))
        await call.chunk(delta(finish="tool_calls") + usage + b"data: [DONE]\n\n")
        await call.end()

    async with raw_engine(act) as engine, running(redis_client, keys, engine.url) as rig:
        await rig.stream()
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        sessions = [await rig.session(index) for index in range(1, 41)]
        for sse in await asyncio.gather(*(session.stream() for session in sessions)):
            assert sse.choices[1]["delta"]["tool_calls"][0]["function"]["arguments"] == argument
            assert sse.ended
        grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024
        # Prompt ids, the argument in a few forms, and what the test itself holds of it: bounded per session.
        assert grown < 40 * (32 << 20)
        [record] = await sessions[0].records()
        assert record.prompt_ids == prompt
        assert record.reply["tool_calls"][0]["function"]["arguments"] == argument
        assert record.trainable


async def test_an_event_without_end_is_cut_and_the_others_go_on(redis_client: Redis, keys: Keys) -> None:
    sent = 0

    async def act(call: RawCall) -> None:
        nonlocal sent
        await call.head()
        await call.chunk(FIRST + delta("half", (11,)))
        if call.headers["x-session-id"] != "task.0":
            await call.chunk(delta("whole", (12,), "stop") + last(2))
            await call.end()
            return
        await call.chunk(b'data: {"x": "')
        while True:
            await call.chunk(b"x" * (1 << 20))
            sent += 1 << 20

    async with raw_engine(act) as engine, running(redis_client, keys, engine.url, event_limit=4 << 20) as rig:
        other = await rig.session(1)
        sse, good = await asyncio.gather(rig.stream(), other.stream())
        assert (sse.text(), sse.finish_reasons) == ("half", [])
        assert "longer than" in sse.errors[0]["message"]
        assert good.finish_reasons == ["stop"]
        assert sent < 64 << 20
        [record] = await rig.records()
        assert (record.sampled_ids, record.incomplete) == ([11], True)


async def test_a_waiting_stream_is_kept_alive(redis_client: Redis, keys: Keys) -> None:
    go_on = asyncio.Event()

    async def act(call: RawCall) -> None:
        await go_on.wait()
        await call.head()
        await call.chunk(FIRST + delta("late", (11,), "stop") + last(1))
        await call.end()

    async with raw_engine(act) as engine, running(redis_client, keys, engine.url, keepalive_s=0.05) as rig:
        async with rig.http.post(
            rig.base_url + "/v1/chat/completions", json={"messages": HELLO, "stream": True}
        ) as answered:
            assert answered.status == 200
            comments = [await answered.content.readuntil(b"\n\n") for _ in range(3)]
            assert set(comments) == {b": waiting\n\n"}
            go_on.set()
            sse = Sse.of(200, {}, await answered.content.read())
        assert (sse.text(), sse.finish_reasons) == ("late", ["stop"])


@pytest.mark.parametrize("stream_upstream", [True, False])
async def test_an_error_after_the_first_sign_of_life_is_an_event(
    redis_client: Redis, keys: Keys, stream_upstream: bool
) -> None:
    go_on = asyncio.Event()

    async def act(call: RawCall) -> None:
        await go_on.wait()
        await call.whole({"error": {"message": "out of memory"}}, status=500)

    async with (
        raw_engine(act) as engine,
        running(redis_client, keys, engine.url, keepalive_s=0.05, stream_upstream=stream_upstream) as rig,
        rig.http.post(rig.base_url + "/v1/chat/completions", json={"messages": HELLO, "stream": True}) as answered,
    ):
        await answered.content.readuntil(b"\n\n")
        go_on.set()
        sse = Sse.of(200, {}, await answered.content.read())
        assert "out of memory" in sse.errors[0]["message"]
        assert sse.finish_reasons == []


@pytest.mark.parametrize("stream", [True, False])
async def test_a_harness_that_hangs_up_frees_the_engine_and_leaves_a_partial_record(
    redis_client: Redis, keys: Keys, stream: bool
) -> None:
    turn = Turn(content="word " * 400, tokens_per_s=100)
    scenario = Scenario(name="long", scripts=(Script(name="a", turns=(turn,)),))
    async with (
        ScriptedInference(scenario=scenario) as inference,
        running(redis_client, keys, inference.base_url) as rig,
    ):
        async with aiohttp.ClientSession() as leaving:
            answered = asyncio.create_task(
                _opened(leaving, rig.base_url + "/v1/chat/completions", {"messages": HELLO, "stream": stream})
            )
            await inference.ledger.wait_until(
                lambda calls: any(c.session_id == "task.0" and len(c.sampled_ids) > 2 for c in calls)
            )
            if stream:
                await (await answered).content.readuntil(b"\n\n")
            answered.cancel()
        await inference.ledger.wait_until(lambda calls: any(c.session_id == "task.0" and c.aborted for c in calls))
        await until(rig.records)
        [record] = await rig.records()
        [sampled] = [call for call in inference.ledger if call.session_id == "task.0"]
        assert (record.label, record.incomplete) == (CompletionLabel.ABORTED, True)
        assert "hung up" in (record.untrainable or "")
        assert not record.trainable
        if stream:
            assert record.prompt_ids == list(sampled.prompt_ids)
            assert record.sampled_ids
        assert record.sampled_ids == sampled.sampled_ids[: len(record.sampled_ids)]
        assert len(sampled.sampled_ids) < 400
        await until(lambda: rig.proxy.counters.in_flight == 0)
        assert rig.proxy.counters.aborted == 1
        assert rig.proxy.fleet.endpoints[0].in_flight == 0


async def _opened(http: aiohttp.ClientSession, url: str, body: Any) -> aiohttp.ClientResponse:
    return await http.post(url, json=body)


async def test_a_harness_that_leaves_at_the_end_has_a_whole_record(redis_client: Redis, keys: Keys) -> None:
    async with (
        ScriptedInference(scenario=Scenario.of("one two")) as inference,
        running(redis_client, keys, inference.base_url) as rig,
    ):
        async with aiohttp.ClientSession() as leaving:
            answered = await _opened(
                leaving, rig.base_url + "/v1/chat/completions", {"messages": HELLO, "stream": True}
            )
            while b'"finish_reason":"stop"' not in await answered.content.readuntil(b"\n\n"):
                pass
            answered.close()
        [record] = await rig.records()
        assert record.trainable
        assert not record.incomplete


async def test_a_stream_of_other_replies_never_mixes_with_it(redis_client: Redis, keys: Keys) -> None:
    """Keep-alive comments are written by another task: they must never land inside an event."""

    async def act(call: RawCall) -> None:
        await call.head()
        await call.chunk(FIRST)
        for index in range(60):
            await call.chunk(delta(f"{index} ", (index,)))
            await asyncio.sleep(0.001)
        await call.chunk(delta(finish="stop") + last(60))
        await call.end()

    async with raw_engine(act) as engine, running(redis_client, keys, engine.url, keepalive_s=0.0005) as rig:
        sse = await rig.stream()
        assert sse.text() == "".join(f"{index} " for index in range(60))
        assert sse.ended
        assert (await rig.records())[0].sampled_ids == list(range(60))


async def test_whole_answers_are_not_kept_from_others_by_a_slow_reader(redis_client: Redis, keys: Keys) -> None:
    big = "x" * (8 << 20)

    async def act(call: RawCall) -> None:
        if call.body["stream"]:
            await call.head()
            await call.chunk(FIRST + delta(big, (11,)) + delta(big, (12,), "stop") + last(2))
            await call.end()
        else:
            await call.whole(answer())

    async with raw_engine(act) as engine, running(redis_client, keys, engine.url) as rig:
        slow = await rig.http.post(rig.base_url + "/v1/chat/completions", json={"messages": HELLO, "stream": True})
        for _ in range(5):
            await rig.ask()
        sse = Sse.of(200, {}, await slow.read())
        assert len(sse.text()) == 2 * len(big)
