"""How many rollouts may be in which stage at once.

Preparing and scoring never hold a run slot, and a prepared sandbox that waits for a run slot holds no prepare slot. A
sandbox is prepared only when it will have somewhere to go: a free run slot, or a place in the bounded ready buffer.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

from polarq.contracts.node import StageMetrics


@dataclass(slots=True)
class _Counts:
    prepare_queue: int = 0
    preparing: int = 0
    ready: int = 0
    running: int = 0
    post_queue: int = 0
    post: int = 0


class Slots:
    """The stage limits of one node, on one loop. Limits may be changed while rollouts run."""

    def __init__(self, *, prepare: int, ready: int, run: int, post: int) -> None:
        self.prepare_limit, self.ready_limit, self.run_limit, self.post_limit = prepare, ready, run, post
        self._n = _Counts()
        self._changed = asyncio.Condition()

    def metrics(self) -> StageMetrics:
        n = self._n
        return StageMetrics(
            init_queue_depth=n.prepare_queue,
            init_inflight=n.preparing,
            ready_depth=n.ready,
            run_inflight=n.running,
            postrun_queue_depth=n.post_queue,
            postrun_inflight=n.post,
        )

    def _may_prepare(self) -> bool:
        n = self._n
        places = self.ready_limit + max(0, self.run_limit - n.running)
        return n.preparing < self.prepare_limit and n.preparing + n.ready < places

    @asynccontextmanager
    async def preparing(self) -> AsyncIterator[None]:
        """Holds a prepare slot. What comes out of it waits in `running`, which holds a ready place meanwhile."""
        async with self._changed:
            self._n.prepare_queue += 1
            try:
                await self._changed.wait_for(self._may_prepare)
            finally:
                self._n.prepare_queue -= 1
            self._n.preparing += 1
        try:
            yield
        finally:
            await self._leave("preparing")

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Waits in the ready buffer, then holds a run slot."""
        async with self._changed:
            self._n.ready += 1
            try:
                await self._changed.wait_for(lambda: self._n.running < self.run_limit)
                self._n.running += 1
            finally:
                self._n.ready -= 1
                self._changed.notify_all()
        try:
            yield
        finally:
            await self._leave("running")

    @asynccontextmanager
    async def post(self) -> AsyncIterator[None]:
        """Holds a slot for building and scoring."""
        async with self._changed:
            self._n.post_queue += 1
            try:
                await self._changed.wait_for(lambda: self._n.post < self.post_limit)
            finally:
                self._n.post_queue -= 1
            self._n.post += 1
        try:
            yield
        finally:
            await self._leave("post")

    async def _leave(self, stage: str) -> None:
        # Shielded: a slot whose holder is cancelled a second time must still be given back.
        await asyncio.shield(self._given_back(stage))

    async def _given_back(self, stage: str) -> None:
        async with self._changed:
            setattr(self._n, stage, getattr(self._n, stage) - 1)
            self._changed.notify_all()
