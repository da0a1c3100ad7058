"""What polarq itself does to a sandbox when it has been prepared, before it is kept as a snapshot."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from polarq.contracts.sandbox import ScrubbedHistory
from polarq.contracts.specs import RuntimeSpec
from polarq.contracts.task import Task
from polarq_worker import history
from polarq_worker.runtimes.base import Runtime


class FinishStep(Protocol):
    """One of them. It sees no rollout: what it does holds for all of its recipe."""

    @property
    def identity(self) -> str:
        """What it does, with all that it depends on: part of the recipe's hash."""

    async def carry_out(self, runtime: Runtime, env: Mapping[str, str], timeout_s: float) -> list[ScrubbedHistory]:
        """Answers what results of this recipe's rollouts shall say of it. Raises `RuntimeFault`."""


def finish_steps(task: Task, spec: RuntimeSpec) -> tuple[FinishStep, ...]:
    """Those of a task's sandboxes, the agent's and its evaluator's alike, in order."""
    scrubbing = history.of_task(task, spec)
    return () if scrubbing is None else (scrubbing,)
