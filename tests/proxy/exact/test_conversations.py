"""Conversations with a server that samples other ids than their text encodes to: every prompt goes on from what was
sampled, or says why it does not."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

import pytest

from polarq.contracts.completion import Completion
from polarq.testing.inference import Turn, load_tokenizer
from polarq_proxy.call import ModelCall
from polarq_proxy.engines.sglang import SglangEngine
from polarq_proxy.exact.base import Missed, Renderer
from polarq_proxy.exact.check import check
from polarq_proxy.exact.context import ExactContext
from polarq_proxy.exact.suffix import Suffixes

from .loop import SYSTEM, TOOLS, Loop, Message, Turned, looping, reading, respelt, result, user

TURNS = 24


def agent_turns() -> list[Turn]:
    """Thinking and not, with text and not, one tool call or three at once."""
    return [
        reading(
            f"src/module_{at}.py",
            thinking=f"Next is module {at}, because of the parser." if at % 3 else "",
            content=f"Let me look at module {at}." if at % 2 else "",
            calls=3 if at % 5 == 2 else 1,
        )
        for at in range(TURNS)
    ] + [Turn(content="All of it is read.")]


def returned(message: Message, how: str) -> Message:
    if how == "verbatim":
        return message
    if how == "thinking dropped":
        return {key: value for key, value in message.items() if key != "reasoning_content"}
    return respelt(message, thinking=how == "respelt")


async def work(loop: Loop, how: str, turns: int = TURNS + 1, **options: Any) -> list[Message]:
    """The whole agent: reads until the model says that it is done."""
    messages: list[Message] = [SYSTEM, user("read everything")]
    for at in range(turns):
        turn = await loop.say(messages, TOOLS, **options)
        messages.append(returned(turn.message, how))
        ids = [called["id"] for called in turn.message.get("tool_calls", ())]
        messages += [result(f"line {at}\n  indented\n\nünï {call_id[-3:]} \n", call_id) for call_id in ids]
        if at % 7 == 3:
            messages.append(user(f"and hurry, it is {at} o'clock"))
    return messages


@pytest.mark.parametrize("keep_thinking", [True, False])
@pytest.mark.parametrize("how", ["verbatim", "thinking dropped", "respelt", "respelt, thinking dropped"])
async def test_a_long_conversation_never_breaks(how: str, keep_thinking: bool) -> None:
    async with looping(*agent_turns(), keep_thinking=keep_thinking) as loop:
        await work(loop, how)
        assert loop.missed == []
        assert [turn.plan.ids is None for turn in loop.turns] == [True] + [False] * TURNS
        for before, after in zip(loop.turns, loop.turns[1:], strict=False):
            assert after.ids[: len(before.ids)] == before.ids


@pytest.mark.parametrize("version", ["0.5.13", "0.5.18", "0.5.23"])
async def test_it_does_not_break_on_sglang_either(version: str) -> None:
    async with looping(*agent_turns(), engine="sglang", version=version, keep_thinking=False) as loop:
        loop.endpoint.engine = SglangEngine(version)
        assert await check(loop.render, loop.ask) is None
        await work(loop, "respelt")
        assert loop.missed == []
        for before, after in zip(loop.turns, loop.turns[1:], strict=False):
            assert after.ids[: len(before.ids)] == before.ids


async def test_without_exact_mode_the_same_conversation_breaks() -> None:
    async with looping(*agent_turns(), keep_thinking=False) as loop:
        messages = await work(loop, "respelt")
        assert await loop.render.ids(loop.turns[-1].call) != loop.turns[-1].plan.ids
        assert len(messages) > 3 * TURNS / 2


async def test_a_generation_prompt_with_an_empty_thinking_block_is_part_of_the_suffix() -> None:
    async with looping(*agent_turns()[:3], Turn(content="done")) as loop:
        await work(loop, "verbatim", turns=4, chat_template_kwargs={"enable_thinking": False})
        assert loop.missed == []
        tail = load_tokenizer().encode("<|im_start|>assistant\n<think>\n\n</think>\n\n")
        assert all((turn.answer.prompt_ids or [])[-len(tail) :] == tail for turn in loop.turns)


class Counted:
    """The engine's renderer, and how many ids it was asked for."""

    def __init__(self, render: Renderer) -> None:
        self._render = render
        self.name = render.name
        self.asked: list[int] = []

    async def ids(self, call: ModelCall, *, generation_prompt: bool = True) -> list[int]:
        ids = await self._render.ids(call, generation_prompt=generation_prompt)
        self.asked.append(len(ids))
        return ids


