"""Random conversations of random harnesses: no prompt is ever wrong, and whoever tells the truth is never missed."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from polarq.testing.inference import load_tokenizer
from polarq_proxy.exact.base import Missed

from . import templates
from .loop import SYSTEM, TOOLS, Message, user
from .templates import Session
from .test_meaning import TEXT, plain, spellings
from .test_meaning import messages as any_message

SAID = TEXT.map(lambda text: f"said {text}".replace("<", "").strip())


def written(new: list[Message]) -> str:
    """What the template writes of new messages, told by another road than rendering."""
    text = ""
    for role, group in groupby(new, key=lambda message: str(message["role"])):
        contents = [message["content"] for message in group]
        if role == "tool":
            inside = "".join(f"\n<tool_response>\n{content}\n</tool_response>" for content in contents)
            text += f"<|im_start|>user{inside}<|im_end|>\n"
        else:
            text += "".join(f"<|im_start|>{role}\n{content}<|im_end|>\n" for content in contents)
    return text + "<|im_start|>assistant\n"


@dataclass
class Told:
    """One sampled turn as the test knows it: the history by meaning, and the ids."""

    history: list[Any]
    ids: list[int]
    ended: bool
    messages: list[Message] = field(repr=False)


@st.composite
def sampled_turns(draw: st.DrawFn) -> tuple[Message, str, bool]:
    """(message, sampled text, whether it came to its end)."""
    message = draw(any_message("assistant"))
    message["content"] = draw(SAID)
    thinking = draw(st.sampled_from(["", "I think so."]))
    if thinking:
        message["reasoning_content"] = thinking
    ended = draw(st.sampled_from([True, True, True, False]))
    calls = "".join(f"\n<tool_call>\n{call['function']['arguments']}\n</tool_call>" for call in message["tool_calls"])
    shown = f"<think>\n{thinking}\n</think>\n\n" if thinking else ""
    if not message["tool_calls"]:
        del message["tool_calls"]
    return message, f"{shown}{message['content']}{calls}", ended


@st.composite
def news(draw: st.DrawFn, turn: Message) -> list[Message]:
    """What a harness adds after a turn."""
    results: list[Message] = [
        {"role": "tool", "tool_call_id": call["id"], "content": draw(TEXT)} for call in turn.get("tool_calls", ())
    ]
    if not results or draw(st.booleans()):
        results.append(user(draw(TEXT)))
    return results


def matching(told: list[Told], history: list[Any]) -> Iterator[Told]:
    """The turns with the longest history that this one goes on from."""
    fits = [turn for turn in told if len(turn.history) < len(history) and history[: len(turn.history)] == turn.history]
    longest = max((len(turn.history) for turn in fits), default=0)
    return (turn for turn in fits if len(turn.history) == longest)


@settings(max_examples=25, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])
@given(st.data())
def test_no_prompt_is_wrong_and_no_honest_harness_is_missed(data: st.DataObject) -> None:
    asyncio.run(converse(data))


async def converse(data: st.DataObject) -> None:
    session = Session(templates.STRIPS_BEFORE_LAST_USER)
    tokenizer = load_tokenizer()
    told: list[Told] = []
    for _ in range(data.draw(st.integers(2, 7), "turns")):
        past: list[Message] = []
        lie = False
        if not told or data.draw(st.integers(0, 9), "new") == 0:
            messages: list[Message] = [SYSTEM, user(data.draw(TEXT))]
        else:
            before = data.draw(st.sampled_from(told), "from")
            past = list(before.messages)
            if data.draw(st.integers(0, 5), "lie") == 0:
                past[data.draw(st.integers(0, len(past) - 1))] = data.draw(any_message())
                lie = True
            messages = [*past, *data.draw(news(before.messages[-1]))]
        history = [plain(message) for message in messages]
        parents = list(matching(told, history))
        message, text, ended = data.draw(sampled_turns(), "answer")
        end = "<|im_end|>" if ended else ""
        # What is rendered is sent as it is: how a template writes another spelling of it is the template's own affair,
        # and after a lie what is called past here may be new.
        spelt = [] if lie else [data.draw(spellings(message)) for message in past]
        sent = [*spelt, *messages[len(spelt) :]]
        plan = await session.sample(sent, message, text + end, TOOLS, "stop" if ended else "length")
        if plan.ids is not None:
            new = messages[len(parents[0].history) :]
            assert any(
                plan.ids
                == turn.ids + tokenizer.encode("\n" + written(new) if turn.ended else "<|im_end|>\n" + written(new))
                for turn in parents
            )
        else:
            honest = bool(parents) and not any(m["role"] == "assistant" for m in messages[len(parents[0].history) :])
            assert not honest, plan.detail
            assert lie or plan.missed is None or plan.missed is Missed.NOT_SAMPLED
        told.append(Told([*history, plain(message)], session.ids, ended, [*messages, message]))
