"""One rollout's result, and a task's: the neutral, versioned contract every trainer is served from."""

from __future__ import annotations

from datetime import datetime
from enum import StrEnum
from typing import Any

from pydantic import Field

from polarq.contracts.artifacts import Artifact
from polarq.contracts.base import Contract
from polarq.contracts.endings import Ending
from polarq.contracts.sandbox import SandboxReport
from polarq.contracts.trajectory import FidelityCounts, Trajectory


class RolloutState(StrEnum):
    """Where a rollout is. The transitions between them are in `polarq.ledger.states`."""

    QUEUED = "queued"
    PREPARING = "preparing"
    READY = "ready"
    RUNNING = "running"
    BUILDING = "building"
    EVALUATING = "evaluating"
    COMPLETED = "completed"
    FAILED = "failed"
    TIMED_OUT = "timed_out"
    CANCELLED = "cancelled"

    @property
    def terminal(self) -> bool:
        return self in TERMINAL


TERMINAL = frozenset({RolloutState.COMPLETED, RolloutState.FAILED, RolloutState.TIMED_OUT, RolloutState.CANCELLED})


class TaskState(StrEnum):
    """Polar's words. `completed` means every rollout ended, whatever its outcome: read the counts beside it."""

    RUNNING = "running"
    COMPLETED = "completed"
    CANCELLING = "cancelling"
    CANCELLED = "cancelled"

    @property
    def terminal(self) -> bool:
        return self in {TaskState.COMPLETED, TaskState.CANCELLED}


class Boundary(StrEnum):
    """The part that failed."""

    NONE = "none"
    TASK = "task"
    QUEUE = "queue"
    RUNTIME = "runtime"
    PREPARE = "prepare"
    HARNESS = "harness"
    MODEL = "model"
    BUILDER = "builder"
    EVALUATOR = "evaluator"
    STORE = "store"
    NODE = "node"
    CONTROL = "control"
    """Somebody asked for it: cancel, early stop, drain."""


class Outcome(Contract):
    """How a rollout ended. `reason` is a stable code; `message` is one line for a person."""

    state: RolloutState
    boundary: Boundary = Boundary.NONE
    reason: str = "ok"
    message: str = ""
    trainable: bool = False
    """A trainer may use this rollout: it has trainable tokens and a reward that is the policy's own doing.
    An infrastructure failure is never trainable and has no reward."""

    @property
    def ending(self) -> Ending:
        """The kind of end, by which a task's `endings` decide."""
        if self.state is RolloutState.CANCELLED:
            return Ending.EARLY_STOPPED if self.reason == EARLY_STOP else Ending.CANCELLED
        if (by_reason := _BY_REASON.get(self.reason)) is not None:
            return by_reason
        if self.boundary is Boundary.HARNESS:
            return Ending.AGENT_TIMED_OUT if self.state is RolloutState.TIMED_OUT else Ending.AGENT_FAILED
        return _BY_BOUNDARY[self.boundary]


EARLY_STOP = "early_stop"
"""`Outcome.reason` of a rollout that was stopped because enough others of its group had ended usably."""
MISSES_FIDELITY = "fidelity"
"""`Outcome.reason`, at the boundary `builder`, of a rollout whose trajectory misses what its task requires."""

_BY_REASON = {
    "agent_limit": Ending.AGENT_LIMIT,
    "call_limit": Ending.AGENT_LIMIT,
    "answer_cut": Ending.TRUNCATED,
    "context_overflow": Ending.OVERFLOW,
    "invalid_tool_call": Ending.PARSER_INVALID_CALL,
    MISSES_FIDELITY: Ending.FIDELITY,
}
_BY_BOUNDARY = {
    Boundary.NONE: Ending.COMPLETED,
    Boundary.TASK: Ending.TASK,
    Boundary.QUEUE: Ending.NODE,
    Boundary.RUNTIME: Ending.RUNTIME,
    Boundary.PREPARE: Ending.RUNTIME,
    Boundary.MODEL: Ending.MODEL_ERROR,
    Boundary.BUILDER: Ending.NODE,
    Boundary.EVALUATOR: Ending.EVALUATOR,
    Boundary.STORE: Ending.NODE,
    Boundary.NODE: Ending.NODE,
    Boundary.CONTROL: Ending.CANCELLED,
}


