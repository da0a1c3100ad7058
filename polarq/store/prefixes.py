"""Which earlier call a prompt continues, and how much of it is already stored.

A session's calls mostly extend each other. Each distinct branch is kept once, as one line of token ids (their text)
with marks where its calls ended, so that a linear session holds a single line however many turns it has, and a turn
costs the reading of its new ids and one comparison of bytes.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from operator import itemgetter
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from polarq.store.token_text import Border, Line, NotIds, ids_of, text_of

MAX_BRANCHES = 16

_encode = msgspec.msgpack.Encoder().encode

Message = dict[str, Any]


class Shared(msgspec.Struct, frozen=True):
    """The first `length` entries are those of the call with id `base` (None: nothing is shared)."""

    base: str | None = None
    length: int = 0


class History(msgspec.Struct, frozen=True, eq=False):
    """Messages that are stored."""

    messages: list[Message] = []
    plain: bool = True
    """They hold no numbers and truth values, which Python calls equal across types (1, 1.0, True)."""
    size: int = 0
    """Bytes, roughly."""

    def common(self, messages: list[Message]) -> int:
        """How many messages at the beginning are the same."""
        ours = self.messages
        if self.plain and len(messages) >= len(ours) and messages[: len(ours)] == ours:
            return len(ours)
        length = 0
        for mine, other in zip(ours, messages, strict=False):
            if not equal(mine, other):
                break
            length += 1
        return length

    def with_new(self, length: int, messages: list[Message]) -> History:
        """`messages`, of which the first `length` are stored here."""
        old, new = self.messages[:length], messages[length:]
        whole = length == len(self.messages)
        size = self.size if whole else sum(len(_encoded(message)) for message in old)
        unmixed = (self.plain or all(map(plain, old))) and all(map(plain, new))
        return History([*old, *new], unmixed, size + sum(len(_encoded(message)) for message in new))


NO_HISTORY = History()


class Branch(msgspec.Struct, frozen=True, eq=False):
    """A call that no stored call extends, or the longest of those that extend each other."""

    call: str
    """Id of the call whose prompt and sampled ids these are."""
    line: Line
    marks: list[tuple[int, int]]
    """(length in bytes, seq), lengths growing: up to there the ids are the prompt and the sampled ids of call `seq`,
    the last one if there are several."""
    history: History


class Prompt(msgspec.Struct, frozen=True):
    """A prompt's ids: what an earlier call has of them, and what is new."""

    line: Line
    shared: Shared
    new_ids: npt.NDArray[np.int32]
    parent: int | None
    """seq of the call whose prompt and sampled ids this prompt extends; the longest, if there are several."""
    canonical: bool = True
    """The text that was given is the canonical one."""
    found: tuple[tuple[Branch, Border], ...] = ()
    """Up to where each branch that was stored has them."""

    @property
    def count(self) -> int:
        return self.shared.length + len(self.new_ids)


NO_PROMPT = Prompt(Line(), Shared(), np.array([], dtype=np.int32), None)


