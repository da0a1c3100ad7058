"""Captured pairs of requests of unmodified harnesses: which second one goes on from the first."""

from __future__ import annotations

import json
from typing import Any

import pytest

from polarq_proxy.call import ModelCall
from polarq_proxy.exact.base import Missed
from polarq_proxy.exact.context import ExactContext, Plan
from polarq_proxy.exact.suffix import Suffixes

from ..harness_replay import captured, parsed
from . import templates
from .loop import Message, choice
from .templates import TemplateRenderer


def as_sampled(turn: Message) -> Message:
    """What the engine's parsers made of the sample: thinking, arguments with two blanks and an escape, other ids."""
    sampled: Message = {"role": "assistant", "content": turn.get("content") or None, "reasoning_content": "I think."}
    if turn.get("tool_calls"):
        sampled["tool_calls"] = [
            {
                "id": f"chatcmpl-tool-{at}",
                "type": "function",
                "function": {"name": call["function"]["name"], "arguments": spelt(call["function"]["arguments"])},
            }
            for at, call in enumerate(turn["tool_calls"])
        ]
    return sampled


def spelt(arguments: Any) -> str:
    tree = json.loads(arguments) if isinstance(arguments, str) else arguments
    return json.dumps(tree, separators=(",  ", ":  ")).replace("e", "\\u0065", 1)


async def second(harness: str, first_turn: int) -> Plan:
    """The plan for the request after `first_turn`, when what the first one got is what the second one tells."""
    before, after = map(parsed, captured(harness)[first_turn - 1 : first_turn + 1])
    suffixes = Suffixes(TemplateRenderer(templates.STRIPS_BEFORE_LAST_USER))
    context = ExactContext()
    plan = await context.prompt(before, suffixes)
    assert plan.ids is None
    told = next(
        (m for m in after.messages[len(before.messages) :] if m["role"] == "assistant"),
        {"role": "assistant", "content": "a title"},
    )
    prompt = await TemplateRenderer(templates.STRIPS_BEFORE_LAST_USER).ids(before)
    if harness == "smolagents-toolcalling":  # a tool call is told as text
        function = {"name": "write_file", "arguments": '{"path": "hello.txt"}'}
        told = {"role": "assistant", "tool_calls": [{"id": "x", "type": "function", "function": function}]}
    context.sampled(plan, prompt, choice(as_sampled(told), [30, 31, 2]))
    return await context.prompt(after, suffixes)


@pytest.mark.parametrize(
    ("harness", "turn"),
    [
        ("ag2", 1),
        ("claude-code", 1),
        ("claude-code-compact", 1),
        ("codex", 1),
        ("codex-quiet", 1),
        ("langchain-chat", 1),
        ("mini-swe-agent", 1),
        ("mini-swe-agent-anthropic", 1),
        ("mini-swe-agent-responses", 1),
        ("openai-agents-chat", 1),
        ("openai-agents-responses-stream", 1),
        ("opencode", 2),
        ("opencode-anthropic", 1),
        ("opencode-openai-responses", 1),
        ("openhands-sdk", 1),
        ("pi", 1),
        ("pi-anthropic", 1),
        ("pi-responses", 1),
        ("pydantic-ai-anthropic", 1),
        ("pydantic-ai-chat", 1),
        ("qwen-code-reasoning", 1),
        ("swe-agent", 1),
        ("swe-agent", 2),
        ("terminus-2", 1),
        ("terminus-2", 2),
        ("gemini-cli", 1),
    ],
)
async def test_the_next_request_goes_on_from_the_sampled_turn(harness: str, turn: int) -> None:
    plan = await second(harness, turn)
    assert plan.parent is not None, plan.detail
    assert plan.ids is not None


@pytest.mark.parametrize(
    ("harness", "turn", "cause"),
    [
        ("aider", 1, None),  # a commit message, told from nothing
        ("aider-anthropic", 1, None),
        ("codex-compaction", 1, Missed.TOOLS_DIFFER),
        ("codex-compaction", 2, None),  # the summary begins a history
        ("opencode", 1, None),  # a title, then the agent
        ("smolagents-toolcalling", 1, Missed.HISTORY_DIFFERS),
    ],
)
async def test_the_next_request_is_another_conversation(harness: str, turn: int, cause: Missed | None) -> None:
    plan = await second(harness, turn)
    assert (plan.ids, plan.missed) == (None, cause)


async def test_aiders_second_edit_tells_another_past() -> None:
    first = parsed(captured("aider")[0])
    suffixes = Suffixes(TemplateRenderer(templates.STRIPS_BEFORE_LAST_USER))
    context = ExactContext()
    plan = await context.prompt(first, suffixes)
    answer = {"content": "Here it is.\n\nhello.txt\n```\nhi\n```\n"}
    context.sampled(plan, [1, 2, 3], choice(answer, [30, 2]))
    *past, last = first.messages
    files: list[Message] = [
        {"role": "user", "content": "I have *added these files to the chat*"},
        {"role": "assistant", "content": "Ok, any changes I propose will be to those files."},
    ]
    told = [
        *past[:-2],
        {"role": "user", "content": last["content"].split("\n")[0]},
        {"role": "assistant", "content": answer["content"].strip()},
        *files,
        {"role": "user", "content": "and now bye.txt"},
    ]
    plan = await context.prompt(ModelCall(told, None, {}, ""), suffixes)
    assert plan.missed is Missed.HISTORY_DIFFERS
