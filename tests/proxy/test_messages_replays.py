"""Requests of unmodified harnesses that speak Messages, as they were captured: every turn is answered, whole and
streamed, and a later turn's history goes on where the earlier one ended."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from redis.asyncio import Redis

from polarq.contracts.completion import Completion
from polarq.ledger.keys import Keys
from polarq.testing.inference import Scenario, Script, ScriptedInference, ToolCall, Turn

from .messages_client import Events
from .rig import Rig, running

FOLDER = Path(__file__).parent.parent / "fixtures" / "harness"
HARNESSES = (
    "aider-anthropic",
    "claude-code",
    "claude-code-compact",
    "mini-swe-agent-anthropic",
    "opencode-anthropic",
    "pi-anthropic",
    "pydantic-ai-anthropic",
)
GROWING = tuple(name for name in HARNESSES if name not in {"aider-anthropic", "claude-code-compact"})
"""Aider rewrites its history each turn; the compaction is another conversation than its first turn."""

TURN = Turn(content="I write it.", tool_calls=(ToolCall(name="bash", arguments={"command": "echo hi > hello.txt"}),))
SCENARIO = Scenario(name="writes", scripts=(Script(name="a", turns=(TURN, Turn(content="Done."))),))


def captured(harness: str) -> list[dict[str, Any]]:
    turns = sorted((FOLDER / harness).glob("turn*.json"))
    assert turns
    return [json.loads(turn.read_text("utf-8")) for turn in turns]


async def replay(rig: Rig, turn: dict[str, Any], **changes: Any) -> dict[str, Any]:
    """The whole message, or the blocks of the streamed one."""
    sent = {**turn["body"], **changes}
    path = turn["path"].removeprefix("/s/SESS01") + (f"?{turn['query']}" if turn["query"] else "")
    dropped = {"x-api-key", "authorization", "connection", "accept-encoding"}
    headers = {name: value for name, value in turn["headers"] if name.lower() not in dropped}
    status, answered, raw = await rig.raw(sent, path, headers=headers)
    assert status == 200, raw
    if not sent.get("stream"):
        tree = json.loads(raw)
        assert isinstance(tree, dict)
        return tree
    assert answered["content-type"].startswith("text/event-stream")
    events = Events.of(raw)
    assert (events.types[0], events.types[-1]) == ("message_start", "message_stop")
    return {"content": events.blocks, **events.named("message_delta")[0]["delta"]}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("harness", HARNESSES)
async def test_every_turn_is_answered(redis_client: Redis, keys: Keys, harness: str, stream: bool) -> None:
    async with (
        ScriptedInference(scenario=SCENARIO, max_model_len=262_144) as inference,
        running(redis_client, keys, inference.base_url) as rig,
    ):
        turns = captured(harness)
        for turn in turns:
            message = await replay(rig, turn, stream=stream)
            assert message["stop_reason"] in {"end_turn", "tool_use"}
            assert message["content"]
        records = await rig.records()
        assert len(records) == len(turns)
        assert [record.untrainable for record in records] == [None] * len(turns)
        for record, turn in zip(records, turns, strict=True):
            _all_of_it_was_read(record, turn["body"])


def _all_of_it_was_read(record: Completion, body: dict[str, Any]) -> None:
    names = [tool["function"]["name"] for tool in record.tools or []]
    assert names == [tool["name"] for tool in body.get("tools", [])]
    prompt = json.dumps(record.messages, ensure_ascii=False)
    assert "cache_control" not in prompt
    assert "x-anthropic-billing-header" not in prompt
    assert [message["role"] for message in record.messages].count("system") <= 1
    used = [b for m in body["messages"] for b in m["content"] if isinstance(b, dict) and b.get("type") == "tool_use"]
    calls = [call for message in record.messages for call in message.get("tool_calls", ())]
    assert [json.loads(call["function"]["arguments"]) for call in calls] == [block["input"] for block in used]


@pytest.mark.parametrize("harness", GROWING)
async def test_a_history_that_grew_goes_on_where_it_ended(redis_client: Redis, keys: Keys, harness: str) -> None:
    """Although marks for the cache moved and lists of blocks became plain strings."""
    async with (
        ScriptedInference(scenario=SCENARIO, max_model_len=262_144) as inference,
        running(redis_client, keys, inference.base_url) as rig,
    ):
        first, second = captured(harness)
        await replay(rig, first)
        await replay(rig, second)
        one, two = await rig.records()
        assert two.messages[: len(one.messages)] == one.messages
        assert two.tools == one.tools
        answer, result = two.messages[len(one.messages) :]
        assert (answer["role"], result["role"]) == ("assistant", "tool")
        assert [call["id"] for call in answer["tool_calls"]] == [result["tool_call_id"]]
        # The prompt up to where the first answer begins is the same, token by token.
        assert two.prompt_ids[: len(one.prompt_ids)] == one.prompt_ids


async def test_claude_codes_second_turn_is_read_to_the_last_word(redis_client: Redis, keys: Keys) -> None:
    async with (
        ScriptedInference(scenario=SCENARIO, max_model_len=262_144) as inference,
        running(redis_client, keys, inference.base_url) as rig,
    ):
        await replay(rig, captured("claude-code")[1])
        [record] = await rig.records()
        system, user, assistant, tool = record.messages
        assert system["content"].startswith("You are a Claude agent, built on Anthropic's Claude Agent SDK.\n\n")
        assert "# Environment" in system["content"]
        assert user["content"].endswith("\ncreate hello.txt containing hi")
        assert assistant["reasoning_content"] == "I will write the file."
        assert tool == {
            "role": "tool",
            "tool_call_id": "toolu_000002cap",
            "content": "(Bash completed with no output)",
        }
        assert record.sampling["max_tokens"] == 128000


async def test_the_probe_of_claude_code_is_answered(redis_client: Redis, keys: Keys) -> None:
    probe = json.loads((FOLDER / "claude-code" / "side1.json").read_text("utf-8"))
    async with (
        ScriptedInference(scenario=SCENARIO) as inference,
        running(redis_client, keys, inference.base_url) as rig,
        rig.http.head(rig.base_url + probe["path"].removeprefix("/s/SESS01")) as answered,
    ):
        assert answered.status == 200
