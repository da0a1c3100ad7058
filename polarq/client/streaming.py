"""Results as they come: each rollout once, in the order of the commits, over one connection.

The event stream says that a rollout ended; what it ended with is read from the ledger and the store. Events may be
trimmed or lost, records are not: after every gap (a cursor older than the stream's first entry or newer than its last
one, a connection that broke, a Redis that restarted), and once in a while anyway, the tasks' counters are compared.

What has to be done is one sequence of steps for both clients, `Stream.steps`.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from polarq.client.results import Trajectories, assemble, from_summary, payload_refs
from polarq.client.steps import Outage, Steps, patiently, work
from polarq.contracts.base import check_id
from polarq.contracts.event import Event
from polarq.contracts.rollout import PayloadRef, RolloutResult, RolloutState
from polarq.contracts.task import split_rollout_id
from polarq.errors import InvalidInput, PayloadMissing, ResultTimeout, TaskNotFound
from polarq.ledger import Call, Calls, RolloutRecord
from polarq.ledger.control import tasks_of
from polarq.ledger.following import ended_rollouts, news, progress, request_metadata
from polarq.store.payloads import get_payload, read_raw

T = TypeVar("T")

log = logging.getLogger("polarq.client.results")

_WAIT_S = 5.0
COMPARE_S = 30.0
"""How often the tasks' counters are compared without a reason."""
_PER_CALL = 500
_BATCH_BYTES = 16 * 1024 * 1024


@dataclass(slots=True)
class _Group:
    """A task that is not through yet."""

    run_id: str
    total: int
    left: set[int]
    unread: bool = False
    """Some of it is new to whoever asks: not acknowledged, not among what was seen before."""
    metadata: dict[str, Any] | None = None


