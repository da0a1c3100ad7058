"""What a submission is let in by, and what the ledger keeps of a task so that it can be ordered and routed."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from polarq.contracts.task import Task
from polarq.errors import QueueFull
from polarq.topology.models import LimitsSection, RunShare


@dataclass(frozen=True, slots=True)
class Admission:
    """A deployment's limits, as the atomic steps take them."""

    most_of_all: int | None = None
    retry_after_s: float = 5.0
    head_start_s: float = 60.0
    runs: Mapping[str, RunShare] = field(default_factory=dict)
    memory_budget: float | None = None
    """Bytes that Redis may use, or up to 1 a share of its maxmemory; None: all of maxmemory."""

    @classmethod
    def of(cls, limits: LimitsSection, memory_budget: float | None = None) -> Admission:
        return cls(limits.max_queued, limits.retry_after_s, limits.priority_head_start_s, limits.runs, memory_budget)

    @property
    def budget(self) -> float | str:
        """The memory budget as an argument of a script."""
        return "" if self.memory_budget is None else self.memory_budget

    def out_of_memory(self, task: Task, used: int, budget: int) -> QueueFull:
        """The refusal, in one line. Rollouts under way need the rest for their results."""
        text = (
            f"task '{task.task_id}' is refused: Redis uses {used / 2**20:.0f} of the {budget / 2**20:.0f} MiB it may; "
            "acknowledge results, lower retention.result_s, or raise redis.memory_budget (or maxmemory)"
        )
        return QueueFull(text, max(self.retry_after_s, _MEMORY_RETRY_S))

    def most_of_run(self, run_id: str) -> int | None:
        share = self.runs.get(run_id)
        return None if share is None else share.max_queued

    def most_waiting(self, run_id: str) -> tuple[int | str, int | str]:
        """Rollouts that may wait, of all runs and of this one, as arguments of a script ('' for no limit)."""
        of_run = self.most_of_run(run_id)
        return ("" if self.most_of_all is None else self.most_of_all, "" if of_run is None else of_run)

    def full(self, task: Task, of_run: bool, waiting: int) -> QueueFull:
        """The refusal, in one line."""
        most = self.most_of_run(task.run_id) if of_run else self.most_of_all
        whose = f" of run '{task.run_id}'" if of_run else ""
        text = (
            f"the queue is full: {waiting} rollouts{whose} wait and at most {most} may, so that {task.num_samples} "
            f"more do not fit; try again in {self.retry_after_s:g} s"
        )
        return QueueFull(text, self.retry_after_s)


@dataclass(frozen=True, slots=True)
class Place:
    """A node as the choice among what waits needs it, with the shares and quotas of runs as its topology has them."""

    node_id: str
    labels: Mapping[str, str]
    model: str
    """Blank: not known."""
    runtimes: Sequence[str]
    default_runtime: bool
    runs: Mapping[str, RunShare]
    incarnation: str = ""
    """The worker that claims; not part of the choice."""

    def as_json(self) -> str:
        return json.dumps(
            {
                "id": self.node_id,
                "labels": dict(self.labels),
                "model": self.model,
                "runtimes": dict.fromkeys(self.runtimes, True),
                "default_runtime": self.default_runtime,
                "weights": {run_id: share.weight for run_id, share in self.runs.items()},
                "most": {run_id: s.max_in_flight for run_id, s in self.runs.items() if s.max_in_flight is not None},
            }
        )


UNLIMITED = Admission()

HIGH_SHARE, FULL_SHARE = 0.8, 0.95
"""Shares of the memory budget: from the first on a warning is given, from the second on no task is taken."""

_MEMORY_RETRY_S = 30.0


def facts(task: Task, admission: Admission) -> tuple[str | int, ...]:
    """Names and values of a task's fields that order and routing need, beside its request."""
    place = task.placement
    made: dict[str, str | int] = {"head_ms": int(task.dispatch_priority * admission.head_start_s * 1000)}
    if task.early_stop_min_usable_sessions is not None:
        made["early"] = task.early_stop_min_usable_sessions
    if place.node_id is not None:
        made["pin"] = place.node_id
    if place.policy == "together":
        made["together"] = 1
    if place.labels:
        made["labels"] = json.dumps(place.labels, sort_keys=True)
    if place.model is not None:
        made["wants_model"] = place.model
    if task.runtime is None:
        made["backend"] = ""
    elif task.runtime.import_path is None:
        made["backend"] = task.runtime.backend
    return tuple(part for pair in made.items() for part in pair)
