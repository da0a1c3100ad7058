"""When a node looks at its flags, and for work, before its next heartbeat is due."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from polarq_worker.presence import Presence
from polarq_worker.work import WorkSeeker

if TYPE_CHECKING:
    from polarq_worker.pool import EnginePool

SHORTEST_LOOK_S = 0.05
"""Between two looks at flags or work, however often there is reason to."""

_OTHERS_FIRST_S = 0.3


class Looks:
    """One node's. What wishes for a look may be called from any thread."""

    def __init__(self, presence: Presence, work: WorkSeeker, pool: EnginePool) -> None:
        self._presence = presence
        self._work = work
        self._pool = pool
        self._look_soon = asyncio.Event()
        self._freed = asyncio.Event()
        self._seeking_soon = False

    def again(self) -> None:
        """Reads the flags before the next heartbeat is due."""
        self._pool.loop.call_soon_threadsafe(self._look_soon.set)

    def freed(self) -> None:
        """A job has ended: what waits for other nodes may be for its place."""
        if not self._pool.loop.is_closed():
            self._pool.loop.call_soon_threadsafe(self._freed.set)

    def others_first(self) -> None:
        """Seeks work when others have taken what they were rung for."""
        self._pool.loop.call_soon_threadsafe(self._seek_soon)

    async def look(self) -> None:
        """Says how the node is, reads its flags, and seeks work. Raises `LedgerUnavailable`, `NotQueued`."""
        await self._presence.announce()
        self._pool.wake()
        await self._work.seek()

    async def when_told(self) -> None:
        await self._look_soon.wait()
        self._look_soon.clear()
        await self.look()

    async def when_freed(self) -> None:
        await self._freed.wait()
        self._freed.clear()
        await self._work.seek()
        if self._work.again_s is not None:
            asyncio.get_running_loop().call_later(self._work.again_s, self._freed.set)

    def _seek_soon(self) -> None:
        if not self._seeking_soon:
            self._seeking_soon = True
            asyncio.get_running_loop().call_later(_OTHERS_FIRST_S, self._seek_now)

    def _seek_now(self) -> None:
        self._seeking_soon = False
        self._freed.set()
