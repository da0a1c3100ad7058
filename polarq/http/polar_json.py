"""From polarq's contracts to Polar's words. The only module that knows both."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Literal, cast

from polarq.contracts.event import Event
from polarq.contracts.node import NodeRecord
from polarq.contracts.rollout import (
    EARLY_STOP,
    EarlyStop,
    Outcome,
    RolloutResult,
    RolloutState,
    RolloutSummary,
    TaskCounts,
    Timing,
)
from polarq.contracts.sandbox import SandboxReport
from polarq.contracts.trajectory import Trace, Trajectory
from polarq.http.polar_shapes import (
    GatewayNodeInfo,
    PolarTrace,
    PolarTrajectory,
    SessionResult,
    SessionRow,
    SessionStatusWord,
    SessionTiming,
    SessionTimingDetail,
)
from polarq.ledger.records import RolloutRecord

EndWord = Literal["COMPLETED", "ERROR", "TIMEOUT"]

_LIVE: Mapping[RolloutState, SessionStatusWord] = {
    RolloutState.QUEUED: "REGISTERED",
    RolloutState.PREPARING: "INITIALIZING",
    RolloutState.READY: "READY",
    RolloutState.RUNNING: "RUNNING",
    RolloutState.BUILDING: "BUILDING",
    RolloutState.EVALUATING: "EVALUATING",
}
_ENDS: Mapping[RolloutState, EndWord] = {
    RolloutState.COMPLETED: "COMPLETED",
    RolloutState.FAILED: "ERROR",
    RolloutState.TIMED_OUT: "TIMEOUT",
    RolloutState.CANCELLED: "ERROR",
}
_LIFTED = ("group_id", "policy_version", "rollout_step")
"""Keys of the task's metadata that Polar repeats on the trajectory itself."""
_EARLY_STOP = tuple(EarlyStop(min_usable=0, usable=0, elapsed_ms=0).metadata())


_OWN = {
    "index", "parent", "shared", "cause", "left_out", "weight", "weight_versions", "completion_seqs", "turns",
    "untrainable", "images", "teacher_logprobs",
}  # fmt: skip
"""Of a trace, beside what Polar has."""


def session_status(state: RolloutState) -> SessionStatusWord:
    return _ENDS[state] if state.terminal else _LIVE[state]


def error_of(outcome: Outcome) -> str | None:
    """Polar's error text: None for what completed."""
    if outcome.state is RolloutState.COMPLETED:
        return None
    return outcome.message or f"{outcome.boundary.value}: {outcome.reason}"


def timing(spent: Timing) -> SessionTiming:
    after = [s for s in (spent.build_s, spent.evaluate_s, spent.teardown_s) if s is not None]
    answer: SessionTiming = {}
    if spent.queue_s is not None:
        answer["register_to_init_queue_ms"] = spent.queue_s * 1000
    if spent.prepare_s is not None:
        answer["init_ms"] = spent.prepare_s * 1000
    if spent.agent_s is not None:
        answer["run_ms"] = spent.agent_s * 1000
    if after:
        answer["postrun_ms"] = sum(after) * 1000
    return answer


_DETAIL = {
    "ready_queue_ms": "ready_s",
    "postrun_queue_ms": "post_queue_s",
    "container_start_ms": "sandbox_start_s",
    "eval_container_start_ms": "eval_sandbox_start_s",
    "runtime_validation_ms": "sandbox_check_s",
    "eval_runtime_validation_ms": "eval_sandbox_check_s",
    "prepare_ms": "recipe_s",
    "eval_prepare_ms": "eval_recipe_s",
    "agent_setup_ms": "agent_setup_s",
    "agent_exec_ms": "agent_exec_s",
    "agent_postprocess_ms": "agent_postprocess_s",
    "build_ms": "build_s",
    "eval_ms": "evaluate_s",
    "runtime_stop_ms": "sandbox_stop_s",
}
"""Polar's later keys, by the part of `Timing` that is the same thing."""


def timing_detail(spent: Timing, sandbox: SandboxReport | None) -> SessionTimingDetail:
    seconds = spent.model_dump()
    found = {key: seconds[part] * 1000 for key, part in _DETAIL.items() if seconds[part] is not None}
    if spent.total_s is not None:
        found["e2e_ms"] = ((spent.queue_s or 0.0) + spent.total_s) * 1000
    answer = cast(SessionTimingDetail, {**timing(spent), **found})
    if sandbox is not None:
        times = sandbox.exec_times
        answer["runtime_exec_ms"] = times.total_s * 1000
        answer["runtime_exec_count"] = times.count
        answer["runtime_exec_timeout_count"] = times.timed_out
        answer["runtime_exec_failure_count"] = times.failed
        answer["runtime_exec_cancelled_count"] = times.cancelled
        answer["runtime_exec_ms_by_category"] = {kind.value: s * 1000 for kind, s in times.seconds.items()}
        answer["runtime_exec_count_by_category"] = {kind.value: count for kind, count in times.counts.items()}
    return answer