class Prefixes:
    """The branches of one attempt, at most `MAX_BRANCHES` of them, the least recently extended forgotten first."""

    def __init__(self) -> None:
        self._branches: list[Branch] = []

    @property
    def size(self) -> int:
        """Bytes that are remembered, roughly."""
        return sum(branch.line.length + branch.history.size for branch in self._branches)

    def read(self, data: bytes, begin: int, end: int, *, canonical: bool = True) -> Prompt:
        """Reads the prompt in `data[begin:end]`, JSON without its brackets. Raises `NotIds`."""
        found = tuple((branch, branch.line.common(data, begin, end)) for branch in self._branches)
        base, border = max(found, key=_length, default=(None, Border(0, 0, 0)))
        marks = [mark for branch, at in found for mark in _within(branch.marks, at.length)[-1:]]
        new_text = data[begin + border.length : end]
        if border.length and new_text:
            new_text = new_text[1:]
            if not new_text:
                raise NotIds("a comma follows the last id")
        new_ids = ids_of(new_text)
        plain_text = text_of(new_ids)
        known = base.line.before(border) if base is not None and border.length else Line()
        if plain_text != new_text:
            text = known.plus(plain_text, len(new_ids)).text
            return self.read(text, 0, len(text), canonical=False)
        shared = Shared(base.call, known.count) if base is not None and border.length else Shared()
        parent = max(marks)[1] if marks else None
        # As Python numbers, the ids of a first long prompt would take ten times their bytes until they are stored.
        packed = np.array(new_ids, dtype=np.int32)
        return Prompt(known.plus(new_text, len(new_ids)), shared, packed, parent, canonical, found)

    def shared_messages(self, messages: list[Message]) -> tuple[Branch | None, int]:
        """The branch whose messages have the longest common beginning with these, and its length."""
        best: tuple[Branch | None, int] = (None, 0)
        for branch in self._branches:
            length = branch.history.common(messages)
            if length > best[1]:
                best = (branch, length)
        return best

    def breaks(self, branch: Branch, shared: int, messages: list[Message], parent: int | None) -> bool:
        """Whether these messages, the first `shared` of which are in `branch`, are those of a stored call, an answer,
        and what is new, while no such call is the `parent` of their prompt."""
        if not _answered(branch.history.messages, messages, shared) or (branch.marks and parent == branch.marks[-1][1]):
            return False
        alike = [
            other
            for other in self._branches
            if len(other.history.messages) == shared and other.history.common(messages) == shared
        ]
        seqs = {other.marks[-1][1] for other in alike if other.marks}
        return bool(seqs) and parent not in seqs

    def add(self, call: str, seq: int, prompt: Prompt, sampled_ids: Sequence[int], history: History) -> None:
        """The call is stored: later ones may refer to it."""
        sampled = text_of(sampled_ids)
        line = prompt.line.plus(sampled, len(sampled_ids))
        known = dict(prompt.found)
        marks: list[tuple[int, int]] = []
        left = []
        for branch in self._branches:
            border = known.get(branch)
            if border is None:  # it came while this call was being written
                text = line.text
                border = branch.line.common(text, 0, len(text))
            elif border.length == prompt.line.length and sampled:
                text = b"," + sampled if border.length else sampled
                border = branch.line.common(text, 0, len(text), since=border)
            marks = _merged(marks, _within(branch.marks, border.length))
            if border.length < branch.line.length:
                left.append(branch)
        if sampled:
            marks = _merged(marks, [(line.length, seq)])
        self._branches = [*left, Branch(call, line, marks, history)][-MAX_BRANCHES:]


def _answered(old: Sequence[Message], new: Sequence[Message], shared: int) -> bool:
    return shared == len(old) < len(new) and new[shared].get("role") == "assistant"


def _length(found: tuple[Branch, Border]) -> int:
    return found[1].length


def _within(marks: list[tuple[int, int]], length: int) -> list[tuple[int, int]]:
    return marks[: bisect_right(marks, length, key=itemgetter(0))]


def _merged(marks: list[tuple[int, int]], others: list[tuple[int, int]]) -> list[tuple[int, int]]:
    if not marks or not others:
        return marks or others
    if marks[-1][0] < others[0][0]:
        return marks + others
    # Of several calls that ended at one place, the one that came last.
    return list(dict(sorted({*marks, *others})).items())


def equal(mine: Message, other: Message) -> bool:
    """Whether two messages are the same JSON."""
    return mine is other or (mine == other and _encoded(mine) == _encoded(other))


def plain(message: Message) -> bool:
    """It holds no numbers and truth values."""
    left: list[Any] = [message]
    while left:
        value = left.pop()
        if isinstance(value, dict):
            left += value.values()
        elif isinstance(value, list):
            left += value
        elif value is not None and not isinstance(value, str):
            return False
    return True


def _encoded(value: Any) -> bytes:
    """Bytes that differ whenever two JSON values do."""
    try:
        return _encode(value)
    except OverflowError:  # an integer beyond 64 bits
        return repr(value).encode("utf-8", "surrogatepass")
