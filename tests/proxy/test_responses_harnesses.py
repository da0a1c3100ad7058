"""What harnesses that speak Responses really sent, replayed: every turn is answered, and an answer that comes back in a
harness's own hand is the answer that was given."""

from __future__ import annotations

import json
from typing import Any

import pytest
from redis.asyncio import Redis

from polarq.contracts.completion import Completion
from polarq.ledger.keys import Keys
from polarq.testing.inference import Scenario, Script, ScriptedInference, ToolCall, Turn

from .responses_client import PATH, Events, parsed, turn
from .rig import Rig, running

CODEX = ("codex", "codex-quiet", "codex-websocket-probe", "codex-compaction")
HARNESSES = (
    *CODEX,
    "opencode-openai-responses",
    "pi-responses",
    "mini-swe-agent-responses",
    "openai-agents-responses-stream",
)
RESPELLING = {"opencode-openai-responses", "pi-responses"}
MODES = [(False, True), (True, True), (True, False)]
"""(the harness streams, the engine is asked to stream)"""


def came_back(name: str) -> list[dict[str, Any]]:
    """The items of the model's in the second request: what is left of them tells what a harness keeps."""
    known = len(turn(name, 1)["input"])
    return [item for item in turn(name, 2)["input"][known:] if item.get("type") in {"reasoning", "function_call"}]


def script(name: str) -> Script:
    """The model does what it did then, with thinking where the harness showed that it brings it back."""
    [call] = [item for item in came_back(name) if item["type"] == "function_call"]
    thinks = any(item["type"] == "reasoning" for item in came_back(name))
    first = Turn(
        reasoning="A file, then." if thinks else "",
        content="" if thinks else "Writing it.",
        tool_calls=(ToolCall(name=call["name"], arguments=json.loads(call["arguments"])),),
    )
    return Script(name=name, turns=(first, Turn(content="Done \U0001f9ea."), Turn(content="Again.")))


SCENARIO = Scenario(name="harnesses", scripts=tuple(script(name) for name in HARNESSES))


def in_the_hand_of(name: str, output: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The items as this harness would send them back: its keys, its nulls, its spelling."""
    hands = {item["type"]: item for item in came_back(name)}
    found: list[dict[str, Any]] = []
    for item in output:
        if item["type"] == "message":
            found.append(
                {"role": "assistant", "content": [{"type": "output_text", "text": item["content"][0]["text"]}]}
            )
            continue
        hand = hands[item["type"]]
        written = {key: None if value is None else item.get(key, value) for key, value in hand.items()}
        if name in RESPELLING and "arguments" in written:
            written["arguments"] = json.dumps(json.loads(str(written["arguments"])), separators=(",", ":"))
        found.append(written)
    return found


async def answered(rig: Rig, body: dict[str, Any], streams: bool) -> dict[str, Any]:
    status, headers, raw = await rig.raw({**body, "stream": streams}, PATH)
    assert status == 200, raw
    if streams:
        assert headers["content-type"].startswith("text/event-stream")
        return Events.of(raw).response()
    response = json.loads(raw)
    assert isinstance(response, dict)
    return response


def meant(message: dict[str, Any]) -> Any:
    calls = [
        (call["id"], call["function"]["name"], json.loads(call["function"]["arguments"]))
        for call in message.get("tool_calls") or []
    ]
    return message["role"], message.get("content") or "", message.get("reasoning_content") or "", calls


def rendered_on(first: Completion, second: Completion) -> bool:
    ids = [*first.prompt_ids, *first.sampled_ids]
    return second.prompt_ids[: len(ids)] == ids


@pytest.mark.parametrize(("streams", "upstream"), MODES)
async def test_an_answer_comes_back_as_the_message_that_it_was(
    redis_client: Redis, keys: Keys, streams: bool, upstream: bool
) -> None:
    async with (
        ScriptedInference(scenario=SCENARIO) as inference,
        running(redis_client, keys, inference.base_url, stream_upstream=upstream) as rig,
    ):
        for index, name in enumerate(HARNESSES):
            session = await rig.session(index + len(HARNESSES))
            first, second = turn(name, 1), turn(name, 2)
            response = await answered(session, first, streams)
            assert response["status"] == "completed"
            theirs = len(first["input"]) + len(came_back(name))
            history = [*first["input"], *in_the_hand_of(name, response["output"]), *second["input"][theirs:]]
            for item in history:
                if item.get("type") == "function_call_output":
                    item["call_id"] = response["output"][-1]["call_id"]
            reply = await answered(session, {**second, "input": history}, streams)
            assert reply["output"][0]["content"][0]["text"] == "Done \U0001f9ea."

            one, two = await session.records()
            known = len(one.messages)
            assert two.messages[:known] == one.messages, name
            assert meant(two.messages[known]) == meant(one.reply), name
            assert two.messages[known + 1]["role"] == "tool"
            assert (one.trainable, two.trainable) == (True, True)
            if name not in RESPELLING and second["tools"]:
                assert rendered_on(one, two), name


@pytest.mark.parametrize(("streams", "upstream"), MODES)
async def test_every_request_that_was_ever_sent_is_answered(
    redis_client: Redis, keys: Keys, streams: bool, upstream: bool
) -> None:
    turns = [(name, number) for name in HARNESSES for number in (1, 2)] + [("codex-compaction", 3)]
    async with (
        ScriptedInference(scenario=Scenario.of("ok")) as inference,
        running(redis_client, keys, inference.base_url, stream_upstream=upstream) as rig,
    ):
        for index, (name, number) in enumerate(turns):
            session = await rig.session(index)
            response = await answered(session, turn(name, number), streams)
            assert response["output"][-1]["content"][0]["text"] == "ok"
            [record] = await session.records()
            assert record.dialect == "openai_responses"
            assert record.trainable


def test_codex_keeps_its_agents_tools_and_loses_its_web_search() -> None:
    names = [tool["function"]["name"] for tool in parsed(turn("codex", 1)).tools or []]
    assert "exec_command" in names
    assert "close_agent" in names
    assert "web_search" not in names
    assert parsed(turn("codex", 1)).options == {"tool_choice": "auto", "parallel_tool_calls": True}
    assert parsed(turn("codex-compaction", 2)).tools is None
    roles = [message["role"] for message in parsed(turn("codex", 2)).messages]
    assert roles == ["system", "user", "user", "assistant", "tool"]