def session_result(
    result: RolloutResult,
    *,
    builder: str | None = None,
    summary: RolloutSummary | None = None,
    problem: str | None = None,
) -> SessionResult:
    """An ended rollout as Polar's SessionResult.

    `builder` and `summary` (the ledger's counts) serve results whose trajectory was left out. `problem`: why the
    committed payload could not be read; such a session is an ERROR to a client of Polar, its outcome stays beside it.
    """
    status: EndWord = "ERROR" if problem else _ENDS[result.outcome.state]
    error = problem or error_of(result.outcome)
    own = result.model_dump(mode="json", exclude={"trajectory", "outcome", "metadata", "task_id"})
    if problem:
        own["payload_problem"] = problem
    if result.trajectory is not None:
        own["trajectory_metadata"] = list(result.trajectory.metadata)
    return {
        "session_id": result.rollout_id,
        "task_id": result.task_id,
        "status": status,
        "trajectory": _trajectory(result, builder, summary, status, error),
        "timing": timing(result.timing),
        "timing_detail": timing_detail(result.timing, result.sandbox),
        "node_id": result.node_id,
        "error": error,
        "metadata": result.metadata,
        "outcome": result.outcome.model_dump(mode="json"),
        "rollout": own,
    }


def _trajectory(
    result: RolloutResult, builder: str | None, summary: RolloutSummary | None, status: EndWord, error: str | None
) -> PolarTrajectory:
    full = result.trajectory
    metadata = {
        **(full.metadata if full else {}),
        "session_id": result.rollout_id,
        "task_id": result.task_id,
        "builder": full.builder if full else builder,
        "record_count": _record_count(full, summary),
        "trace_count": len(full.traces) if full else summary.traces if summary else 0,
        "task_metadata": result.metadata,
        **{key: result.metadata[key] for key in _lifted(result) if key in result.metadata},
    }
    if full:
        metadata["fidelity"] = full.fidelity.model_dump(mode="json")
    if result.reward is not None:
        metadata["evaluation"] = {
            "strategy": result.reward.evaluator,
            "outcome_reward": result.reward.outcome,
            "trace_rewards": result.reward.trace_rewards,
            "metadata": result.reward.report,
            "report": result.reward.report,
        }
    return {
        "status": status,
        "metadata": metadata,
        "traces": [_trace(trace) for trace in full.traces] if full else [],
        "error": error,
    }


def _lifted(result: RolloutResult) -> Iterable[str]:
    return (*_LIFTED, *_EARLY_STOP) if result.outcome.reason == EARLY_STOP else _LIFTED


def _record_count(full: Trajectory | None, summary: RolloutSummary | None) -> int:
    if full is not None:
        return full.fidelity.calls
    return summary.calls if summary else 0


def _trace(trace: Trace) -> PolarTrace:
    own = trace.model_dump(mode="json", include=_OWN)
    return {
        "prompt_ids": trace.prompt_ids,
        "response_ids": trace.response_ids,
        "loss_mask": trace.loss_mask,
        "prompt_messages": trace.prompt_messages,
        "response_messages": trace.response_messages,
        "tools": trace.tools,
        "finish_reason": trace.finish_reason,
        "response_logprobs": trace.logprobs,
        "reward": trace.reward,
        "metadata": {**trace.metadata, "polarq": own},
    }


def session_row(task_id: str, rollout: RolloutRecord) -> SessionRow:
    """One line of a task's session list."""
    row: SessionRow = {
        "session_id": rollout.rollout_id,
        "task_id": task_id,
        "status": session_status(rollout.state),
        "attempt": rollout.attempt,
        "node_id": rollout.owner,
    }
    if rollout.policy_version is not None:
        row["policy_version"] = rollout.policy_version
    if rollout.state.terminal:
        summary = rollout.summary or RolloutSummary(outcome=Outcome(state=rollout.state))
        row["reward"] = summary.reward
        row["timing"] = timing(summary.timing)
        row["error"] = error_of(summary.outcome)
        row["outcome"] = summary.outcome.model_dump(mode="json")
        row["summary"] = summary.model_dump(mode="json", exclude={"outcome", "reward", "payload"})
    return row


def counts(of: TaskCounts) -> dict[str, int]:
    return {name: int(value) for name, value in of.model_dump().items()}


def node_info(record: NodeRecord, heartbeat_s: float) -> GatewayNodeInfo:
    return {
        "node_id": record.node_id,
        "gateway_url": record.proxy_url,
        "max_init_workers": record.max_init_workers,
        "max_run_workers": record.max_run_workers,
        "max_postrun_workers": record.max_postrun_workers,
        "metrics": record.metrics.model_dump(),
        "dispatch_reservations": record.queue_depth,
        "healthy": record.alive,
        "draining": record.draining,
        "heartbeat_interval_seconds": heartbeat_s,
        "last_heartbeat": record.last_seen_at.isoformat() if record.last_seen_at else None,
        "node": record.model_dump(mode="json"),
    }


def event_frame(event: Event) -> dict[str, Any]:
    """Polar's `{type, ts, data}`. A session's status is Polar's word; polarq's own state stands beside it."""
    data = dict(event.data)
    state = data.get("status")
    if event.type == "session.state_changed" and state in set(RolloutState):
        data["state"] = state
        data["status"] = session_status(RolloutState(state))
    return {"type": event.type, "ts": event.at.isoformat(), "data": data}
