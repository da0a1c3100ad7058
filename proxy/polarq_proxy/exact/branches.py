"""The sampled turns of one session, each with the ids that lead up to it and the history that it ends."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from polarq_proxy.call import ModelCall
from polarq_proxy.exact.base import Ended, Message
from polarq_proxy.exact.meaning import call_ids_of, thinking_digest

MAX_BRANCHES = 512
MAX_TOKENS = 8_000_000
"""What one session remembers at most; the oldest turns are forgotten first. Four bytes a token."""
MAX_KNOWN = 16_384
"""Histories whose beginnings are recognised."""

_ITEM = array("i").itemsize


def packed(ids: Iterable[int]) -> bytes:
    """Native 32-bit integers. Raises TypeError or OverflowError for what is no token id."""
    return array("i", ids).tobytes()


def unpacked(data: bytes) -> list[int]:
    return array("i", data).tolist()


@dataclass(frozen=True, slots=True)
class Setting:
    """What a prompt depends on beside its messages."""

    tools: bytes
    options: bytes
    rendered_by: str


@dataclass(eq=False, slots=True)
class Branch:
    """One sampled turn. Holds only the ids that its parent does not."""

    parent: Branch | None
    tail: bytes
    """Packed ids after the parent's: what was appended to the prompt, then what was sampled."""
    tokens: int
    """Length of the whole, prompt and sample."""
    sampled_tokens: int
    end_id: int | None
    """See `Ended.end_id`."""
    history: bytes
    """Digest of the messages up to this turn and with it."""
    setting: Setting
    thinking: bytes | None = None
    """Digest of its thinking."""
    call_ids: tuple[str, ...] = ()
    asked: ModelCall | None = field(default=None, repr=False)
    """The call that it answered, where the engine rendered the prompt itself."""

    @property
    def depth(self) -> int:
        """How many turns of its line were continued by ids."""
        count, branch = 0, self
        while branch.parent is not None:
            count, branch = count + 1, branch.parent
        return count

    @property
    def root(self) -> Branch:
        branch = self
        while branch.parent is not None:
            branch = branch.parent
        return branch

    def packed_ids(self) -> bytes:
        parts, branch = [self.tail], self
        while branch.parent is not None:
            branch = branch.parent
            parts.append(branch.tail)
        return b"".join(reversed(parts))

    def ended(self) -> Ended:
        return Ended(array("i", self.packed_ids()), self.tokens - self.sampled_tokens, self.end_id)


def grown(parent: Branch | None, prompt: bytes, sampled: bytes) -> tuple[Branch | None, bytes, int]:
    """(parent, tail, tokens) of a new branch; without the parent where the prompt does not start with its ids."""
    whole = prompt + sampled
    if parent is not None and len(prompt) > parent.tokens * _ITEM and prompt.startswith(parent.packed_ids()):
        return parent, whole[parent.tokens * _ITEM :], len(whole) // _ITEM
    return None, whole, len(whole) // _ITEM


class Branches:
    """Finds the turn that a request continues."""

    def __init__(self, max_branches: int = MAX_BRANCHES, max_tokens: int = MAX_TOKENS) -> None:
        self._by_history: dict[bytes, list[Branch]] = {}
        self._order: dict[Branch, None] = {}
        self._known: dict[bytes, None] = {}
        self._answers: dict[bytes, None] = {}
        self._tokens = 0
        self._max_branches = max_branches
        self._max_tokens = max_tokens

    def __len__(self) -> int:
        return len(self._order)

    def __iter__(self) -> Iterator[Branch]:
        return iter(list(self._order))

    def add(self, branch: Branch, chain: Sequence[bytes], answer: bytes) -> None:
        """`chain` are the digests of its prompt's histories, `answer` that of the sampled message alone."""
        _remember(self._known, chain)
        _remember(self._answers, (answer,))
        self._by_history.setdefault(branch.history, []).append(branch)
        self._order[branch] = None
        self._tokens += len(branch.tail) // _ITEM
        while len(self._order) > self._max_branches or (self._tokens > self._max_tokens and len(self._order) > 1):
            self._forget(next(iter(self._order)))

    def _forget(self, branch: Branch) -> None:
        del self._order[branch]
        self._tokens -= len(branch.tail) // _ITEM
        same = self._by_history[branch.history]
        same.remove(branch)
        if not same:
            del self._by_history[branch.history]

    def longest(self, chain: Sequence[bytes]) -> int:
        """How many messages of a history the longest sampled one covers, less than all of them; 0: there is none.
        `chain[i]` is the digest of the first i messages."""
        return next((count for count in range(len(chain) - 2, 0, -1) if chain[count] in self._by_history), 0)

    def at(self, history: bytes) -> list[Branch]:
        """Oldest first."""
        return self._by_history.get(history, [])

    def known(self, chain: Sequence[bytes]) -> int:
        """How many of its messages began a prompt before."""
        return next((count for count in range(len(chain) - 1, 0, -1) if chain[count] in self._known), 0)

    def answered(self, digest: bytes) -> bool:
        """Whether a message of this meaning was sampled."""
        return digest in self._answers

    def touch(self, branch: Branch) -> None:
        """It is in use: others are forgotten first."""
        if branch in self._order:
            del self._order[branch]
            self._order[branch] = None


def meant(branches: Sequence[Branch], turn: Message) -> Branch:
    """Which of several samples of one meaning a harness sends back: the one with its thinking or its call ids, else
    the newest."""
    thinking, call_ids = thinking_digest(turn), call_ids_of(turn)

    def likeness(place: int) -> tuple[bool, bool, int]:
        branch = branches[place]
        same_calls = bool(call_ids) and branch.call_ids == call_ids
        return same_calls, thinking is not None and branch.thinking == thinking, place

    return branches[max(range(len(branches)), key=likeness)]


def _remember(known: dict[bytes, None], digests: Iterable[bytes]) -> None:
    for digest in digests:
        known[digest] = None
    while len(known) > MAX_KNOWN:
        del known[next(iter(known))]
