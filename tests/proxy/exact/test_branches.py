"""What a session remembers: ids bit for bit, found by history, and never without bound."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from polarq_proxy.call import ModelCall
from polarq_proxy.exact.base import Missed
from polarq_proxy.exact.branches import Branch, Branches, Setting, grown, packed, unpacked
from polarq_proxy.exact.context import ExactContext
from polarq_proxy.exact.meaning import message_digest
from polarq_proxy.exact.suffix import Suffixes

from . import templates
from .loop import Message, choice, user
from .templates import Session, TemplateRenderer

SETTING = Setting(b"", b"", "model")
IDS = st.lists(st.integers(0, 2**31 - 1), min_size=1, max_size=20)


def branch(parent: Branch | None, prompt: list[int], sampled: list[int], history: bytes = b"h") -> Branch:
    found, tail, tokens = grown(parent, packed(prompt), packed(sampled))
    return Branch(found, tail, tokens, len(sampled), None, history, SETTING)


@given(st.lists(st.tuples(IDS, IDS), min_size=1, max_size=6))
def test_a_line_of_branches_gives_back_every_id(turns: list[tuple[list[int], list[int]]]) -> None:
    line: Branch | None = None
    before: list[int] = []
    for new, sampled in turns:
        line = branch(line, before + new, sampled)
        ended = line.ended()
        assert (ended.prompt_ids, ended.sampled_ids) == (before + new, sampled)
        before = [*before, *new, *sampled]
    assert line is not None
    assert line.depth == len(turns) - 1
    assert sum(len(part) for part in tails(line)) == len(packed(before)), "nothing is stored twice"


def tails(line: Branch | None) -> list[bytes]:
    found = []
    while line is not None:
        found.append(line.tail)
        line = line.parent
    return found


@given(IDS, IDS, IDS)
def test_a_prompt_that_does_not_start_with_its_parents_ids_stands_alone(
    one: list[int], two: list[int], new: list[int]
) -> None:
    parent = branch(None, one, two)
    other = [one[0] ^ 1, *one[1:], *two, *new]
    child = branch(parent, other, [1])
    assert child.parent is None
    assert unpacked(child.packed_ids()) == [*other, 1]


def test_the_oldest_turns_are_forgotten_first() -> None:
    branches = Branches(max_branches=3)
    made = [branch(None, [at], [at], history=bytes([at])) for at in range(5)]
    for one in made[:3]:
        branches.add(one, [one.history], b"")
    branches.touch(made[0])
    for one in made[3:]:
        branches.add(one, [one.history], b"")
    assert len(branches) == 3
    assert [bool(branches.at(one.history)) for one in made] == [True, False, False, True, True]


def test_a_session_keeps_a_bounded_number_of_tokens() -> None:
    branches = Branches(max_tokens=100)
    for at in range(50):
        one = branch(None, [1] * 20, [2] * 10, history=bytes([at]))
        branches.add(one, [one.history], b"")
    assert len(branches) == 3


@pytest.mark.parametrize("marked", [False, True])
async def test_a_session_reads_only_messages_that_are_new(marked: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    session = Session(templates.STRIPS_BEFORE_LAST_USER)
    read: list[Message] = []

    def counted(message: Message) -> bytes:
        read.append(message)
        return message_digest(message)

    monkeypatch.setattr("polarq_proxy.exact.context.message_digest", counted)
    messages: list[Message] = []
    for at in range(12):
        messages = [*(dict(message) for message in messages), user(f"ask {at}")]
        sent = [*messages[:-1], {**messages[-1], "cache_control": {}}] if marked else messages  # it moves along
        read.clear()
        answer: Message = {"role": "assistant", "content": f"answer {at}"}
        await session.sample(sent, answer, f"answer {at}<|im_end|>")
        assert len(read) <= 3 + marked, "what came back, what is new, what was sampled, and what lost its mark"
        messages.append(answer)


async def test_conversations_side_by_side_do_not_disturb_each_other() -> None:
    session = Session(templates.STRIPS_BEFORE_LAST_USER)
    lines: list[list[Message]] = [[user(f"line {line}")] for line in range(6)]
    for at in range(4):
        for messages in lines:
            answer: Message = {"role": "assistant", "content": f"answer {at}"}
            plan = await session.sample(messages, answer, f"answer {at}<|im_end|>")
            assert (plan.ids is not None) == (at > 0)
            assert plan.missed is None
            messages += [answer, user(f"more {at}")]


async def test_few_whole_calls_are_kept() -> None:
    session = Session(templates.STRIPS_BEFORE_LAST_USER)
    for at in range(30):
        await session.sample([user(f"ask {at}")], {"role": "assistant", "content": "yes"}, "yes<|im_end|>")
    kept = [one for one in session.context.branches if one.asked is not None]
    assert len(kept) == 8
    told: list[Message] = [user("ask 1"), {"role": "assistant", "content": "yes"}, user("on")]
    assert (await session.plan(told)).missed is Missed.RENDERED_OTHERWISE, "nothing proves that it is what it seems"
    told[0] = user("ask 29")
    assert (await session.plan(told)).ids is not None
    told[0] = user("ask 1")
    assert (await session.plan(told)).ids is not None, "now it is proven"


async def test_ids_that_are_none_are_not_continued() -> None:
    suffixes = Suffixes(TemplateRenderer(templates.STRIPS_BEFORE_LAST_USER))
    context = ExactContext()
    plan = await context.prompt(ModelCall([user("go")], None, {}, ""), suffixes)
    for bad in (None, [], ["x"], [2**40], [1.5]):
        sampled = choice({"content": "yes"}, [1])
        sampled.ids = bad
        context.sampled(plan, [1, 2], sampled)
    context.sampled(plan, None, choice({"content": "yes"}, [1]))
    told: list[Message] = [user("go"), {"role": "assistant", "content": "yes"}, user("on")]
    plan = await context.prompt(ModelCall(told, None, {}, ""), suffixes)
    assert plan.ids is None
