"""Which earlier call a call goes on from, told by messages alone."""

from __future__ import annotations

from typing import Any

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
        ([("AbC", "d")], ("XbCdE", None), "it began otherwise"),
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


@pytest.mark.parametrize("other", [{"tool_call_id": "2"}, {"content": [{"type": "text", "text": "r"}]}, {"name": None}])
def test_a_message_of_the_same_words_is_another_one(other: dict[str, Any]) -> None:
    begun = [*said("Ab"), {"role": "tool", "content": "r", "tool_call_id": "1"}]
    first = call(0, [1], [2], messages=begun)
    for last, expected in ((begun[-1], [0]), ({**begun[-1], **other}, [])):
        later = call(1, [3], [4], messages=[*begun[:-1], last, *said("bC")])
        assert [earlier.seq for _, earlier in continued([first, later])] == expected
