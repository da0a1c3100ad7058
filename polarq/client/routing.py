"""Which nodes can run a task, which nodes' queues are rung for it, and what it waits for otherwise.

A node can run a task when it carries the asked labels, serves the asked model, has the sandbox, and is the one the task
is pinned to. What is not known of a node (one that never started, an engine that never said its model) is never held
against it. A task that no node of the deployment can run is refused; one that no node can run now waits in the ledger,
so that nothing depends on the choice of the queue.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass

from polarq.client.limits import Judge
from polarq.contracts.node import NodeRecord
from polarq.contracts.task import Task
from polarq.errors import InvalidTask
from polarq.ledger.control import RunState
from polarq.topology.models import Node, Topology

_NAMED = 5
"""Nodes that a message names at most."""


@dataclass(frozen=True, slots=True)
class Candidate:
    """A node as far as it is known: its own record, where it ever announced itself, and its place in the topology."""

    node_id: str
    record: NodeRecord | None
    listed: Node | None

    @property
    def labels(self) -> dict[str, str]:
        if self.record is not None:
            return self.record.labels
        return self.listed.labels if self.listed is not None else {}

    @property
    def model(self) -> str:
        """Blank: not known."""
        if self.record is not None and self.record.model:
            return self.record.model
        return self.listed.model_served if self.listed is not None else ""

    @property
    def runtimes(self) -> list[str]:
        """Empty: not known."""
        return self.record.runtimes if self.record is not None else []

    @property
    def in_hand(self) -> int:
        """Rollouts that it has, as its last heartbeat said."""
        if self.record is None:
            return 0
        m = self.record.metrics
        busy = m.init_queue_depth + m.init_inflight + m.ready_depth + m.run_inflight + m.postrun_queue_depth
        return busy + m.postrun_inflight

    @property
    def taken(self) -> int:
        """Rollouts that it has, and doorbells in its queue."""
        return self.in_hand + (0 if self.record is None else self.record.queue_depth)

    @property
    def load(self) -> float:
        """0: idle, 1: as much in hand and waiting as it can hold."""
        return self.taken / self.capacity

    @property
    def free(self) -> int:
        """Places that nothing is in or on its way to."""
        return max(0, self.capacity - self.taken)

    @property
    def room(self) -> int:
        """Doorbells that its queue takes now: for its free places, and a few ahead."""
        return max(0, self.capacity + ahead(self.capacity) - self.taken)

    @property
    def capacity(self) -> int:
        if self.record is not None:
            return self.record.places or (
                self.record.max_init_workers + 2 * self.record.max_run_workers + self.record.max_postrun_workers
            )
        return self.listed.capacity if self.listed is not None else 1

    @property
    def idle_because(self) -> str | None:
        """Why it takes nothing now; None: it does."""
        if self.record is None or not self.record.alive:
            return "is not alive"
        if self.record.draining:
            return "is draining"
        if self.record.paused:
            return "is paused"
        if self.record.stopping:
            return "is stopping"
        return self.record.health.unusable


def fleet_of(nodes: Sequence[NodeRecord], topology: Topology) -> list[Candidate]:
    """Every node of a deployment: those that announced themselves, and those of the topology that did not yet."""
    listed = {node.id: node for node in topology.gateway.nodes}
    template = topology.gateway.nodes[0] if len(listed) == 1 else None
    fleet = [Candidate(node.node_id, node, listed.get(node.node_id, template)) for node in nodes]
    known = {candidate.node_id for candidate in fleet}
    # The one node of a template stands for others once one of them is there.
    if not (template is not None and fleet):
        fleet += [Candidate(node.id, None, node) for node in topology.gateway.nodes if node.id not in known]
    return fleet


def able(task: Task, fleet: Sequence[Candidate]) -> list[Candidate]:
    """The nodes that can run the task, whether they live or not. Raises `InvalidTask` when there are none."""
    left = list(fleet)
    among = ""
    for path, problem, holds, also in _demands(task, fleet):
        kept = [candidate for candidate in left if holds(candidate)]
        if not kept:
            raise InvalidTask("task", [f"{path}: {problem}{among}"])
        left = kept
        among = f"{among}{' and' if among else ' of those that'} {also}"
    return left


Demand = tuple[str, str, Callable[[Candidate], bool], str]
"""The key of the task, what to say when no node meets it, whether one does, and how it goes on in later messages."""


def _demands(task: Task, fleet: Sequence[Candidate]) -> Iterator[Demand]:
    place = task.placement
    if place.node_id is not None:
        known = _list(candidate.node_id for candidate in fleet)
        yield (
            "placement.node_id",
            f"no node '{place.node_id}' (known: {known})",
            lambda c: c.node_id == place.node_id,
            f"are '{place.node_id}'",
        )
    if place.labels:
        wanted = ", ".join(f"{key}={value}" for key, value in place.labels.items())
        yield (
            "placement.labels",
            f"no node carries {wanted}",
            lambda c: all(c.labels.get(key) == value for key, value in place.labels.items()),
            f"carry {wanted}",
        )
    if place.model is not None:
        served = _list(candidate.model for candidate in fleet if candidate.model)
        yield (
            "placement.model",
            f"no node serves '{place.model}' (served: {served})",
            lambda c: c.model in {"", place.model},
            f"serve '{place.model}'",
        )
    if task.runtime is None:
        yield (
            "runtime",
            "the task names none, and no node has a default_runtime",
            lambda c: c.record is None or c.record.default_runtime is not False,
            "have a default_runtime",
        )
    elif task.runtime.import_path is None:
        backend = task.runtime.backend
        installed = _list(name for candidate in fleet for name in candidate.runtimes)
        yield (
            "runtime.backend",
            f"no node has '{backend}' (installed: {installed})",
            lambda c: not c.runtimes or backend in c.runtimes,
            f"have '{backend}'",
        )


def ahead(capacity: int) -> int:
    """Doorbells in a full node's queue, so that a place that gets free is taken at once."""
    return 2 + capacity // 8


