"""The official openai SDK against Responses, whole and streamed, with and without a streaming engine."""

from __future__ import annotations

import itertools
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from typing import Any

import openai
import pytest
from openai import AsyncOpenAI
from openai.types.responses import Response, ResponseFunctionToolCall, ResponseOutputMessage
from pydantic import BaseModel
from redis.asyncio import Redis

from polarq.ledger.keys import Keys
from polarq.store.grants import close_grant
from polarq.testing.inference import Scenario, Script, ScriptedInference, ToolCall, Turn
from polarq.testing.inference.faults import HttpStatus, StreamError

from ..raw_engine import RawCall, answer, raw_engine
from ..rig import Rig, running

PNG = "data:image/png;base64,iVBORw0KGgo="
WEATHER: Any = {
    "type": "function",
    "name": "weather",
    "strict": True,
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
}
PATCH: Any = {"type": "custom", "name": "patch", "description": "Edits files."}
THINKS: Any = {"include": ["reasoning.encrypted_content"], "store": False}


def calls(*found: ToolCall, reasoning: str = "", content: str = "") -> Turn:
    return Turn(reasoning=reasoning, content=content, tool_calls=found)


def scenario(*turns: Turn) -> Scenario:
    return Scenario(name="sdk", scripts=(Script(name="only", turns=turns),))


@pytest.fixture(params=["streams", "replays"])
def upstream(request: pytest.FixtureRequest) -> bool:
    return bool(request.param == "streams")


@asynccontextmanager
async def client_of(rig: Rig) -> AsyncIterator[AsyncOpenAI]:
    async with AsyncOpenAI(base_url=f"{rig.base_url}/v1", api_key="unused", max_retries=0) as client:
        yield client


class Sdk:
    """One client before one scripted engine; every question is asked whole or streamed."""

    def __init__(self, client: AsyncOpenAI, rig: Rig, streams: bool) -> None:
        self.client = client
        self.rig = rig
        self.streams = streams
        self.kinds: list[str] = []

    async def ask(self, given: Any = "hello", **fields: Any) -> Response:
        if not self.streams:
            response: Response = await self.client.responses.create(model="asked", input=given, **fields)
            return response
        async with self.client.responses.stream(model="asked", input=given, **fields) as stream:
            last: Response | None = None
            async for event in stream:
                self.kinds.append(event.type)
                last = getattr(event, "response", last)
        assert last is not None
        return last


@pytest.fixture(params=["whole", "streamed"])
def streams(request: pytest.FixtureRequest) -> bool:
    return bool(request.param == "streamed")


@asynccontextmanager
async def sdk(
    redis: Redis, keys: Keys, said: Scenario, *, streams: bool, upstream: bool, **options: Any
) -> AsyncIterator[Sdk]:
    async with (
        ScriptedInference(scenario=said, **options) as inference,
        running(redis, keys, inference.base_url, stream_upstream=upstream) as rig,
        client_of(rig) as client,
    ):
        yield Sdk(client, rig, streams)


async def test_words_and_usage(redis_client: Redis, keys: Keys, streams: bool, upstream: bool) -> None:
    async with sdk(redis_client, keys, Scenario.of("hi \U0001f9ea"), streams=streams, upstream=upstream) as api:
        response = await api.ask(instructions="be good", temperature=0.5, metadata={"a": "b"})
        assert (response.output_text, response.status) == ("hi \U0001f9ea", "completed")
        assert (response.model, response.instructions, response.metadata) == ("asked", "be good", {"a": "b"})
        [record] = await api.rig.records()
        assert response.usage is not None
        assert response.usage.input_tokens == len(record.prompt_ids)
        assert response.usage.output_tokens == len(record.sampled_ids)
        assert response.usage.output_tokens_details.reasoning_tokens == 0
        assert record.trainable
        if streams:
            assert api.kinds[0] == "response.created"
            assert api.kinds[-1] == "response.completed"


