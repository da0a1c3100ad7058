<<<<<<< HEAD
"""Which earlier call a call goes on from, told by messages alone."""
=======
"""Which earlier call a call goes on from, by its messages."""
>>>>>>> seven-sessions

from __future__ import annotations

from typing import Any

<<<<<<< HEAD
import pytest

from polarq.trajectory.breaks import continued, find_breaks
from tests.trajectory.calls import call


def said(words: str) -> list[dict[str, Any]]:
    """A letter each: a capital one is the user's, a small one an answer."""
    return [{"role": "user" if word.isupper() else "assistant", "content": word} for word in words]


@pytest.mark.parametrize(
    ("asked", "follows", "why"),
    [
        ([("A", "b")], ("AbC", 0), "it goes on with the answer that was given"),
        ([("A", "b")], ("AxC", 0), "or with another one"),
        ([("A", "b")], ("AC", None), "no answer lies between"),
        ([("AbC", "d")], ("AbXdE", None), "the last message is not the same"),
        ([("A", "b")], ("XbC", None), "it began otherwise"),
        ([("A", "b"), ("A", "c")], ("AbC", 0), "the one that gave that very answer"),
        ([("A", "b"), ("A", "b")], ("AbC", 1), "the latest of equals"),
        ([("AbC", "d"), ("A", "b")], ("AbCdE", 0), "the longest"),
        ([("A", "b"), ("AbC", "")], ("AbCdE", 0), "not one that sampled nothing"),
    ],
)
def test_a_call_goes_on_from(asked: list[tuple[str, str]], follows: tuple[str, int | None], why: str) -> None:
    calls = [
        call(seq, [seq], [9] if reply else [], messages=said(words), reply=said(reply)[0] if reply else {})
        for seq, (words, reply) in enumerate(asked)
    ]
    words, expected = follows
    last = call(len(calls), [50], [60], messages=said(words))
    found = {after.seq: before.seq for after, before in continued([*calls, last])}
    assert found.get(last.seq) == expected, why
    assert ([one.continues for one in find_breaks([*calls, last]) if one.seq == last.seq] == [expected]) is (
        expected is not None
    )
=======
from polarq.contracts import Completion
from polarq.trajectory.breaks import continued
from tests.trajectory.calls import call


def said(*words: str, system: str = "s") -> list[dict[str, Any]]:
    """A system prompt, then a user and an assistant in turn."""
    roles = ("user", "assistant")
    return [{"role": "system", "content": system}, *({"role": roles[i % 2], "content": w} for i, w in enumerate(words))]


def saying(seq: int, messages: list[dict[str, Any]], reply: str, sampled: tuple[int, ...] = (1,)) -> Completion:
    return call(seq, [0], list(sampled), messages=messages, reply={"role": "assistant", "content": reply})


def pairs(*calls: Completion) -> list[tuple[int, int]]:
    return [(later.seq, earlier.seq) for later, earlier in continued(calls)]


def test_the_call_with_most_messages_is_continued() -> None:
    calls = [
        saying(0, said("a", "b", "c"), "d"),
        saying(1, said("a"), "b"),
        saying(2, said("a", "b", "c", "d", "e"), ""),
    ]
    assert pairs(*calls) == [(2, 0)]


def test_of_two_calls_the_one_that_gave_the_answer_is_continued() -> None:
    first, second = saying(0, said("a"), "b"), saying(1, said("a"), "B")
    assert pairs(first, second, saying(2, said("a", "b", "c"), "")) == [(2, 0)]
    assert pairs(first, second, saying(2, said("a", "B", "c"), "")) == [(2, 1)]


def test_where_neither_gave_the_answer_the_latest_is_continued() -> None:
    assert pairs(saying(0, said("a"), "b"), saying(1, said("a"), "B"), saying(2, said("a", "?", "c"), "")) == [(2, 1)]


def test_another_opening_is_another_conversation() -> None:
    one, other = saying(0, said("a"), "b"), saying(1, said("a", system="other"), "b")
    assert pairs(one, other, saying(2, said("a", "b", "c"), "")) == [(2, 0)]


def test_another_last_message_is_not_continued() -> None:
    fits, other = saying(0, said("a", "b", "c"), "d"), saying(1, said("a", "b", "C"), "d")
    assert pairs(fits, other, saying(2, said("a", "b", "c", "d", "e"), ""))[-1] == (2, 0)


def test_what_sampled_nothing_is_not_continued() -> None:
    assert pairs(saying(0, said("a"), "", sampled=()), saying(1, said("a", "b", "c"), "")) == []


def test_a_message_more_without_an_answer_continues_nothing() -> None:
    more = [*said("a"), {"role": "user", "content": "and"}]
    assert pairs(saying(0, said("a"), "b"), saying(1, more, "")) == []
>>>>>>> seven-sessions
