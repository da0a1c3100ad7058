"""Which earlier call a prompt continues, and how much of it is already stored.

A session's calls mostly extend each other. Each distinct branch is kept once, as one line of token ids with marks
where its calls ended, so that a linear session holds a single line however many turns it has.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

Ids = npt.NDArray[np.int64]

MAX_LINES = 16


@dataclass(frozen=True, slots=True)
class Shared:
    """The first `length` entries are those of the call with id `base` (None: nothing is shared)."""

    base: str | None = None
    length: int = 0


@dataclass(slots=True)
class _Line:
    call: str
    """Id of the call whose prompt and sampled ids these are."""
    ids: Ids
    marks: list[tuple[int, int]]
    """(length, seq): the first `length` ids are the prompt and the sampled ids of call `seq`."""
    messages: list[bytes] = field(default_factory=list)
    """A digest per message of the same call."""


class Prefixes:
    """The branches of one attempt, at most `MAX_LINES` of them, the least recently extended forgotten first."""

    def __init__(self) -> None:
        self._lines: list[_Line] = []

    def parent(self, prompt: Ids) -> int | None:
        """seq of the call whose prompt and sampled ids this prompt extends; the longest, if there are several."""
        best = (0, -1)
        for line in self._lines:
            best = max([best, *_within(line.marks, _common(line.ids, prompt))])
        return best[1] if best[0] else None

    def shared_ids(self, prompt: Ids) -> Shared:
        """The stored call whose prompt and sampled ids have the longest common beginning with this prompt."""
        best = Shared()
        for line in self._lines:
            length = _common(line.ids, prompt)
            if length > best.length:
                best = Shared(line.call, length)
        return best

    def shared_messages(self, digests: Sequence[bytes]) -> Shared:
        """The stored call whose messages have the longest common beginning with these."""
        best = Shared()
        for line in self._lines:
            length = 0
            for ours, theirs in zip(digests, line.messages, strict=False):
                if ours != theirs:
                    break
                length += 1
            if length > best.length:
                best = Shared(line.call, length)
        return best

    def add(self, call: str, seq: int, prompt: Ids, sampled: Ids, digests: Sequence[bytes]) -> None:
        """The call is stored: later ones may refer to it."""
        ids = np.concatenate((prompt, sampled))
        marks: list[tuple[int, int]] = []
        for line in list(self._lines):
            length = _common(line.ids, ids)
            marks = max(marks, _within(line.marks, length), key=len)
            if length == len(line.ids):
                self._lines.remove(line)
        if len(sampled):
            marks = [*marks, (len(ids), seq)]
        self._lines.append(_Line(call, ids, marks, list(digests)))
        del self._lines[:-MAX_LINES]


def as_ids(ids: Sequence[int]) -> Ids:
    return np.array(ids, dtype=np.int64)


def _common(first: Ids, second: Ids) -> int:
    length = min(len(first), len(second))
    different = first[:length] != second[:length]
    return int(different.argmax()) if different.any() else length


def _within(marks: list[tuple[int, int]], length: int) -> list[tuple[int, int]]:
    return [mark for mark in marks if mark[0] <= length]
