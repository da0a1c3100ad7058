"""The trainer's side for threads and plain scripts: submit, wait, follow, read, hold back."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from typing import TYPE_CHECKING, Self, TypeVar

from polarq.client import acknowledging, controls, pausing, reading, submitting
from polarq.client.deployment import Deployment, TaskSource
from polarq.client.pausing import LEASE_S, TIMEOUT_S, InferenceState, of_run
from polarq.client.results import Trajectories
from polarq.client.routing import choose_queues
from polarq.client.steps import OUTAGE_S, Outage, Steps, each, outcome
from polarq.client.streaming import stream
from polarq.contracts.base import check_id
from polarq.contracts.event import Event
from polarq.contracts.node import NodeRecord
from polarq.contracts.rollout import RolloutResult, TaskResult
from polarq.contracts.task import Task
from polarq.ledger import Cancelled, Ledger, Submitted, TaskHead, TaskRecord
from polarq.ledger.control import RunState, run_state
from polarq.ledger.limits import BY_COMMAND, Published, publish, published
from polarq.ledger.policy import set_policy_version
from polarq.settings import Settings
from polarq.store.archive import Archive
from polarq.store.pauses import PauseMode
from polarq.topology import Topology
from polarq.topology.models import LimitsSection

if TYPE_CHECKING:
    from celery import Celery

R = TypeVar("R")


class Client(Deployment):
    """Submits tasks, reads results, and holds work back.

    Every method raises `LedgerUnavailable` when Redis does not answer.
    """

    def __init__(
        self, topology: Topology | None = None, settings: Settings | None = None, app: Celery | None = None
    ) -> None:
        super().__init__(topology, settings, app)
        self.ledger = Ledger(self.url, self.calls)

    def _do(self, steps: Steps[R]) -> R:
        return outcome(self.ledger, steps)

    # --- tasks

    def submit(self, source: TaskSource, *, celery_id: str | None = None) -> Submitted:
        """Records the task and rings its doorbells. The same request under the same task_id is the same task.

        Raises `InvalidTask`, `TaskConflict` or `QueueFull`; then nothing was recorded.
        """
        return self._do(submitting.submit(self, source, celery_id))

    def waiting_for(self, task_id: str) -> str | None:
        """What the task's waiting rollouts wait for, in one line; None: for nothing but a free place, or none waits."""
        return self._do(submitting.waiting_for(self, task_id))

    def cancel(self, task_id: str, *, register_if_missing: bool = False) -> Cancelled:
        """Cancels a task, or one rollout when given a rollout id. Raises `TaskNotFound` unless registered ahead."""
        return self._do(submitting.cancel(self, task_id, register_if_missing=register_if_missing))

    def get(self, task_id: str, trajectories: Trajectories | str = Trajectories.FULL) -> TaskResult:
        """The task as it is now, with its ended rollouts. Raises `TaskNotFound`."""
        return self._do(reading.get(self.calls, task_id, Trajectories(trajectories)))

    def rollout(self, rollout_id: str) -> RolloutResult:
        """One ended rollout with its trajectory. Raises `TaskNotFound` when it has not ended or is unknown."""
        return self._do(reading.rollout(self.calls, rollout_id))

    def head(self, task_id: str) -> TaskHead:
        """A task's state and counters, without its rollouts. Raises `TaskNotFound`."""
        return self._do(reading.head_of(self.calls, task_id))

    def record(self, task_id: str) -> TaskRecord:
        """The ledger's own picture of a task. Raises `TaskNotFound`."""
        return self._do(reading.record_of(self.calls, task_id))

    def wait(
        self,
        task_id: str,
        timeout_s: float | None = None,
        trajectories: Trajectories | str = Trajectories.FULL,
    ) -> TaskResult:
        """Waits until every rollout of the task has ended. Raises `ResultTimeout`; the task then goes on."""
        return self._do(reading.wait(self.calls, task_id, timeout_s, Trajectories(trajectories)))

    def follow(
        self, task_id: str | None = None, after: str | None = None, wait_s: float = 15.0, outage_s: float = OUTAGE_S
    ) -> Iterator[Event]:
        """Events as they happen, of one task (until it ends) or of everything (endless). Resumable with `after`.

        Raises `TaskNotFound`, and `LedgerUnavailable` when Redis is away at the start, or later for `outage_s`.
        """
        return each(self.ledger, reading.follow(self.calls, task_id, after, wait_s, Outage(outage_s)))

    # --- results

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
        steps = stream(
            self.calls, task_ids, run_id, Trajectories(trajectories), seen, timeout_s=timeout_s, outage_s=outage_s
        )
        return each(self.ledger, steps)

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
        steps = stream(
            self.calls, task_ids, run_id, Trajectories(trajectories), seen,
            whole_tasks=True, timeout_s=timeout_s, outage_s=outage_s,
        )  # fmt: skip
        return each(self.ledger, steps)

    def acknowledge(self, target: str | Iterable[str]) -> int:
        """Says that these results are stored: a task id (or one rollout id), or several rollout ids. Their payloads
        and captured calls are archived, if the deployment has an archive, and deleted; outcome and reward stay.

        Answers how many were not acknowledged before. Raises `NotEnded` when one has not ended, `TaskNotFound`,
        `ArchiveFailed`; of the task it is raised for, nothing was acknowledged (of several tasks, those before were).
        """
        return self._do(acknowledging.acknowledge(self.calls, Archive.of(self.topology), target))

    # --- runs

    def run(self, run_id: str) -> RunState:
        """One run, whether anything of it was ever submitted or not."""
        return self.ledger.do(run_state(self.calls.keys, check_id("run", run_id)))

    def runs(self) -> list[RunState]:
        """Runs of which the ledger has a task, a policy version or a pause."""
        return self._do(controls.runs(self))

    def pause_run(self, run_id: str) -> RunState:
        """Nothing of the run is started until `resume_run`; what runs goes on, and submits are taken."""
        return self._do(controls.pause_run(self, run_id, on=True))

    def resume_run(self, run_id: str) -> RunState:
        return self._do(controls.pause_run(self, run_id, on=False))

    def limits(self) -> Published:
        """The deployment's limits, or where nobody has published any, those of the topology."""
        return self.ledger.do(published(self.calls.keys, self.topology.limits))

    def set_limits(self, limits: LimitsSection) -> Published:
        """Makes these the deployment's limits, for whoever submits and every worker, until they are set again."""
        self.ledger.do(publish(self.calls, limits, BY_COMMAND, anyway=True))
        return self.limits()

    def set_policy_version(self, run_id: str, version: int) -> RunState:
        """Says that the run's engines sample with policy `version` from now on. A rollout that is claimed later records
        it (`RolloutRecord.policy_version`), so that its staleness is the version now less that one. Raises
        `InvalidInput`."""
        self.ledger.do(set_policy_version(self.calls, run_id, version))
        return self.run(run_id)

    # --- model calls

    def inference_state(self, run_id: str | None = None) -> InferenceState:
        """Whether model calls are held back, and how many are in flight. With a run: its own pause, and its calls."""
        return self._do(pausing.inference_state(self.calls, of_run(run_id)))

    def pause_inference(
        self,
        *,
        mode: PauseMode = "drain",
        timeout_s: float = TIMEOUT_S,
        lease_s: float = LEASE_S,
        run_id: str | None = None,
    ) -> InferenceState:
        """Holds every model call back, and returns when none is in flight on any live node. Raises `NotPaused`. With a
        run: that run's calls only; the two kinds of pause end independently of each other.

        `drain` lets calls in flight end, `abort` cuts them (what they sampled is kept, and what no harness has seen
        is sampled anew after the pause). The pause ends by itself after `lease_s`.
        """
        steps = pausing.pause_inference(
            self.calls, mode=mode, timeout_s=timeout_s, lease_s=lease_s, run_id=of_run(run_id)
        )
        return self._do(steps)

    def resume_inference(self, run_id: str | None = None) -> bool:
        """Ends the pause; whether there was one."""
        return self._do(pausing.resume_inference(self.calls, of_run(run_id)))

    # --- nodes

    def nodes(self) -> list[NodeRecord]:
        return self.ledger.nodes()

    def drain(self, node_id: str, on: bool = True, deadline_s: float | None = None) -> NodeRecord:
        """Sets or clears a node's drain: it takes nothing new and finishes what it has. What has not ended after
        `deadline_s` seconds goes back to the queue, for other nodes; without one there is no hurry. This and the next
        three answer how the node then is, and raise `NodeNotFound` for one that never announced itself."""
        return self._do(controls.drain(self, node_id, on, deadline_s))

    def pause_node(self, node_id: str, on: bool = True) -> NodeRecord:
        """A paused node takes nothing new; what it has goes on. `resume_node` ends it."""
        return self._do(controls.pause_node(self, node_id, on))

    def resume_node(self, node_id: str) -> NodeRecord:
        return self.pause_node(node_id, on=False)

    def set_capacity(self, node_id: str, run_workers: int | None) -> NodeRecord:
        """How many harnesses a node runs at once, from now on; None: what its topology says. Nothing that runs is
        interrupted by a smaller number."""
        return self._do(controls.set_capacity(self, node_id, run_workers))

    def ring_again(self, task: Task, index: int, *, leaving: str | None = None) -> None:
        """Publishes a doorbell for one waiting rollout; `leaving` is a node that should not get it if others can."""
        others = [node for node in self.ledger.nodes() if node.node_id != leaving]
        for queue in choose_queues(task, others, self.topology, 1):
            self.ring(task, {index: queue})

    def close(self) -> None:
        self.ledger.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
