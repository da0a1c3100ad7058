"""From the shim's JSON (Polar's words with polarq's beside them) to what the command line shows."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any

from polarq.cli.picture import Picture, Row, TaskLine
from polarq.client.pausing import InferenceState, NodeInference
from polarq.contracts.event import Event
from polarq.contracts.rollout import Outcome, RolloutState, TaskCounts, TaskState, Timing
from polarq.ledger.limits import Published
from polarq.topology.models import LimitsSection

Json = Mapping[str, Any]

_STATES = {
    "REGISTERED": RolloutState.QUEUED,
    "DISPATCHING": RolloutState.QUEUED,
    "INITIALIZING": RolloutState.PREPARING,
    "READY": RolloutState.READY,
    "RUNNING": RolloutState.RUNNING,
    "POST_RUN": RolloutState.BUILDING,
    "BUILDING": RolloutState.BUILDING,
    "EVALUATING": RolloutState.EVALUATING,
    "COMPLETED": RolloutState.COMPLETED,
    "ERROR": RolloutState.FAILED,
    "TIMEOUT": RolloutState.TIMED_OUT,
}
"""Polar's words, where polarq's own state does not stand beside them."""


def picture_of(status: Json, sessions: Json) -> Picture:
    """A task out of its status (without results) and its session list."""
    rows = [_row(index, session) for index, session in enumerate(sessions["sessions"])]
    return Picture(
        task_id=str(status["task_id"]),
        run_id=str(status.get("run_id", "")),
        state=TaskState.COMPLETED if status["status"] == "failed" else TaskState(status["status"]),
        counts=TaskCounts.stored(status["counts"]) if "counts" in status else _counts(rows),
        rows=tuple(rows),
        created_at=moment(status.get("created_at")),
        updated_at=moment(status.get("updated_at")),
        waiting_for=status.get("waiting_for"),
    )


def _row(index: int, session: Json) -> Row:
    outcome = Outcome.stored(session["outcome"]) if session.get("outcome") else None
    state = outcome.state if outcome else _STATES.get(str(session["status"]), RolloutState.QUEUED)
    summary = session.get("summary", {})
    return Row(
        rollout_id=str(session["session_id"]),
        index=index,
        state=state,
        attempt=int(session.get("attempt", 0)),
        node_id=session.get("node_id"),
        outcome=outcome or (Outcome(state=state) if state.terminal else None),
        reward=session.get("reward"),
        calls=summary.get("calls"),
        traces=summary.get("traces"),
        sampled_tokens=summary.get("sampled_tokens"),
        timing=Timing.stored(summary.get("timing", {})),
        policy_version=session.get("policy_version"),
        versions=tuple(summary.get("versions", ())),
    )


def _counts(rows: list[Row]) -> TaskCounts:
    by_state = {name: sum(row.state.value == name for row in rows) for name in TaskCounts.model_fields}
    active = sum(not row.state.terminal and row.state is not RolloutState.QUEUED for row in rows)
    return TaskCounts(**{**by_state, "total": len(rows), "running": active})


def task_line_of(row: Json) -> TaskLine:
    """One line of the shim's task list."""
    return TaskLine(
        task_id=str(row["task_id"]),
        run_id=str(row.get("run_id", "")),
        state=TaskState.COMPLETED if row["status"] == "failed" else TaskState(row["status"]),
        counts=TaskCounts.stored(row["counts"])
        if "counts" in row
        else TaskCounts(total=row["num_samples"], completed=row["completed_sessions"]),
        harness=str(row.get("harness", "")),
        model=str(row.get("model", "")),
        created_at=moment(row.get("created_at")),
        updated_at=moment(row.get("updated_at")),
    )


def event_of(event_id: str, frame: Json) -> Event:
    """One frame of the event stream, with polarq's word for a rollout's state."""
    data = dict(frame.get("data") or {})
    if state := data.pop("state", None):
        data["status"] = state
    elif frame.get("type") == "session.state_changed" and data.get("status") in _STATES:
        data["status"] = _STATES[data["status"]].value
    return Event(event_id=event_id or "0-0", type=str(frame["type"]), at=frame["ts"], data=data)


def inference_of(status: Json) -> InferenceState:
    """Whether model calls are held back."""
    nodes = [
        NodeInference(
            node_id=str(node["node_id"]),
            alive=bool(node["alive"]),
            paused=bool(node["paused"]),
            in_flight=node["inflight"],
            waiting=int(node["waiting"]),
            usable=node["inference"],
            counted=bool(node["alive"]),
        )
        for node in status["nodes"]
    ]
    return InferenceState(bool(status["paused"]), status["inflight"], tuple(nodes))


def limits_of(view: Json) -> Published:
    """The deployment's limits."""
    limits = LimitsSection.model_validate(view["limits"])
    return Published(limits, int(view["version"]), str(view["by"]), moment(view["published_at"]))


def moment(value: float | None) -> datetime | None:
    """Seconds since 1970 as a moment."""
    return None if value is None else datetime.fromtimestamp(value, UTC)
