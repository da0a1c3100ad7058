"""Requests of unmodified harnesses that speak chat, as they were captured: every turn is answered, whole and streamed,
and a later turn's history begins with the earlier one's, by meaning."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from redis.asyncio import Redis

from polarq.ledger.keys import Keys
from polarq.testing.inference import Scenario, Script, ScriptedInference, ToolCall, Turn

from .rig import Rig, Sse, running

FOLDER = Path(__file__).parent.parent / "fixtures" / "harness"
HARNESSES = (
    "ag2", "aider", "langchain-chat", "mini-swe-agent", "openai-agents-chat", "opencode", "opencode-compaction",
    "openhands-cli", "openhands-sdk", "pi", "pi-0.73-mariozechner", "pydantic-ai-chat", "qwen-code",
    "qwen-code-reasoning", "smolagents-toolcalling", "swe-agent", "terminus-2",
)  # fmt: skip
GROWING = tuple(name for name in HARNESSES if name not in {"aider", "opencode-compaction"})
"""Aider rewrites its history each turn; the compaction is another conversation than its first turn."""
SAMPLED_BEFORE = {"opencode": 1}
"""OpenCode's first request asks for a title."""
TURNS = (
    Turn(content="I write it.", tool_calls=(ToolCall(name="bash", arguments={"command": "x"}),)),
    Turn(content="k"),
)
SCENARIO = Scenario(name="writes", scripts=(Script(name="a", turns=TURNS),))


def captured(harness: str) -> list[dict[str, Any]]:
    turns = sorted((FOLDER / harness).glob("turn*.json"))
    assert turns
    return [json.loads(turn.read_text("utf-8")) for turn in turns]


async def replay(rig: Rig, turn: dict[str, Any], *, stream: bool) -> tuple[list[str], Any]:
    """(finish reasons, usage) of the answer."""
    dropped = {"authorization", "connection", "accept-encoding", "x-api-key"}
    headers = {name: value for name, value in turn["headers"] if name.lower() not in dropped}
    path = turn["path"].removeprefix("/s/SESS01")
    status, answered, raw = await rig.raw({**turn["body"], "stream": stream}, path, headers=headers)
    assert status == 200, raw
    if not stream:
        tree = json.loads(raw)
        assert all("content" in choice["message"] for choice in tree["choices"])
        return [choice["finish_reason"] for choice in tree["choices"]], tree["usage"]
    sse = Sse.of(status, answered, raw)
    assert sse.ended
    assert answered["content-type"].startswith("text/event-stream")
    usage = [event["usage"] for event in sse.events if "usage" in event]
    assert bool(usage) is bool((turn["body"].get("stream_options") or {}).get("include_usage"))
    return sse.finish_reasons, usage


@pytest.mark.parametrize("stream_upstream", [True, False], ids=["passed_on", "made_up"])
@pytest.mark.parametrize("stream", [True, False], ids=["streamed", "whole"])
@pytest.mark.parametrize("harness", HARNESSES)
async def test_every_turn_is_answered(
    redis_client: Redis, keys: Keys, harness: str, stream: bool, stream_upstream: bool
) -> None:
    async with (
        ScriptedInference(scenario=SCENARIO) as inference,
        running(redis_client, keys, inference.base_url, stream_upstream=stream_upstream) as rig,
    ):
        turns = captured(harness)
        for turn in turns:
            reasons, _ = await replay(rig, turn, stream=stream)
            assert len(reasons) == 1
            assert reasons[0] in {"stop", "tool_calls"}
        records = await rig.records()
        assert len(records) == len(turns)
        assert all(record.untrainable is None for record in records)
        for record, turn in zip(records, turns, strict=True):
            offered = turn["body"].get("tools") or []
            assert [tool["function"]["name"] for tool in record.tools or ()] == [
                tool["function"]["name"] for tool in offered
            ]


@pytest.mark.parametrize("harness", GROWING)
async def test_a_later_turn_begins_with_the_earlier_one(redis_client: Redis, keys: Keys, harness: str) -> None:
    async with (
        ScriptedInference(scenario=SCENARIO) as inference,
        running(redis_client, keys, inference.base_url) as rig,
    ):
        for turn in captured(harness):
            await replay(rig, turn, stream=False)
        records = (await rig.records())[SAMPLED_BEFORE.get(harness, 0) :]
        assert len(records) > 1
        for before, after in pairwise(records):
            assert after.messages[: len(before.messages)] == before.messages
            # The prompt's end is where the answer was opened, so that it goes on in the later prompt.
            assert after.prompt_ids[: len(before.prompt_ids)] == before.prompt_ids


async def test_thinking_comes_back_from_a_harness_that_returns_it(redis_client: Redis, keys: Keys) -> None:
    async with (
        ScriptedInference(scenario=SCENARIO) as inference,
        running(redis_client, keys, inference.base_url) as rig,
    ):
        for turn in captured("qwen-code-reasoning"):
            await replay(rig, turn, stream=True)
        [answer] = [m for m in (await rig.records())[1].messages if m["role"] == "assistant"]
        assert answer["reasoning_content"] == "I think about it."


async def test_terminus_gets_the_ids_it_asks_for(redis_client: Redis, keys: Keys) -> None:
    async with (
        ScriptedInference(scenario=SCENARIO) as inference,
        running(redis_client, keys, inference.base_url) as rig,
    ):
        [turn, *_] = captured("terminus-2")
        status, tree = await rig.post(turn["body"])
        [record] = await rig.records()
        assert status == 200
        assert tree["prompt_token_ids"] == record.prompt_ids
        assert tree["choices"][0]["token_ids"] == record.sampled_ids
        assert [entry["logprob"] for entry in tree["choices"][0]["logprobs"]["content"]] == record.logprobs
