"""The official google-genai SDK against a running proxy, with streams from the engine passed on and made up."""

from __future__ import annotations

import asyncio
import base64
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
from google import genai
from google.genai import errors, types
from redis.asyncio import Redis

from polarq.ledger.keys import Keys
from polarq.testing.inference import Scenario, Script, ScriptedInference, ToolCall, Turn
from polarq.testing.inference.faults import HttpStatus, StreamError
from polarq_proxy.dialects.google_answer import GoogleEvents

from ..google_client import PIXEL
from ..raw_engine import FIRST, RawCall, answer, delta, last, raw_engine
from ..rig import Rig, running

# The SDK's own subclass of a class of aiohttp.
pytestmark = pytest.mark.filterwarnings("ignore:Inheritance class AiohttpClientSession:DeprecationWarning")
MODES = pytest.mark.parametrize("stream_upstream", [True, False], ids=["passed_on", "made_up"])
LOOK = Turn(
    reasoning="I look first.",
    content="Let me look. \U0001f9ea",
    tool_calls=(
        ToolCall(name="bash", arguments={"command": "ls \u0939"}),
        ToolCall(name="bash", arguments={"command": "pwd"}),
    ),
)
BASH = types.FunctionDeclaration(
    name="bash",
    description="runs a command",
    parameters=types.Schema(type=types.Type.OBJECT, properties={"command": types.Schema(type=types.Type.STRING)}),
)
TOOLS: list[Any] = [types.Tool(function_declarations=[BASH])]


def scenario(*turns: Turn) -> Scenario:
    return Scenario(name="sdk", scripts=(Script(name="a", turns=turns),))


def client_of(rig: Rig) -> genai.client.AsyncClient:
    options = types.HttpOptions(base_url=rig.base_url, retry_options=types.HttpRetryOptions(attempts=1))
    return genai.Client(api_key="unused", http_options=options).aio


@asynccontextmanager
async def sdk(
    redis: Redis, keys: Keys, said: Scenario, *, stream_upstream: bool = True, **options: Any
) -> AsyncIterator[tuple[genai.client.AsyncClient, Rig, ScriptedInference]]:
    async with (
        ScriptedInference(scenario=said, **options) as inference,
        running(redis, keys, inference.base_url, stream_upstream=stream_upstream) as rig,
    ):
        client = client_of(rig)
        try:
            yield client, rig, inference
        finally:
            await client.aclose()


async def streamed(
    client: genai.client.AsyncClient, contents: Any, **config: Any
) -> list[types.GenerateContentResponse]:
    stream = await client.models.generate_content_stream(
        model="asked", contents=contents, config=types.GenerateContentConfig(**config)
    )
    return [chunk async for chunk in stream]


async def both(
    client: genai.client.AsyncClient, contents: Any, **config: Any
) -> list[list[types.GenerateContentResponse]]:
    """The same question, whole and streamed."""
    whole = await client.models.generate_content(
        model="asked", contents=contents, config=types.GenerateContentConfig(**config)
    )
    return [[whole], await streamed(client, contents, **config)]


def parts(chunks: list[types.GenerateContentResponse]) -> list[types.Part]:
    contents = [candidate.content for chunk in chunks for candidate in chunk.candidates or ()]
    return [part for content in contents if content is not None for part in content.parts or ()]


def text(chunks: list[types.GenerateContentResponse]) -> str:
    return "".join(part.text or "" for part in parts(chunks) if not part.thought)


def end(chunks: list[types.GenerateContentResponse]) -> str | None:
    [candidate] = chunks[-1].candidates or []
    return candidate.finish_reason.value if candidate.finish_reason is not None else None


@MODES
async def test_text(redis_client: Redis, keys: Keys, stream_upstream: bool) -> None:
    said = scenario(Turn(content="It is \U0001f9ea \u0939."))
    async with sdk(redis_client, keys, said, stream_upstream=stream_upstream) as (client, rig, inference):
        for chunks in await both(client, "hello", system_instruction="be brief", temperature=0.5):
            assert text(chunks) == "It is \U0001f9ea \u0939."
            assert end(chunks) == "STOP"
            usage = chunks[-1].usage_metadata
            assert usage is not None
            assert usage.prompt_token_count == len(inference.ledger[-1].prompt_ids)
            assert usage.candidates_token_count == len(inference.ledger[-1].sampled_ids)
            assert chunks[0].model_version == "asked"
        assert [record.sampling["temperature"] for record in await rig.records()] == [0.5, 0.5]


