"""What recipes left on this node's disk: made once, whoever asks at the same time; the longest unused go."""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from polarq.contracts.sandbox import ScrubbedHistory
from polarq.errors import CannotBeKept, DiskFull, RuntimeFault, UnknownPlugin
from polarq_worker.runtimes.base import Runtime, Snapshot
from polarq_worker.stages.prepare import PrepareFailed
from polarq_worker.warm.making import Maker
from polarq_worker.warm.notes import Note, Notes
from polarq_worker.warm.recipe import Recipe, Recipes

log = logging.getLogger("polarq.worker.warm")

_MB = 1_000_000
_REMEMBERED = 10_000
_FULL_S = 600.0
"""So long no snapshot of a recipe is tried again for which the disk had no room."""


class RecipeChanged(RuntimeFault):
    """Files on disk were written while they were uploaded: what was made is neither the old recipe's nor the new."""


class _NoRoom(CannotBeKept):
    """For a while; it is noted and said."""


@dataclass(eq=False, slots=True)
class Kept:
    """A snapshot that is there. Whoever starts from it is one of its `users` until that sandbox has ended."""

    runtime: type[Runtime]
    snapshot: Snapshot
    history: Sequence[ScrubbedHistory]
    used_at: float
    """Time stamp: it outlives the worker."""
    users: int = 0


@dataclass(eq=False, slots=True)
class _Flight:
    making: asyncio.Task[Kept]
    budget_s: float
    waiting: int = 0


@dataclass(slots=True)
class Lease:
    """The right to start from a snapshot: it stays until `Snapshots.release`."""

    kept: Kept
    made: bool
    """It was made for whoever has this, and for others who waited with it."""

    @property
    def reference(self) -> str:
        return self.kept.snapshot.reference


@dataclass(slots=True)
class Counts:
    made: int = 0
    dropped: int = 0
    listed: set[type[Runtime]] = field(default_factory=set)


