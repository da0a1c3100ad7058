"""Places for deliveries: few at once, and fewer to one receiver, so that a slow one holds up nobody but itself."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from weakref import WeakValueDictionary


class Lanes:
    """One process's. What waits for a place holds nothing but its task's id."""

    def __init__(self, to_one: int = 4, in_all: int = 16) -> None:
        self._to_one = to_one
        self._all = asyncio.Semaphore(in_all)
        self._lanes: WeakValueDictionary[str, asyncio.Semaphore] = WeakValueDictionary()

    @asynccontextmanager
    async def place(self, receiver: str) -> AsyncIterator[None]:
        """A place for a delivery to `receiver` (host and port)."""
        lane = self._lanes.setdefault(receiver, asyncio.Semaphore(self._to_one))
        async with lane, self._all:
            yield
