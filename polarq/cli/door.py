"""The two doors of a deployment, for the command line: Redis itself, or the HTTP shim.

A door answers in the same words whichever it is. `open_door` chooses: an address given with --url or POLARQ_URL is the
shim, else it is Redis.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, Self

from polarq.callback.record import CallbackAttempt, attempts
from polarq.cli.picture import Picture, TaskLine
from polarq.client import Client
from polarq.client.pausing import InferenceState
from polarq.contracts.event import Event
from polarq.contracts.node import NodeRecord
from polarq.contracts.rollout import RolloutResult
from polarq.contracts.task import Task, maybe_rollout_id
from polarq.errors import ResultTimeout, TaskNotFound
from polarq.ledger import without_password
from polarq.ledger.control import RunState, tasks_of
from polarq.ledger.following import position
from polarq.ledger.limits import Published
from polarq.settings import Settings
from polarq.store.pauses import PauseMode
from polarq.topology import load_topology
from polarq.topology.models import LimitsSection

WAIT_STEP_S = 5.0
"""Longest wait on events before the ledger itself is read again: an event may be lost, a record is not."""


@dataclass(frozen=True, slots=True)
class Accepted:
    """A submitted task. `created` is False when the same request is known to have been there already."""

    task_id: str
    created: bool


@dataclass(frozen=True, slots=True)
class Stopped:
    """What a cancel did. `stopping`: rollouts that ran and were told to stop."""

    already_over: bool
    stopping: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Update:
    """What `watch` saw: the task now, and what happened since the update before."""

    picture: Picture
    events: Sequence[Event]


class Door(Protocol):
    """What a command can ask of a deployment. Errors are `polarq.errors` and `Unreachable`."""

    @property
    def where(self) -> str:
        """For people: which door this is."""
        ...

    def submit(self, task: Task) -> Accepted: ...

    def picture(self, task_id: str) -> Picture: ...

    def watch(self, task_id: str, timeout_s: float | None) -> Iterator[Update]:
        """Updates until the task has ended; the last one has its end. Raises `ResultTimeout`."""
        ...

    def rollout(self, rollout_id: str) -> RolloutResult: ...

    def cancel(self, task_id: str, index: int | None) -> Stopped: ...

    def acknowledge(self, task_id: str, index: int | None) -> int:
        """How many rollouts were not acknowledged before."""
        ...

    def callbacks(self, task_id: str) -> list[CallbackAttempt]:
        """The newest tries to deliver the task's callback, oldest first."""
        ...

    def tasks(self, limit: int) -> list[TaskLine]: ...

    def run_tasks(self, run_id: str) -> list[str]:
        """The run's tasks, without those of which all is acknowledged. Raises `TaskNotFound`."""
        ...

    def nodes(self) -> list[NodeRecord]: ...

    def drain(self, node_id: str, on: bool, deadline_s: float | None) -> NodeRecord: ...

    def pause_node(self, node_id: str, on: bool) -> NodeRecord: ...

    def set_capacity(self, node_id: str, run_workers: int | None) -> NodeRecord: ...

    def runs(self) -> list[RunState]: ...

    def run(self, run_id: str) -> RunState: ...

    def pause_run(self, run_id: str, on: bool) -> RunState: ...

    def set_policy_version(self, run_id: str, version: int) -> RunState: ...

    def inference_state(self, run_id: str | None) -> InferenceState: ...

    def pause_inference(self, mode: PauseMode, timeout_s: float, lease_s: float, run_id: str | None) -> InferenceState:
        """Holds model calls back. Raises `NotPaused`."""
        ...

    def resume_inference(self, run_id: str | None) -> InferenceState: ...

    def limits(self) -> Published: ...

    def set_limits(self, limits: LimitsSection) -> Published: ...

    def events(self, task_id: str | None, after: str | None) -> Iterator[Event]:
        """Events as they happen; of one task from its start to its end."""
        ...

    def __enter__(self) -> Self: ...

    def __exit__(self, *_: object) -> None: ...


def open_door(config: Path | None, url: str | None = None) -> Door:
    """The shim at `url` or POLARQ_URL, else the Redis of the topology."""
    settings = Settings.from_env()
    address = url or settings.shim_url
    if address:
        from polarq.cli.shim import ShimDoor

        return ShimDoor(address, settings.token)
    return RedisDoor(Client(load_topology(config, settings), settings))


