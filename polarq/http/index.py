"""Every task in the ledger by its counters, kept up to date by reading what changed since the last look.

The ledger keeps task ids by the time of their last change. A refresh reads the ids that changed since the newest one it
knows, and their counters, so that a list or a scrape over a hundred thousand tasks costs what happened in between.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Any

from polarq.contracts.rollout import TaskCounts, TaskState
from polarq.http.polar_json import counts
from polarq.http.polar_shapes import TaskRow
from polarq.ledger import AsyncLedger
from polarq.ledger.calls import Call
from polarq.ledger.calls import TaskRow as LedgerRow
from polarq.ledger.records import TaskRecord, decode, read_counts

MOST_TASKS = 100_000
"""Tasks looked at; older ones stay in the ledger, reachable by their id."""
_BATCH = 1000
_MEANS_KEPT = 4096
_MEANS_AT_ONCE = 8


@dataclass(frozen=True, slots=True)
class IndexedTask:
    """A task's line: counters, no rollouts. Times are the server's milliseconds."""

    task_id: str
    run_id: str
    state: TaskState
    harness: str
    model: str
    counts: TaskCounts
    created_ms: float
    updated_ms: float

    @classmethod
    def read(cls, row: LedgerRow) -> IndexedTask:
        fields = row.fields
        return cls(
            task_id=row.task_id,
            run_id=fields.get("run_id", ""),
            state=TaskState(fields["state"]),
            harness=fields.get("harness", ""),
            model=fields.get("model", ""),
            counts=read_counts(fields),
            created_ms=float(fields.get("created_ms", 0)),
            updated_ms=float(fields.get("updated_ms", 0)),
        )


@dataclass(frozen=True, slots=True)
class Means:
    """What a task's ended rollouts average to; None where there is nothing to average."""

    reward: float | None
    traces: float | None
    calls: float | None

    @classmethod
    def of(cls, record: TaskRecord) -> Means:
        summaries = [rollout.summary for rollout in record.rollouts if rollout.summary is not None]
        return cls(
            _mean([summary.reward for summary in summaries if summary.reward is not None]),
            _mean([summary.traces for summary in summaries]),
            _mean([summary.calls for summary in summaries]),
        )


class TaskIndex:
    """One process's view of all tasks. `refresh` before reading."""

    def __init__(self, ledger: AsyncLedger) -> None:
        self._ledger = ledger
        self._tasks: dict[str, IndexedTask] = {}
        """In the order of their last change, the oldest first."""
        self._newest_ms = 0.0
        self._lock = asyncio.Lock()
        self._means: OrderedDict[tuple[str, float], Means] = OrderedDict()

    async def refresh(self) -> None:
        """Raises `LedgerUnavailable`."""
        async with self._lock:
            known = await self._ledger.do(_how_many(self._ledger))
            if known < len(self._tasks):
                # The ledger has lost tasks (emptied, restored from an older copy): start over.
                self._tasks.clear()
                self._newest_ms = 0.0
            changed = await self._ledger.do(_changed(self._ledger, self._newest_ms))
            changed.reverse()
            for start in range(0, len(changed), _BATCH):
                batch = changed[start : start + _BATCH]
                rows = await self._ledger.do(self._ledger.calls.task_rows([task_id for task_id, _ in batch]))
                for task_id, _ in batch:
                    self._tasks.pop(task_id, None)
                self._tasks |= {row.task_id: IndexedTask.read(row) for row in rows}
            if changed:
                self._newest_ms = max(score for _, score in changed)
            self._forget(await self._ledger.do(_server_ms()))

    def _forget(self, now_ms: float) -> None:
        """Drops what has expired in the ledger, and the oldest beyond the bound."""
        expired_ms = now_ms - self._ledger.calls.keep_s * 1000
        extra = len(self._tasks) - MOST_TASKS
        gone = []
        for number, task in enumerate(self._tasks.values()):
            if number >= extra and task.updated_ms >= expired_ms:
                break
            if number < extra or task.state.terminal:
                gone.append(task.task_id)
        for task_id in gone:
            del self._tasks[task_id]

    def all(self) -> list[IndexedTask]:
        return list(self._tasks.values())

    def newest_first(self) -> Iterator[IndexedTask]:
        return reversed(self._tasks.values())

    async def rows(self, chosen: Callable[[IndexedTask], bool], limit: int) -> list[TaskRow]:
        """Lines of the task list, newest change first. Raises `LedgerUnavailable`."""
        await self.refresh()
        tasks = list(islice(filter(chosen, self.newest_first()), limit))
        gate = asyncio.Semaphore(_MEANS_AT_ONCE)

        async def row(task: IndexedTask) -> TaskRow:
            async with gate:
                return _row(task, await self._means_of(task))

        return list(await asyncio.gather(*(row(task) for task in tasks)))

    async def _means_of(self, task: IndexedTask) -> Means:
        """Read from the rollouts' summaries, and kept until the task changes."""
        if not task.counts.ended:
            return Means(None, None, None)
        key = (task.task_id, task.updated_ms)
        if key not in self._means:
            record = await self._ledger.do(self._ledger.calls.task(task.task_id))
            self._means[key] = Means.of(record) if record is not None else Means(None, None, None)
            while len(self._means) > _MEANS_KEPT:
                self._means.popitem(last=False)
        return self._means[key]


def _changed(ledger: AsyncLedger, since_ms: float) -> Call[list[tuple[str, float]]]:
    """(task id, time of last change) of tasks that changed at or after a time, newest first."""
    key = ledger.calls.keys.tasks
    command = ("ZREVRANGEBYSCORE", key, "+inf", repr(since_ms), "WITHSCORES", "LIMIT", 0, MOST_TASKS)

    def read(replies: list[Any]) -> list[tuple[str, float]]:
        flat = replies[0]
        if flat and isinstance(flat[0], list | tuple):
            return [(decode(member), float(score)) for member, score in flat]
        return [(decode(member), float(score)) for member, score in zip(flat[::2], flat[1::2], strict=True)]

    return Call(read, commands=(command,))


def _how_many(ledger: AsyncLedger) -> Call[int]:
    return Call(lambda replies: int(replies[0]), commands=(("ZCARD", ledger.calls.keys.tasks),))


def _server_ms() -> Call[float]:
    def read(replies: list[Any]) -> float:
        seconds, micros = replies[0]
        return float(seconds) * 1000 + float(micros) / 1000

    return Call(read, commands=(("TIME",),))


def _mean(values: list[float] | list[int]) -> float | None:
    return sum(values) / len(values) if values else None


def _row(task: IndexedTask, means: Means) -> TaskRow:
    return {
        "task_id": task.task_id,
        "status": task.state.value,
        "harness": task.harness,
        "model": task.model,
        "num_samples": task.counts.total,
        "completed_sessions": task.counts.ended,
        "errored_sessions": task.counts.failed + task.counts.timed_out + task.counts.cancelled,
        "mean_reward": means.reward,
        "mean_traces": means.traces,
        "mean_completions": means.calls,
        "created_at": task.created_ms / 1000,
        "updated_at": task.updated_ms / 1000,
        "source": "live",
        "run_id": task.run_id,
        "counts": counts(task.counts),
    }