async def test_a_later_turn_costs_what_is_new_in_it() -> None:
    async with looping(*agent_turns(), Turn(content="more")) as loop:
        counted = Counted(loop.render)
        loop.suffixes = Suffixes(counted)
        messages = await work(loop, "verbatim")
        for _ in range(3):
            counted.asked.clear()
            turn = await loop.say([*messages, user("more")], TOOLS)
            messages = [*turn.call.messages, turn.message]
        assert loop.missed == []
        assert len(counted.asked) == 2
        assert sum(counted.asked) < len(turn.ids) / 20


async def test_a_turn_cut_at_its_length_is_closed_before_what_follows() -> None:
    async with looping(Turn(content="a long story " * 30), Turn(content="the end")) as loop:
        first = await loop.say([SYSTEM, user("tell")], max_tokens=9)
        assert first.answer.choices[0].finish_reason == "length"
        second = await loop.say([SYSTEM, user("tell"), first.message, user("go on")])
        assert second.plan.ids is not None
        assert second.plan.ids[len(first.ids)] == load_tokenizer().turn_end_id


@pytest.mark.parametrize("keep_thinking", [True, False])
async def test_a_turn_cut_inside_its_thinking_is_continued(keep_thinking: bool) -> None:
    turn = Turn(reasoning="I wonder about this " * 20, content="yes")
    async with looping(turn, Turn(content="the end"), keep_thinking=keep_thinking) as loop:
        first = await loop.say([user("tell")], max_tokens=9)
        second = await loop.say([user("tell"), {"role": "assistant", "content": ""}, user("go on")])
        assert second.plan.ids is not None
        assert second.ids[: len(first.ids)] == first.ids


async def test_a_turn_ended_by_a_stop_string_keeps_its_tokens_and_is_closed() -> None:
    async with looping(Turn(content="one two STOP three"), Turn(content="the end")) as loop:
        first = await loop.say([user("count")], stop=["STOP"])
        assert first.answer.choices[0].stop_reason == "STOP"
        second = await loop.say([user("count"), first.message, user("go on")])
        assert second.plan.ids is not None
        assert second.plan.ids[len(first.ids)] == load_tokenizer().turn_end_id


async def test_a_turn_ended_by_an_id_that_the_request_named_is_closed() -> None:
    tokenizer = load_tokenizer()
    (comma,) = tokenizer.encode(",")
    async with looping(Turn(content="one, two"), Turn(content="the end"), drift_seed=None) as loop:
        first = await loop.say([user("count")], stop_token_ids=[comma])
        assert first.answer.choices[0].stop_reason == comma
        second = await loop.say([user("count"), first.message, user("go on")], stop_token_ids=[comma])
        assert second.plan.ids is not None
        assert second.plan.ids[len(first.ids)] == tokenizer.turn_end_id


async def test_a_fork_goes_on_from_the_turn_that_both_share() -> None:
    async with looping(*agent_turns()) as loop:
        start = [SYSTEM, user("go")]
        first = await loop.say(start, TOOLS)
        second = await loop.say([*start, first.message, result("one")], TOOLS)
        await loop.say([*start, first.message, result("one"), second.message, result("two")], TOOLS)
        fork = await loop.say([*start, first.message, result("another")], TOOLS)
        again = await loop.say([*start, first.message, result("another"), fork.message, user("so?")], TOOLS)
        assert loop.missed == []
        assert fork.plan.parent is second.plan.parent
        assert again.ids[: len(fork.ids)] == fork.ids


async def test_a_retry_is_planned_like_the_first_try() -> None:
    async with looping(*agent_turns()) as loop:
        first = await loop.say([user("go")], TOOLS)
        messages = [user("go"), first.message, result("one")]
        one, other = await loop.say(messages, TOOLS), await loop.say(messages, TOOLS)
        assert one.plan.ids == other.plan.ids
        assert (await loop.say([user("go")], TOOLS)).plan.missed is None