class RedisDoor:
    """Straight to the ledger."""

    def __init__(self, client: Client) -> None:
        self.client = client

    @property
    def where(self) -> str:
        return f"Redis {without_password(self.client.url)}"

    def submit(self, task: Task) -> Accepted:
        done = self.client.submit(task)
        return Accepted(done.task_id, done.created)

    def picture(self, task_id: str) -> Picture:
        record = self.client.record(task_id)
        return Picture.of(record, self.client.waiting_for(task_id) if record.counts.queued else None)

    def rollout(self, rollout_id: str) -> RolloutResult:
        return self.client.rollout(rollout_id)

    def cancel(self, task_id: str, index: int | None) -> Stopped:
        done = self.client.cancel(task_id if index is None else f"{task_id}.{index}")
        return Stopped(done.already_over, tuple(rollout.rollout_id for rollout in done.active))

    def acknowledge(self, task_id: str, index: int | None) -> int:
        return self.client.acknowledge(task_id if index is None else [f"{task_id}.{index}"])

    def callbacks(self, task_id: str) -> list[CallbackAttempt]:
        return self.client.ledger.do(attempts(self.client.calls.keys, task_id))

    def tasks(self, limit: int) -> list[TaskLine]:
        ledger = self.client.ledger
        task_ids = ledger.do(ledger.calls.recent_task_ids(limit))
        return [TaskLine.of(row) for row in ledger.do(ledger.calls.task_rows(task_ids))]

    def run_tasks(self, run_id: str) -> list[str]:
        found = self.client.ledger.do(tasks_of(self.client.calls.keys, run_id))
        if found is None:
            raise TaskNotFound(f"no task of run '{run_id}' in the ledger (never submitted, or expired)")
        return found

    def nodes(self) -> list[NodeRecord]:
        return self.client.nodes()

    def drain(self, node_id: str, on: bool, deadline_s: float | None) -> NodeRecord:
        return self.client.drain(node_id, on, deadline_s)

    def pause_node(self, node_id: str, on: bool) -> NodeRecord:
        return self.client.pause_node(node_id, on)

    def set_capacity(self, node_id: str, run_workers: int | None) -> NodeRecord:
        return self.client.set_capacity(node_id, run_workers)

    def runs(self) -> list[RunState]:
        return self.client.runs()

    def limits(self) -> Published:
        return self.client.limits()

    def set_limits(self, limits: LimitsSection) -> Published:
        return self.client.set_limits(limits)

    def run(self, run_id: str) -> RunState:
        return self.client.run(run_id)

    def set_policy_version(self, run_id: str, version: int) -> RunState:
        return self.client.set_policy_version(run_id, version)

    def inference_state(self, run_id: str | None) -> InferenceState:
        return self.client.inference_state(run_id)

    def pause_inference(self, mode: PauseMode, timeout_s: float, lease_s: float, run_id: str | None) -> InferenceState:
        return self.client.pause_inference(mode=mode, timeout_s=timeout_s, lease_s=lease_s, run_id=run_id)

    def resume_inference(self, run_id: str | None) -> InferenceState:
        self.client.resume_inference(run_id)
        return self.client.inference_state(run_id)

    def pause_run(self, run_id: str, on: bool) -> RunState:
        return self.client.pause_run(run_id) if on else self.client.resume_run(run_id)

    def watch(self, task_id: str, timeout_s: float | None) -> Iterator[Update]:
        last = self._beginning(task_id)
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        events: list[Event] = []
        while True:
            picture = self.picture(task_id)
            if picture.state.terminal:
                yield Update(picture, [*events, *self._rest(task_id, last)])
                return
            yield Update(picture, events)
            events, last = self._next(task_id, last, time_left(deadline, picture))

    def _beginning(self, task_id: str) -> str:
        """An event id from just before the task was made: event ids are the server's milliseconds."""
        return f"{int(self.client.record(task_id).created_at.timestamp() * 1000) - 1}"

    def _next(self, task_id: str, last: str, wait_s: float) -> tuple[list[Event], str]:
        """The next events of the task, after at most `wait_s`, and where to go on."""
        until = time.monotonic() + wait_s
        while (left := until - time.monotonic()) > 0:
            seen = self.client.ledger.wait_events(last, left)
            if seen:
                last = seen[-1].event_id
            if events := _of_task(seen, task_id):
                return events, last
        return [], last

    def events(self, task_id: str | None, after: str | None) -> Iterator[Event]:
        ledger = self.client.ledger
        if task_id is None:
            last = after or ledger.do(ledger.calls.last_event_id())
        else:
            last = after or self._beginning(task_id)
        while task_id is None or not self.client.head(task_id).state.terminal:
            events = ledger.wait_events(last, WAIT_STEP_S)
            if events:
                last = events[-1].event_id
                yield from events if task_id is None else _of_task(events, task_id)
        yield from self._rest(task_id, last)

    def _rest(self, task_id: str, last: str) -> Iterator[Event]:
        """What is still to be read of a task that has ended: up to the newest event there is now."""
        ledger = self.client.ledger
        end = position(ledger.do(ledger.calls.last_event_id()))
        while position(last) < end and (events := ledger.wait_events(last, 0.001)):
            last = events[-1].event_id
            yield from _of_task(events, task_id)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.client.close()


def _of_task(events: Sequence[Event], task_id: str) -> list[Event]:
    return [event for event in events if event.data.get("task_id") == task_id]


def time_left(deadline: float | None, picture: Picture) -> float:
    """How long to wait now, in seconds. Raises `ResultTimeout` when the time is over."""
    if deadline is None:
        return WAIT_STEP_S
    left = deadline - time.monotonic()
    if left <= 0:
        counts = picture.counts
        raise ResultTimeout(
            f"task '{picture.task_id}' has {counts.ended} of {counts.total} rollouts ended; it goes on: "
            f"polarq show {picture.task_id}, or polarq cancel {picture.task_id}"
        )
    return min(left, WAIT_STEP_S)


def find_task(door: Door, any_id: str) -> tuple[Picture, int | None]:
    """The task of a task id or rollout id, and the rollout's index if it was one. A task's own id comes first."""
    try:
        return door.picture(any_id), None
    except TaskNotFound:
        rollout = maybe_rollout_id(any_id)
        if rollout is None:
            raise
    stem, index = rollout
    picture = door.picture(stem)
    check_row(picture, index)
    return picture, index


def check_row(picture: Picture, index: int) -> None:
    """Raises `TaskNotFound` for an index that none of the task's rollouts has."""
    if index >= len(picture.rows):
        task_id, rollouts = picture.task_id, len(picture.rows)
        raise TaskNotFound(f"task '{task_id}' has {rollouts} rollouts; there is no '{task_id}.{index}'")