async def test_an_agents_loop_of_parallel_calls_and_thinking(
    redis_client: Redis, keys: Keys, streams: bool, upstream: bool
) -> None:
    turns = (
        calls(
            ToolCall(name="weather", arguments={"city": "Köln"}),
            ToolCall(name="weather", arguments={"city": "Oslo"}),
            reasoning="Two cities.",
            content="Looking.",
        ),
        Turn(reasoning="Now I know.", content="Rain."),
        Turn(content="Bye."),
    )
    async with sdk(redis_client, keys, scenario(*turns), streams=streams, upstream=upstream) as api:
        history: list[Any] = [{"role": "user", "content": "weather?"}]
        for expected in ("Looking.\n", "Rain.", "Bye."):
            response = await api.ask(history, tools=[WEATHER], **THINKS)
            assert response.output_text == expected
            history += [item.model_dump() for item in response.output]
            for item in response.output:
                if isinstance(item, ResponseFunctionToolCall):
                    city = json.loads(item.arguments)["city"]
                    history.append({"type": "function_call_output", "call_id": item.call_id, "output": f"wet {city}"})
            if expected != "Looking.\n":
                history.append({"role": "user", "content": "and?"})
        records = await api.rig.records()
        assert len(records) == 3
        for before, after in itertools.pairwise(records):
            sampled = [*before.prompt_ids, *before.sampled_ids]
            assert after.prompt_ids[: len(sampled)] == sampled
            reply = {"role": "assistant", "content": "", **before.reply}
            assert after.messages[len(before.messages)] == {key: value for key, value in reply.items() if value}
        assert [message["role"] for message in records[1].messages] == ["user", "assistant", "tool", "tool"]


async def test_custom_tools_are_called_with_plain_text(
    redis_client: Redis, keys: Keys, streams: bool, upstream: bool
) -> None:
    turns = (calls(ToolCall(name="patch", arguments={"input": "*** Begin\n+ü"})), Turn(content="Done."))
    async with sdk(redis_client, keys, scenario(*turns), streams=streams, upstream=upstream) as api:
        response = await api.ask(tools=[PATCH])
        [item] = response.output
        assert item.type == "custom_tool_call"
        assert (item.name, item.input) == ("patch", "*** Begin\n+ü")
        result = {"type": "custom_tool_call_output", "call_id": item.call_id, "output": "ok"}
        history = [{"role": "user", "content": "hello"}, item.model_dump(), result]
        assert (await api.ask(history, tools=[PATCH])).output_text == "Done."
        if streams:
            assert "response.custom_tool_call_input.delta" in api.kinds


async def test_a_schema_is_asked_for_and_parsed(redis_client: Redis, keys: Keys, upstream: bool) -> None:
    class City(BaseModel):
        name: str

    async with sdk(redis_client, keys, Scenario.of('{"name": "Köln"}'), streams=False, upstream=upstream) as api:
        whole = await api.client.responses.parse(model="asked", input="where?", text_format=City)
        assert whole.output_parsed == City(name="Köln")
        async with api.client.responses.stream(model="asked", input="where?", text_format=City) as stream:
            final = await stream.get_final_response()
        assert final.output_parsed == City(name="Köln")
        for record in await api.rig.records():
            assert record.grammar == "response_format: json_schema"


async def test_a_cut_answer_is_incomplete(redis_client: Redis, keys: Keys, streams: bool, upstream: bool) -> None:
    said = Scenario.of("one two three four five six seven")
    async with sdk(redis_client, keys, said, streams=streams, upstream=upstream) as api:
        response = await api.ask(max_output_tokens=3)
        assert response.status == "incomplete"
        assert response.incomplete_details is not None
        assert response.incomplete_details.reason == "max_output_tokens"
        [item] = response.output
        assert isinstance(item, ResponseOutputMessage)
        assert item.status == "incomplete"
        assert said.scripts[0].turns[0].content.startswith(response.output_text)


async def test_an_empty_answer_is_an_empty_text(redis_client: Redis, keys: Keys, streams: bool, upstream: bool) -> None:
    async with sdk(redis_client, keys, scenario(Turn()), streams=streams, upstream=upstream) as api:
        response = await api.ask()
        assert (response.output_text, response.status, len(response.output)) == ("", "completed", 1)


