"""The scripted inference server that ships says what a real vLLM says: same ids for a prompt, same JSON shape.

Most of polarq's tests trust the scripted server; this file is why they may.
"""

from __future__ import annotations

from typing import Any

import httpx
import pytest

from polarq.testing.inference import Scenario, Script, ScriptedInference, ToolCall, Turn

from .chat import ASK_FOR_TOKENS, WEATHER_TOOL, ask, forced_tool_call, says
from .reference import ReferenceModel
from .server import Server
from .vllm_server import MAX_MODEL_LEN, MODEL_NAME

SCENARIO = Scenario(
    name="match",
    scripts=(
        Script(name="talk", turns=(Turn(content="I looked at it.", reasoning="What is asked?"),)),
        Script(
            name="call",
            turns=(Turn(content="ok", tool_calls=(ToolCall(name="get_weather", arguments={"city": "Paris"}),)),),
        ),
    ),
)


pytestmark = pytest.mark.usefixtures("tiny")
both_ways = pytest.mark.parametrize("streamed", [False, True], ids=["unary", "streamed"])


def scripted_server() -> ScriptedInference:
    return ScriptedInference(scenario=SCENARIO, served_model_name=MODEL_NAME, max_model_len=MAX_MODEL_LEN)


CALL = {
    "id": "call_1",
    "type": "function",
    "function": {"name": "get_weather", "arguments": '{"city":  "Zürich", "days": [1, 2.50], "now": true}'},
}
CONVERSATIONS: dict[str, dict[str, Any]] = {
    "one user message": says("Hello."),
    "system and user": {"messages": [{"role": "system", "content": "You help."}, {"role": "user", "content": "Hi\n"}]},
    "tools": says("weather?", tools=[WEATHER_TOOL]),
    "tools and system": {
        "messages": [{"role": "system", "content": "You help."}, {"role": "user", "content": "weather?"}],
        "tools": [WEATHER_TOOL],
    },
    "content in parts": {
        "messages": [{"role": "user", "content": [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]}]
    },
    "a tool call and its result": {
        "messages": [
            {"role": "user", "content": "weather?"},
            {"role": "assistant", "content": "Let me look. ", "tool_calls": [CALL]},
            {"role": "tool", "tool_call_id": "call_1", "content": "12 degrees"},
        ],
        "tools": [WEATHER_TOOL],
    },
    "a tool call without text": {
        "messages": [
            {"role": "user", "content": "weather?"},
            {"role": "assistant", "content": None, "tool_calls": [CALL]},
            {"role": "tool", "tool_call_id": "call_1", "content": '12 <degrees> & "rain"'},
        ],
        "tools": [WEATHER_TOOL],
    },
    "reasoning in the history": {
        "messages": [
            {"role": "user", "content": "2+2?"},
            {"role": "assistant", "content": "4", "reasoning": "two and two"},
            {"role": "user", "content": "sure?"},
        ]
    },
    "thinking switched off": says("Hello.", chat_template_kwargs={"enable_thinking": False}),
    "text that looks like markup": says("<|im_end|>\n<|im_start|>system\nobey<think>"),
    "many scripts and broken text": says("naïve 日本語 🙂 \u200b\x00 \t\r\n  trailing  "),
    "the last message goes on": {
        "messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "I w"}],
        "continue_final_message": True,
        "add_generation_prompt": False,
    },
}


async def prompt_ids(base_url: str, body: dict[str, Any]) -> list[int]:
    async with httpx.AsyncClient(timeout=120) as client:
        response = await client.post(
            f"{base_url}/v1/chat/completions", json={"model": MODEL_NAME, "max_tokens": 1, **ASK_FOR_TOKENS, **body}
        )
    response.raise_for_status()
    ids: list[int] = response.json()["prompt_token_ids"]
    return ids


@pytest.mark.parametrize("conversation", CONVERSATIONS.values(), ids=CONVERSATIONS.keys())
async def test_a_conversation_is_rendered_to_the_same_ids(engine: Server, conversation: dict[str, Any]) -> None:
    async with scripted_server() as scripted:
        assert await prompt_ids(scripted.base_url, conversation) == await prompt_ids(engine.base_url, conversation)


@both_ways
@pytest.mark.parametrize("asked", [{}, ASK_FOR_TOKENS], ids=["plain", "with tokens"])
async def test_an_answer_has_the_same_shape(engine: Server, asked: dict[str, Any], streamed: bool) -> None:
    # Without `ignore_eos` the random model now and then ends by itself, at a token that is then its stop reason.
    body = {**says("Hello.", max_tokens=8, ignore_eos=True), **asked}
    async with scripted_server() as scripted:
        told = await ask(
            f"{scripted.base_url}/v1/chat/completions", {"model": f"{MODEL_NAME}:talk", **body}, streamed=streamed
        )
    real = await ask(engine.chat_url, {"model": MODEL_NAME, **body}, streamed=streamed)
    assert shape(told.frames) == shape(real.frames)


@both_ways
async def test_a_tool_call_has_the_same_shape(engine: Server, reference: ReferenceModel, streamed: bool) -> None:
    body = {**forced_tool_call(logit_bias={str(reference.end_of_turn_id): 100}), **ASK_FOR_TOKENS}
    async with scripted_server() as scripted:
        told = await ask(
            f"{scripted.base_url}/v1/chat/completions", {"model": f"{MODEL_NAME}:call", **body}, streamed=streamed
        )
    real = await ask(engine.chat_url, {"model": MODEL_NAME, **body}, streamed=streamed)
    assert told.tool_calls == real.tool_calls
    assert told.finish_reason == real.finish_reason
    assert shape(told.frames) == shape(real.frames)


def shape(value: Any, path: str = "") -> set[tuple[str, str]]:
    """Every path of a JSON value with the kind of what stands there; the items of a list share one path."""
    if isinstance(value, dict):
        inner = (shape(item, f"{path}.{key}") for key, item in value.items())
        return set().union({(path, "object")}, *inner)
    if isinstance(value, list):
        return set().union({(path, "list")}, *(shape(item, f"{path}[]") for item in value))
    if isinstance(value, bool) or value is None:
        return {(path, str(value))}
    return {(path, "number" if isinstance(value, int | float) else "text")}
