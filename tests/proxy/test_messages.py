"""Messages calls through a running proxy: what harnesses read, what engines get, what is recorded."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from redis.asyncio import Redis

from polarq.ledger.keys import Keys
from polarq.store.grants import close_grant
from polarq.testing.inference import Scenario, Script, ScriptedInference, ToolCall, Turn

from . import captures
from .messages_client import HELLO, Events, as_whole
from .raw_engine import FIRST, RawCall, answer, delta, event, last, raw_engine
from .rig import Rig, running

PATH = "/v1/messages"
TEXT = "go \U0001f9ea \u0939"
PIXEL = "iVBORw0KGgo="
TOOLS = [{"name": "bash", "input_schema": {"type": "object", "properties": {"command": {"type": "string"}}}}]
OVERLOADED = event({"error": {"message": "queue full", "type": "overloaded", "code": 503}})
TURNS = (
    Turn(
        reasoning="I look first.",
        content="Let me look.",
        tool_calls=(
            ToolCall(name="bash", arguments={"command": "ls"}),
            ToolCall(name="bash", arguments={"command": "pwd"}),
        ),
    ),
    Turn(content="Done."),
)
SCENARIO = Scenario(name="looks", scripts=(Script(name="a", turns=TURNS),))


def body(messages: Any = HELLO, **fields: Any) -> dict[str, Any]:
    return {"model": "asked", "max_tokens": 256, "messages": messages, **fields}


async def streamed(rig: Rig, messages: Any = HELLO, **fields: Any) -> Events:
    status, headers, raw = await rig.raw(body(messages, stream=True, **fields), PATH)
    assert (status, headers["content-type"]) == (200, "text/event-stream; charset=utf-8")
    return Events.of(raw)


@pytest.mark.parametrize("stream_upstream", [True, False])
async def test_a_conversation_with_tools_is_told_alike_whole_and_streamed(
    redis_client: Redis, keys: Keys, stream_upstream: bool
) -> None:
    async with (
        ScriptedInference(scenario=SCENARIO) as inference,
        running(redis_client, keys, inference.base_url, stream_upstream=stream_upstream) as rig,
    ):
        other = await rig.session(1)
        status, whole = await rig.post(body(tools=TOOLS), PATH)
        assert status == 200
        events = await streamed(other, tools=TOOLS)
        assert as_whole(events.blocks) == [
            block if block["type"] != "tool_use" else {**block, "id": streamed_block["id"]}
            for block, streamed_block in zip(whole["content"], events.blocks, strict=True)
        ]
        assert [block["type"] for block in whole["content"]] == ["thinking", "text", "tool_use", "tool_use"]
        [last_event] = events.named("message_delta")
        assert last_event["usage"] == whole["usage"]
        assert (whole["stop_reason"], last_event["delta"]["stop_reason"]) == ("tool_use", "tool_use")
        assert whole["usage"]["input_tokens"] == len(inference.ledger[-1].prompt_ids)
        results = [
            {"type": "tool_result", "tool_use_id": block["id"], "content": "x"}
            for block in whole["content"]
            if block["type"] == "tool_use"
        ]
        turn = [*HELLO, {"role": "assistant", "content": whole["content"]}, {"role": "user", "content": results}]
        status, done = await rig.post(body(turn, tools=TOOLS), PATH)
        assert (status, done["content"], done["stop_reason"]) == (200, [{"type": "text", "text": "Done."}], "end_turn")
        records = await rig.records()
        assert all(record.trainable for record in records)
        assert [record.dialect for record in records] == ["anthropic_messages"] * 2
        first, second = records
        # Thinking, text and arguments came back as they were: the second prompt goes on where the first answer ended.
        assert second.prompt_ids[: len(first.prompt_ids) + len(first.sampled_ids)] == [
            *first.prompt_ids,
            *first.sampled_ids,
        ]


async def test_a_real_engines_call_is_told_alike_whole_and_streamed(redis_client: Redis, keys: Keys) -> None:
    async def act(call: RawCall) -> None:
        if call.body["stream"]:
            await call.head()
            await call.chunk(captures.stream("vllm_chat_toolcall_stream"))
            await call.end()
        else:
            await call.whole(captures.whole("vllm_chat_toolcall_nonstream").data)

    async with raw_engine(act) as engine, running(redis_client, keys, engine.url) as rig:
        status, whole = await rig.post(body(tools=TOOLS), PATH)
        events = await streamed(rig, tools=TOOLS)
        assert status == 200
        for content in (whole["content"], as_whole(events.blocks)):
            text, use = content
            assert text == {"type": "text", "text": "ok "}
            assert (use["type"], use["name"], use["input"]) == ("tool_use", "get_weather", {"city": "Paris"})
        [end] = events.named("message_delta")
        assert (whole["stop_reason"], end["delta"]["stop_reason"]) == ("tool_use", "tool_use")
        assert whole["usage"]["output_tokens"] == len((await rig.records())[0].sampled_ids)
        start = events.all[0]["message"]["usage"]["input_tokens"]
        assert start == end["usage"]["input_tokens"] == len((await rig.records())[1].prompt_ids)


async def test_a_call_cut_off_by_its_length_is_readable(redis_client: Redis, keys: Keys) -> None:
    """A harness must see that it is half: it would run it otherwise."""
    async with (
        ScriptedInference(scenario=SCENARIO) as inference,
        running(redis_client, keys, inference.base_url) as rig,
    ):
        events = await streamed(rig, tools=TOOLS)
        most = events.named("message_delta")[0]["usage"]["output_tokens"]
        halves = 0
        for limit in range(1, most):
            cut = await streamed(rig, tools=TOOLS, max_tokens=limit)
            assert cut.named("message_delta")[0]["delta"]["stop_reason"] == "max_tokens"
            for half, block in zip(cut.blocks, events.blocks, strict=False):
                if half["type"] == block["type"] == "tool_use":
                    assert block["json"].startswith(half["json"]) or half["json"] == "{}"
                    halves += half["json"] not in {block["json"], "{}"}
        assert halves


@pytest.mark.parametrize("ascii_only", [False, True])
async def test_a_character_cut_by_a_chunk_stays_whole(redis_client: Redis, keys: Keys, ascii_only: bool) -> None:
    entries = [{"token": token, "logprob": value} for token, value in (("a", -0.1), ("b", -0.2), ("c", -0.3))]
    choice = {"index": 0, "delta": {"content": TEXT}, "token_ids": [11, 12, 13], "logprobs": {"content": entries}}
    data = b"data: " + json.dumps({"choices": [choice]}, ensure_ascii=ascii_only).encode() + b"\n\n"
    cuts = iter(range(1, len(data)))

    async def act(call: RawCall) -> None:
        cut = next(cuts)
        await call.head()
        await call.chunk(FIRST)
        await call.chunk(data[:cut])
        await asyncio.sleep(0)  # two reads where the system likes
        await call.chunk(data[cut:])
        await call.chunk(delta(finish="stop") + last(3))
        await call.end()

    async with raw_engine(act) as engine, running(redis_client, keys, engine.url) as rig:
        for _ in range(1, len(data)):
            status, _, raw = await rig.raw(body(stream=True), PATH)
            events = Events.of(raw)
            assert (status, events.text(), events.types[-1]) == (200, TEXT, "message_stop")
            assert "\ufffd" not in raw.decode()
        for record in await rig.records():
            assert (record.sampled_ids, record.reply["content"], record.trainable) == ([11, 12, 13], TEXT, True)


HALF = event({"choices": [{"index": 0, "delta": {"content": "half"}, "token_ids": [1, 2]}]})


async def _error(call: RawCall) -> None:
    await call.chunk(HALF + OVERLOADED)
    await call.end()


async def _reset(call: RawCall) -> None:
    await call.chunk(HALF + b'data: {"choices":[{"ind')
    await asyncio.sleep(0.05)  # the reset must not overtake what was sent before it
    call.reset()


async def _end(call: RawCall) -> None:
    await call.chunk(HALF)
    await call.end()


@pytest.mark.parametrize(
    ("broken", "kind"),
    [(_error, "overloaded_error"), (_reset, None), (_end, "api_error")],
    ids=["error", "reset", "end"],
)
async def test_an_error_after_status_200_is_the_last_event(
    redis_client: Redis, keys: Keys, broken: Callable[[RawCall], Awaitable[None]], kind: str | None
) -> None:
    async def act(call: RawCall) -> None:
        await call.head()
        await call.chunk(FIRST)
        await broken(call)

    async with raw_engine(act) as engine, running(redis_client, keys, engine.url) as rig:
        events = await streamed(rig)
        assert events.types == ["message_start", "content_block_start", "content_block_delta", "error"]
        error = events.all[-1]["error"]
        assert error["message"]
        assert kind in {None, error["type"]}
        [record] = await rig.records()
        assert (record.sampled_ids, record.incomplete, record.trainable) == ([1, 2], True, False)
        assert record.usage.completion_tokens is None


async def test_an_error_before_anything_was_sampled_is_a_plain_error(redis_client: Redis, keys: Keys) -> None:
    async def act(call: RawCall) -> None:
        await call.head()
        await call.chunk(OVERLOADED)
        await call.end()

    async with raw_engine(act) as engine, running(redis_client, keys, engine.url) as rig:
        status, headers, raw = await rig.raw(body(stream=True), PATH)
        assert (status, headers["retry-after"]) == (503, "2")
        assert json.loads(raw)["error"]["type"] == "overloaded_error"
        assert await rig.records() == []


@pytest.mark.parametrize("stream_upstream", [True, False])
async def test_a_waiting_stream_begins_with_its_message_and_is_pinged(
    redis_client: Redis, keys: Keys, stream_upstream: bool
) -> None:
    go_on = asyncio.Event()

    async def act(call: RawCall) -> None:
        await go_on.wait()
        if stream_upstream:
            await call.head()
            await call.chunk(FIRST + delta("late", (11,), "stop") + last(1))
            await call.end()
        else:
            await call.whole(answer("late"))

    async with (
        raw_engine(act) as engine,
        running(redis_client, keys, engine.url, keepalive_s=0.05, stream_upstream=stream_upstream) as rig,
        rig.http.post(rig.base_url + PATH, json=body(stream=True)) as answered,
    ):
        seen = b""
        while seen.count(b"event: ping") < 2:
            seen += await answered.content.readuntil(b"\n\n")
        go_on.set()
        events = Events.of(seen + await answered.content.read())
        assert events.types[:3] == ["message_start", "ping", "ping"]
        assert [kind for kind in events.types[3:] if kind != "ping"] == [
            "content_block_start",
            "content_block_delta",
            "content_block_stop",
            "message_delta",
            "message_stop",
        ]
        assert events.text() == "late"
        assert events.named("message_delta")[0]["usage"]["input_tokens"] == 3


async def test_pictures_of_results_reach_the_engine_as_pictures(redis_client: Redis, keys: Keys) -> None:
    async def act(call: RawCall) -> None:
        await call.whole(answer())

    image = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": PIXEL}}
    use = {"type": "tool_use", "id": "t1", "name": "shot", "input": {}}
    shown = {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{PIXEL}"}}

    def turn(*content: Any) -> list[Any]:
        result = {"type": "tool_result", "tool_use_id": "t1", "content": list(content)}
        return [*HELLO, {"role": "assistant", "content": [use]}, {"role": "user", "content": [result]}]

    async with raw_engine(act) as engine, running(redis_client, keys, engine.url) as rig:
        for parts, wanted in (
            ([{"type": "text", "text": "shot"}, image], [{"type": "text", "text": "shot"}, shown]),
            ([image], [shown]),
        ):
            status, _ = await rig.post(body(turn(*parts)), PATH)
            assert status == 200
            assert engine.calls[-1].body["messages"][-1] == {"role": "tool", "tool_call_id": "t1", "content": wanted}
        far = {"type": "image", "source": {"type": "url", "url": "https://pictures.invalid/a.png"}}
        status, refused = await rig.post(body(turn(far)), PATH)
        assert (status, refused["error"]["type"]) == (400, "invalid_request_error")
        assert refused["error"]["message"].startswith("messages.2.content.0.content.0.source: ")
        assert len(engine.calls) == 2


async def test_an_overflow_makes_harnesses_compact(redis_client: Redis, keys: Keys) -> None:
    async with (
        ScriptedInference(scenario=SCENARIO, max_model_len=64) as inference,
        running(redis_client, keys, inference.base_url) as rig,
    ):
        for stream in (False, True):
            long = body([{"role": "user", "content": "word " * 400}], stream=stream, max_tokens=8)
            status, headers, raw = await rig.raw(long, PATH)
            error = json.loads(raw)["error"]
            assert (status, error["type"]) == (400, "invalid_request_error")
            assert headers["content-type"].startswith("application/json")
            assert error["message"].startswith("prompt is too long: ")
            assert error["message"].endswith(" tokens > 64 maximum")


async def test_a_dead_session_is_told_not_to_come_back(redis_client: Redis, keys: Keys) -> None:
    async with (
        ScriptedInference(scenario=SCENARIO) as inference,
        running(redis_client, keys, inference.base_url) as rig,
    ):
        await close_grant(redis_client, keys, rig.secret)
        for stream in (False, True):
            status, headers, raw = await rig.raw(body(stream=stream), PATH)
            assert (status, headers["x-should-retry"]) == (404, "false")
            assert json.loads(raw)["error"]["type"] == "not_found_error"


async def test_tokens_are_counted_as_the_engine_counts_them(redis_client: Redis, keys: Keys) -> None:
    async with (
        ScriptedInference(scenario=SCENARIO) as inference,
        running(redis_client, keys, inference.base_url) as rig,
    ):
        counting = {"model": "asked", "messages": HELLO, "system": "be brief", "tools": TOOLS}
        status, counted = await rig.post(counting, f"{PATH}/count_tokens?beta=true")
        assert status == 200
        _, asked = await rig.post({**counting, "max_tokens": 64}, PATH)
        assert counted == {"input_tokens": asked["usage"]["input_tokens"]}
        assert len(await rig.records()) == 1
        status, refused = await rig.post({"model": "asked"}, f"{PATH}/count_tokens")
        assert (status, refused["error"]["type"]) == (400, "invalid_request_error")


async def test_every_path_and_key_that_harnesses_use(redis_client: Redis, keys: Keys) -> None:
    async with (
        ScriptedInference(scenario=SCENARIO) as inference,
        running(redis_client, keys, inference.base_url) as rig,
    ):
        for path in ("/v1/messages?beta=true", "/v1/v1/messages", "//v1//messages", "/messages"):
            status, message = await rig.post(body(), path)
            assert (status, message["type"]) == (200, "message")
        for header in ({"x-api-key": rig.secret}, {"Authorization": f"Bearer {rig.secret}"}):
            status, message = await rig.post(body(), PATH, base=rig.url, headers=header)
            assert (status, message["type"]) == (200, "message")
        for path in ("/v1/messages/batches", "/v1/nothing"):
            status, refused = await rig.post(body(), path, headers={"anthropic-version": "2026-10-21"})
            assert (status, refused["type"], refused["error"]["type"]) == (404, "error", "not_found_error")
        version = {"anthropic-version": "2023-06-01"}
        async with rig.http.get(f"{rig.base_url}/v1/models", headers=version) as answered:
            assert [model["type"] for model in (await answered.json())["data"]] == ["model"]
        async with rig.http.get(f"{rig.base_url}/v1/models/claude-x", headers=version) as answered:
            assert (await answered.json())["id"] == "claude-x"


async def test_a_prefilled_answer_is_gone_on_with(redis_client: Redis, keys: Keys) -> None:
    async with (
        ScriptedInference(scenario=Scenario.of("one", "two")) as inference,
        running(redis_client, keys, inference.base_url) as rig,
    ):
        started = [*HELLO, {"role": "assistant", "content": "The answer is"}]
        status, message = await rig.post(body(started), PATH)
        assert (status, message["content"][0]["text"]) == (200, "two")
        [record] = await rig.records()
        assert record.messages[-1] == {"role": "assistant", "content": "The answer is"}
        status, counted = await rig.post({"messages": started}, f"{PATH}/count_tokens")
        assert (status, counted["input_tokens"]) == (200, len(record.prompt_ids))
