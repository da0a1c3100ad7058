"""Stage limits: who may prepare, wait, run and score at once."""

from __future__ import annotations

import asyncio
from contextlib import suppress

from polarq_worker.slots import Slots


async def settle() -> None:
    """Lets every task that can go on go on."""
    for _ in range(50):
        await asyncio.sleep(0)


class Rollout:
    """Walks through the slots; each step waits for the test's word."""

    def __init__(self, slots: Slots) -> None:
        self.slots = slots
        self.at = "queued"
        self.go = {stage: asyncio.Event() for stage in ("prepare", "run", "post")}
        self.task = asyncio.create_task(self._walk())

    async def _walk(self) -> None:
        async with self.slots.seat() as seat:
            await seat.enter("prepare")
            self.at = "preparing"
            await self.go["prepare"].wait()
            self.at = "ready"
            await seat.enter("run")
            self.at = "running"
            await self.go["run"].wait()
            await seat.enter("post")
            self.at = "post"
            await self.go["post"].wait()
        self.at = "done"


async def test_preparing_stops_when_the_ready_buffer_is_full() -> None:
    slots = Slots(prepare=4, ready=1, run=1, post=4)
    rollouts = [Rollout(slots) for _ in range(5)]
    await settle()
    # One will run, one may wait: nobody prepares a third.
    assert [r.at for r in rollouts] == ["preparing"] * 2 + ["queued"] * 3
    for rollout in rollouts:
        rollout.go["prepare"].set()
    await settle()
    assert [r.at for r in rollouts] == ["running", "ready"] + ["queued"] * 3
    rollouts[0].go["run"].set()
    await settle()
    assert [r.at for r in rollouts] == ["post", "running", "ready", "queued", "queued"]
    for rollout in rollouts:
        rollout.go["run"].set()
        rollout.go["post"].set()
    await asyncio.gather(*(r.task for r in rollouts))
    assert slots.metrics().model_dump() == dict.fromkeys(slots.metrics().model_dump(), 0)


async def test_scoring_and_waiting_hold_no_run_slot() -> None:
    slots = Slots(prepare=2, ready=2, run=1, post=1)
    rollouts = [Rollout(slots) for _ in range(3)]
    for rollout in rollouts:
        rollout.go["prepare"].set()
    rollouts[0].go["run"].set()
    await settle()
    assert [r.at for r in rollouts] == ["post", "running", "ready"]
    metrics = slots.metrics()
    assert (metrics.run_inflight, metrics.postrun_inflight, metrics.ready_depth) == (1, 1, 1)
    rollouts[1].go["run"].set()
    await settle()
    assert slots.metrics().postrun_queue_depth == 1
    for rollout in rollouts:
        rollout.go["run"].set()
        rollout.go["post"].set()
    await asyncio.gather(*(r.task for r in rollouts))


async def test_cancelling_at_any_stage_gives_every_slot_back() -> None:
    slots = Slots(prepare=1, ready=1, run=1, post=1)
    for stage in ("queued", "preparing", "ready", "running", "post"):
        blockers = [Rollout(slots) for _ in range(3)]
        for rollout in blockers:
            rollout.go["prepare"].set()
        blockers[0].go["run"].set()
        await settle()
        victim = Rollout(slots)
        await settle()
        for rollout in [*blockers, victim]:
            if rollout.at == stage or rollout is victim:
                rollout.task.cancel()
        for rollout in blockers:
            rollout.go["run"].set()
            rollout.go["post"].set()
        for rollout in [*blockers, victim]:
            with suppress(asyncio.CancelledError):
                await rollout.task
        assert slots.metrics().model_dump() == dict.fromkeys(slots.metrics().model_dump(), 0), stage


async def test_a_raised_limit_takes_effect_at_once() -> None:
    slots = Slots(prepare=4, ready=4, run=1, post=4)
    rollouts = [Rollout(slots) for _ in range(4)]
    for rollout in rollouts:
        rollout.go["prepare"].set()
    await settle()
    assert [r.at for r in rollouts].count("running") == 1
    slots.limits["run"] = 3
    slots.pump()
    await settle()
    assert [r.at for r in rollouts].count("running") == 3
    for rollout in rollouts:
        rollout.go["run"].set()
        rollout.go["post"].set()
    await asyncio.gather(*(r.task for r in rollouts))
