"""The official Anthropic SDK against a running proxy, with streams from the engine passed on and made up."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import anthropic
import pytest
from anthropic import AsyncAnthropic
from anthropic.types import Message, MessageParam, TextBlock, ThinkingBlock, ToolParam, ToolUseBlock
from redis.asyncio import Redis

from polarq.ledger.keys import Keys
from polarq.store.grants import close_grant
from polarq.testing.inference import Scenario, Script, ScriptedInference, ToolCall, Turn
from polarq.testing.inference.faults import HttpStatus, StreamError
from polarq_proxy.dialects.messages_arguments import UNPARSED

from ..raw_engine import FIRST, RawCall, answer, event, last, raw_engine
from ..rig import Rig, running

HELLO: list[MessageParam] = [{"role": "user", "content": "hello"}]
TOOLS: list[ToolParam] = [
    {"name": "bash", "input_schema": {"type": "object", "properties": {"command": {"type": "string"}}}}
]
PIXEL = "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwADhgGAWjR9awAAAABJRU5ErkJggg=="

MODES = pytest.mark.parametrize("stream_upstream", [True, False], ids=["passed_on", "made_up"])


def scenario(*turns: Turn) -> Scenario:
    return Scenario(name="sdk", scripts=(Script(name="a", turns=turns),))


LOOK = Turn(
    reasoning="I look first.",
    content="Let me look. \U0001f9ea",
    tool_calls=(
        ToolCall(name="bash", arguments={"command": "ls", "deep": {"a": [1, 2.5, None, "\u0939"]}}),
        ToolCall(name="bash", arguments={"command": "pwd"}),
    ),
)


@asynccontextmanager
async def sdk(
    redis: Redis, keys: Keys, said: Scenario, *, stream_upstream: bool = True, retries: int = 0, **options: Any
) -> AsyncIterator[tuple[AsyncAnthropic, Rig, ScriptedInference]]:
    async with (
        ScriptedInference(scenario=said, **options) as inference,
        running(redis, keys, inference.base_url, stream_upstream=stream_upstream) as rig,
        AsyncAnthropic(base_url=rig.base_url, api_key="unused", max_retries=retries) as client,
    ):
        yield client, rig, inference


async def both(client: AsyncAnthropic, messages: list[MessageParam], **fields: Any) -> list[Message]:
    """The same question, whole and streamed."""
    asked: dict[str, Any] = {"model": "asked", "max_tokens": 256, "messages": messages, **fields}
    whole = await client.messages.create(**asked)
    async with client.messages.stream(**asked) as stream:
        streamed = await stream.get_final_message()
    return [whole, streamed]


@MODES
async def test_text(redis_client: Redis, keys: Keys, stream_upstream: bool) -> None:
    said = scenario(Turn(content="It is \U0001f9ea \u0939."))
    async with sdk(redis_client, keys, said, stream_upstream=stream_upstream) as (client, rig, inference):
        for message in await both(client, HELLO, system="be brief"):
            [block] = message.content
            assert isinstance(block, TextBlock)
            assert block.text == "It is \U0001f9ea \u0939."
            assert (message.model, message.role, message.stop_reason) == ("asked", "assistant", "end_turn")
            assert message.id.startswith("msg_")
            assert message.usage.input_tokens == len(inference.ledger[-1].prompt_ids)
            assert message.usage.output_tokens == len(inference.ledger[-1].sampled_ids)
        async with client.messages.stream(model="asked", max_tokens=99, messages=HELLO) as stream:
            assert "".join([text async for text in stream.text_stream]) == "It is \U0001f9ea \u0939."
        assert all(record.trainable for record in await rig.records())


@MODES
async def test_thinking_and_parallel_calls_and_the_way_back(
    redis_client: Redis, keys: Keys, stream_upstream: bool
) -> None:
    said = scenario(LOOK, Turn(reasoning="Nothing there.", content="Done."))
    fields: dict[str, Any] = {"tools": TOOLS, "tool_choice": {"type": "auto"}}
    async with sdk(redis_client, keys, said, stream_upstream=stream_upstream) as (client, rig, _):
        for message in await both(
            client,
            HELLO,
            tools=TOOLS,
            tool_choice={"type": "auto"},
            thinking={"type": "enabled", "budget_tokens": 2000},
        ):
            thinking, text, first, second = message.content
            assert isinstance(thinking, ThinkingBlock)
            assert (thinking.thinking, bool(thinking.signature)) == ("I look first.", True)
            assert isinstance(text, TextBlock)
            assert text.text.strip() == LOOK.content
            assert isinstance(first, ToolUseBlock)
            assert isinstance(second, ToolUseBlock)
            assert [first.input, second.input] == [call.arguments for call in LOOK.tool_calls]
            assert (first.name, message.stop_reason, first.id != second.id) == ("bash", "tool_use", True)
            results: Any = [
                {"type": "tool_result", "tool_use_id": use.id, "content": [{"type": "text", "text": "empty"}]}
                for use in (first, second)
            ]
            history: list[MessageParam] = [
                *HELLO,
                {"role": "assistant", "content": message.content},
                {"role": "user", "content": results},
            ]
            done = await client.messages.create(model="asked", max_tokens=256, messages=history, **fields)
            assert [block.type for block in done.content] == ["thinking", "text"]
            record = (await rig.records())[-1]
            back = record.messages[1]
            assert (back["reasoning_content"], back["content"]) == ("I look first.", text.text)
            assert [json.loads(call["function"]["arguments"]) for call in back["tool_calls"]] == [
                first.input,
                second.input,
            ]
            assert [message["role"] for message in record.messages] == ["user", "assistant", "tool", "tool"]


@MODES
async def test_an_answer_that_was_cut_off(redis_client: Redis, keys: Keys, stream_upstream: bool) -> None:
    said = scenario(Turn(content="word " * 50))
    async with sdk(redis_client, keys, said, stream_upstream=stream_upstream) as (client, _, _):
        for message in await both(client, HELLO, max_tokens=5):
            assert (message.stop_reason, message.usage.output_tokens) == ("max_tokens", 5)
            assert message.content


@MODES
async def test_a_stop_sequence(redis_client: Redis, keys: Keys, stream_upstream: bool) -> None:
    said = scenario(Turn(content="one two END three"))
    async with sdk(redis_client, keys, said, stream_upstream=stream_upstream) as (client, _, _):
        for message in await both(client, HELLO, stop_sequences=["END"]):
            assert (message.stop_reason, message.stop_sequence) == ("stop_sequence", "END")
            assert isinstance(message.content[0], TextBlock)
            assert message.content[0].text == "one two "


@MODES
async def test_an_empty_answer(redis_client: Redis, keys: Keys, stream_upstream: bool) -> None:
    async with sdk(redis_client, keys, scenario(Turn()), stream_upstream=stream_upstream) as (client, _, _):
        for message in await both(client, HELLO):
            assert (message.content, message.stop_reason) == ([], "end_turn")


@MODES
async def test_a_picture_goes_in(redis_client: Redis, keys: Keys, stream_upstream: bool) -> None:
    async with sdk(redis_client, keys, scenario(Turn(content="ok")), stream_upstream=stream_upstream) as (
        client,
        rig,
        _,
    ):
        picture: Any = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": PIXEL}}
        content = [{"type": "text", "text": "what is it?"}, picture]
        for message in await both(client, [{"role": "user", "content": content}]):
            assert message.stop_reason == "end_turn"
        url = {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{PIXEL}"}}
        assert (await rig.records())[0].messages[0]["content"] == [{"type": "text", "text": "what is it?"}, url]
        picture["source"] = {"type": "url", "url": "https://pictures.invalid/a.png"}
        with pytest.raises(anthropic.BadRequestError, match=r"messages\.0\.content\.1\.source: an image must be sent"):
            await both(client, [{"role": "user", "content": content}])


@MODES
async def test_tokens_are_counted(redis_client: Redis, keys: Keys, stream_upstream: bool) -> None:
    async with sdk(redis_client, keys, scenario(LOOK), stream_upstream=stream_upstream) as (client, _, _):
        counted = await client.messages.count_tokens(model="asked", messages=HELLO, tools=TOOLS, system="be brief")
        [message, _] = await both(client, HELLO, tools=TOOLS, system="be brief")
        assert counted.input_tokens == message.usage.input_tokens


@MODES
async def test_the_beta_client_too(redis_client: Redis, keys: Keys, stream_upstream: bool) -> None:
    async with sdk(redis_client, keys, scenario(LOOK), stream_upstream=stream_upstream) as (client, _, _):
        asked: Any = {
            "model": "asked",
            "max_tokens": 256,
            "messages": HELLO,
            "betas": ["interleaved-thinking-2025-05-14", "context-management-2025-06-27"],
            "thinking": {"type": "adaptive"},
            "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
            "tools": [*TOOLS, {"type": "web_search_20250305", "name": "web_search"}],
        }
        whole = await client.beta.messages.create(**asked)
        async with client.beta.messages.stream(**asked) as stream:
            streamed = await stream.get_final_message()
        for message in (whole, streamed):
            assert [block.type for block in message.content] == ["thinking", "text", "tool_use", "tool_use"]
        assert (await client.beta.messages.count_tokens(model="asked", messages=asked["messages"])).input_tokens > 0


async def test_models_are_listed(redis_client: Redis, keys: Keys) -> None:
    async with sdk(redis_client, keys, scenario(Turn(content="ok"))) as (client, _, inference):
        listed = await client.models.list()
        assert [model.id for model in listed.data] == [inference.options.served_model_name]
        assert (await client.models.retrieve("claude-x")).id == "claude-x"


@MODES
async def test_an_overflow(redis_client: Redis, keys: Keys, stream_upstream: bool) -> None:
    said = scenario(Turn(content="ok"))
    async with sdk(redis_client, keys, said, stream_upstream=stream_upstream, max_model_len=64) as (client, _, _):
        long: list[MessageParam] = [{"role": "user", "content": "word " * 400}]
        with pytest.raises(anthropic.BadRequestError, match=r"prompt is too long: \d+ tokens > 64 maximum"):
            await client.messages.create(model="asked", max_tokens=8, messages=long)
        with pytest.raises(anthropic.BadRequestError, match=r"prompt is too long: \d+ tokens > 64 maximum"):
            async with client.messages.stream(model="asked", max_tokens=8, messages=long) as stream:
                await stream.get_final_message()


@MODES
async def test_errors_of_the_engine(redis_client: Redis, keys: Keys, stream_upstream: bool) -> None:
    busy = scenario(Turn(content="ok", fault=HttpStatus(kind="http_status", status=503, retry_after_s=3)))
    async with sdk(redis_client, keys, busy, stream_upstream=stream_upstream) as (client, _, _):
        with pytest.raises(anthropic.APIStatusError) as caught:
            await client.messages.create(model="asked", max_tokens=8, messages=HELLO)
        assert (caught.value.status_code, caught.value.response.headers["retry-after"]) == (503, "3")
        assert isinstance(caught.value.body, dict)
        assert caught.value.body["error"]["type"] == "overloaded_error"
        with pytest.raises(anthropic.APIStatusError, match="told to refuse"):
            async with client.messages.stream(model="asked", max_tokens=8, messages=HELLO) as stream:
                await stream.get_final_message()


async def test_an_error_inside_a_stream_is_raised(redis_client: Redis, keys: Keys) -> None:
    fault = StreamError(kind="stream_error", after_tokens=2)
    async with sdk(redis_client, keys, scenario(Turn(content="one two three", fault=fault))) as (client, rig, _):
        with pytest.raises(anthropic.APIStatusError, match="the scripted engine died"):
            async with client.messages.stream(model="asked", max_tokens=99, messages=HELLO) as stream:
                await stream.get_final_message()
        [record] = await rig.records()
        assert (record.incomplete, record.trainable) == (True, False)


@MODES
async def test_the_sdks_own_retry_is_answered(redis_client: Redis, keys: Keys, stream_upstream: bool) -> None:
    fault = HttpStatus(kind="http_status", status=503, retry_after_s=0, times=1)
    said = scenario(Turn(content="ok", fault=fault))
    async with sdk(redis_client, keys, said, stream_upstream=stream_upstream, retries=1) as (client, rig, _):
        message = await client.messages.create(model="asked", max_tokens=8, messages=HELLO)
        assert message.stop_reason == "end_turn"
        assert len(await rig.records()) == 1


async def test_a_dead_session_is_asked_once(redis_client: Redis, keys: Keys) -> None:
    async with sdk(redis_client, keys, scenario(Turn(content="ok")), retries=3) as (client, rig, _):
        await close_grant(redis_client, keys, rig.secret)
        with pytest.raises(anthropic.NotFoundError):
            await client.messages.create(model="asked", max_tokens=8, messages=HELLO)
        assert rig.proxy.counters.errors["no_session"] == 1


@MODES
async def test_a_slow_first_token_is_waited_for(redis_client: Redis, keys: Keys, stream_upstream: bool) -> None:
    pings = asyncio.Event()

    async def act(call: RawCall) -> None:
        await pings.wait()
        if call.body["stream"]:
            await call.head()
            choice = {"index": 0, "delta": {"content": "late"}, "token_ids": [11], "finish_reason": "stop"}
            choice["logprobs"] = {"content": [{"token": "t", "logprob": -0.5}]}
            await call.chunk(FIRST + event({"choices": [choice]}) + last(1))
            await call.end()
        else:
            await call.whole(answer("late"))

    async with (
        raw_engine(act) as engine,
        running(redis_client, keys, engine.url, keepalive_s=0.02, stream_upstream=stream_upstream) as rig,
        AsyncAnthropic(base_url=rig.url, auth_token=rig.secret, api_key=None, max_retries=0) as client,
        client.messages.stream(model="asked", max_tokens=99, messages=HELLO) as stream,
    ):
        async with asyncio.timeout(60):
            first = await anext(aiter(stream))
        assert first.type == "message_start"
        pings.set()
        message = await stream.get_final_message()
        assert isinstance(message.content[0], TextBlock)
        assert (message.content[0].text, message.usage.input_tokens) == ("late", 3)


@pytest.mark.parametrize(
    "arguments", ["ls -la", '{"command": "ls\n"}', '{"command": "ls"} and more', "[1]", '{"a": tru']
)
@MODES
async def test_arguments_that_are_no_object_do_not_break_the_sdk(
    redis_client: Redis, keys: Keys, stream_upstream: bool, arguments: str
) -> None:
    function = {"name": "bash", "arguments": arguments}
    tool = {"index": 0, "id": "c1", "type": "function", "function": function}

    async def act(call: RawCall) -> None:
        if not call.body["stream"]:
            tree = answer("")
            tree["choices"][0]["message"]["tool_calls"] = [tool]
            tree["choices"][0]["finish_reason"] = "tool_calls"
            await call.whole(tree)
            return
        await call.head()
        await call.chunk(FIRST)
        for place, sign in enumerate(arguments):
            part = {**tool, "function": {**function, "arguments": sign, "name": "" if place else "bash"}}
            choice = {"index": 0, "delta": {"tool_calls": [part]}, "token_ids": [11]}
            await call.chunk(event({"choices": [{**choice, "logprobs": {"content": [{"token": "t", "logprob": -1}]}}]}))
        await call.chunk(event({"choices": [{"index": 0, "delta": {}, "finish_reason": "tool_calls"}]}))
        await call.chunk(last(len(arguments)))
        await call.end()

    async with (
        raw_engine(act) as engine,
        running(redis_client, keys, engine.url, stream_upstream=stream_upstream) as rig,
        AsyncAnthropic(base_url=rig.base_url, api_key="unused", max_retries=0) as client,
    ):
        for message in await both(client, HELLO, tools=TOOLS):
            [block] = message.content
            assert isinstance(block, ToolUseBlock)
            assert isinstance(block.input, dict)
            assert block.input[UNPARSED] == arguments