class ExecKind(StrEnum):
    """How a command in a sandbox ended."""

    EXITED = "exited"
    SIGNALLED = "signalled"
    TIMED_OUT = "timed_out"
    CANCELLED = "cancelled"
    COULD_NOT_START = "could_not_start"
    SANDBOX_LOST = "sandbox_lost"


class StepReport(Contract):
    """One command of the harness, as it ended. Output is the kept tail, decoded with replacement."""

    kind: ExecKind
    exit_code: int | None = None
    signal: int | None = None
    duration_s: float = Field(0.0, ge=0)
    stdout_tail: str = ""
    stderr_tail: str = ""
    truncated: bool = False
    log: str | None = None
    message: str = ""
    out_of_memory: bool = False
    """The kernel killed something of the sandbox meanwhile because its memory was used up."""


class HarnessReport(Contract):
    """The harness's own end, kept beside the reward and never confused with it."""

    name: str
    ok: bool
    steps: list[StepReport] = []
    metadata: dict[str, Any] = {}


class Reward(Contract):
    """A verdict. Absent (None) when the evaluator could not reach one."""

    outcome: float
    trace_rewards: list[float] | None = None
    """One per trace, in place of `outcome`."""
    turn_rewards: list[list[float]] | None = None
    """Per trace, one per turn: credit beside the trace's reward."""
    teacher_logprobs: list[list[float] | None] | None = None
    """Per trace, as `Trace.teacher_logprobs`. A committed result has them on its traces alone."""
    evaluator: str
    report: dict[str, Any] = {}
    """The evaluator's evidence: JSON, small."""


class Timing(Contract):
    """Seconds (monotonic clock); None: it was not reached, or there was nothing of the kind.

    The stages follow one another. What is indented below a stage is a part of it.
    """

    queue_s: float | None = None
    prepare_s: float | None = None
    sandbox_start_s: float | None = None
    """Starting it, where that was done for this rollout."""
    sandbox_check_s: float | None = None
    """Whether one that had waited was alive."""
    recipe_s: float | None = None
    """Its prepare actions, where they had to be done."""
    history_s: float | None = None
    """Taking from its repository what lies after the checked-out commit."""
    ready_s: float | None = None
    agent_s: float | None = None
    agent_setup_s: float | None = None
    agent_exec_s: float | None = None
    agent_postprocess_s: float | None = None
    post_queue_s: float | None = None
    """From the harness's end until there was a place to go on."""
    build_s: float | None = None
    evaluate_s: float | None = None
    eval_sandbox_start_s: float | None = None
    eval_sandbox_check_s: float | None = None
    eval_recipe_s: float | None = None
    teardown_s: float | None = None
    artifacts_s: float | None = None
    sandbox_stop_s: float | None = None
    total_s: float | None = None
    """From claim to commit."""


class PayloadRef(Contract):
    """Where a committed result lies in the store, and how to check it."""

    key: str
    chunks: int = Field(ge=1)
    stored_bytes: int = Field(ge=0)
    raw_bytes: int = Field(ge=0)
    sha256: str


class EarlyStop(Contract):
    """A group that was stopped once enough of its rollouts were usable: completed, with tokens to train on."""

    min_usable: int
    usable: int
    elapsed_ms: int
    """From the task's submission to the stop."""

    def metadata(self) -> dict[str, Any]:
        """Polar's keys, on the result and the trajectory of each rollout that was stopped."""
        return {
            "early_stop_cancelled": True,
            "fully_masked": True,
            "early_stop_reason": "minimum_usable_sessions_reached",
            "early_stop_min_usable_sessions": self.min_usable,
            "early_stop_usable_sessions": self.usable,
            "early_stop_elapsed_ms": self.elapsed_ms,
        }

    def outcome(self) -> Outcome:
        message = f"{self.usable} usable rollouts had ended; the task asked for {self.min_usable}"
        return Outcome(state=RolloutState.CANCELLED, boundary=Boundary.CONTROL, reason=EARLY_STOP, message=message)


