"""What the ledger holds, read back as typed pictures."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from enum import StrEnum
from importlib.metadata import version
from typing import Any

from pydantic import ValidationError

from polarq.contracts.base import problems_of
from polarq.contracts.rollout import EarlyStop, Loss, RolloutState, RolloutSummary, TaskCounts, TaskState
from polarq.contracts.task import Task, split_rollout_id
from polarq.errors import PolarqError

Fields = Mapping[str, str]


def moment(ms: str | float | None) -> datetime | None:
    """A server time in milliseconds as an aware UTC datetime."""
    return None if ms in (None, "") else datetime.fromtimestamp(float(ms or 0) / 1000, UTC)


def text_fields(flat: Sequence[bytes]) -> dict[str, str]:
    """A Redis reply of alternating names and values as a dictionary of texts."""
    parts = [part.decode("utf-8", "replace") for part in flat]
    return dict(zip(parts[::2], parts[1::2], strict=True))


@dataclass(frozen=True, slots=True)
class RolloutRecord:
    """One rollout as the ledger knows it. Times are the server's."""

    rollout_id: str
    index: int
    state: RolloutState
    attempt: int
    token: int
    owner: str | None
    job_id: str | None
    cancel_requested: bool
    queued_at: datetime | None
    claimed_at: datetime | None
    stage_at: datetime | None
    ended_at: datetime | None
    summary: RolloutSummary | None
    acknowledged_at: datetime | None = None
    """Its trainer has stored it: the payload is gone from the store."""
    policy_version: int | None = None
    """The run's when this attempt was claimed; None: its trainer had said none."""
    losses: tuple[Loss, ...] = ()
    """Attempts that ended with the loss of their worker, the newest ones."""

    @classmethod
    def read(cls, rollout_id: str, index: int, fields: Fields) -> RolloutRecord:
        summary = fields.get("summary")
        return cls(
            rollout_id=rollout_id,
            index=index,
            state=RolloutState(fields["state"]),
            attempt=int(fields.get("attempt", 0)),
            token=int(fields.get("token", 0)),
            owner=fields.get("owner") or None,
            job_id=fields.get("job_id") or None,
            cancel_requested=fields.get("cancel") == "1",
            queued_at=moment(fields.get("queued_ms")),
            claimed_at=moment(fields.get("claimed_ms")),
            stage_at=moment(fields.get("stage_ms")),
            ended_at=moment(fields.get("ended_ms")),
            summary=RolloutSummary.stored(summary) if summary else None,
            acknowledged_at=moment(fields.get("acknowledged_ms")),
            policy_version=int(fields["policy_version"]) if "policy_version" in fields else None,
            losses=read_losses(fields.get("losses")),
        )


def read_losses(text: str | None) -> tuple[Loss, ...]:
    """As `lua/losses.lua` keeps them."""
    return tuple(
        Loss(
            attempt=kept["attempt"],
            node_id=kept["node"],
            stage=kept["stage"],
            cause=kept["cause"],
            how=kept.get("how", ""),
            beside=kept.get("beside", 0),
            share=kept.get("share", 1.0),
            at=datetime.fromtimestamp(kept["at_ms"] / 1000, UTC),
        )
        for kept in json.loads(text or "[]")
    )


@dataclass(frozen=True, slots=True)
class TaskRecord:
    """One task with all its rollouts, as one consistent picture."""

    task_id: str
    run_id: str
    state: TaskState
    celery_ids: tuple[str, ...]
    """Celery results that wait for this task."""
    harness: str
    model: str
    counts: TaskCounts
    created_at: datetime
    updated_at: datetime
    ended_at: datetime | None
    rollouts: tuple[RolloutRecord, ...]
    request: Task | None
    """None where it was not asked for."""

    @classmethod
    def read(cls, task_id: str, fields: Fields, rollouts: Sequence[Fields]) -> TaskRecord:
        request = fields.get("request")
        created, updated = moment(fields["created_ms"]), moment(fields["updated_ms"])
        assert created is not None
        assert updated is not None
        return cls(
            task_id=task_id,
            run_id=fields["run_id"],
            state=TaskState(fields["state"]),
            celery_ids=tuple(fields["celery_id"].split(",")),
            harness=fields.get("harness", ""),
            model=fields.get("model", ""),
            counts=read_counts(fields),
            created_at=created,
            updated_at=updated,
            ended_at=moment(fields.get("ended_ms")),
            rollouts=tuple(RolloutRecord.read(f"{task_id}.{i}", i, r) for i, r in enumerate(rollouts) if r),
            request=read_request(task_id, request) if request else None,
        )


