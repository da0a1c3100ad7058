"""Chat through a running proxy: forms of 2023, thinking, pictures, and answers that are cut or empty."""

from __future__ import annotations

import json
from typing import Any

import pytest
from redis.asyncio import Redis

from polarq.ledger.keys import Keys
from polarq.testing.inference import Scenario, Script, ScriptedInference, ToolCall, Turn

from .raw_engine import RawCall, answer, raw_engine
from .rig import HELLO, running

MODES = pytest.mark.parametrize("stream_upstream", [True, False], ids=["passed_on", "made_up"])
BASH: dict[str, Any] = {"name": "bash", "parameters": {"type": "object"}}
TOOLS = [{"type": "function", "function": BASH}]
CALLS = tuple(ToolCall(name="bash", arguments={"command": command}) for command in ("ls", "pwd"))


def scenario(*turns: Turn) -> Scenario:
    return Scenario(name="chat", scripts=(Script(name="a", turns=turns),))


@MODES
@pytest.mark.parametrize("streamed", [True, False])
async def test_who_offers_functions_gets_a_function_call(
    redis_client: Redis, keys: Keys, stream_upstream: bool, streamed: bool
) -> None:
    async with (
        ScriptedInference(scenario=scenario(Turn(tool_calls=CALLS), Turn(content="done"))) as inference,
        running(redis_client, keys, inference.base_url, stream_upstream=stream_upstream) as rig,
    ):
        if streamed:
            sse = await rig.stream(functions=[BASH])
            parts = [choice["delta"]["function_call"] for choice in sse.choices if "function_call" in choice["delta"]]
            called = {key: "".join(part.get(key) or "" for part in parts) for key in ("name", "arguments")}
            assert not any("tool_calls" in choice["delta"] for choice in sse.choices)
            reason = sse.finish_reasons[0]
        else:
            choice = (await rig.ask(functions=[BASH]))["choices"][0]
            called, reason = choice["message"]["function_call"], choice["finish_reason"]
            assert "tool_calls" not in choice["message"]
        assert (called["name"], json.loads(called["arguments"]), reason) == ("bash", {"command": "ls"}, "function_call")
        result = {"role": "function", "name": "bash", "content": "a.txt"}
        await rig.ask([*HELLO, {"role": "assistant", "content": None, "function_call": called}, result])
        first, second = await rig.records()
        assert len(first.reply["tool_calls"]) == 2
        assert second.messages[2]["tool_call_id"] == second.messages[1]["tool_calls"][0]["id"]


@MODES
@pytest.mark.parametrize("streamed", [True, False])
@pytest.mark.parametrize(("limit", "said", "reason"), [(2, "one two three", "length"), (100, "", "stop")])
async def test_cut_and_empty_answers_end_with_their_reason(
    redis_client: Redis, keys: Keys, stream_upstream: bool, streamed: bool, limit: int, said: str, reason: str
) -> None:
    async with (
        ScriptedInference(scenario=Scenario.of(said)) as inference,
        running(redis_client, keys, inference.base_url, stream_upstream=stream_upstream) as rig,
    ):
        if streamed:
            sse = await rig.stream(max_completion_tokens=limit)
            text, reasons = sse.text(), sse.finish_reasons
            assert sse.ended
        else:
            choice = (await rig.ask(max_completion_tokens=limit))["choices"][0]
            text, reasons = choice["message"]["content"], [choice["finish_reason"]]
        assert reasons == [reason]
        assert said.startswith(text)
        [record] = await rig.records()
        assert record.sampling["max_tokens"] == limit
        assert record.trainable


@MODES
@pytest.mark.parametrize("streamed", [True, False])
async def test_who_offers_a_tool_of_free_text_gets_a_call_of_it(
    redis_client: Redis, keys: Keys, stream_upstream: bool, streamed: bool
) -> None:
    said = (ToolCall(name="patch", arguments={"input": "*** \u0939\n"}), CALLS[0])
    tools = [{"type": "custom", "custom": {"name": "patch", "format": {"type": "text"}}}, *TOOLS]
    async with (
        ScriptedInference(scenario=scenario(Turn(content="so", tool_calls=said), Turn(content="k"))) as inference,
        running(redis_client, keys, inference.base_url, stream_upstream=stream_upstream) as rig,
    ):
        if streamed:
            sse = await rig.stream(tools=tools)
            calls = [part for choice in sse.choices for part in choice["delta"].get("tool_calls", [])]
            assert [call.pop("index") for call in calls] == [0, 1]
            assert (sse.text().strip(), sse.finish_reasons) == ("so", ["tool_calls"])
        else:
            calls = (await rig.ask(tools=tools))["choices"][0]["message"]["tool_calls"]
        patch, bash = calls
        assert (patch["type"], patch["custom"]) == ("custom", {"name": "patch", "input": "*** \u0939\n"})
        assert (bash["type"], json.loads(bash["function"]["arguments"])) == ("function", {"command": "ls"})
        await rig.ask([*HELLO, {"role": "assistant", "content": "so", "tool_calls": calls}], tools=tools)
        first, second = await rig.records()
        ids = first.prompt_ids + first.sampled_ids
        assert second.prompt_ids[: len(ids)] == ids


@MODES
@pytest.mark.parametrize("streamed", [True, False])
async def test_an_answer_without_a_reason_is_given_one(
    redis_client: Redis, keys: Keys, stream_upstream: bool, streamed: bool
) -> None:
    async def act(call: RawCall) -> None:
        tree = answer(ids=(11,))
        tree["choices"][0]["finish_reason"] = None
        await call.whole(tree)

    async with (
        raw_engine(act) as engine,
        running(redis_client, keys, engine.url, stream_upstream=stream_upstream) as rig,
    ):
        if streamed and stream_upstream:
            assert len((await rig.stream()).errors) == 1
        elif streamed:
            assert (await rig.stream()).finish_reasons == ["stop"]
        else:
            assert (await rig.ask())["choices"][0]["finish_reason"] == "stop"
        assert (await rig.records())[0].untrainable


async def test_an_empty_answer_has_a_text(redis_client: Redis, keys: Keys) -> None:
    async def act(call: RawCall) -> None:
        tree = answer(ids=(11,))
        tree["choices"][0]["message"] = {"role": "assistant", "content": None}
        await call.whole(tree)

    async with raw_engine(act) as engine, running(redis_client, keys, engine.url) as rig:
        assert (await rig.ask())["choices"][0]["message"]["content"] == ""


async def test_a_picture_in_a_result_reaches_the_engine_as_a_picture(redis_client: Redis, keys: Keys) -> None:
    async def act(call: RawCall) -> None:
        await call.whole(answer())

    url = "data:image/png;base64,iVBORw0KGgo="
    parts = [{"type": "text", "text": "shot"}, {"type": "image_url", "image_url": {"url": url}}]
    call = {"id": "c1", "type": "function", "function": {"name": "shot", "arguments": "{}"}}
    history = [
        *HELLO,
        {"role": "assistant", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c1", "content": parts},
    ]
    async with raw_engine(act) as engine, running(redis_client, keys, engine.url) as rig:
        await rig.ask(history)
        assert engine.calls[0].body["messages"][2] == {"role": "tool", "tool_call_id": "c1", "content": parts}
        history[2] = {**history[2], "content": [{"type": "image_url", "image_url": {"url": "https://x/a.png"}}]}
        status, refused = await rig.post({"messages": history})
        assert (status, refused["error"]["param"]) == (400, "messages[2].content[0]")
        assert len(engine.calls) == 1
