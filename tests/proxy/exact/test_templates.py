"""What a template puts after a sampled turn is found out, whatever kind of template it is; where it cannot be known,
that is said."""

from __future__ import annotations

from typing import Any

import pytest

from polarq_proxy.exact.base import Missed

from . import templates
from .loop import SYSTEM, TOOLS, Message, choice, result, user
from .templates import Session


def called(*ids: str, content: str = "") -> Message:
    calls: list[Message] = [
        {"id": call_id, "type": "function", "function": {"name": "read", "arguments": '{"path":  "a"}'}}
        for call_id in ids
    ]
    return {"role": "assistant", "content": content, "tool_calls": calls}


def text_of(*ids: str) -> str:
    return "\n".join('<tool_call>\n{"name": "read", "arguments": {"path":  "a"}}\n</tool_call>' for _ in ids)


ASK: list[Message] = [SYSTEM, user("go")]
SAID: Message = {"role": "assistant", "content": "I see.", "reasoning_content": "hm"}


async def test_thinking_that_the_template_would_take_out_stays() -> None:
    session = Session(templates.STRIPS_BEFORE_LAST_USER)
    await session.sample(ASK, SAID, "<think>\nhm\n</think>\n\nI see.<|im_end|>")
    added = session.added(await session.plan([*ASK, SAID, user("and?")]))
    assert added == "\n<|im_start|>user\nand?<|im_end|>\n<|im_start|>assistant\n"


async def test_results_of_one_turn_are_rendered_together() -> None:
    session = Session(templates.STRIPS_BEFORE_LAST_USER)
    await session.sample(ASK, called("a", "b"), text_of("a", "b") + "<|im_end|>", TOOLS)
    plan = await session.plan([*ASK, called("a", "b"), result("one", "a"), result("two", "b")], TOOLS)
    assert session.added(plan) == (
        "\n<|im_start|>user\n<tool_response>\none\n</tool_response>\n<tool_response>\ntwo\n</tool_response><|im_end|>\n"
        "<|im_start|>assistant\n"
    )


@pytest.mark.parametrize("finish_reason", ["length", "stop"])
async def test_a_turn_that_the_next_opener_ends(finish_reason: str) -> None:
    session = Session(templates.NEXT_OPENER_ENDS)
    ended = finish_reason == "stop"
    await session.sample(ASK, SAID, "I see." + "<|im_end|>" * ended, finish_reason=finish_reason)
    added = session.added(await session.plan([*ASK, SAID, user("and?")]))
    assert added == "<|im_end|>" * (not ended) + "user\nand?<|im_start|>assistant\n"


@pytest.mark.parametrize("finish_reason", ["length", "stop"])
async def test_a_tool_call_that_the_next_opener_ends(finish_reason: str) -> None:
    session = Session(templates.NEXT_OPENER_ENDS)
    ended = finish_reason == "stop"
    sampled = text_of("a") + "<tool_response>" * ended
    await session.sample(ASK, called("a"), sampled, TOOLS, finish_reason=finish_reason)
    added = session.added(await session.plan([*ASK, called("a"), result("one", "a")], TOOLS))
    assert added == "<tool_response>" * (not ended) + "\none<|im_start|>assistant\n"


async def test_a_turn_ended_by_another_opener_than_the_one_that_follows_is_a_miss() -> None:
    session = Session(templates.NEXT_OPENER_ENDS)
    await session.sample(ASK, SAID, "I see.<tool_response>")
    assert (await session.plan([*ASK, SAID, user("and?")])).missed is Missed.OTHER_END


async def test_nothing_is_added_between_a_close_and_an_opener_that_touch() -> None:
    session = Session(templates.CLOSES_TIGHTLY)
    await session.sample(ASK, SAID, "I see.<|endoftext|>")
    added = session.added(await session.plan([*ASK, SAID, user("and?")]))
    assert added == "<|im_start|>user\nand?<|im_end|><|im_start|>model\n"


async def test_another_end_of_text_stands_in_for_the_close() -> None:
    session = Session(templates.STRIPS_BEFORE_LAST_USER)
    await session.sample(ASK, SAID, "I see.<|endoftext|>")
    added = session.added(await session.plan([*ASK, SAID, user("and?")]))
    assert added == "\n<|im_start|>user\nand?<|im_end|>\n<|im_start|>assistant\n"


async def test_the_tool_of_a_result_is_looked_up_by_the_id_that_came_back() -> None:
    session = Session(templates.NAMES_THE_TOOL)
    await session.sample(ASK, called("engine-1"), '<tool_call>{"path": "a"} by read as engine-1</tool_call><|im_end|>')
    plan = await session.plan([*ASK, called("harness-9"), result("one", "harness-9")])
    assert session.added(plan) == "\n<|im_start|>tool read harness-9\none<|im_end|>\n<|im_start|>assistant\n"


@pytest.mark.parametrize("ids", [("x",), ("call_1", "call_2", "call_3"), ("a-much-longer-id-than-the-others",)])
async def test_what_follows_a_call_is_found_whatever_its_id(ids: tuple[str, ...]) -> None:
    session = Session(templates.NAMES_THE_TOOL)
    for _ in range(2):  # what was found out for one is used for the other
        messages = [*ASK, user(f"{ids}")]
        await session.sample(messages, called(*ids), "<tool_call>anything</tool_call><|im_end|>")
        plan = await session.plan([*messages, called(*ids), *(result("one", call_id) for call_id in ids)])
        expected = "".join(f"<|im_start|>tool read {call_id}\none<|im_end|>\n" for call_id in ids)
        assert session.added(plan) == f"\n{expected}<|im_start|>assistant\n"
        ids = tuple(f"other {call_id}" for call_id in ids)


