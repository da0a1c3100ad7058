"""A sandbox's start, in the middle of which its stop may come."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any

from polarq.errors import RuntimeFault
from polarq_worker.runtimes.processes import uninterrupted


class Starting:
    """One sandbox's: whoever stops it ends the start first, so that nothing is begun any more while it is undone."""

    def __init__(self) -> None:
        self._work: asyncio.Task[None] | None = None
        self._over = False

    async def run(self, work: Coroutine[Any, Any, None]) -> None:
        """Raises `RuntimeFault` where `end` came before `work` was through. Cancelled, it first waits for its end."""
        if self._over:
            work.close()
            raise RuntimeFault("the sandbox was stopped before it was started")
        self._work = task = asyncio.create_task(work)
        try:
            await asyncio.wait([task])
        except asyncio.CancelledError:
            await uninterrupted(self.end())
            raise
        if task.cancelled():
            raise RuntimeFault("the sandbox was stopped while it was being started")
        task.result()

    async def end(self) -> None:
        """What has been begun is for the caller to undo. May be called again."""
        self._over = True
        if self._work is not None and not self._work.done():
            self._work.cancel()
            await asyncio.wait([self._work])
            if not self._work.cancelled():
                # Asked for, so that no failure of one that was given up is said to have been seen by nobody.
                self._work.exception()
