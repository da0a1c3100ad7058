"""The official OpenAI SDK's chat and completions against a running proxy, with streams passed on and made up."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import openai
import pytest
from openai import AsyncOpenAI
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from pydantic import BaseModel
from redis.asyncio import Redis

from polarq.ledger.keys import Keys
from polarq.testing.inference import Scenario, Script, ScriptedInference, ToolCall, Turn
from polarq.testing.inference.faults import HttpStatus, StreamError

from ..raw_engine import RawCall, answer, raw_engine
from ..rig import Rig, running

MODES = pytest.mark.parametrize("stream_upstream", [True, False], ids=["passed_on", "made_up"])
HELLO: list[Any] = [{"role": "user", "content": "hello"}]
TOOLS: list[Any] = [{"type": "function", "function": {"name": "bash", "parameters": {"type": "object"}}}]
LOOK = Turn(
    reasoning="I look first.",
    content="Let me look. \U0001f9ea",
    tool_calls=(
        ToolCall(name="bash", arguments={"command": "ls \u0939"}),
        ToolCall(name="bash", arguments={"command": "pwd"}),
    ),
)


def scenario(*turns: Turn) -> Scenario:
    return Scenario(name="sdk", scripts=(Script(name="a", turns=turns),))


def client_of(rig: Rig) -> AsyncOpenAI:
    return AsyncOpenAI(base_url=rig.base_url + "/v1", api_key="unused", max_retries=0)


@asynccontextmanager
async def sdk(
    redis: Redis, keys: Keys, said: Scenario, *, stream_upstream: bool = True, **options: Any
) -> AsyncIterator[tuple[AsyncOpenAI, Rig, ScriptedInference]]:
    async with (
        ScriptedInference(scenario=said, **options) as inference,
        running(redis, keys, inference.base_url, stream_upstream=stream_upstream) as rig,
        client_of(rig) as client,
    ):
        yield client, rig, inference


async def chunks(client: AsyncOpenAI, messages: list[Any], **fields: Any) -> list[ChatCompletionChunk]:
    return [
        chunk
        async for chunk in await client.chat.completions.create(model="asked", messages=messages, stream=True, **fields)
    ]


async def final(client: AsyncOpenAI, messages: list[Any], **fields: Any) -> ChatCompletion:
    """A stream as the SDK itself puts it together."""
    async with client.chat.completions.stream(model="asked", messages=messages, **fields) as stream:
        async for _ in stream:
            pass
        return await stream.get_final_completion()


async def both(client: AsyncOpenAI, messages: list[Any], **fields: Any) -> list[ChatCompletion]:
    """The same question, whole and streamed."""
    whole = await client.chat.completions.create(model="asked", messages=messages, **fields)
    return [whole, await final(client, messages, stream_options={"include_usage": True}, **fields)]


@MODES
async def test_text(redis_client: Redis, keys: Keys, stream_upstream: bool) -> None:
    said = scenario(Turn(content="It is \U0001f9ea \u0939."))
    async with sdk(redis_client, keys, said, stream_upstream=stream_upstream) as (client, _, inference):
        for completion in await both(client, HELLO):
            [choice] = completion.choices
            assert (choice.message.content, choice.finish_reason) == ("It is \U0001f9ea \u0939.", "stop")
            assert completion.usage is not None
            assert completion.usage.completion_tokens == len(inference.ledger[-1].sampled_ids)
            assert completion.usage.prompt_tokens == len(inference.ledger[-1].prompt_ids)
            assert completion.model == "asked"


@MODES
@pytest.mark.parametrize("stream", [True, False])
async def test_parallel_tool_calls_and_thinking_come_back(
    redis_client: Redis, keys: Keys, stream_upstream: bool, stream: bool
) -> None:
    said = scenario(LOOK, Turn(content="It is a.txt."))
    async with sdk(redis_client, keys, said, stream_upstream=stream_upstream) as (client, rig, _):

        async def ask(messages: list[Any]) -> ChatCompletion:
            if stream:
                return await final(client, messages, tools=TOOLS)
            return await client.chat.completions.create(model="asked", messages=messages, tools=TOOLS)

        message = (await ask(HELLO)).choices[0].message
        assert (message.content or "").strip() == "Let me look. \U0001f9ea"
        calls = message.tool_calls or []
        arguments = [json.loads(call.function.arguments) for call in calls if call.type == "function"]
        assert arguments == [{"command": "ls \u0939"}, {"command": "pwd"}]
        assert len({call.id for call in calls}) == 2
        # What the SDK keeps of a message goes back as it is, with all its null keys.
        history = [*HELLO, message.model_dump()]
        history += [{"role": "tool", "tool_call_id": call.id, "content": "a.txt"} for call in calls]
        assert (await ask(history)).choices[0].message.content == "It is a.txt."
        first, second = await rig.records()
        assert second.messages[1]["reasoning_content"].strip() == "I look first."
        assert second.parent == 0
        ids = first.prompt_ids + first.sampled_ids
        assert second.prompt_ids[: len(ids)] == ids


@MODES
async def test_structured_output(redis_client: Redis, keys: Keys, stream_upstream: bool) -> None:
    class Found(BaseModel):
        a: int

    async with sdk(redis_client, keys, scenario(Turn(content='{"a": 1}')), stream_upstream=stream_upstream) as (
        client,
        rig,
        _,
    ):
        parsed = await client.chat.completions.parse(model="asked", messages=HELLO, response_format=Found)
        assert parsed.choices[0].message.parsed == Found(a=1)
        streamed = await final(client, HELLO, response_format=Found)
        assert json.loads(streamed.choices[0].message.content or "") == {"a": 1}
        assert {record.grammar for record in await rig.records()} == {"response_format: json_schema"}


@MODES
async def test_log_probabilities(redis_client: Redis, keys: Keys, stream_upstream: bool) -> None:
    async with sdk(redis_client, keys, Scenario.of("one two"), stream_upstream=stream_upstream) as (client, rig, _):
        for completion in await both(client, HELLO, logprobs=True, top_logprobs=2):
            logprobs = completion.choices[0].logprobs
            assert logprobs is not None
            record = (await rig.records())[-1]
            assert [entry.logprob for entry in logprobs.content or []] == record.logprobs


async def test_a_picture(redis_client: Redis, keys: Keys) -> None:
    async def act(call: RawCall) -> None:
        await call.whole(answer())

    url = "data:image/png;base64,iVBORw0KGgo="
    parts = [{"type": "text", "text": "what?"}, {"type": "image_url", "image_url": {"url": url}}]
    async with raw_engine(act) as engine, running(redis_client, keys, engine.url) as rig, client_of(rig) as client:
        messages: list[Any] = [{"role": "user", "content": parts}]
        await client.chat.completions.create(model="m", messages=messages)
        assert engine.calls[0].body["messages"][0]["content"] == parts
        messages[0]["content"][1]["image_url"]["url"] = "https://example.com/a.png"
        with pytest.raises(openai.BadRequestError) as caught:
            await client.chat.completions.create(model="m", messages=messages)
        assert caught.value.param == "messages[0].content[1]"


@MODES
@pytest.mark.parametrize(("limit", "said", "reason"), [(2, "one two three", "length"), (100, "", "stop")])
async def test_truncated_and_empty_answers(
    redis_client: Redis, keys: Keys, stream_upstream: bool, limit: int, said: str, reason: str
) -> None:
    async with sdk(redis_client, keys, Scenario.of(said), stream_upstream=stream_upstream) as (client, _, _):
        whole = await client.chat.completions.create(model="m", messages=HELLO, max_completion_tokens=limit)
        assert whole.choices[0].finish_reason == reason
        assert said.startswith(whole.choices[0].message.content or "")
        streamed = await chunks(client, HELLO, max_completion_tokens=limit)
        assert [c.finish_reason for chunk in streamed for c in chunk.choices if c.finish_reason] == [reason]


@MODES
@pytest.mark.parametrize("stream", [True, False])
async def test_overflow(redis_client: Redis, keys: Keys, stream_upstream: bool, stream: bool) -> None:
    said = Scenario.of("x")
    async with sdk(redis_client, keys, said, stream_upstream=stream_upstream, max_model_len=64) as (client, _, _):
        with pytest.raises(openai.BadRequestError) as caught:
            await client.chat.completions.create(
                model="m", messages=[{"role": "user", "content": "word " * 200}], stream=stream
            )
        assert caught.value.code == "context_length_exceeded"
        assert "maximum context length is 64 tokens" in caught.value.message


@MODES
@pytest.mark.parametrize("stream", [True, False])
async def test_errors(redis_client: Redis, keys: Keys, stream_upstream: bool, stream: bool) -> None:
    said = scenario(Turn(content="x", fault=HttpStatus(kind="http_status", status=429, retry_after_s=3)))
    async with sdk(redis_client, keys, said, stream_upstream=stream_upstream) as (client, rig, _):
        with pytest.raises(openai.RateLimitError) as caught:
            await client.chat.completions.create(model="m", messages=HELLO, stream=stream)
        assert caught.value.response.headers["retry-after"] == "3"
        async with client_of(replace(rig, secret="pq-of-nobody")) as stranger:
            with pytest.raises(openai.NotFoundError):
                await stranger.chat.completions.create(model="m", messages=HELLO, stream=stream)


async def test_an_error_inside_a_stream_is_raised(redis_client: Redis, keys: Keys) -> None:
    said = scenario(Turn(content="one two three", fault=StreamError(kind="stream_error", after_tokens=2)))
    async with sdk(redis_client, keys, said) as (client, _, _):
        with pytest.raises(openai.APIError) as caught:
            await chunks(client, HELLO)
        assert "died" in caught.value.message


@MODES
async def test_legacy_completions(redis_client: Redis, keys: Keys, stream_upstream: bool) -> None:
    async with sdk(redis_client, keys, Scenario.of("one two"), stream_upstream=stream_upstream) as (client, rig, _):
        whole = await client.completions.create(model="asked", prompt="say", max_tokens=64, logprobs=1)
        [choice] = whole.choices
        assert (choice.text, choice.finish_reason) == ("one two", "stop")
        assert choice.logprobs is not None
        assert choice.logprobs.token_logprobs == (await rig.records())[0].logprobs
        assert whole.usage is not None
        assert whole.usage.completion_tokens == len((await rig.records())[0].sampled_ids)
        streamed = [
            chunk
            async for chunk in await client.completions.create(
                model="asked", prompt=[5, 6, 7], max_tokens=64, stream=True, stream_options={"include_usage": True}
            )
        ]
        assert "".join(c.text for chunk in streamed for c in chunk.choices) == "one two"
        record = (await rig.records())[1]
        assert record.prompt_ids == [5, 6, 7]
        usage = streamed[-1].usage
        assert usage is not None
        assert (usage.prompt_tokens, usage.completion_tokens) == (3, len(record.sampled_ids))
        with pytest.raises(openai.BadRequestError) as caught:
            await client.completions.create(model="asked", prompt=["a", "b"])
        assert caught.value.param == "prompt"


async def test_models(redis_client: Redis, keys: Keys) -> None:
    async with sdk(redis_client, keys, Scenario.of("x")) as (client, _, _):
        assert [model.id async for model in client.models.list()] == ["scripted"]
        assert (await client.models.retrieve("any/name")).id == "any/name"