async def test_a_call_cut_in_the_middle_of_its_turn_is_closed() -> None:
    session = Session(templates.STRIPS_BEFORE_LAST_USER)
    await session.sample(ASK, called("a"), text_of("a"), TOOLS, finish_reason="length")
    added = session.added(await session.plan([*ASK, called("a"), result("one", "a")], TOOLS))
    assert added.startswith("<|im_end|>\n<|im_start|>user\n<tool_response>")


async def test_a_turn_with_calls_may_close_in_a_way_of_its_own() -> None:
    session = Session(templates.CALLS_CLOSE_OTHERWISE)
    messages = list(ASK)
    for at in range(3):
        await session.sample(messages, called(f"{at}"), text_of("a") + "<|endoftext|>", TOOLS)
        messages += [called(f"{at}"), result("one", f"{at}")]
        added = session.added(await session.plan(messages, TOOLS))
        assert added == "<|im_start|>tool\none<|im_end|><|im_start|>assistant\n"
    await session.sample(messages, SAID, "I see.<|im_end|>", TOOLS)
    added = session.added(await session.plan([*messages, SAID, user("and?")], TOOLS))
    assert added == "<|im_start|>user\nand?<|im_end|><|im_start|>assistant\n"


async def test_where_calls_close_in_a_way_of_their_own_one_that_was_cut_is_a_miss() -> None:
    session = Session(templates.CALLS_CLOSE_OTHERWISE)
    await session.sample(ASK, called("a"), text_of("a"), TOOLS, finish_reason="length")
    plan = await session.plan([*ASK, called("a"), result("one", "a")], TOOLS)
    assert plan.missed is Missed.NOT_PROVEN


@pytest.mark.parametrize(
    ("template", "cause"),
    [
        (templates.SYSTEM_IN_LAST_USER, Missed.LOOKS_AHEAD),
        (templates.LAST_CLOSE_DIFFERS, Missed.OTHER_END),
        (templates.COUNTS_TURNS, Missed.NOT_PROVEN),
        (templates.TOOLS_BEFORE_LAST_USER, Missed.LOOKS_AHEAD),
    ],
)
async def test_a_template_that_cannot_be_continued_is_a_miss(template: str, cause: Missed) -> None:
    session = Session(template)
    ask = [*ASK, {"role": "assistant", "content": "made up"}, user("go on")]
    await session.sample(ask, SAID, "I see.<|endoftext|>", TOOLS)
    plan = await session.plan([*ask, SAID, user("and?")], TOOLS)
    assert (plan.ids, plan.missed) == (None, cause)


async def test_a_template_that_counts_is_found_out_when_its_count_differs() -> None:
    session = Session(templates.COUNTS_TURNS)
    await session.sample(ASK, SAID, "I see.<|im_end|>")
    messages = [*ASK, SAID, user("and?")]
    plan = await session.sample(messages, SAID, "I see.<|im_end|>")
    assert plan.missed is None, "by chance the made-up conversation has as many turns"
    for _ in range(4):
        messages += [SAID, user("and?")]
        plan = await session.sample(messages, SAID, "I see.<|im_end|>")
        assert plan.missed is Missed.NOT_PROVEN


@pytest.mark.parametrize(
    ("template", "end"),
    [
        (templates.STRIPS_BEFORE_LAST_USER, "<|im_end|>"),
        (templates.NEXT_OPENER_ENDS, "<tool_response>"),
        (templates.CALLS_CLOSE_OTHERWISE, "<|endoftext|>"),
        (templates.STRIPS_BEFORE_LAST_USER, ""),
    ],
)
async def test_a_later_turn_is_rendered_twice_and_without_tools_that_show_only_at_the_start(
    template: str, end: str
) -> None:
    session = Session(template)
    seen: list[bool] = []
    ids = session.render.ids

    async def looked(call: Any, **how: Any) -> list[int]:
        seen.append(bool(call.tools))
        return await ids(call, **how)

    session.render.ids = looked  # type: ignore[method-assign]
    messages = list(ASK)
    for at in range(7):
        seen.clear()
        finish_reason = "stop" if end else "length"
        plan = await session.sample(messages, called(f"{at}"), text_of("a") + end, TOOLS, finish_reason)
        messages += [called(f"{at}"), result("one", f"{at}")]
    assert plan.ids is not None
    assert seen == [False, False]


async def test_a_model_that_went_on_after_its_turns_end_is_a_miss() -> None:
    session = Session(templates.STRIPS_BEFORE_LAST_USER)
    await session.sample(ASK, SAID, "I see.<|im_end|>\n<|im_start|>user\nwell?<|im_end|>")
    assert (await session.plan([*ASK, SAID, user("and?")])).missed is Missed.NOT_PROVEN


async def test_a_chat_that_renders_otherwise_than_it_says_is_a_miss() -> None:
    session = Session(templates.STRIPS_BEFORE_LAST_USER)
    plan = await session.plan(ASK)
    assert plan.call is not None
    prompt = [*await session.render.ids(plan.call), 5]
    session.context.sampled(plan, prompt, choice(SAID, [1, 2, 3], "length"))
    assert (await session.plan([*ASK, SAID, user("and?")])).missed is Missed.RENDERED_OTHERWISE


@pytest.mark.parametrize(
    "options", [{"continue_final_message": True}, {"add_generation_prompt": False}, {"truncate_prompt_tokens": 100}]
)
async def test_a_call_that_shapes_its_own_prompt_is_left_to_the_engine(options: dict[str, Any]) -> None:
    session = Session(templates.STRIPS_BEFORE_LAST_USER)
    await session.sample(ASK, SAID, "I see.<|im_end|>")
    assert (await session.plan([*ASK, SAID, user("and?")], **options)).missed is Missed.OPTIONS_DIFFER