def choose_queues(
    task: Task,
    nodes: Sequence[NodeRecord],
    topology: Topology,
    count: int | None = None,
    judge: Judge | None = None,
) -> list[str]:
    """Queues to ring for a task's `count` rollouts (all of them), one entry per doorbell, least loaded nodes first.

    Fewer than `count`, or none, when no more have a place soon: a doorbell is for a place and not for a rollout, and
    the node that rings itself (it does when a place gets free, and when it starts to take work) gives the place to what
    stands first in line. Raises `InvalidTask` for a task that no node can run, or may by their rules.
    """
    can = able(task, fleet_of(nodes, topology))
    if judge is not None:
        problems = {c.node_id: judge.problems(c.node_id) for c in can}
        willing = [c for c in can if not problems[c.node_id]]
        if not willing:
            raise InvalidTask("task", problems[can[0].node_id])
        can = willing
    takers = [c for c in can if c.idle_because is None]
    wanted = task.num_samples if count is None else count
    if task.placement.policy == "together":
        takers = sorted(takers, key=lambda c: (c.load, c.node_id))[:1]
    return _spread(takers, wanted)


def why_waiting(
    task: Task, nodes: Sequence[NodeRecord], topology: Topology, run: RunState, most: int | None
) -> str | None:
    """What the waiting rollouts of a task wait for, when it is more than a free place; one line. `most`: how many
    rollouts of its run may be in flight."""
    if run.paused:
        return f"run '{task.run_id}' to be resumed"
    if most is not None and run.held >= most:
        return f"run '{task.run_id}', of which {run.held} rollouts are in flight and at most {most} may be"
    try:
        can = able(task, fleet_of(nodes, topology))
    except InvalidTask as exc:
        return f"a node that can run it ({'; '.join(exc.problems)})"
    reasons = [(c.node_id, c.idle_because) for c in can]
    if any(reason is None for _, reason in reasons):
        return None
    names = ", ".join(f"{node_id} {reason}" for node_id, reason in reasons[:_NAMED])
    more = f", and {len(reasons) - _NAMED} more" if len(reasons) > _NAMED else ""
    return f"a node that can run it ({names}{more})"


def _spread(takers: Sequence[Candidate], count: int) -> list[str]:
    """Least relative load first; each assignment counts before the next."""
    heap = [(c.load, c.node_id, c.room, c.capacity) for c in takers if c.room]
    heapq.heapify(heap)
    queues: list[str] = []
    while heap and len(queues) < count:
        load, node_id, room, capacity = heapq.heappop(heap)
        queues.append(node_id)
        if room > 1:
            heapq.heappush(heap, (load + 1 / capacity, node_id, room - 1, capacity))
    return queues


def _list(words: Iterator[str] | Collection[str]) -> str:
    return ", ".join(sorted(set(words))) or "none"


def celery_priority(dispatch_priority: int) -> int:
    """Polar's 0..100 (higher first) as a kombu priority 0..9 on Redis (0 is served first)."""
    return 9 - round(dispatch_priority * 9 / 100)
