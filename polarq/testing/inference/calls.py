"""The server's own record of what it sampled: the truth that a test compares a proxy's records with."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, overload


@dataclass
class SampledCall:
    """One choice of one request. Fields fill while tokens come; times are seconds since the epoch.

    `aborted` is set when the client went away, or the engine aborted, before the last token; `sampled_ids` are then
    those sampled until that moment. `hung_up` is set when it was the client (or the server's own stop). `delivered` is
    set when the whole answer was written to the connection. `request_digest` is the SHA-256 of the request's body:
    the same for requests that are byte for byte the same; `user` is the body's field of that name; `images` are the
    SHA-256 sums of the pictures in its messages, `sampling` what it asked of sampling, by the fields' names.
    """

    request_id: str
    choice_index: int
    session_id: str | None
    conversation: str
    script: str
    turn_index: int
    prompt_ids: tuple[int, ...]
    request_digest: str = ""
    user: str | None = None
    images: tuple[str, ...] = ()
    sampling: dict[str, Any] = field(default_factory=dict)
    started_at: float = field(default_factory=time.time)
    sampled_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    weight_versions: list[str] = field(default_factory=list)
    finish_reason: str | None = None
    aborted: bool = False
    hung_up: bool = False
    delivered: bool = False
    finished_at: float | None = None

    def as_json(self) -> dict[str, Any]:
        return {**self.__dict__, "prompt_ids": list(self.prompt_ids)}


class CallLedger(Sequence[SampledCall]):
    """The calls in the order in which they began; only the newest `limit` are kept."""

    def __init__(self, limit: int = 10_000) -> None:
        self._calls: deque[SampledCall] = deque(maxlen=limit)
        self._waiting: set[asyncio.Event] = set()

    @overload
    def __getitem__(self, index: int) -> SampledCall: ...
    @overload
    def __getitem__(self, index: slice) -> list[SampledCall]: ...
    def __getitem__(self, index: int | slice) -> SampledCall | list[SampledCall]:
        return list(self._calls)[index]

    def __len__(self) -> int:
        return len(self._calls)

    def __iter__(self) -> Iterator[SampledCall]:
        return iter(list(self._calls))

    def append(self, call: SampledCall) -> None:
        self._calls.append(call)
        self.changed()

    def changed(self) -> None:
        """Wakes whoever waits for a call to begin, to get a token or to end."""
        for event in self._waiting:
            event.set()

    async def wait_until(self, condition: Callable[[CallLedger], bool], timeout_s: float = 10.0) -> None:
        """Returns as soon as `condition(ledger)` holds; raises TimeoutError when it does not within `timeout_s`."""
        event = asyncio.Event()
        self._waiting.add(event)
        try:
            async with asyncio.timeout(timeout_s):
                while not condition(self):
                    event.clear()
                    await event.wait()
        finally:
            self._waiting.discard(event)