class RolloutSummary(Contract):
    """What the ledger itself holds of an ended rollout: everything but the tokens."""

    outcome: Outcome
    reward: float | None = None
    calls: int = 0
    traces: int = 0
    sampled_tokens: int = 0
    trainable_tokens: int = 0
    fidelity: FidelityCounts = FidelityCounts()
    versions: list[str] = []
    """Policy versions that sampled tokens, as the engines name them, in order of appearance."""
    timing: Timing = Timing()
    payload: PayloadRef | None = None
    early_stop: EarlyStop | None = None
    """With the reason `early_stop`: what its group had reached."""

    def counted(self) -> dict[str, int]:
        """What its commit adds to its run's counters."""
        refused = self.outcome.reason == MISSES_FIDELITY
        return {
            "rollouts": 1,
            **({"rollouts_refused": 1} if refused else {}),
            **self.fidelity.model_dump(exclude_defaults=True),
        }


class Loss(Contract):
    """An attempt that ended with the loss of its worker."""

    attempt: int
    node_id: str
    stage: RolloutState
    cause: str
    """`node_gone`, `worker_gone` (another has its place now), or `lease_expired` (it lives, and did not renew)."""
    how: str = ""
    """How the worker ended, where that is known."""
    beside: int = 0
    """Rollouts that were lost with it."""
    share: float = 1.0
    """How much of the loss is held against this rollout, 0 to 1: see `gateway.max_attempts`."""
    at: datetime

    @property
    def line(self) -> str:
        """For a person."""
        what = {"node_gone": "the node was gone", "worker_gone": "its worker was gone"}
        said = [what.get(self.cause, "its lease was not renewed"), *([self.how] if self.how else [])]
        company = f", with {self.beside} other{'' if self.beside == 1 else 's'}" if self.beside else ""
        return f"attempt {self.attempt} on {self.node_id} while {self.stage.value}: {': '.join(said)}{company}"


class RolloutResult(Contract):
    """One rollout as a trainer gets it."""

    schema_version: int = 1
    rollout_id: str
    task_id: str
    run_id: str
    index: int = Field(ge=0)
    """Stable whole number of the rollout within its group."""
    attempt: int = Field(0, ge=0)
    policy_version: int | None = None
    """The run's when this attempt was claimed; None: its trainer had published none. The rollout's staleness is the
    run's version now less this one. What really sampled is in `versions`."""
    versions: list[str] = []
    """Policy versions that sampled tokens, as the engines name them (text), in order of appearance; empty where they
    name none. Token by token: `Trace.weight_versions`."""
    node_id: str | None = None
    outcome: Outcome
    reward: Reward | None = None
    trajectory: Trajectory | None = None
    """None where trajectories were left out, or when the rollout never captured anything."""
    payload: PayloadRef | None = None
    harness: HarnessReport | None = None
    sandbox: SandboxReport | None = None
    """None where none was started."""
    artifacts: list[Artifact] = []
    """What came back from the sandbox, and what did not, with the reason."""
    losses: list[Loss] = []
    """Earlier attempts that ended with the loss of their worker, the newest 20."""
    timing: Timing = Timing()
    started_at: datetime | None = None
    ended_at: datetime | None = None
    metadata: dict[str, Any] = {}


class TaskCounts(Contract):
    """Rollouts by where they are."""

    total: int = 0
    queued: int = 0
    running: int = 0
    completed: int = 0
    failed: int = 0
    timed_out: int = 0
    cancelled: int = 0

    @property
    def ended(self) -> int:
        return self.completed + self.failed + self.timed_out + self.cancelled


class TaskResult(Contract):
    """A task as a trainer gets it. Results are in sample order; while the task runs, only ended rollouts are in it."""

    schema_version: int = 1
    task_id: str
    run_id: str
    state: TaskState
    counts: TaskCounts
    results: list[RolloutResult] = []
    created_at: datetime
    updated_at: datetime
    metadata: dict[str, Any] = {}

    @property
    def rewards(self) -> list[float | None]:
        """One entry per result, None where there is no verdict."""
        return [None if r.reward is None else r.reward.outcome for r in self.results]