@dataclass(slots=True)
class Stream:
    """What is asked for, and how far it is. For one iteration."""

    calls: Calls
    task_ids: Sequence[str]
    run_id: str | None = None
    trajectories: Trajectories = Trajectories.FULL
    seen: frozenset[str] = frozenset()
    """Rollout ids that are left out."""
    whole_tasks: bool = False
    timeout_s: float | None = None
    outage: Outage = field(default_factory=Outage)
    """How long Redis may be away once the stream has begun."""
    _open: dict[str, _Group] = field(default_factory=dict)
    _over: set[str] = field(default_factory=set)
    _fresh: list[str] = field(default_factory=list)
    """Tasks of which nothing is known yet."""
    _lost: list[str] = field(default_factory=list)
    _begun: bool = False
    _began_at: float = field(default_factory=time.monotonic)

    def steps(self) -> Steps[None]:
        """Yields the results among the steps."""
        cursor = yield from self._ask(self.calls.last_event_id())
        self._fresh = list(dict.fromkeys(self.task_ids))
        yield from self._find_run()
        yield from self._compare()
        self._begun = True
        compared_at = time.monotonic()
        while self._open:
            said = yield from self._ask(news(self.calls, cursor, self._wait_s()))
            cursor = said.cursor
            if said.gap or self.outage.was or time.monotonic() - compared_at > COMPARE_S:
                if said.gap or self.outage.was:
                    log.info("events may be missing: the ledger is read again for %d open tasks", len(self._open))
                    yield from self._find_run()
                self.outage.was = False
                yield from self._compare()
                compared_at = time.monotonic()
            else:
                yield from self._heed(said.events)
        if self._lost:
            raise PayloadMissing(
                f"{len(self._lost)} rollouts ended, and what they captured is not in the store (expired or deleted): "
                + ", ".join(self._lost[:20])
            )

    # --- what there is

    def _find_run(self) -> Steps[None]:
        """The run's tasks that are not known yet."""
        if self.run_id is None:
            return
        task_ids = yield from self._ask(tasks_of(self.calls.keys, self.run_id))
        if task_ids is None:
            if not self._begun:
                raise TaskNotFound(f"no task of run '{self.run_id}' in the ledger (never submitted, or expired)")
            return
        asked = {*self._fresh, *self._open, *self._over}
        self._fresh += [task_id for task_id in task_ids if task_id not in asked]

    def _compare(self) -> Steps[None]:
        """Reads whatever ended unnoticed. Raises `TaskNotFound` for a task that is gone, after all others were read."""
        gone: list[str] = []
        fresh, self._fresh = self._fresh, []
        for some in _slices([*fresh, *self._open]):
            rows = yield from self._ask(progress(self.calls.keys, some))
            ended: list[tuple[str, int]] = []
            for task_id, row in zip(some, rows, strict=True):
                if row is None:
                    # A task of the run that expired just now, having ended long ago, is nobody's loss.
                    if task_id in self._open or task_id in self.task_ids:
                        gone.append(task_id)
                    continue
                group = self._open.setdefault(task_id, _Group(row.run_id, row.total, set(range(row.total))))
                if row.ended > group.total - len(group.left):
                    ended += [(task_id, index) for index in sorted(group.left)]
            yield from self._read(ended)
        if gone:
            raise TaskNotFound(f"no task '{gone[0]}' in the ledger (never submitted, or expired)")

    def _heed(self, events: Sequence[Event]) -> Steps[None]:
        """Reads what the events say has ended, and learns of the run's new tasks."""
        ended: dict[tuple[str, int], None] = {}
        for event in events:
            task_id = str(event.data.get("task_id", ""))
            if event.type == "task.created":
                if self.run_id is not None and event.data.get("run_id") == self.run_id and task_id not in self._over:
                    self._fresh.append(task_id)
            elif event.type == "session.state_changed" and event.data.get("status") in _ENDS:
                group = self._open.get(task_id)
                index = split_rollout_id(event.data["session_id"])[1]
                if group is not None and index in group.left:
                    ended[task_id, index] = None
        if self._fresh:
            yield from self._compare()
        yield from self._read(list(ended))

    # --- what came

    def _read(self, ids: Sequence[tuple[str, int]]) -> Steps[None]:
        """Hands on those of the rollouts that have ended, and takes them off the list."""
        for some in _slices(ids):
            records = yield from self._ask(ended_rollouts(self.calls.keys, some))
            came: list[tuple[_Group, RolloutRecord]] = []
            for (task_id, index), record in zip(some, records, strict=True):
                group = self._open.get(task_id)
                if record is None or group is None or index not in group.left:
                    continue
                group.left.discard(index)
                if record.acknowledged_at is None and record.rollout_id not in self.seen:
                    group.unread = True
                    came.append((group, record))
            if not self.whole_tasks:
                came.sort(key=lambda pair: pair[1].ended_at.timestamp() if pair[1].ended_at else 0.0)
                yield from self._hand_on(came)
            for task_id in dict.fromkeys(task_id for task_id, _ in some):
                if task_id in self._open and not self._open[task_id].left:
                    group = self._open.pop(task_id)
                    self._over.add(task_id)
                    if self.whole_tasks and group.unread:
                        yield from self._whole(task_id)

    def _hand_on(self, came: Sequence[tuple[_Group, RolloutRecord]]) -> Steps[None]:
        batch: list[tuple[str, PayloadRef]] = []
        for group, record in came:
            ref = record.summary.payload if record.summary is not None else None
            if ref is not None and self.trajectories is Trajectories.FULL:
                batch.append((record.rollout_id, ref))
                if sum(ref.stored_bytes for _, ref in batch) > _BATCH_BYTES:
                    yield from (yield from self._fetched(batch))
                    batch = []
                continue
            task_id = split_rollout_id(record.rollout_id)[0]
            if group.metadata is None:
                group.metadata = yield from self._ask(request_metadata(self.calls.keys, task_id))
            yield from_summary(task_id, group.run_id, record, self.trajectories, group.metadata or {})
        yield from (yield from self._fetched(batch))

    def _whole(self, task_id: str) -> Steps[None]:
        """Hands on a task that has ended."""
        record = yield from self._ask(self.calls.task(task_id, with_request=True))
        if record is None or record.request is None:
            raise TaskNotFound(f"task '{task_id}' has ended, and is not in the ledger any more")
        refs = list(payload_refs(record).items()) if self.trajectories is Trajectories.FULL else []
        results = yield from self._fetched(refs)
        by_id = {result.rollout_id: result for result in results}
        yield assemble(record, by_id, self.trajectories, record.request.metadata)

    def _fetched(self, refs: Sequence[tuple[str, PayloadRef]]) -> Steps[list[RolloutResult]]:
        """The results of payloads, all read in one go; those that are not in the store are noted."""
        reads = [get_payload(ref) for _, ref in refs]
        commands = tuple(command for read in reads for command in read.commands)
        if not commands:
            return []
        replies = yield from self._ask(read_raw(commands))
        missing: list[tuple[str, int]] = []

        def decoded() -> list[RolloutResult]:
            results = []
            at = 0
            for (rollout_id, ref), read in zip(refs, reads, strict=True):
                try:
                    results.append(read.read(replies[at : at + ref.chunks]))
                except PayloadMissing:
                    missing.append(split_rollout_id(rollout_id))
                at += ref.chunks
            return results

        results = yield from work(decoded)
        if missing:
            # Acknowledged a moment ago, by somebody else, is no loss.
            now = yield from self._ask(ended_rollouts(self.calls.keys, missing))
            self._lost += [record.rollout_id for record in now if record and record.acknowledged_at is None]
        return results

    # --- asking

    def _ask(self, call: Call[T]) -> Steps[T]:
        """The answer. Once the stream has begun, Redis may be away for a while."""
        if not self._begun:
            answer: T = yield call
            return answer
        return (yield from patiently(call, self.outage, self._wait_s))

    def _wait_s(self) -> float:
        """How long to wait now. Raises `ResultTimeout` when the time is over."""
        if self.timeout_s is None:
            return _WAIT_S
        left = self._began_at + self.timeout_s - time.monotonic()
        if left <= 0:
            waiting = sum(len(group.left) for group in self._open.values())
            raise ResultTimeout(
                f"{waiting} rollouts of {len(self._open)} tasks have not ended within {self.timeout_s:g} s; they go "
                "on, ask again later"
            )
        return min(left, _WAIT_S)


_ENDS = frozenset(state.value for state in RolloutState if state.terminal)


def _slices(items: Sequence[Any]) -> Iterator[Sequence[Any]]:
    for start in range(0, len(items), _PER_CALL):
        yield items[start : start + _PER_CALL]


def stream(
    calls: Calls,
    task_ids: str | Iterable[str],
    run_id: str | None,
    trajectories: Trajectories,
    seen: Collection[str],
    *,
    whole_tasks: bool = False,
    timeout_s: float | None,
    outage_s: float,
) -> Steps[None]:
    """What `results` and `groups` do. Raises `InvalidInput`, at once, where nothing is asked for."""
    several = [task_ids] if isinstance(task_ids, str) else list(task_ids)
    if not several and run_id is None:
        raise InvalidInput("results", ["name the tasks, or give a run_id"])
    if run_id is not None:
        check_id("run", run_id)
    made = Stream(calls, several, run_id, trajectories, frozenset(seen), whole_tasks, timeout_s, Outage(outage_s))
    return made.steps()