async def test_thinking_is_streamed_as_it_comes(redis_client: Redis, keys: Keys, upstream: bool) -> None:
    turns = scenario(Turn(reasoning="Hm, hm.", content="Yes."))
    async with sdk(redis_client, keys, turns, streams=True, upstream=upstream) as api:
        response = await api.ask()
        assert [item.type for item in response.output] == ["reasoning", "message"]
        for kind in ("reasoning_text.delta", "reasoning_text.done", "content_part.done", "output_item.done"):
            assert f"response.{kind}" in api.kinds


async def test_pictures_go_to_the_engine(redis_client: Redis, keys: Keys) -> None:
    async def act(call: RawCall) -> None:
        await call.whole(answer())

    parts: Any = [{"type": "input_text", "text": "what?"}, {"type": "input_image", "image_url": PNG, "detail": "auto"}]
    async with raw_engine(act) as engine, running(redis_client, keys, engine.url) as rig, client_of(rig) as client:
        response = await client.responses.create(model="asked", input=[{"role": "user", "content": parts}])
        assert response.output_text == "ok"
        assert engine.calls[0].body["messages"][0]["content"][1]["image_url"]["url"] == PNG
        remote: Any = [{"type": "input_image", "image_url": "https://example.com/a.png", "detail": "auto"}]
        with pytest.raises(openai.BadRequestError) as caught:
            await client.responses.create(model="asked", input=[{"role": "user", "content": remote}])
        assert caught.value.param == "input[0].content[0]"


async def test_errors_are_the_sdks_own(redis_client: Redis, keys: Keys, streams: bool, upstream: bool) -> None:
    fault = HttpStatus(kind="http_status", status=429, retry_after_s=7, times=1)
    said = Scenario(name="busy", scripts=(Script(name="only", turns=(Turn(content="x", fault=fault),)),))
    async with sdk(redis_client, keys, said, streams=streams, upstream=upstream, max_model_len=512) as api:
        with pytest.raises(openai.RateLimitError) as busy:
            await api.ask()
        assert busy.value.response.headers["retry-after"] == "7"
        with pytest.raises(openai.BadRequestError) as overflow:
            await api.ask("word " * 2000)
        assert overflow.value.code == "context_length_exceeded"
        with pytest.raises(openai.BadRequestError) as stored:
            await api.ask(previous_response_id="resp_1")
        assert stored.value.code == "previous_response_not_found"
        assert "whole history" in str(stored.value)
        with pytest.raises(openai.NotFoundError) as missing:
            await api.client.responses.retrieve("resp_1")
        assert "stores no responses" in str(missing.value)
        await close_grant(redis_client, keys, api.rig.secret)
        with suppress(openai.NotFoundError):  # a stream that begins before this is known fails instead
            closed = await api.ask()
            assert (closed.status, closed.error and closed.error.code) == ("failed", "invalid_prompt")
        with pytest.raises(openai.NotFoundError):
            await api.ask()


async def test_a_stream_that_breaks_ends_with_a_failed_response(redis_client: Redis, keys: Keys) -> None:
    fault = StreamError(kind="stream_error", after_tokens=2)
    said = Scenario(name="dies", scripts=(Script(name="only", turns=(Turn(content="a b c d", fault=fault),)),))
    async with sdk(redis_client, keys, said, streams=True, upstream=True) as api:
        response = await api.ask()
        assert (response.status, api.kinds[-1]) == ("failed", "response.failed")
        assert response.error is not None
        assert response.error.code == "server_error"
        assert "response.completed" not in api.kinds


async def test_tokens_of_an_input_are_counted(redis_client: Redis, keys: Keys) -> None:
    async with sdk(redis_client, keys, Scenario.of("hi"), streams=False, upstream=True) as api:
        counted = await api.client.responses.input_tokens.count(model="asked", input="hello")
        response = await api.ask()
        assert response.usage is not None
        assert counted.input_tokens == response.usage.input_tokens
