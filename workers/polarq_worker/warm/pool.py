"""Sandboxes of a node, ready before they are needed.

A rollout that asks gets, in this order: one of its recipe that waits idle and is alive; one that is being made ahead;
one made for it now, from the recipe's snapshot where the backend takes any. What is made ahead is what the node's work
in sight wants (`ahead`), within limits: the snapshots of all that is in sight, and sandboxes for what comes first. What
is in the way of those goes by least recent use. Each is handed out once, except with `reuse: true`.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter, deque
from collections.abc import Sequence
from typing import Any

from polarq.contracts.node import PoolMetrics
from polarq.errors import CannotBeKept, RuntimeFault
from polarq.ledger import Claim
from polarq_worker.outcomes import OF_OTHERS
from polarq_worker.runtimes.base import Runtime
from polarq_worker.runtimes.exec_times import ExecTimes
from polarq_worker.stages.prepare import PrepareFailed
from polarq_worker.warm.idle import Idle, now
from polarq_worker.warm.making import Begun, Maker
from polarq_worker.warm.members import Coming, Handed, Member, Origin, Wish, empty
from polarq_worker.warm.recipe import Recipe
from polarq_worker.warm.snapshots import Lease, Snapshots

log = logging.getLogger("polarq.worker.warm")

_NOT_AGAIN_S = 60.0
"""So long a recipe that failed is not made ahead. A rollout of it tries at once."""


class WarmPool:
    """One node's. Everything happens on one loop."""

    def __init__(self, maker: Maker, snapshots: Snapshots) -> None:
        self._maker = maker
        self._snapshots = snapshots
        self._settings = maker.host.settings.pool
        self._members: dict[str, Member] = {}
        self._idle = Idle(self._settings, self._recipes_coming, self._end)
        self._coming: dict[str, deque[Coming]] = {}
        self._keeping: dict[str, asyncio.Task[None]] = {}
        """Snapshots that are made ahead."""
        self._failed_at: dict[str, float] = {}
        self._handed = Handed()
        self._closed = False

    # --- asked by rollouts

    async def take(self, recipe: Recipe, name: str, claim: Claim | None, budget_s: float, begun: Begun) -> Member:
        """One that nobody else has. `begun` is told of each sandbox before it is started or handed out: whoever asked
        has to `stop` it, also when this raises. `name` is for one that is made now; `claim` goes into its record.

        Raises `PrepareFailed`, `RuntimeFault`, `UnknownPlugin`, `InvalidTask`.
        """
        self._idle.note_use(recipe)
        member = await self._ready(recipe, claim, begun) or await self._made_ahead(recipe, claim, begun)
        if member is None:
            member = await self._made_now(recipe, name, claim, budget_s, begun)
        self._handed.counts[member.origin] += 1
        return member

    async def stop(self, runtime: Runtime) -> None:
        """Raises `RuntimeFault`."""
        member = self._members.pop(runtime.runtime_id, None)
        try:
            await self._maker.stop(runtime)
        finally:
            if member is not None and member.lease is not None:
                self._snapshots.release(member.lease)

    async def give_back(self, runtime: Runtime, *, used: bool) -> bool:
        """Lets the next rollout of its recipe have it; False: there is no place for it, and it has to be stopped. Where
        this raises, that is done."""
        member = self._members.get(runtime.runtime_id)
        if member is None or self._closed or not self._idle.has_room(member.recipe, {}):
            return False
        try:
            if used:
                member.used = True
                runtime.exec_times = ExecTimes()
                await asyncio.to_thread(empty, runtime.host_log_dir)
            await self._maker.note(runtime, None)
        except BaseException:
            self._end(member)
            raise
        self._put(member)
        return True

    # --- ahead of rollouts

    def ahead(self, wanted: Sequence[Wish]) -> int:
        """Begins to make what is missing of `wanted`, which is in the order in which it will be asked for. Answers how
        many were begun. What has no snapshot yet gets that first: it takes longest, and holds no sandbox."""
        if self._closed or not self._settings.max_idle:
            return 0
        there = self._idle.counts()
        there.update(one.recipe.key for waiting in self._coming.values() for one in waiting if not one.taken)
        needed: Counter[str] = Counter()
        begun, full = 0, False
        for wish in wanted:
            recipe = wish.recipe
            needed[recipe.key] += 1
            if there[recipe.key] >= needed[recipe.key]:
                continue
            if recipe.key in self._failed_at and self._failed_at[recipe.key] > now() - _NOT_AGAIN_S:
                continue
            if self.making >= self._settings.max_starting:
                break
            if self._snapshots.can_keep(recipe) and not self._snapshots.has(recipe):
                if recipe.key not in self._keeping:
                    self._keep(wish)
                    begun += 1
            elif not full:
                # What comes later must not take the place of what comes first.
                full = not self._idle.has_room(recipe, needed)
                if not full:
                    there[recipe.key] += 1
                    self._begin(wish)
                    begun += 1
        return begun

    def tidy(self, *, all_of_it: bool = False) -> None:
        """Gives up what has waited for too long, or everything."""
        self._idle.tidy(all_of_it=all_of_it)
        if all_of_it:
            for coming in [one for waiting in self._coming.values() for one in waiting]:
                coming.making.cancel()
            for keeping in self._keeping.values():
                keeping.cancel()

    async def aclose(self) -> None:
        """Stops all that waits, and nothing new is made."""
        self._closed = True
        coming: list[asyncio.Task[Any]] = [one.making for waiting in self._coming.values() for one in waiting]
        coming += self._keeping.values()
        self.tidy(all_of_it=True)
        if coming:
            await asyncio.wait(coming)
        await self._snapshots.aclose()
        await self._maker.ended()

    # --- numbers

    @property
    def idle(self) -> int:
        return len(self._idle)

    @property
    def coming(self) -> int:
        return sum(map(len, self._coming.values()))

    @property
    def making(self) -> int:
        """Sandboxes and snapshots that are being made ahead."""
        return self.coming + len(self._keeping)

    def metrics(self) -> PoolMetrics:
        handed = self._handed.counts
        return PoolMetrics(
            idle=self.idle,
            coming=self.making,
            snapshots=len(self._snapshots.kept),
            snapshots_mb=round(self._snapshots.size_mb),
            taken_warm=handed["warm"] + handed["reused"],
            taken_from_snapshot=handed["snapshot"],
            taken_cold=handed["cold"],
        )

    # --- handing out

    async def _ready(self, recipe: Recipe, claim: Claim | None, begun: Begun) -> Member | None:
        while (member := self._idle.pop(recipe)) is not None:
            handed = False
            try:
                if await self._maker.lives(member.runtime):
                    member.origin = "reused" if member.used else "warm"
                    handed = True
                    begun(member.runtime)
                    await self._maker.note(member.runtime, claim)
                    return member
            finally:
                if not handed:
                    self._end(member)
        return None

    async def _made_ahead(self, recipe: Recipe, claim: Claim | None, begun: Begun) -> Member | None:
        """Waits for one that was begun before it was asked for; None: there is none, or it came to nothing that says
        anything of this rollout. Raises as `take`."""
        coming = next((one for one in self._coming.get(recipe.key, ()) if not one.taken), None)
        if coming is None:
            return None
        coming.taken = True
        try:
            await asyncio.wait([coming.making])
        except asyncio.CancelledError:
            coming.taken = False
            self._put_if_landed(coming)
            raise
        if coming.making.cancelled():
            return None
        problem = coming.making.exception()
        if isinstance(problem, PrepareFailed) and problem.timed_out:
            # Its budget was another task's.
            return None
        if problem is not None:
            raise problem
        member = coming.making.result()
        member.origin = "warm"
        begun(member.runtime)
        await self._maker.note(member.runtime, claim)
        return member

    async def _made_now(self, recipe: Recipe, name: str, claim: Claim | None, budget_s: float, begun: Begun) -> Member:
        if not self._snapshots.can_keep(recipe):
            return await self._prepared(recipe, name, claim, budget_s, begun)
        again = True
        while True:
            try:
                lease = await self._snapshots.lease(recipe, budget_s)
            except CannotBeKept:
                return await self._prepared(recipe, name, claim, budget_s, begun)
            try:
                return await self._started(recipe, name, claim, lease, begun)
            except RuntimeFault:
                if not again or not await self._snapshots.is_gone(lease):
                    raise
                log.warning("the snapshot of recipe %s is gone; it is made again", recipe.key)
                again = False
                await self.stop(self._members[name].runtime)

    async def _prepared(self, recipe: Recipe, name: str, claim: Claim | None, budget_s: float, begun: Begun) -> Member:
        """Without snapshots, or with nothing to keep."""
        member = Member(self._maker.create(recipe, name), recipe)
        self._members[name] = member
        begun(member.runtime)
        await self._maker.start(member.runtime, claim, online=recipe.online)
        if recipe.has_work:
            member.history = await self._maker.carry_out(recipe, member.runtime, budget_s)
        return member

    async def _started(self, recipe: Recipe, name: str, claim: Claim | None, lease: Lease, begun: Begun) -> Member:
        try:
            runtime = self._maker.create(recipe, name)
        except BaseException:
            self._snapshots.release(lease)
            raise
        origin: Origin = "cold" if lease.made else "snapshot"
        member = Member(runtime, recipe, origin, lease.kept.history, lease)
        self._members[name] = member
        begun(runtime)
        await self._maker.start(runtime, claim, snapshot=lease.reference, online=recipe.online)
        return member

    # --- making ahead

    def _keep(self, wish: Wish) -> None:
        key = wish.recipe.key
        keeping = self._keeping[key] = asyncio.create_task(self._make_snapshot(wish), name=f"snapshot {key} ahead")
        keeping.add_done_callback(lambda _: self._keeping.pop(key))

    async def _make_snapshot(self, wish: Wish) -> None:
        try:
            self._snapshots.release(await self._snapshots.lease(wish.recipe, wish.budget_s))
        except CannotBeKept:
            pass  # It is known now, and said.
        except OF_OTHERS as exc:
            self._failed(wish.recipe, exc)

    def _begin(self, wish: Wish) -> None:
        making = asyncio.create_task(self._make(wish), name=f"warm {wish.recipe.key}")
        coming = Coming(wish.recipe, making)
        self._coming.setdefault(wish.recipe.key, deque()).append(coming)
        making.add_done_callback(lambda _: self._came(coming))

    async def _make(self, wish: Wish) -> Member:
        name = self._maker.neutral_id()
        try:
            return await self._made_now(wish.recipe, name, None, wish.budget_s, lambda _: None)
        except BaseException:
            if (member := self._members.get(name)) is not None:
                self._end(member)
            raise

    def _came(self, coming: Coming) -> None:
        waiting = self._coming[coming.recipe.key]
        waiting.remove(coming)
        if not waiting:
            del self._coming[coming.recipe.key]
        coming.landed = True
        if coming.making.cancelled():
            return
        if (problem := coming.making.exception()) is not None:
            self._failed(coming.recipe, problem)
        elif not coming.taken:
            self._put(coming.making.result())

    def _failed(self, recipe: Recipe, problem: BaseException) -> None:
        long_ago = now() - _NOT_AGAIN_S
        self._failed_at = {key: at for key, at in self._failed_at.items() if at > long_ago}
        self._failed_at[recipe.key] = now()
        log.warning("recipe %s could not be made ahead: %s", recipe.key, problem)

    def _put_if_landed(self, coming: Coming) -> None:
        making = coming.making
        if coming.landed and not making.cancelled() and making.exception() is None:
            self._put(making.result())

    def _put(self, member: Member) -> None:
        if self._closed:
            self._end(member)
            return
        self._idle.put(member)

    def _end(self, member: Member) -> None:
        self._members.pop(member.runtime.runtime_id, None)
        ending = self._maker.end(member.runtime)
        if (lease := member.lease) is not None:
            ending.add_done_callback(lambda _: self._snapshots.release(lease))

    def _recipes_coming(self) -> list[Recipe]:
        return [one.recipe for coming in self._coming.values() for one in coming]
