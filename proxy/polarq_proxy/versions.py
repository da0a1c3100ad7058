"""Which policy version samples now, for engines that do not say it with their answers.

A version read before a call and one read after it bound what sampled it: if they are equal, it was that one. Reads are
shared: one that is a second old is good enough for the start of a call, because an older version there can only make
the two differ; the one after the call must begin after the call has ended. After a pause, which weights change in,
older reads are not good enough: the first calls would all seem to have seen two versions.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

FRESH_S = 1.0

UNREAD = ""
"""The engine has versions and did not tell one now: what it samples meanwhile belongs to no version for sure."""


class PolicyVersions:
    """`fetch` asks the engine; None: it does not say."""

    def __init__(self, fetch: Callable[[], Awaitable[str | None]]) -> None:
        self._fetch = fetch
        self._running: asyncio.Task[str | None] | None = None
        self._known: str | None = None
        self._known_at = float("-inf")

    async def before(self, since: float = float("-inf")) -> str | None:
        """A version for the start of a call, from a read that began at `since` (the loop's time) or later."""
        if self._known_at >= since and asyncio.get_running_loop().time() - self._known_at < FRESH_S:
            return self._known
        return await self.after()

    async def after(self) -> str | None:
        """A version from a read that begins now or later."""
        running = self._running
        if running is not None and not running.done():
            await asyncio.wait({running})  # it began before this call ended, so its answer may be too old
        if self._running is running or self._running is None:
            self._running = asyncio.create_task(self._read())
        return await asyncio.shield(self._running)

    async def _read(self) -> str | None:
        began = asyncio.get_running_loop().time()
        self._known = await self._fetch()
        self._known_at = began
        return self._known