class Snapshots:
    """One node's. `logs` gets what preparing printed, a folder per recipe."""

    def __init__(self, maker: Maker, recipes: Recipes, logs: Path) -> None:
        self.kept: dict[str, Kept] = {}
        self.counts = Counts()
        self._maker = maker
        self._recipes = recipes
        self._logs = logs
        self._flights: dict[str, _Flight] = {}
        self._makings: set[asyncio.Task[Kept]] = set()
        """Of all flights, those too that nobody waits for any more."""
        self._notes = Notes(maker.host.folder)
        self._unkept: dict[str, float] = {}
        """Recipes of which none can be kept, and until when."""
        self._listing = asyncio.Lock()
        self._dropping = asyncio.Lock()
        self._dropping_tasks: set[asyncio.Task[None]] = set()

    @property
    def size_mb(self) -> float:
        return sum(kept.snapshot.size_bytes for kept in self.kept.values()) / _MB

    def logs_of(self, recipe: Recipe) -> Path:
        return self._logs / "recipes" / recipe.key / "prepare"

    def has(self, recipe: Recipe) -> bool:
        """Whether it is known to be there: cheap, for choices that may be wrong."""
        return recipe.key in self.kept

    def can_keep(self, recipe: Recipe) -> bool:
        """Whether there is any use in asking for one."""
        if not recipe.has_work or self._unkept.get(recipe.key, 0.0) > time.monotonic():
            return False
        return recipe.runtime.takes_snapshots(self._maker.host)

    async def settle(self) -> None:
        """Before anything is made, by the one worker of the node: notes go that a killed one wrote of what it never
        made, and what there is no room for."""
        notes = await asyncio.to_thread(self._notes.all)
        for name in sorted({note.runtime for note in notes.values()}):
            try:
                await self._list(self._maker.named(name))
            except (RuntimeFault, UnknownPlugin) as exc:
                log.info("notes of snapshots of runtime '%s' are left as they are: %s", name, exc)
                continue
            for key, note in notes.items():
                if note.runtime == name and key not in self.kept:
                    await asyncio.to_thread(self._notes.drop, key)
        self._make_room_soon()

    async def lease(self, recipe: Recipe, budget_s: float) -> Lease:
        """Makes it where there is none, in at most `budget_s` seconds. However many ask for one, it is made once, and
        who waited shares its fate. Raises `PrepareFailed`, `RecipeChanged`, `CannotBeKept`, `RuntimeFault`,
        `UnknownPlugin`, `InvalidTask`."""
        await self._list(recipe.runtime)
        while True:
            if (kept := self.kept.get(recipe.key)) is not None:
                return self._leased(kept, made=False)
            flight = self._flights.get(recipe.key) or self._begin(recipe, budget_s)
            flight.waiting += 1
            try:
                return self._leased(await asyncio.shield(flight.making), made=True)
            except PrepareFailed as exc:
                if not exc.timed_out or flight.budget_s >= budget_s:
                    raise
                # Somebody else's budget was too short for it.
            finally:
                flight.waiting -= 1
                if not flight.waiting:
                    self._nobody_waits(recipe, flight)

    def release(self, lease: Lease) -> None:
        """Once per lease, when what was started from it has ended."""
        lease.kept.users -= 1
        self._make_room_soon()

    async def is_gone(self, lease: Lease) -> bool:
        """Whether somebody removed it; then it is forgotten, and can be made again. Raises `RuntimeFault`."""
        kept = lease.kept
        there = await kept.runtime.snapshots(self._maker.host)
        if any(snapshot.name == kept.snapshot.name for snapshot in there):
            return False
        if self.kept.get(kept.snapshot.name) is kept:
            del self.kept[kept.snapshot.name]
        return True

    async def aclose(self) -> None:
        """Nothing is made any more."""
        for flight in self._flights.values():
            flight.making.cancel()
        if working := [*self._makings, *self._dropping_tasks]:
            await asyncio.wait(working)

    # --- making

    def _begin(self, recipe: Recipe, budget_s: float) -> _Flight:
        making = asyncio.create_task(self._make(recipe, budget_s), name=f"snapshot {recipe.key}")
        self._makings.add(making)
        making.add_done_callback(self._makings.discard)
        flight = self._flights[recipe.key] = _Flight(making, budget_s)
        making.add_done_callback(lambda _: self._forget(recipe, flight))
        return flight

    def _forget(self, recipe: Recipe, flight: _Flight) -> None:
        if self._flights.get(recipe.key) is flight:
            del self._flights[recipe.key]

    def _nobody_waits(self, recipe: Recipe, flight: _Flight) -> None:
        if not flight.making.done():
            # A new one must not join what is being given up.
            self._forget(recipe, flight)
            flight.making.cancel()
        elif not flight.making.cancelled() and flight.making.exception() is None:
            flight.making.result().users -= 1
            self._make_room_soon()

    async def _make(self, recipe: Recipe, budget_s: float) -> Kept:
        maker = self._maker
        runtime = maker.create(recipe, maker.neutral_id())
        no_room = False
        try:
            await maker.start(runtime, None, online=recipe.prepared_online)
            history = await maker.carry_out(recipe, runtime, budget_s)
            if (await self._recipes.again(recipe)).key != recipe.key:
                raise RecipeChanged("files that prepare uploads were changed while it did so")
            snapshot = await self._taken(recipe, runtime, history)
        except _NoRoom:
            no_room = True
            raise
        except CannotBeKept as exc:
            log.info("recipe %s is prepared for each rollout: %s", recipe.key, exc)
            self._note_unkept(recipe, math.inf)
            raise
        except asyncio.CancelledError:
            # It may have come to be nevertheless.
            self.counts.listed.discard(recipe.runtime)
            raise
        finally:
            try:
                await maker.keep_logs(runtime, self.logs_of(recipe))
            finally:
                ending = maker.end(runtime)
                if no_room:
                    # Whoever goes on without it needs the place.
                    await asyncio.wait([ending])
        self.counts.made += 1
        # The first use is the flight's own, until all that waited have theirs.
        kept = self.kept[recipe.key] = Kept(recipe.runtime, snapshot, history, time.time(), users=1)
        log.info("recipe %s is kept as a snapshot of %d MB", recipe.key, snapshot.size_bytes // _MB)
        return kept

    async def _taken(self, recipe: Recipe, runtime: Runtime, history: Sequence[ScrubbedHistory]) -> Snapshot:
        """Raises `CannotBeKept`, also where the disk has no room for it; `RuntimeFault`."""
        async with self._dropping:
            pass  # One of the same name that is just being dropped goes first, with its note.
        note = Note(runtime=recipe.spec.import_path or recipe.spec.backend, history=list(history))
        try:
            await asyncio.to_thread(self._notes.write, recipe.key, note)
            return await runtime.snapshot(recipe.key)
        except RuntimeFault as exc:
            if recipe.key not in self.kept:
                await asyncio.to_thread(self._notes.drop, recipe.key)
            if not isinstance(exc, DiskFull):
                raise
            log.warning("recipe %s is prepared for each rollout for the next %g s: %s", recipe.key, _FULL_S, exc)
            self._note_unkept(recipe, time.monotonic() + _FULL_S)
            raise _NoRoom(str(exc)) from exc

    def _note_unkept(self, recipe: Recipe, until: float) -> None:
        self._unkept[recipe.key] = until
        while len(self._unkept) > _REMEMBERED:
            del self._unkept[next(iter(self._unkept))]

    # --- keeping

    def _leased(self, kept: Kept, *, made: bool) -> Lease:
        kept.users += 1
        kept.used_at = time.time()
        self._notes.used(kept.snapshot.name)
        return Lease(kept, made)

    async def _list(self, runtime: type[Runtime]) -> None:
        """Those of earlier workers, once per backend."""
        async with self._listing:
            if runtime in self.counts.listed:
                return
            for snapshot in await runtime.snapshots(self._maker.host):
                if snapshot.name not in self.kept:
                    note, used_at = await asyncio.to_thread(self._notes.read, snapshot.name)
                    self.kept[snapshot.name] = Kept(runtime, snapshot, note.history, used_at)
            self.counts.listed.add(runtime)

    def _make_room_soon(self) -> None:
        task = asyncio.create_task(self._make_room(), name="room for snapshots")
        self._dropping_tasks.add(task)
        task.add_done_callback(self._dropping_tasks.discard)

    async def _make_room(self) -> None:
        """Drops what has been unused for longest until the rest fits."""
        most = self._maker.host.settings.pool.snapshots_mb
        async with self._dropping:
            while self.size_mb > most or (not most and self.kept):
                unused = [kept for kept in self.kept.values() if not kept.users]
                if not unused:
                    return
                kept = min(unused, key=lambda one: one.used_at)
                del self.kept[kept.snapshot.name]
                self.counts.dropped += 1
                await self._drop(kept)

    async def _drop(self, kept: Kept) -> None:
        name = kept.snapshot.name
        try:
            await kept.runtime.drop_snapshot(kept.snapshot.reference, self._maker.host)
        except RuntimeFault as exc:
            log.error("snapshot %s cannot be removed: %s", name, exc)
        if name not in self.kept:
            self._notes.drop(name)