@MODES
async def test_parallel_tool_calls_and_thoughts(redis_client: Redis, keys: Keys, stream_upstream: bool) -> None:
    async with sdk(redis_client, keys, scenario(LOOK), stream_upstream=stream_upstream) as (client, _, _):
        thinking = types.ThinkingConfig(include_thoughts=True)
        for chunks in await both(client, "look", tools=TOOLS, thinking_config=thinking):
            thoughts = "".join(part.text or "" for part in parts(chunks) if part.thought)
            assert thoughts.strip() == "I look first."
            assert text(chunks).strip() == "Let me look. \U0001f9ea"
            calls = [part.function_call for part in parts(chunks) if part.function_call is not None]
            assert [call.args for call in calls] == [{"command": "ls \u0939"}, {"command": "pwd"}]
            assert all(call.name == "bash" and call.id for call in calls)
            assert end(chunks) == "STOP"


@MODES
@pytest.mark.parametrize("stream", [True, False])
async def test_a_chat_of_the_sdk_extends_its_samples(
    redis_client: Redis, keys: Keys, stream_upstream: bool, stream: bool
) -> None:
    """The SDK keeps one content for each event, and writes signatures in the other alphabet."""
    said = scenario(LOOK, Turn(reasoning="so there", content="It is a.txt."), Turn(content="bye"))
    async with sdk(redis_client, keys, said, stream_upstream=stream_upstream) as (client, rig, _):
        config = types.GenerateContentConfig(
            tools=TOOLS, automatic_function_calling=types.AutomaticFunctionCallingConfig(disable=True)
        )
        chat = client.chats.create(model="asked", config=config)

        async def send(message: Any) -> list[types.GenerateContentResponse]:
            if not stream:
                return [await chat.send_message(message)]
            return [chunk async for chunk in await chat.send_message_stream(message)]

        first = await send("look")
        calls = [part.function_call for part in parts(first) if part.function_call is not None]
        results = [
            types.Part(
                function_response=types.FunctionResponse(id=call.id, name=call.name, response={"output": "a.txt"})
            )
            for call in calls
        ]
        assert text(await send(results)) == "It is a.txt."
        assert text(await send("thanks")) == "bye"
        records = await rig.records()
        assert [record.parent for record in records] == [None, 0, 1]
        for before, after in pairwise(records):
            ids = before.prompt_ids + before.sampled_ids
            assert after.prompt_ids[: len(ids)] == ids


async def test_a_function_of_python_is_called_by_the_sdk(redis_client: Redis, keys: Keys) -> None:
    seen: list[str] = []

    def bash(command: str) -> str:
        """Runs a command."""
        seen.append(command)
        return "a.txt"

    said = scenario(Turn(tool_calls=(ToolCall(name="bash", arguments={"command": "ls"}),)), Turn(content="a.txt it is"))
    async with sdk(redis_client, keys, said) as (client, rig, _):
        answered = await client.models.generate_content(
            model="asked", contents="look", config=types.GenerateContentConfig(tools=[bash])
        )
        assert answered.text == "a.txt it is"
        assert seen == ["ls"]
        assert [record.parent for record in await rig.records()] == [None, 0]


@MODES
async def test_structured_output(redis_client: Redis, keys: Keys, stream_upstream: bool) -> None:
    async with sdk(redis_client, keys, scenario(Turn(content='{"a": 1}')), stream_upstream=stream_upstream) as (
        client,
        rig,
        _,
    ):
        schema = {"type": "OBJECT", "properties": {"a": {"type": "INTEGER"}}}
        for chunks in await both(client, "json", response_mime_type="application/json", response_schema=schema):
            assert json.loads(text(chunks)) == {"a": 1}
        for record in await rig.records():
            assert record.sampling["response_format"]["json_schema"]["schema"] == {
                "type": "object",
                "properties": {"a": {"type": "integer"}},
            }