async def test_of_several_answers_the_one_that_comes_back_is_continued() -> None:
    turns = [Turn(content="the first answer"), Turn(content="x")]
    async with looping(*turns) as loop:
        asked = [user("ask")]
        first = await loop.say(asked, temperature=1.0)
        other = await loop.say(asked, temperature=1.0, max_tokens=2)
        assert other.message["content"] != first.message["content"]
        for answer in (first, other):
            turn = await loop.say([*asked, answer.message, user("and?")])
            assert turn.ids[: len(answer.ids)] == answer.ids


async def test_the_same_answer_twice_is_told_apart_by_its_thinking() -> None:
    async with looping(Turn(content="yes")) as loop:
        first = await loop.say([user("ask")])
        ids = first.answer.prompt_ids
        for place, thinking in enumerate(["because of this", "because of that"]):
            sampled = load_tokenizer().encode(f"<think>\n{thinking}\n</think>\n\nyes<|im_end|>")
            first.answer.choices[0].ids = sampled
            first.answer.choices[0].message = {"role": "assistant", "content": "yes", "reasoning_content": thinking}
            loop.context.sampled(first.plan, ids, first.answer.choices[0])
            del place
        told = {"role": "assistant", "content": "yes", "reasoning_content": "because of this "}
        turn = await loop.say([user("ask"), told, user("and?")])
        assert "because of this" in load_tokenizer().decode(turn.answer.prompt_ids or [])


def recorded(turn: Turned, seq: int) -> Completion:
    sampled = turn.answer.choices[0]
    now = datetime.now(UTC)
    return Completion(
        rollout_id="task.0",
        attempt=1,
        seq=seq,
        completion_id=f"{seq}",
        requested_at=now,
        answered_at=now,
        latency_s=0,
        dialect="openai_chat",
        path="chat/completions",
        request_digest="",
        messages=turn.call.messages,
        tools=turn.call.tools,
        reply=sampled.message,
        prompt_ids=turn.answer.prompt_ids or [],
        sampled_ids=sampled.ids or [],
        finish_reason=sampled.finish_reason,
        stop_reason=sampled.stop_reason,
        sampling=turn.call.options,
        exact=turn.plan.ids is not None,
    )


async def test_a_conversation_goes_on_after_a_restart_from_its_record() -> None:
    async with looping(*agent_turns()) as loop:
        messages = await work(loop, "respelt", turns=6)
        before, context = loop.turns[-1], loop.context
        loop.context, loop.suffixes = ExactContext(), Suffixes(loop.render)
        loop.context.remember([recorded(turn, at) for at, turn in enumerate(loop.turns)], loop.suffixes.name)
        after = await loop.say(messages, TOOLS)
        assert after.plan.missed is None
        assert after.ids[: len(before.ids)] == before.ids
        stored = [sum(len(branch.tail) for branch in kept.branches) for kept in (context, loop.context)]
        assert stored[0] < stored[1] < 1.5 * stored[0], "and takes no more room than it did"


async def test_compaction_begins_a_new_conversation_and_is_no_miss() -> None:
    async with looping(*agent_turns()) as loop:
        await work(loop, "verbatim")
        summary = await loop.say([SYSTEM, user("read everything"), user("So far: all was read.")], TOOLS)
        assert summary.plan.ids is None
        assert summary.plan.missed is None
        after = await loop.say([*summary.call.messages, summary.message, result("more")], TOOLS)
        assert after.ids[: len(summary.ids)] == summary.ids


async def test_a_past_that_was_rewritten_is_a_counted_miss_and_then_goes_on() -> None:
    async with looping(*agent_turns()) as loop:
        first = await loop.say([SYSTEM, user("go")], TOOLS)
        second = await loop.say([SYSTEM, user("go"), first.message, result("one")], TOOLS)
        edited = {"role": "assistant", "content": "I did something else."}
        third = await loop.say([SYSTEM, user("go"), first.message, result("one"), edited, user("why?")], TOOLS)
        assert third.plan.missed is Missed.NOT_SAMPLED
        fourth = await loop.say([*third.call.messages, third.message, result("two")], TOOLS)
        assert fourth.ids[: len(third.ids)] == third.ids
        assert second.plan.ids is not None


