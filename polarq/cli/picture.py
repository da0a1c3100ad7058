"""A task as the command line shows it, whichever door it came through: one row per rollout."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from rich.text import Text

from polarq.cli.terminal import Column, Screen, print_table, seconds, shown, table, table_width
from polarq.contracts.rollout import Outcome, RolloutState, TaskCounts, TaskState, Timing
from polarq.ledger.calls import TaskRow
from polarq.ledger.records import RolloutRecord, TaskRecord, moment, read_counts

STYLES = {
    RolloutState.COMPLETED: "green",
    RolloutState.FAILED: "red",
    RolloutState.TIMED_OUT: "red",
    RolloutState.CANCELLED: "yellow",
    RolloutState.QUEUED: "dim",
}

COLUMNS = (
    Column("rollout"),
    Column("outcome"),
    Column("reward", "right"),
    Column("calls", "right"),
    Column("traces", "right"),
    Column("tokens", "right"),
    Column("queue", "right"),
    Column("prepare", "right"),
    Column("agent", "right"),
    Column("build", "right"),
    Column("evaluate", "right"),
    Column("total s", "right"),
)
"""`calls` are model calls, `tokens` sampled tokens; from `queue` on, seconds per stage."""
NARROW = (
    *COLUMNS[:6],
    Column("prep", "right"),
    Column("agent", "right"),
    Column("build", "right"),
    Column("eval", "right"),
    Column("total", "right"),
)
"""The same for 80 columns: the rollout by its index, without the time in the queue."""


NOTHING_TIMED = Timing()


@dataclass(frozen=True, slots=True)
class Row:
    """One rollout."""

    rollout_id: str
    index: int
    state: RolloutState
    attempt: int = 0
    node_id: str | None = None
    stage_at: datetime | None = None
    outcome: Outcome | None = None
    """None until it has ended."""
    reward: float | None = None
    calls: int | None = None
    traces: int | None = None
    sampled_tokens: int | None = None
    timing: Timing = NOTHING_TIMED
    policy_version: int | None = None
    """The run's when this attempt was claimed."""
    versions: tuple[str, ...] = ()
    """What sampled it."""

    @classmethod
    def of(cls, record: RolloutRecord) -> Row:
        summary = record.summary
        known = {}
        if summary is not None:
            known = {
                "outcome": summary.outcome,
                "reward": summary.reward,
                "calls": summary.calls,
                "traces": summary.traces,
                "sampled_tokens": summary.sampled_tokens,
                "timing": summary.timing,
                "versions": tuple(summary.versions),
            }
        return cls(
            rollout_id=record.rollout_id,
            index=record.index,
            state=record.state,
            attempt=record.attempt,
            node_id=record.owner,
            stage_at=record.stage_at,
            policy_version=record.policy_version,
            **known,  # type: ignore[arg-type]
        )

    def json(self) -> dict[str, Any]:
        return {
            "rollout_id": self.rollout_id,
            "index": self.index,
            "state": self.state.value,
            "attempt": self.attempt,
            "node_id": self.node_id,
            "outcome": self.outcome.model_dump(mode="json") if self.outcome else None,
            "reward": self.reward,
            "calls": self.calls,
            "traces": self.traces,
            "sampled_tokens": self.sampled_tokens,
            "timing": self.timing.model_dump(mode="json"),
            "policy_version": self.policy_version,
            "versions": list(self.versions),
        }


@dataclass(frozen=True, slots=True)
class Picture:
    """One task and its rollouts at one moment."""

    task_id: str
    run_id: str
    state: TaskState
    counts: TaskCounts
    rows: tuple[Row, ...]
    harness: str = ""
    model: str = ""
    created_at: datetime | None = None
    updated_at: datetime | None = None
    waiting_for: str | None = None
    """What its queued rollouts wait for, when it is more than a free place."""

    @classmethod
    def of(cls, record: TaskRecord, waiting_for: str | None = None) -> Picture:
        return cls(
            task_id=record.task_id,
            run_id=record.run_id,
            state=record.state,
            counts=record.counts,
            rows=tuple(Row.of(rollout) for rollout in record.rollouts),
            harness=record.harness,
            model=record.model,
            created_at=record.created_at,
            updated_at=record.updated_at,
            waiting_for=waiting_for,
        )

    def json(self) -> dict[str, Any]:
        return {
            "task_id": self.task_id,
            "run_id": self.run_id,
            "state": self.state.value,
            "counts": self.counts.model_dump(),
            "harness": self.harness,
            "model": self.model,
            "created_at": self.created_at.isoformat() if self.created_at else None,
            "updated_at": self.updated_at.isoformat() if self.updated_at else None,
            "waiting_for": self.waiting_for,
            "rollouts": [row.json() for row in self.rows],
        }


