"""How many rollouts may be in which stage at once.

A rollout takes a seat and moves it from stage to stage. Preparing and scoring never hold a run slot, and a prepared
sandbox that waits for a run slot holds no prepare slot. A sandbox is prepared only when it will have somewhere to go:
a free run slot, or a place in the bounded ready buffer. Within a stage, who came first goes first.

Everything happens on one loop and between two awaits, so each move is atomic.
"""

from __future__ import annotations

import asyncio
from collections import Counter, deque
from typing import Literal, Self

from polarq.contracts.node import StageMetrics

Stage = Literal["prepare", "run", "post"]

_WAITING: dict[Stage, str] = {"prepare": "prepare_queue", "run": "ready", "post": "post_queue"}
"""What a seat counts as while it waits for a stage."""


class Slots:
    """The stage limits of one node. Limits may be changed while rollouts run; call `pump` after it."""

    def __init__(self, *, prepare: int, ready: int, run: int, post: int) -> None:
        self.limits: dict[Stage, int] = {"prepare": prepare, "run": run, "post": post}
        self.ready_limit = ready
        self._held: Counter[str] = Counter()
        self._queues: dict[Stage, deque[tuple[Seat, asyncio.Future[None]]]] = {
            "post": deque(),
            "run": deque(),
            "prepare": deque(),
        }

    def resize(self, *, run: int, ready: int) -> None:
        """Changes how many run at once. What runs beyond a smaller number goes on to its end."""
        self.limits["run"], self.ready_limit = run, ready
        self.pump()

    def seat(self) -> Seat:
        return Seat(self)

    def metrics(self) -> StageMetrics:
        n = self._held
        return StageMetrics(
            init_queue_depth=n["prepare_queue"],
            init_inflight=n["prepare"],
            ready_depth=n["ready"],
            run_inflight=n["run"],
            postrun_queue_depth=n["post_queue"],
            postrun_inflight=n["post"],
        )

    def _may_enter(self, stage: Stage) -> bool:
        if self._held[stage] >= self.limits[stage]:
            return False
        if stage != "prepare":
            return True
        places = self.ready_limit + max(0, self.limits["run"] - self._held["run"])
        return self._held["prepare"] + self._held["ready"] < places

    def pump(self) -> None:
        """Lets in whoever may now go on. A run slot taken frees a ready place, hence the order."""
        for stage, queue in self._queues.items():
            while queue and self._may_enter(stage):
                seat, granted = queue.popleft()
                if not granted.done():
                    seat._count_as(stage)
                    granted.set_result(None)

    def _wait(self, stage: Stage, seat: Seat) -> asyncio.Future[None]:
        granted: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._queues[stage].append((seat, granted))
        self.pump()
        return granted

    def _shift(self, before: str | None, after: str | None) -> None:
        if before is not None:
            self._held[before] -= 1
        if after is not None:
            self._held[after] += 1


class Seat:
    """One rollout's place among the stages. Leaving the `with` gives back whatever it holds."""

    def __init__(self, slots: Slots) -> None:
        self._slots = slots
        self._at: str | None = None

    async def enter(self, stage: Stage) -> None:
        """Leaves the present stage at once, and waits for a place in the next one."""
        self._count_as(_WAITING[stage])
        await self._slots._wait(stage, self)

    def _count_as(self, what: str | None) -> None:
        self._slots._shift(self._at, what)
        self._at = what

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        self._count_as(None)
        self._slots.pump()
