"""Requests of Gemini CLI as they were captured: every turn is answered, whole and streamed, and the second goes on
where the first one ended."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from redis.asyncio import Redis

from polarq.ledger.keys import Keys
from polarq.testing.inference import Scenario, Script, ScriptedInference, ToolCall, Turn

from .google_client import events, parts, text
from .rig import Rig, running

FOLDER = Path(__file__).parent.parent / "fixtures" / "harness" / "gemini-cli"
CALL = ToolCall(name="run_shell_command", arguments={"command": "echo hi > hello.txt"})
TURNS = (Turn(reasoning="A file is wanted.", tool_calls=(CALL,)), Turn(content="Done."))
SCENARIO = Scenario(name="cli", scripts=(Script(name="a", turns=TURNS),))


def captured(turn: int) -> dict[str, Any]:
    found = json.loads((FOLDER / f"turn{turn}.json").read_text("utf-8"))
    assert isinstance(found, dict)
    return found


async def replay(rig: Rig, turn: dict[str, Any], *, stream: bool) -> list[dict[str, Any]]:
    path = str(turn["path"]).removeprefix("/s/SESS01")
    path = f"{path}?{turn['query']}" if stream else path.replace("streamGenerateContent", "generateContent")
    dropped = {"x-goog-api-key", "connection", "accept-encoding"}
    headers = {name: value for name, value in turn["headers"] if name.lower() not in dropped}
    status, _, raw = await rig.raw(turn["body"], path, headers=headers)
    assert status == 200, raw
    return events(raw) if stream else [json.loads(raw)]


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("stream_upstream", [True, False])
async def test_the_second_turn_extends_the_first(
    redis_client: Redis, keys: Keys, stream: bool, stream_upstream: bool
) -> None:
    async with (
        ScriptedInference(scenario=SCENARIO) as inference,
        running(redis_client, keys, inference.base_url, stream_upstream=stream_upstream) as rig,
    ):
        turns = [captured(1), captured(2)]
        first = await replay(rig, turns[0], stream=stream)
        [called] = [part for part in parts(*first) if "functionCall" in part]
        # The CLI gives back the call with its id and signature, and leaves thoughts out.
        said, result = turns[1]["body"]["contents"][-2:]
        assert said["parts"][0].keys() == called.keys()
        assert said["parts"][0]["functionCall"]["args"] == called["functionCall"]["args"]
        said["parts"] = [called]
        result["parts"][0]["functionResponse"]["id"] = called["functionCall"]["id"]
        second = await replay(rig, turns[1], stream=stream)
        assert text(*second) == "Done."
        before, after = await rig.records()
        assert after.parent == 0
        ids = before.prompt_ids + before.sampled_ids
        assert after.prompt_ids[: len(ids)] == ids
        assert after.messages[: len(before.messages)] == before.messages
        assert (before.sampling["temperature"], before.sampling["top_p"], before.sampling["top_k"]) == (1, 0.95, 64)
        assert len(before.tools or ()) == sum(len(tool["functionDeclarations"]) for tool in turns[0]["body"]["tools"])


async def test_the_turns_as_they_were_are_answered(redis_client: Redis, keys: Keys) -> None:
    async with (
        ScriptedInference(scenario=SCENARIO) as inference,
        running(redis_client, keys, inference.base_url) as rig,
    ):
        for turn in (captured(1), captured(2)):
            for stream in (True, False):
                found = await replay(rig, turn, stream=stream)
                assert found[-1]["candidates"][0]["finishReason"] == "STOP"
        records = await rig.records()
        assert records[2].messages[: len(records[0].messages)] == records[0].messages


async def test_the_router_gets_json(redis_client: Redis, keys: Keys) -> None:
    """Without a model's name the CLI first asks a small model which one to take."""
    schema = {"type": "object", "properties": {"model_choice": {"type": "string"}}, "required": ["model_choice"]}
    asked = {
        "contents": [{"role": "user", "parts": [{"text": "which?"}]}],
        "generationConfig": {"responseMimeType": "application/json", "responseJsonSchema": schema},
    }
    async with (
        ScriptedInference(scenario=Scenario.of('{"model_choice": "flash"}')) as inference,
        running(redis_client, keys, inference.base_url) as rig,
    ):
        status, tree = await rig.post(asked, "/v1beta/models/gemini-3.5-flash-lite:generateContent")
        assert status == 200
        assert json.loads(text(tree)) == {"model_choice": "flash"}
        [record] = await rig.records()
        assert record.grammar == "response_format: json_schema"
