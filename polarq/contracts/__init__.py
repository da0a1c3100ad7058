"""Frozen models of everything that crosses a boundary. Import from the module that owns the idea, or from here."""

from polarq.contracts.base import ID_PATTERN, Contract, problems_of
from polarq.contracts.completion import Completion, CompletionLabel, Usage, VersionSpan
from polarq.contracts.event import Event
from polarq.contracts.node import NodeHealth, NodeRecord, StageMetrics
from polarq.contracts.rollout import (
    TERMINAL,
    Boundary,
    ExecKind,
    HarnessReport,
    Outcome,
    PayloadRef,
    Reward,
    RolloutResult,
    RolloutState,
    RolloutSummary,
    StepReport,
    TaskCounts,
    TaskResult,
    TaskState,
    Timing,
)
from polarq.contracts.specs import (
    AgentSpec,
    BuilderSpec,
    EvaluatorSpec,
    ExecInput,
    McpServerSpec,
    Placement,
    PrepareAction,
    RuntimeSpec,
    Timeouts,
)
from polarq.contracts.task import StageBudgets, Task, split_rollout_id
from polarq.contracts.trajectory import Break, Fidelity, Trace, Trajectory

__all__ = [
    "ID_PATTERN", "TERMINAL", "AgentSpec", "Boundary", "Break", "BuilderSpec", "Completion", "CompletionLabel", "Contract",
    "EvaluatorSpec", "Event", "ExecInput", "ExecKind", "Fidelity", "HarnessReport", "McpServerSpec", "NodeHealth",
    "NodeRecord", "Outcome", "PayloadRef", "Placement", "PrepareAction", "Reward", "RolloutResult", "RolloutState",
    "RolloutSummary", "RuntimeSpec", "StageBudgets", "StageMetrics", "StepReport", "Task", "TaskCounts", "TaskResult",
    "TaskState", "Timeouts", "Timing", "Trace", "Trajectory", "Usage", "VersionSpan", "problems_of", "split_rollout_id",
]  # fmt: skip
