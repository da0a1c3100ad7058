"""Results as they come and their acknowledgement, for both clients."""

from __future__ import annotations

from collections.abc import AsyncIterator, Collection, Iterable, Iterator
from typing import Any

from polarq.client.acknowledging import acknowledge_async, acknowledge_now, batches, is_rollout_id
from polarq.client.results import Trajectories
from polarq.client.streaming import OUTAGE_S, Stream, carry_out, carry_out_async
from polarq.contracts.rollout import RolloutResult, TaskResult
from polarq.errors import InvalidInput, TaskNotFound
from polarq.ledger import AsyncLedger, Calls, Ledger
from polarq.store.archive import Archive
from polarq.topology import Topology


def _stream(
    calls: Calls, task_ids: str | Iterable[str], run_id: str | None, *, seen: Collection[str], **how: Any
) -> Stream:
    several = [task_ids] if isinstance(task_ids, str) else list(task_ids)
    if not several and run_id is None:
        raise InvalidInput("results", ["name the tasks, or give a run_id"])
    return Stream(calls, several, run_id, seen=frozenset(seen), **how)


class ReadsResults:
    """What `Client` can do with results beside `get` and `wait`."""

    ledger: Ledger
    topology: Topology

    def results(
        self,
        task_ids: str | Iterable[str] = (),
        *,
        run_id: str | None = None,
        trajectories: Trajectories | str = Trajectories.FULL,
        seen: Collection[str] = (),
        timeout_s: float | None = None,
        outage_s: float = OUTAGE_S,
    ) -> Iterator[RolloutResult]:
        """Each rollout's result as it commits, of these tasks and of all tasks of the run: those that ended before
        too, each once. Ends when all have ended; a run's tasks that are submitted meanwhile are followed as well.

        Acknowledged rollouts are left out, and those in `seen` (rollout ids): a trainer that stores, then
        acknowledges, goes on after its own restart where it was.

        Raises `ResultTimeout` when `timeout_s` are over and rollouts are still under way, `TaskNotFound` for a task
        that is not in the ledger, `LedgerUnavailable` when Redis is away at the start, or later for `outage_s`, and at
        the very end `PayloadMissing` when something that was captured is not in the store.
        """
        how: dict[str, Any] = {
            "trajectories": Trajectories(trajectories),
            "seen": seen,
            "timeout_s": timeout_s,
            "outage_s": outage_s,
        }
        stream = _stream(self.ledger.calls, task_ids, run_id, **how)
        return (step for step in carry_out(stream, self.ledger) if isinstance(step, RolloutResult))

    def groups(
        self,
        task_ids: str | Iterable[str] = (),
        *,
        run_id: str | None = None,
        trajectories: Trajectories | str = Trajectories.FULL,
        seen: Collection[str] = (),
        timeout_s: float | None = None,
        outage_s: float = OUTAGE_S,
    ) -> Iterator[TaskResult]:
        """As `results`, a whole task at a time, as each ends. A task is left out when all its rollouts are."""
        how: dict[str, Any] = {
            "trajectories": Trajectories(trajectories),
            "seen": seen,
            "timeout_s": timeout_s,
            "outage_s": outage_s,
        }
        stream = _stream(self.ledger.calls, task_ids, run_id, whole_tasks=True, **how)
        return (step for step in carry_out(stream, self.ledger) if isinstance(step, TaskResult))

    def acknowledge(self, target: str | Iterable[str]) -> int:
        """Says that these results are stored: a task id (or one rollout id), or several rollout ids. Their payloads
        and captured calls are archived, if the deployment has an archive, and deleted; outcome and reward stay.

        Answers how many were not acknowledged before. Raises `NotEnded` when one has not ended, `TaskNotFound`,
        `ArchiveFailed`; of the task it is raised for, nothing was acknowledged (of several tasks, those before were).
        """
        archive = Archive.of(self.topology)
        if not isinstance(target, str):
            return sum(acknowledge_now(self.ledger, archive, *batch) for batch in batches(target))
        try:
            return acknowledge_now(self.ledger, archive, target, ())
        except TaskNotFound:
            if not is_rollout_id(target):
                raise
            return self.acknowledge([target])


class ReadsResultsAsync:
    """The same for `AsyncClient`; see `ReadsResults`."""

    ledger: AsyncLedger
    topology: Topology

    async def results(
        self,
        task_ids: str | Iterable[str] = (),
        *,
        run_id: str | None = None,
        trajectories: Trajectories | str = Trajectories.FULL,
        seen: Collection[str] = (),
        timeout_s: float | None = None,
        outage_s: float = OUTAGE_S,
    ) -> AsyncIterator[RolloutResult]:
        how: dict[str, Any] = {
            "trajectories": Trajectories(trajectories),
            "seen": seen,
            "timeout_s": timeout_s,
            "outage_s": outage_s,
        }
        stream = _stream(self.ledger.calls, task_ids, run_id, **how)
        async for step in carry_out_async(stream, self.ledger):
            if isinstance(step, RolloutResult):
                yield step

    async def groups(
        self,
        task_ids: str | Iterable[str] = (),
        *,
        run_id: str | None = None,
        trajectories: Trajectories | str = Trajectories.FULL,
        seen: Collection[str] = (),
        timeout_s: float | None = None,
        outage_s: float = OUTAGE_S,
    ) -> AsyncIterator[TaskResult]:
        how: dict[str, Any] = {
            "trajectories": Trajectories(trajectories),
            "seen": seen,
            "timeout_s": timeout_s,
            "outage_s": outage_s,
        }
        stream = _stream(self.ledger.calls, task_ids, run_id, whole_tasks=True, **how)
        async for step in carry_out_async(stream, self.ledger):
            if isinstance(step, TaskResult):
                yield step

    async def acknowledge(self, target: str | Iterable[str]) -> int:
        archive = Archive.of(self.topology)
        if not isinstance(target, str):
            return sum([await acknowledge_async(self.ledger, archive, *batch) for batch in batches(target)])
        try:
            return await acknowledge_async(self.ledger, archive, target, ())
        except TaskNotFound:
            if not is_rollout_id(target):
                raise
            return await self.acknowledge([target])