async def test_a_picture(redis_client: Redis, keys: Keys) -> None:
    async def act(call: RawCall) -> None:
        await call.whole(answer())

    async with raw_engine(act) as engine, running(redis_client, keys, engine.url) as rig:
        client = client_of(rig)
        picture = types.Part.from_bytes(data=base64.b64decode(PIXEL), mime_type="image/png")
        await client.models.generate_content(model="m", contents=["what is this?", picture])
        await client.aclose()
        sent = engine.calls[0].body["messages"][-1]["content"]
        assert sent == [
            {"type": "text", "text": "what is this?"},
            {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{PIXEL}"}},
        ]


@MODES
@pytest.mark.parametrize(("limit", "said", "reason"), [(2, "one two three", "MAX_TOKENS"), (100, "", "STOP")])
async def test_truncated_and_empty_answers(
    redis_client: Redis, keys: Keys, stream_upstream: bool, limit: int, said: str, reason: str
) -> None:
    async with sdk(redis_client, keys, Scenario.of(said), stream_upstream=stream_upstream) as (client, _, _):
        for chunks in await both(client, "hello", max_output_tokens=limit):
            assert end(chunks) == reason
            assert text(chunks) == "" if not said else said.startswith(text(chunks))


@MODES
async def test_overflow(redis_client: Redis, keys: Keys, stream_upstream: bool) -> None:
    async with sdk(redis_client, keys, Scenario.of("x"), stream_upstream=stream_upstream, max_model_len=64) as (
        client,
        _,
        _,
    ):
        for ask in (both, streamed):
            with pytest.raises(errors.ClientError) as caught:
                await ask(client, "word " * 200)
            assert (caught.value.code, caught.value.status) == (400, "INVALID_ARGUMENT")
            assert "exceeds the maximum number of tokens allowed (64)" in str(caught.value.message)


@MODES
async def test_errors(redis_client: Redis, keys: Keys, stream_upstream: bool) -> None:
    said = scenario(Turn(content="x", fault=HttpStatus(kind="http_status", status=503)))
    async with sdk(redis_client, keys, said, stream_upstream=stream_upstream) as (client, rig, _):
        for ask in (both, streamed):
            with pytest.raises(errors.ServerError) as caught:
                await ask(client, "hello")
            assert (caught.value.code, caught.value.status) == (503, "UNAVAILABLE")
        stranger = client_of(replace(rig, secret="pq-of-nobody"))
        with pytest.raises(errors.ClientError) as gone:
            await streamed(stranger, "hello")
        assert (gone.value.code, gone.value.status) == (400, "FAILED_PRECONDITION")
        await stranger.aclose()


async def test_an_error_inside_a_stream_is_raised(redis_client: Redis, keys: Keys) -> None:
    said = scenario(Turn(content="one two three", fault=StreamError(kind="stream_error", after_tokens=2)))
    async with sdk(redis_client, keys, said) as (client, _, _):
        with pytest.raises(errors.ServerError) as caught:
            await streamed(client, "hello")
        assert "died" in str(caught.value.message)


@MODES
async def test_a_long_wait_does_not_disturb_the_sdk(
    redis_client: Redis, keys: Keys, stream_upstream: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    go_on, signs = asyncio.Event(), 0
    sign_of_life = GoogleEvents.wait

    def counted(writer: GoogleEvents) -> bytes:
        nonlocal signs
        signs += 1
        if signs == 3:
            go_on.set()
        return sign_of_life(writer)

    async def act(call: RawCall) -> None:
        await go_on.wait()
        if call.body["stream"]:
            await call.head()
            await call.chunk(FIRST + delta("late", (11,), "stop") + last(1))
            await call.end()
        else:
            await call.whole(answer("late"))

    monkeypatch.setattr(GoogleEvents, "wait", counted)
    async with (
        raw_engine(act) as engine,
        running(redis_client, keys, engine.url, keepalive_s=0.01, stream_upstream=stream_upstream) as rig,
    ):
        client = client_of(rig)
        assert text(await streamed(client, "hello")) == "late"
        await client.aclose()


async def test_tokens_are_counted_and_models_listed(redis_client: Redis, keys: Keys) -> None:
    async with sdk(redis_client, keys, Scenario.of("x")) as (client, rig, _):
        counted = await client.models.count_tokens(model="m", contents="hello")
        answered = await client.models.generate_content(model="m", contents="hello")
        assert answered.usage_metadata is not None
        assert counted.total_tokens == answered.usage_metadata.prompt_token_count
        assert [model.name async for model in await client.models.list()] == ["models/scripted"]
        assert (await client.models.get(model="any")).name == "models/any"
        assert len(await rig.records()) == 1
