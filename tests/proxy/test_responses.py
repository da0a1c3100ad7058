"""Responses through a running proxy: routes, streams that are cut anywhere, engines that break, pictures, errors."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
from redis.asyncio import Redis

from polarq.contracts.completion import CompletionLabel
from polarq.ledger.keys import Keys
from polarq.store.grants import close_grant
from polarq.testing.inference import Scenario, Script, ScriptedInference, ToolCall, Turn

from .raw_engine import FIRST, RawCall, answer, delta, event, last, raw_engine
from .responses_client import PATH, Events, ask, stream
from .rig import running

TEXT = "go \U0001f9ea \u0939"
OVERLOADED = event({"error": {"message": "queue full", "type": "overloaded", "code": 503}})
PNG = "data:image/png;base64,iVBORw0KGgo="
TOOL = {"type": "function", "name": "get_weather", "parameters": {"type": "object", "properties": {}}}
WEATHER = Scenario(
    name="weather",
    scripts=(
        Script(
            name="paris",
            turns=(
                Turn(
                    reasoning="Where?",
                    content="Let me look.",
                    tool_calls=(
                        ToolCall(name="get_weather", arguments={"city": "Paris"}),
                        ToolCall(name="get_weather", arguments={"city": "Köln \U0001f9ea"}),
                    ),
                ),
            ),
        ),
    ),
)


async def test_any_path_that_ends_in_responses_is_answered(redis_client: Redis, keys: Keys) -> None:
    async with (
        ScriptedInference(scenario=Scenario.of("hi")) as inference,
        running(redis_client, keys, inference.base_url) as rig,
    ):
        for path in ("/v1/responses", "/responses", "//v1/v1//responses", "/v1/responses?x=1"):
            status, body = await rig.post({"input": path}, path)
            assert (status, body["output"][0]["content"][0]["text"]) == (200, "hi")
        records = await rig.records()
        assert {record.dialect for record in records} == {"openai_responses"}
        assert records[0].messages == [{"role": "user", "content": "/v1/responses"}]


async def test_what_is_stored_nowhere_is_not_found(redis_client: Redis, keys: Keys) -> None:
    async with (
        ScriptedInference(scenario=Scenario.of("hi")) as inference,
        running(redis_client, keys, inference.base_url) as rig,
    ):
        for method, path in (
            ("GET", "/v1/responses/resp_1"),
            ("DELETE", "/v1/responses/resp_1"),
            ("GET", "/v1/responses/resp_1/input_items"),
            ("POST", "/v1/responses/resp_1/cancel"),
            ("POST", "/v1/responses/compact"),
            ("GET", "/v1/responses"),
        ):
            async with rig.http.request(method, rig.base_url + path) as answered:
                assert answered.status == 404
                error = (await answered.json())["error"]
            assert set(error) == {"message", "type", "param", "code"}
            assert "stores no responses" in error["message"]
            assert rig.secret not in error["message"]
        assert await rig.records() == []


async def test_tokens_of_an_input_are_counted_and_not_recorded(redis_client: Redis, keys: Keys) -> None:
    async with (
        ScriptedInference(scenario=Scenario.of("hi")) as inference,
        running(redis_client, keys, inference.base_url) as rig,
    ):
        status, counted = await rig.post({"input": "hello", "tools": [TOOL]}, "/v1/responses/input_tokens")
        assert (status, counted["object"]) == (200, "response.input_tokens")
        assert (await ask(rig, tools=[TOOL]))["usage"]["input_tokens"] == counted["input_tokens"]
        [record] = await rig.records()
        assert len(record.prompt_ids) == counted["input_tokens"]


@pytest.mark.parametrize("upstream", [True, False])
async def test_whole_and_streamed_say_and_record_the_same(redis_client: Redis, keys: Keys, upstream: bool) -> None:
    async with (
        ScriptedInference(scenario=WEATHER) as inference,
        running(redis_client, keys, inference.base_url, stream_upstream=upstream) as rig,
    ):
        whole = await ask(rig, tools=[TOOL])
        events = await stream(rig, tools=[TOOL])
        response = events.response()
        assert [item["type"] for item in whole["output"]] == ["reasoning", "message", "function_call", "function_call"]

        def told(tree: dict[str, Any]) -> Any:
            own = {"id", "call_id", "created_at"}
            output = [{key: value for key, value in item.items() if key not in own} for item in tree["output"]]
            return {**{key: value for key, value in tree.items() if key not in own}, "output": output}

        assert told(whole) == told(response)
        assert json.loads(whole["output"][3]["arguments"]) == {"city": "Köln \U0001f9ea"}
        assert (events.deltas("response.reasoning_text"), events.deltas()) == ("Where?", "Let me look.\n")
        first, second = await rig.records()
        assert (first.sampled_ids, first.logprobs) == (second.sampled_ids, second.logprobs)
        assert first.trainable
        assert second.trainable
        assert whole["usage"]["output_tokens"] == len(first.sampled_ids)
        assert whole["usage"]["input_tokens"] == len(first.prompt_ids)


@pytest.mark.parametrize("streams", [True, False])
async def test_a_limit_cuts_the_answer_and_says_so(redis_client: Redis, keys: Keys, streams: bool) -> None:
    async with (
        ScriptedInference(scenario=Scenario.of("one two three four five six")) as inference,
        running(redis_client, keys, inference.base_url) as rig,
    ):
        if streams:
            response = (await stream(rig, max_output_tokens=2)).response()
        else:
            response = await ask(rig, max_output_tokens=2)
        assert (response["status"], response["incomplete_details"]) == ("incomplete", {"reason": "max_output_tokens"})
        assert response["output"][-1]["status"] == "incomplete"
        assert response["usage"]["output_tokens"] == 2


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
            events = await stream(rig)
            assert events.deltas() == TEXT
            assert events.response()["output"][0]["content"][0]["text"] == TEXT
            assert "\ufffd" not in json.dumps(events.all, ensure_ascii=False)
        records = await rig.records()
        assert len(records) == len(data)
        for record in records:
            assert (record.sampled_ids, record.reply["content"], record.trainable) == ([11, 12, 13], TEXT, True)


@pytest.mark.parametrize("rest", ["error", "reset", "close", "end", "junk"])
async def test_an_error_after_status_200_fails_the_response(redis_client: Redis, keys: Keys, rest: str) -> None:
    half = event({"choices": [{"index": 0, "delta": {"content": "half"}, "token_ids": [1, 2]}]})

    async def act(call: RawCall) -> None:
        await call.head()
        await call.chunk(FIRST + half)
        if rest == "error":
            await call.chunk(OVERLOADED)
        elif rest == "reset":
            await call.chunk(b'data: {"choices":[{"ind')
            await asyncio.sleep(0.05)  # the reset must not overtake what was sent before it
            call.reset()
            return
        elif rest == "close":
            call.close()
            return
        elif rest == "junk":
            await call.chunk(b"data: {nonsense\n\n")
        await call.end()

    async with raw_engine(act) as engine, running(redis_client, keys, engine.url) as rig:
        events = await stream(rig)
        response = events.response()
        assert events.kinds[-1] == "response.failed"
        assert response["error"]["code"] == "server_error"
        assert response["error"]["message"]
        assert (response["usage"], response["output"]) == (None, [])
        assert events.deltas() == "half"
        [record] = await rig.records()
        assert (record.sampled_ids, record.incomplete, record.trainable) == ([1, 2], True, False)
        assert record.label is CompletionLabel.ABORTED


@pytest.mark.parametrize("streams", [True, False])
async def test_an_error_before_anything_is_a_plain_one(redis_client: Redis, keys: Keys, streams: bool) -> None:
    async def act(call: RawCall) -> None:
        if call.body["stream"]:
            await call.head()
            await call.chunk(OVERLOADED)
            await call.end()
        else:
            await call.whole({"error": {"message": "queue full", "code": 503}}, 503)

    async with raw_engine(act) as engine, running(redis_client, keys, engine.url) as rig:
        status, headers, data = await rig.raw({"input": "hi", "stream": streams}, PATH)
        assert (status, headers["content-type"].partition(";")[0]) == (503, "application/json")
        assert "retry-after" in headers
        error = json.loads(data)["error"]
        assert error["type"] == "overloaded_error"
        assert "queue full" in error["message"]


async def test_an_overflow_while_a_stream_waits_is_said_in_the_stream(redis_client: Redis, keys: Keys) -> None:
    go_on = asyncio.Event()
    words = "This model's maximum context length is 64 tokens. However, you requested 99 tokens (99 in the messages)."

    async def act(call: RawCall) -> None:
        await go_on.wait()
        await call.whole({"error": {"message": words, "code": 400, "param": "input_tokens"}}, 400)

    async with raw_engine(act) as engine, running(redis_client, keys, engine.url, keepalive_s=0.05) as rig:
        body = {"input": "hi", "stream": True}
        async with rig.http.post(rig.base_url + PATH, json=body) as answered:
            waited = await answered.content.readuntil(b"\n\n")
            assert waited.startswith(b"event: response.created\n")
            go_on.set()
            events = Events.of(waited + await answered.content.read())
        response = events.response()
        assert (events.kinds[-1], response["error"]["code"]) == ("response.failed", "context_length_exceeded")
        assert "maximum context length is 64 tokens" in response["error"]["message"]


@pytest.mark.parametrize("streams", [True, False])
async def test_overflow_has_the_words_that_harnesses_look_for(redis_client: Redis, keys: Keys, streams: bool) -> None:
    async with (
        ScriptedInference(scenario=Scenario.of("hi"), max_model_len=64) as inference,
        running(redis_client, keys, inference.base_url) as rig,
    ):
        status, body = await rig.post({"input": "word " * 200, "stream": streams}, PATH)
        assert (status, body["error"]["code"]) == (400, "context_length_exceeded")
        assert body["error"]["type"] == "invalid_request_error"
        assert "This model's maximum context length is 64 tokens" in body["error"]["message"]
        assert "exceeds the context window" in body["error"]["message"]


async def test_a_session_that_is_over_is_answered_so_that_codex_stops(redis_client: Redis, keys: Keys) -> None:
    async with (
        ScriptedInference(scenario=Scenario.of("hi")) as inference,
        running(redis_client, keys, inference.base_url) as rig,
    ):
        await close_grant(redis_client, keys, rig.secret)
        for streams in (True, False):
            status, body = await rig.post({"input": "hi", "stream": streams}, PATH)
            assert (status, body["error"]["code"]) == (404, "no_session")


async def test_what_a_previous_response_said_must_be_sent_again(redis_client: Redis, keys: Keys) -> None:
    async with (
        ScriptedInference(scenario=Scenario.of("hi")) as inference,
        running(redis_client, keys, inference.base_url) as rig,
    ):
        status, body = await rig.post({"input": "hi", "previous_response_id": "resp_1"}, PATH)
        assert status == 400
        error = body["error"]
        assert (error["code"], error["param"]) == ("previous_response_not_found", "previous_response_id")
        assert "whole history in 'input'" in error["message"]
        assert await rig.records() == []


async def test_pictures_reach_the_engine_beside_their_text(redis_client: Redis, keys: Keys) -> None:
    async def act(call: RawCall) -> None:
        await call.whole(answer())

    def given(*parts: dict[str, Any]) -> list[dict[str, Any]]:
        return [
            {"role": "user", "content": "look"},
            {"type": "function_call", "call_id": "c1", "name": "shot", "arguments": "{}"},
            {"type": "function_call_output", "call_id": "c1", "output": list(parts)},
        ]

    text, picture = {"type": "input_text", "text": "shot"}, {"type": "input_image", "image_url": PNG}
    shown, seen = {"type": "text", "text": "shot"}, {"type": "image_url", "image_url": {"url": PNG}}
    async with raw_engine(act) as engine, running(redis_client, keys, engine.url) as rig:
        await ask(rig, given(text, picture))
        await ask(rig, given(picture, text))
        await ask(rig, given(picture))
        sent = [call.body["messages"][-1] for call in engine.calls]
        assert [message["content"] for message in sent] == [[shown, seen], [seen, shown], [seen]]
        assert {(message["role"], message["tool_call_id"]) for message in sent} == {("tool", "c1")}
        for bad in ({"file_id": "file-1"}, {"image_url": "https://example.com/a.png"}):
            status, body = await rig.post({"input": given(text, {"type": "input_image", **bad})}, PATH)
            assert (status, body["error"]["param"]) == (400, "input[2].output[1]")
        assert len(engine.calls) == 3
