"""Reading tasks, rollouts and events: the steps, for both clients."""

from __future__ import annotations

import time
from typing import TypeVar

from polarq.client.results import Trajectories, assemble, payload_refs
from polarq.client.steps import Outage, Steps, ask, patiently, work
from polarq.contracts.rollout import PayloadRef, RolloutResult, TaskResult
from polarq.errors import InvalidInput, PayloadMissing, ResultTimeout, TaskNotFound
from polarq.ledger import Calls, TaskHead, TaskRecord
from polarq.ledger.following import EVENT_ID, events_after, position
from polarq.store.payloads import get_payload, read_raw

T = TypeVar("T")

_WAIT_STEP_S = 5.0
"""Longest wait on the event stream before the ledger itself is read again: an event may be lost, a record is not."""


def _known(found: T | None, task_id: str) -> T:
    if found is None:
        raise TaskNotFound(f"no task '{task_id}' in the ledger (never submitted, or expired)")
    return found


def head_of(calls: Calls, task_id: str) -> Steps[TaskHead]:
    """A task's state and counters, without its rollouts. Raises `TaskNotFound`."""
    return _known((yield from ask(calls.head(task_id))), task_id)


def record_of(calls: Calls, task_id: str, *, with_request: bool = False) -> Steps[TaskRecord]:
    """The ledger's own picture of a task. Raises `TaskNotFound`."""
    return _known((yield from ask(calls.task(task_id, with_request=with_request))), task_id)


def _payload(ref: PayloadRef) -> Steps[RolloutResult]:
    """Fetched here, decoded where it holds nobody up: it may be 50 MB. Raises `PayloadMissing`, `PayloadCorrupt`."""
    read = get_payload(ref)
    replies = yield from ask(read_raw(read.commands))
    return (yield from work(lambda: read.read(replies)))


def get(calls: Calls, task_id: str, wanted: Trajectories) -> Steps[TaskResult]:
    record = yield from record_of(calls, task_id, with_request=True)
    payloads: dict[str, RolloutResult] = {}
    if wanted is Trajectories.FULL:
        try:
            for rollout_id, ref in payload_refs(record).items():
                payloads[rollout_id] = yield from _payload(ref)
        except PayloadMissing:
            now = yield from record_of(calls, task_id)
            if payload_refs(now) == payload_refs(record):
                raise
            return (yield from get(calls, task_id, wanted))  # acknowledged meanwhile
    assert record.request is not None
    return assemble(record, payloads, wanted, record.request.metadata)


def rollout(calls: Calls, rollout_id: str) -> Steps[RolloutResult]:
    record = yield from record_of(calls, rollout_id.rpartition(".")[0])
    ref = payload_refs(record).get(rollout_id)
    if ref is not None:
        return (yield from _payload(ref))
    for result in assemble(record, {}, Trajectories.REFS, {}).results:
        if result.rollout_id == rollout_id:
            return result
    raise TaskNotFound(f"rollout '{rollout_id}' has not ended, or does not exist")


def wait(calls: Calls, task_id: str, timeout_s: float | None, wanted: Trajectories) -> Steps[TaskResult]:
    deadline = None if timeout_s is None else time.monotonic() + timeout_s
    while True:
        after = yield from ask(calls.last_event_id())
        head = yield from head_of(calls, task_id)
        if head.state.terminal:
            return (yield from get(calls, task_id, wanted))
        yield from _next_event(calls, task_id, after, _remaining(deadline, head))


def _next_event(calls: Calls, task_id: str, after: str, wait_s: float) -> Steps[None]:
    """Returns when something happened to the task, or after `wait_s` (at most `_WAIT_STEP_S`)."""
    until = time.monotonic() + min(wait_s, _WAIT_STEP_S)
    while (left := until - time.monotonic()) > 0:
        events = yield from ask(events_after(calls, after, left))
        if any(event.data.get("task_id") == task_id for event in events):
            return
        after = events[-1].event_id if events else after


def _remaining(deadline: float | None, head: TaskHead) -> float:
    if deadline is None:
        return _WAIT_STEP_S
    left = deadline - time.monotonic()
    if left <= 0:
        ended = f"{head.counts.ended} of {head.counts.total} rollouts ended"
        raise ResultTimeout(f"task '{head.task_id}' has {ended}; it goes on, ask again later")
    return left


def follow(calls: Calls, task_id: str | None, after: str | None, wait_s: float, outage: Outage) -> Steps[None]:
    """Yields events as they happen."""
    if after is not None and not EVENT_ID.fullmatch(after):
        raise InvalidInput("follow", [f"after: '{after[:60]}' is not an event id, such as 1764420000000-0"])
    last = after or (yield from ask(calls.last_event_id()))
    if task_id is not None:
        yield from head_of(calls, task_id)
    end: str | None = None
    while end is None or position(last) < position(end):
        if task_id is not None and end is None:
            head = _known((yield from patiently(calls.head(task_id), outage, lambda: wait_s)), task_id)
            if head.state.terminal:
                end = yield from patiently(calls.last_event_id(), outage, lambda: wait_s)
        call = events_after(calls, last, wait_s if end is None else 0.001)
        events = yield from patiently(call, outage, lambda: wait_s)
        for event in events:
            last = event.event_id
            if task_id is None or event.data.get("task_id") == task_id:
                yield event
        if end is not None and not events:
            return