@dataclass(frozen=True, slots=True)
class TaskLine:
    """A task in a list: its counters, not its rollouts."""

    task_id: str
    run_id: str
    state: TaskState
    counts: TaskCounts
    harness: str = ""
    model: str = ""
    created_at: datetime | None = None
    updated_at: datetime | None = None

    @classmethod
    def of(cls, row: TaskRow) -> TaskLine:
        fields = row.fields
        return cls(
            task_id=row.task_id,
            run_id=fields.get("run_id", ""),
            state=TaskState(fields["state"]),
            counts=read_counts(fields),
            harness=fields.get("harness", ""),
            model=fields.get("model", ""),
            created_at=moment(fields.get("created_ms")),
            updated_at=moment(fields.get("updated_ms")),
        )

    def json(self) -> dict[str, Any]:
        return {
            "task_id": self.task_id,
            "run_id": self.run_id,
            "state": self.state.value,
            "counts": self.counts.model_dump(),
            "harness": self.harness,
            "model": self.model,
            "created_at": self.created_at.isoformat() if self.created_at else None,
            "updated_at": self.updated_at.isoformat() if self.updated_at else None,
        }


def state_text(state: RolloutState) -> Text:
    return Text(state.value.replace("_", " "), STYLES.get(state, "cyan"))


def number(value: float | None) -> str:
    return "-" if value is None else f"{value:,}" if isinstance(value, int) else f"{value:.4g}"


def cells(row: Row) -> list[Text]:
    """The row's cells, in the order of `COLUMNS`."""
    reward = Text(number(row.reward), "bold green" if row.reward else "bold" if row.reward is not None else "dim")
    timing = row.timing
    spent = (timing.queue_s, timing.prepare_s, timing.agent_s, timing.build_s, timing.evaluate_s, timing.total_s)
    return [
        Text(shown(row.rollout_id)),
        state_text(row.state),
        reward,
        *(Text(number(value)) for value in (row.calls, row.traces, row.sampled_tokens)),
        *(Text(seconds(value)) for value in spent),
    ]


def print_rollouts(screen: Screen, rows: Sequence[Row]) -> None:
    """The table that ends `demo`, `submit` and `show`, and a line for each rollout that did not end well."""
    wide = [cells(row) for row in rows]
    narrow = [[Text(str(row.index)), *line[1:6], *line[7:]] for row, line in zip(rows, wide, strict=True)]
    if table_width(COLUMNS, wide) > screen.width >= table_width(NARROW, narrow, gap=1):
        screen.say(("task ", "dim"), shown(rows[0].rollout_id.rpartition(".")[0]))
        screen.print(table(NARROW, narrow, gap=1))
    else:
        print_table(screen, COLUMNS, wide)
    for line in troubles(rows):
        screen.say(line)


def troubles(rows: Sequence[Row]) -> Iterator[Text]:
    """What went wrong, one line per rollout, by the boundary that failed."""
    for row in rows:
        outcome = row.outcome
        if outcome is None or (outcome.state is RolloutState.COMPLETED and not outcome.message):
            continue
        where = f"{outcome.boundary.value}/{outcome.reason}"
        yield Text.assemble(shown(row.rollout_id), "  ", (shown(where), "red"), "  ", shown(outcome.message))


def counts_text(counts: TaskCounts) -> str:
    """'4 rollouts: 3 completed, 1 failed'."""
    parts = [
        f"{value} {name.replace('_', ' ')}"
        for name in ("queued", "running", "completed", "failed", "timed_out", "cancelled")
        if (value := getattr(counts, name))
    ]
    return f"{counts.total} {'rollout' if counts.total == 1 else 'rollouts'}: {', '.join(parts) or 'none'}"
