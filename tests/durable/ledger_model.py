"""What the ledger should hold: a rollout is a state, an attempt, a token and a few flags. Knows nothing of Redis."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from polarq.contracts import RolloutState, Task
from polarq.ledger import Call, Claim, Refused
from polarq.ledger.states import ACTIVE

S = RolloutState

RUNS = {"a": "left", "b": "left", "c.1": "right", "d": "right"}
"""task_id -> run_id. `c.1` looks like a rollout of a task `c`."""


@dataclass
class RolloutModel:
    """What a rollout should be."""

    rollout_id: str
    state: RolloutState = S.QUEUED
    attempt: int = 0
    token: int = 0
    owner: str = ""
    job: str = ""
    incarnation: str = ""
    cancel: bool = False
    lease_over: bool = False
    lost: int = 0
    """Attempts that ended with the loss of their worker."""
    blame: Counter[RolloutState] = field(default_factory=Counter)
    """What is held against it of losses at each stage, in quarters."""
    summary: str | None = None
    """As it was first seen: it never changes."""

    def was_lost(self, quarters: int = 4) -> None:
        self.lost += 1
        self.blame[self.state] += quarters

    @property
    def active(self) -> bool:
        return self.state in ACTIVE


@dataclass
class TaskModel:
    """What a task should be."""

    task: Task
    celery_ids: list[str]
    rollouts: list[RolloutModel]
    cancelling: bool = False

    @property
    def ended(self) -> bool:
        return all(r.state.terminal for r in self.rollouts)

    @property
    def state(self) -> str:
        if self.ended:
            return "cancelled" if self.cancelling else "completed"
        return "cancelling" if self.cancelling else "running"


@dataclass(frozen=True)
class Ticket:
    """A grant as its holder remembers it, current or long outdated."""

    call: Call[Claim | Refused] = field(repr=False)
    rollout_id: str
    node: str
    token: int
    attempt: int


@dataclass
class Story:
    """The events that must have been written, in their order."""

    lines: list[tuple[str, str, str]] = field(default_factory=list)

    def moved(self, rollout: RolloutModel) -> None:
        self.lines.append(("session.state_changed", rollout.rollout_id, rollout.state.value))


def a_task(task_id: str, samples: int) -> Task:
    agent = {"harness": "shell", "custom_shell": {"command": "true"}}
    request = {"task_id": task_id, "instruction": "do it", "num_samples": samples, "agent": agent}
    return Task.load({**request, "run_id": RUNS[task_id]})