async def test_a_past_told_otherwise_from_the_beginning_is_a_counted_miss() -> None:
    async with looping(Turn(content="Here is the file.\n")) as loop:
        example = [user("an example"), {"role": "assistant", "content": "Ok."}]
        first = await loop.say([SYSTEM, *example, user("write it, with all these rules")])
        again = await loop.say(first.call.messages)
        assert [first.plan.missed, again.plan.missed] == [None, None], "made-up turns at the start are no break"
        past = [user("write it"), {"role": "assistant", "content": "Here is the file."}]
        second = await loop.say([SYSTEM, *example, *past, user("and now?")])
        assert second.plan.missed is Missed.HISTORY_DIFFERS


async def test_another_list_of_tools_begins_a_new_branch() -> None:
    async with looping(*agent_turns()) as loop:
        first = await loop.say([user("go")], TOOLS)
        second = await loop.say([user("go"), first.message, result("one")], TOOLS[:1])
        assert second.plan.missed is Missed.TOOLS_DIFFER
        third = await loop.say([*second.call.messages, second.message, result("two")], TOOLS[:1])
        assert third.ids[: len(second.ids)] == second.ids


async def test_tools_in_another_spelling_are_the_same_tools() -> None:
    spelt = [
        {"function": {**dict(reversed(tool["function"].items())), "strict": None}, "type": "function"} for tool in TOOLS
    ]
    async with looping(*agent_turns()) as loop:
        first = await loop.say([user("go")], TOOLS)
        second = await loop.say([user("go"), first.message, result("one")], spelt)
        assert second.plan.missed is None
        assert second.ids[: len(first.ids)] == first.ids


async def test_other_template_options_begin_a_new_branch() -> None:
    async with looping(*agent_turns()) as loop:
        first = await loop.say([user("go")], TOOLS)
        messages = [user("go"), first.message, result("one")]
        second = await loop.say(messages, TOOLS, chat_template_kwargs={"enable_thinking": False})
        assert second.plan.missed is Missed.OPTIONS_DIFFER
        third = await loop.say(messages, TOOLS, temperature=0.5, seed=3)
        assert third.plan.ids is not None


async def test_images_are_left_to_the_engine() -> None:
    async with looping(Turn(content="I see"), Turn(content="a cat")) as loop:
        first = await loop.say([user("look")])
        picture = {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:,x"}}]}
        second = await loop.say([user("look"), first.message, picture])
        assert second.plan.missed is Missed.IMAGES


async def test_an_answer_that_was_aborted_is_not_continued() -> None:
    async with looping(Turn(content="something long")) as loop:
        first = await loop.say([user("go")])
        sampled = first.answer.choices[0]
        sampled.message, sampled.finish_reason = {"role": "assistant", "content": "some"}, "abort"
        loop.context.sampled(first.plan, first.answer.prompt_ids, sampled)
        second = await loop.say([user("go"), sampled.message, user("on")])
        assert second.plan.missed is Missed.HISTORY_DIFFERS


async def test_a_prompt_without_room_for_an_answer_is_left_to_the_engine() -> None:
    async with looping(Turn(content="word " * 40), max_context=120) as loop:
        first = await loop.say([user("go")])
        second = await loop.say([user("go"), first.message, user("on")], max_tokens=100)
        assert second.plan.missed is Missed.TOO_LONG
        third = await loop.say([user("go"), first.message, user("on")], max_tokens=2)
        assert third.plan.ids is not None


async def test_messages_that_the_engine_refuses_to_render_are_a_counted_miss() -> None:
    async with looping(Turn(content="one")) as loop:
        first = await loop.say([user("go")])
        messages = [user("go"), first.message, {"role": "user", "content": 5}]
        plan = await loop.context.prompt(ModelCall(messages, None, {}, ""), loop.suffixes)
        assert plan.missed is Missed.NOT_RENDERED
        assert "cannot be rendered" in plan.detail
