"""Polar's JSON, as types. Keys of polarq's own stand beside Polar's and are marked so; clients of Polar ignore them.

`timing` and the traces hold Polar's keys alone: the released line forbids any other key there.
"""

from __future__ import annotations

from typing import Any, Literal, NotRequired

from typing_extensions import TypedDict

TaskStatusWord = Literal["running", "completed", "failed", "cancelling", "cancelled"]
SessionStatusWord = Literal[
    "REGISTERED", "INITIALIZING", "READY", "RUNNING", "BUILDING", "EVALUATING", "COMPLETED", "ERROR", "TIMEOUT"
]


class PolarTrace(TypedDict):
    """One token sequence. `loss_mask` and `response_logprobs` are as long as `response_ids`."""

    prompt_ids: list[int]
    response_ids: list[int]
    loss_mask: list[int]
    prompt_messages: list[dict[str, Any]]
    response_messages: list[dict[str, Any]]
    tools: list[dict[str, Any]] | None
    finish_reason: str | None
    response_logprobs: list[float]
    reward: float | None
    metadata: dict[str, Any]
    """`polarq` in it: index, parent, shared, cause, left_out, weight, weight_versions, completion_seqs, turns,
    untrainable, images."""


class PolarTrajectory(TypedDict):
    status: Literal["COMPLETED", "ERROR", "TIMEOUT"]
    metadata: dict[str, Any]
    """builder, record_count, trace_count, task_metadata, evaluation (when there is a verdict), fidelity."""
    traces: list[PolarTrace]
    error: str | None


class SessionTiming(TypedDict):
    """Milliseconds; a stage that was not reached has no key."""

    register_to_init_queue_ms: NotRequired[float]
    init_ms: NotRequired[float]
    run_ms: NotRequired[float]
    postrun_ms: NotRequired[float]


class SessionTimingDetail(SessionTiming):
    """What Polar's later line has in its `timing`, which a client of the released line could not read. What there is
    nothing of here has no key: a dispatcher, a result that is waited for, steps after the run."""

    ready_queue_ms: NotRequired[float]
    postrun_queue_ms: NotRequired[float]
    container_start_ms: NotRequired[float]
    eval_container_start_ms: NotRequired[float]
    runtime_validation_ms: NotRequired[float]
    eval_runtime_validation_ms: NotRequired[float]
    prepare_ms: NotRequired[float]
    eval_prepare_ms: NotRequired[float]
    agent_setup_ms: NotRequired[float]
    agent_exec_ms: NotRequired[float]
    agent_postprocess_ms: NotRequired[float]
    build_ms: NotRequired[float]
    eval_ms: NotRequired[float]
    runtime_stop_ms: NotRequired[float]
    e2e_ms: NotRequired[float]
    """From submission to the end of the teardown."""
    runtime_exec_ms: NotRequired[float]
    runtime_exec_count: NotRequired[int]
    runtime_exec_timeout_count: NotRequired[int]
    runtime_exec_failure_count: NotRequired[int]
    runtime_exec_cancelled_count: NotRequired[int]
    runtime_exec_ms_by_category: NotRequired[dict[str, float]]
    """By what polarq ran a command for: prepare, setup, agent, repository, verifier, artifacts, other."""
    runtime_exec_count_by_category: NotRequired[dict[str, int]]


class SessionResult(TypedDict):
    """One ended rollout. `outcome`, `rollout` and `timing_detail` are polarq's."""

    session_id: str
    task_id: str
    status: Literal["COMPLETED", "ERROR", "TIMEOUT"]
    trajectory: PolarTrajectory
    timing: SessionTiming
    timing_detail: SessionTimingDetail
    node_id: str | None
    error: str | None
    metadata: dict[str, Any]
    outcome: dict[str, Any]
    """state, boundary, reason, message, trainable."""
    rollout: dict[str, Any]
    """polarq's result without the trajectory: index, attempt, reward, harness, payload, timing in seconds, times."""


class TaskStatus(TypedDict):
    """A task. `completed` says that every session ended; `counts` say how."""

    task_id: str
    status: TaskStatusWord
    total_sessions: int
    completed_sessions: int
    results: list[SessionResult]
    result_paths: list[str]
    counts: NotRequired[dict[str, int]]
    """polarq's: total, queued, running, completed, failed, timed_out, cancelled."""
    run_id: NotRequired[str]
    waiting_for: NotRequired[str | None]
    """polarq's: what its queued rollouts wait for, when it is more than a free place."""
    created_at: NotRequired[float]
    updated_at: NotRequired[float]
    results_offset: NotRequired[int]
    results_total: NotRequired[int]
    """Ended rollouts that could be paged through."""


