"""The ledger's event stream, read once for everybody who listens to this process.

A listener has a cursor (an event id) and no queue: it takes what is after its cursor from the events kept here, or from
Redis when it is further behind. So a slow or stalled listener costs nothing and loses nothing, and a thousand of them
cost Redis one reader.
"""

from __future__ import annotations

import asyncio
import bisect
import logging
import re

from polarq.contracts.event import Event
from polarq.errors import LedgerUnavailable
from polarq.ledger import AsyncLedger

log = logging.getLogger(__name__)

KEPT = 4096
"""Events kept in memory."""
_BLOCK_S = 10.0
_RETRY_S = 0.5
_LONGEST_RETRY_S = 5.0
_EVENT_ID = re.compile(r"([0-9]{1,20})(?:-([0-9]{1,20}))?")

Position = tuple[int, int]


def position(event_id: str) -> Position:
    """An event id in its order. Raises ValueError when it is none."""
    match = _EVENT_ID.fullmatch(event_id)
    if match is None:
        raise ValueError(f"'{event_id}' is not an event id (<milliseconds>-<number>)")
    return int(match[1]), int(match[2] or 0)


class Feed:
    """Runs as one asyncio task (`run`); any number of listeners read with `after` and wait with `news`."""

    def __init__(self, ledger: AsyncLedger) -> None:
        self._ledger = ledger
        self._events: list[Event] = []
        self._positions: list[Position] = []
        self._complete_after: Position | None = None
        """Every event after this position is kept here."""
        self._newest = "0-0"
        self._news = asyncio.Event()
        self.closed = False

    async def run(self) -> None:
        """Reads for ever; waits out a Redis that is away."""
        delay = _RETRY_S
        while True:
            try:
                if self._complete_after is None:
                    self._newest = await self._ledger.do(self._ledger.calls.last_event_id())
                    self._complete_after = position(self._newest)
                self._take(await self._ledger.wait_events(self._newest, _BLOCK_S))
                delay = _RETRY_S
            except LedgerUnavailable as exc:
                log.warning("the event stream cannot be read, trying again: %s", exc)
                await asyncio.sleep(delay)
                delay = min(2 * delay, _LONGEST_RETRY_S)

    def close(self) -> None:
        """Lets every listener end."""
        self.closed = True
        self._news.set()

    async def newest(self) -> str:
        """Id of the newest event: what is read from the ledger after this misses nothing when it follows from here."""
        if self._complete_after is None:
            return await self._ledger.do(self._ledger.calls.last_event_id())
        return self._newest

    async def after(self, cursor: str, limit: int = 200) -> list[Event]:
        """Up to `limit` events after an id, oldest first. Raises `LedgerUnavailable`."""
        at = position(cursor)
        if self._complete_after is not None and at >= self._complete_after:
            start = bisect.bisect_right(self._positions, at)
            return self._events[start : start + limit]
        return await self._ledger.do(self._ledger.calls.events(cursor, limit))

    async def missed(self, cursor: str) -> bool:
        """Whether events after an event's id may be gone: the event itself is no longer kept. Raises as `after`."""
        at = position(cursor)
        if at == (0, 0) or (self._complete_after is not None and at >= self._complete_after):
            return False
        oldest = await self._ledger.do(self._ledger.calls.events("0", 1))
        return bool(oldest) and position(oldest[0].event_id) > at

    async def news(self, cursor: str, timeout_s: float) -> bool:
        """Waits until there are events after `cursor`; False when there were none in time."""
        try:
            async with asyncio.timeout(timeout_s):
                while not self.closed:
                    waiting = self._news
                    if self._complete_after is not None and position(self._newest) > position(cursor):
                        return True
                    await waiting.wait()
        except TimeoutError:
            pass
        return False

    def _take(self, events: list[Event]) -> None:
        if not events:
            return
        self._events += events
        self._positions += [position(event.event_id) for event in events]
        self._newest = events[-1].event_id
        extra = len(self._events) - KEPT
        if extra > 0:
            self._complete_after = self._positions[extra - 1]
            del self._events[:extra]
            del self._positions[:extra]
        done, self._news = self._news, asyncio.Event()
        done.set()