def read_request(task_id: str, text: str) -> Task:
    """A task as it was submitted. Raises `Unreadable`."""
    try:
        return Task.model_validate(json.loads(text))
    except ValueError as exc:
        raise Unreadable(task_id, exc) from exc


def read_early_stop(fields: Fields) -> EarlyStop | None:
    """A task's early stop; None where it was not stopped so."""
    if "early_usable" not in fields:
        return None
    usable, elapsed_ms = int(fields["early_usable"]), int(fields["early_ms"])
    return EarlyStop(min_usable=int(fields["early"]), usable=usable, elapsed_ms=elapsed_ms)


def read_counts(fields: Fields) -> TaskCounts:
    """A task's counters. What is neither queued nor ended is running."""
    total, queued = int(fields["num"]), int(fields.get("queued", 0))
    ends = {key: int(fields.get(key, 0)) for key in ("completed", "failed", "timed_out", "cancelled")}
    return TaskCounts(total=total, queued=queued, running=total - queued - sum(ends.values()), **ends)


@dataclass(frozen=True, slots=True)
class TaskHead:
    """A task without its rollouts: what waiting and progress need, at the same cost for any number of samples."""

    task_id: str
    state: TaskState
    counts: TaskCounts
    celery_ids: tuple[str, ...]

    @classmethod
    def read(cls, task_id: str, fields: Fields) -> TaskHead:
        celery_ids = tuple(fields["celery_id"].split(","))
        return cls(task_id, TaskState(fields["state"]), read_counts(fields), celery_ids)


@dataclass(frozen=True, slots=True)
class Submitted:
    """What a submission did: `created` is False when the same request was there already."""

    task_id: str
    celery_id: str
    created: bool
    state: TaskState


class Unreadable(PolarqError):
    """A task that this polarq cannot read: a newer one wrote it, or it was damaged."""

    def __init__(self, task_id: str, cause: Exception) -> None:
        why = problems_of(cause) if isinstance(cause, ValidationError) else [f"{type(cause).__name__}: {cause}"]
        super().__init__(f"task '{task_id}' cannot be read by this polarq ({version('polarq')}): {'; '.join(why)}")


class UnreadableClaim(Unreadable):
    """Its claim was granted all the same."""

    def __init__(self, rollout_id: str, token: int, cause: Exception) -> None:
        super().__init__(split_rollout_id(rollout_id)[0], cause)
        self.rollout_id = rollout_id
        self.token = token


@dataclass(frozen=True, slots=True)
class Claim:
    """The right to run one attempt of a rollout: every later step shows `token`."""

    rollout_id: str
    attempt: int
    token: int
    waited_s: float
    """From queued to claimed, by the server's clock."""
    claimed_at: datetime
    task: Task
    policy_version: int | None = None
    """The run's now; None: its trainer has published none."""
    losses: tuple[Loss, ...] = ()
    """How its earlier attempts lost their workers, the newest ones."""


@dataclass(frozen=True, slots=True)
class Refused:
    """Why a claim was not granted: busy, done or unknown. Nothing to do."""

    reason: str
    detail: str = ""


class Released(StrEnum):
    """What became of a rollout that was given back."""

    QUEUED = "queued"
    CANCELLED = "cancelled"
    """It had been told to stop, and has ended with that."""


@dataclass(frozen=True, slots=True)
class Committed:
    """`won`: this attempt's result is the visible one. `finished`: it ended its task."""

    won: bool
    finished: bool
    detail: str = ""
    stopping: tuple[ActiveRollout, ...] = ()
    """Rollouts of its group that run and were told to stop: enough have ended usably."""


@dataclass(frozen=True, slots=True)
class ActiveRollout:
    """A running rollout that was told to stop."""

    rollout_id: str
    owner: str
    job_id: str


@dataclass(frozen=True, slots=True)
class Cancelled:
    """What a cancel found. `known` is False for a task that is not in the ledger."""

    known: bool
    already_over: bool = False
    registered: bool = False
    """A tombstone was set: a later submit under this id is refused."""
    active: tuple[ActiveRollout, ...] = ()


def decode(value: Any) -> str:
    return value.decode() if isinstance(value, bytes) else str(value)