class SubmitAnswer(TypedDict):
    task_id: str
    status: TaskStatusWord


class TaskRow(TypedDict):
    """One line of the task list. Times are seconds since 1970. Means are over ended sessions."""

    task_id: str
    status: TaskStatusWord
    harness: str
    model: str
    num_samples: int
    completed_sessions: int
    errored_sessions: int
    mean_reward: float | None
    mean_traces: float | None
    mean_completions: float | None
    created_at: float
    updated_at: float
    source: Literal["live"]
    run_id: str
    counts: dict[str, int]


class TaskList(TypedDict):
    tasks: list[TaskRow]


class SessionRow(TypedDict):
    session_id: str
    task_id: str
    status: SessionStatusWord
    node_id: NotRequired[str | None]
    reward: NotRequired[float | None]
    timing: NotRequired[SessionTiming]
    error: NotRequired[str | None]
    outcome: NotRequired[dict[str, Any]]
    attempt: NotRequired[int]
    policy_version: NotRequired[int]
    """polarq's: the run's when this attempt was claimed, where its trainer had published one."""
    summary: NotRequired[dict[str, Any]]
    """polarq's, once ended: calls, traces, sampled_tokens, trainable_tokens, timing in seconds."""


class SessionList(TypedDict):
    task_id: str
    sessions: list[SessionRow]


class SessionView(TypedDict):
    """One session; `result` is there once it has ended."""

    session_id: str
    task_id: str
    status: SessionStatusWord
    node_id: str | None
    attempt: int
    policy_version: NotRequired[int]
    """polarq's: the run's when this attempt was claimed, where its trainer had published one."""
    completion_count: int
    result: SessionResult | None


class SessionCancelled(TypedDict):
    session_id: str
    deleted: bool
    messages_deleted: int
    status: SessionStatusWord


class Acknowledged(TypedDict):
    """polarq's own. `acknowledged`: sessions that were not acknowledged before."""

    task_id: str
    acknowledged: int


class GatewayNodeInfo(TypedDict):
    """One node. `node` is polarq's own record: liveness, pause flag, queue depth, labels, health, versions."""

    node_id: str
    gateway_url: str
    max_init_workers: int
    max_run_workers: int
    max_postrun_workers: int
    metrics: dict[str, int]
    dispatch_reservations: int
    healthy: bool
    draining: bool
    heartbeat_interval_seconds: float
    last_heartbeat: str | None
    node: dict[str, Any]


class LimitsView(TypedDict):
    """polarq's own: what bounds the queue and shares the nodes. `version` 0: nobody has published any."""

    version: int
    by: str
    published_at: float | None
    limits: dict[str, Any]


class RunRow(TypedDict):
    """polarq's own: one training run, over all its tasks."""

    run_id: str
    paused: bool
    waiting: int
    in_flight: int
    policy_version: NotRequired[int]
    """What its trainer has published, where it has."""


class RunList(TypedDict):
    runs: list[RunRow]


class NodeList(TypedDict):
    nodes: list[GatewayNodeInfo]


class Pipeline(TypedDict):
    pending_sessions: int


class ServerStatus(TypedDict):
    tasks: dict[str, TaskStatusWord]
    """The newest thousand."""
    pipeline: Pipeline
    nodes: NodeList


class Health(TypedDict):
    status: Literal["ok"]
    nodes: int
    ledger: bool
    memory: Literal["ok", "high", "full"] | None
    """How much of its memory budget Redis uses; at `full` new tasks are refused. None: not known."""


class Ready(TypedDict):
    status: Literal["ready"]


class InferenceNode(TypedDict):
    node_id: str
    paused: bool
    alive: bool
    inference: bool | None
    inflight: int | None
    waiting: int


class InferenceStatus(TypedDict):
    paused: bool
    inflight: int | None
    nodes: list[InferenceNode]


class CallbackTries(TypedDict):
    """polarq's own: every recorded try to deliver the task's callback."""

    task_id: str
    attempts: list[dict[str, Any]]


class Problem(TypedDict):
    loc: list[str]
    msg: str
    type: str


class ErrorAnswer(TypedDict):
    """Every refusal: one line, or for a body or query that cannot be used (422) one entry per mistake."""

    detail: str | list[Problem]
