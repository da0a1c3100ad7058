"""The trainer's side: submit, wait, follow, cancel. `Client` for threads, `AsyncClient` for asyncio."""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Self, TypeVar

from polarq.client.controls import Controls, ControlsAsync
from polarq.client.limits import check_task
from polarq.client.pausing import (
    LEASE_S,
    TIMEOUT_S,
    InferenceState,
    inference_state,
    pause_inference,
    resume_inference,
)
from polarq.client.reading import ReadsResults, ReadsResultsAsync
from polarq.client.results import Trajectories, assemble, payload_refs
from polarq.client.routing import celery_priority, choose_queues, why_waiting
from polarq.contracts.event import Event
from polarq.contracts.node import NodeRecord
from polarq.contracts.rollout import RolloutResult, TaskResult
from polarq.contracts.task import Task
from polarq.errors import InvalidTask, LedgerUnavailable, NotQueued, PayloadMissing, ResultTimeout, TaskNotFound
from polarq.ledger import AsyncLedger, Cancelled, Ledger, Submitted, TaskHead, TaskRecord, calls_for, without_password
from polarq.ledger.control import run_state, waiting_task
from polarq.settings import Settings
from polarq.store.pauses import PauseMode
from polarq.store.payloads import get_payload
from polarq.topology import Topology, broker_url, load_topology, redis_url

if TYPE_CHECKING:
    from celery import Celery

T = TypeVar("T")

log = logging.getLogger("polarq.client")

TaskSource = Task | Mapping[str, Any] | str | os.PathLike[str]

RUN_ROLLOUT = "polarq.run_rollout"
SUBMIT_ROLLOUT = "polarq.submit_rollout"
FINISH_TASK = "polarq.finish_task"
SUBMIT_QUEUE = "polarq"
"""The queue every worker also takes: where a client that knows only the task's name submits."""

_WAIT_STEP_S = 5.0
"""Longest wait on the event stream before the ledger itself is read again: an event may be lost, a record is not."""


class _Deployment:
    """What both clients share: topology, settings, and the doorbells."""

    def __init__(self, topology: Topology | None, settings: Settings | None, app: Celery | None) -> None:
        self.settings = settings or Settings.from_env()
        self.topology = topology or load_topology(settings=self.settings)
        self.url = redis_url(self.topology, self.settings)
        self._app = app

    @property
    def app(self) -> Celery:
        """The Celery app that rings the doorbells; loaded only when something is submitted."""
        if self._app is None:
            from polarq.celery import make_app

            self._app = make_app(self.topology, self.settings)
        return self._app

    def checked(self, source: TaskSource) -> Task:
        task = Task.load(source)
        check_task(task, self.topology)
        return task

    def ring(self, task: Task, queues: Mapping[int, str]) -> None:
        """Publishes one doorbell per rollout (index -> queue). A lost one is rung again by whoever finds it waiting."""
        from kombu.exceptions import OperationalError

        priority = celery_priority(task.dispatch_priority)
        try:
            with self.app.producer_or_acquire() as producer:
                for index, queue in queues.items():
                    self.app.send_task(
                        RUN_ROLLOUT,
                        args=[task.rollout_id(index), 0],
                        queue=queue,
                        priority=priority,
                        shadow=f"rollout.{task.agent.harness or 'custom'}",
                        producer=producer,
                        # The ledger has the result. Celery would subscribe this process to a channel per rollout.
                        ignore_result=True,
                    )
        except (OperationalError, RuntimeError) as exc:
            # RuntimeError: kombu's own, when the connection it is retrying on was closed under it.
            where = without_password(broker_url(self.topology, self.settings))
            raise NotQueued(
                f"task '{task.task_id}' is recorded, but the queue at {where} went away ({type(exc).__name__}): submit "
                f"it again, under task_id '{task.task_id}' it is the same task"
            ) from exc

    def ring_node(self, node_id: str, rollout_ids: Sequence[str]) -> None:
        """Publishes doorbells for waiting rollouts on one node's queue. Raises `NotQueued`."""
        from kombu.exceptions import OperationalError

        try:
            with self.app.producer_or_acquire() as producer:
                for rollout_id in rollout_ids:
                    self.app.send_task(
                        RUN_ROLLOUT, args=[rollout_id, 0], queue=node_id, producer=producer, ignore_result=True
                    )
        except (OperationalError, RuntimeError) as exc:
            raise NotQueued(f"the queue of node '{node_id}' went away ({type(exc).__name__})") from exc

    def spread_word(self, task_id: str, cancelled: Cancelled) -> None:
        """After a cancel: speeds it up for what runs, and where nothing runs any more has a worker tell of the end."""
        from kombu.exceptions import OperationalError

        job_ids = [rollout.job_id for rollout in cancelled.active if rollout.job_id]
        try:
            if job_ids:
                self.app.control.revoke(job_ids, terminate=True)
            if cancelled.known and not cancelled.already_over and not cancelled.active:
                # Whoever commits a task's last rollout tells its Celery results and callback. Nobody committed here.
                self.app.send_task(FINISH_TASK, args=[task_id], queue=SUBMIT_QUEUE, ignore_result=True)
        except (OperationalError, RuntimeError) as exc:
            log.warning("task %s is cancelled in the ledger; its workers could not be told at once: %s", task_id, exc)


def _waiting(record: TaskRecord, queues: list[str]) -> dict[int, str]:
    return {r.index: queues[r.index] for r in record.rollouts if r.state == "queued"}


@contextmanager
def _once_begun(task: Task) -> Iterator[None]:
    """A ledger that goes away here may have taken the task: says so, and what to do."""
    try:
        yield
    except LedgerUnavailable as exc:
        again = f"submit it again, under task_id '{task.task_id}' it is the same task"
        raise NotQueued(f"{exc}. It may have taken the task already: {again}") from exc


def _known(found: T | None, task_id: str) -> T:
    if found is None:
        raise TaskNotFound(f"no task '{task_id}' in the ledger (never submitted, or expired)")
    return found


class Client(_Deployment, ReadsResults, Controls):
    """Submits tasks and reads results from threads and plain scripts.

    Every method raises `LedgerUnavailable` when Redis does not answer.
    """

    def __init__(
        self, topology: Topology | None = None, settings: Settings | None = None, app: Celery | None = None
    ) -> None:
        super().__init__(topology, settings, app)
        self.ledger = Ledger(self.url, calls_for(self.topology))

    def submit(self, source: TaskSource, *, celery_id: str | None = None) -> Submitted:
        """Records the task and rings its doorbells. The same request under the same task_id is the same task.

        Raises `InvalidTask`, `TaskConflict` or `QueueFull`; then nothing was recorded.
        """
        task = self.checked(source)
        try:
            queues = choose_queues(task, self.ledger.nodes(), self.topology)
        except InvalidTask:
            # What the ledger has taken is the same task again, whatever has become of the nodes that could run it.
            if self.ledger.do(self.ledger.calls.head(task.task_id)) is None:
                raise
            queues = []
        with _once_begun(task):
            done = self.ledger.do(self.ledger.calls.submit(task, celery_id or task.task_id))
        if done.created:
            self.ring(task, dict(enumerate(queues)))
        elif queues and not done.state.terminal:
            # The first submitter may have died between recording and ringing; a doorbell too many is harmless.
            self.ring(task, _waiting(self._record(task.task_id), queues))
        return done

    def waiting_for(self, task_id: str) -> str | None:
        """What the task's waiting rollouts wait for, in one line; None: for nothing but a free place, or none waits."""
        keys = self.ledger.calls.keys
        task = self.ledger.do(waiting_task(keys, task_id))
        if task is None:
            return None
        run = self.ledger.do(run_state(keys, task.run_id))
        return why_waiting(task, self.ledger.nodes(), self.topology, run)

    def ring_again(self, task: Task, index: int, *, leaving: str | None = None) -> None:
        """Publishes a doorbell for one waiting rollout; `leaving` is a node that should not get it if others can."""
        others = [node for node in self.ledger.nodes() if node.node_id != leaving]
        queue = choose_queues(task, others, self.topology)[index]
        self.ring(task, {index: queue})

    def get(self, task_id: str, trajectories: Trajectories | str = Trajectories.FULL) -> TaskResult:
        """The task as it is now, with its ended rollouts. Raises `TaskNotFound`."""
        wanted = Trajectories(trajectories)
        record = self._record(task_id, with_request=True)
        payloads = {}
        if wanted is Trajectories.FULL:
            try:
                payloads = {i: self.ledger.do(get_payload(ref)) for i, ref in payload_refs(record).items()}
            except PayloadMissing:
                if payload_refs(self._record(task_id)) == payload_refs(record):
                    raise
                return self.get(task_id, wanted)  # acknowledged meanwhile
        assert record.request is not None
        return assemble(record, payloads, wanted, record.request.metadata)

    def rollout(self, rollout_id: str) -> RolloutResult:
        """One ended rollout with its trajectory. Raises `TaskNotFound` when it has not ended or is unknown."""
        task_id = rollout_id.rpartition(".")[0]
        record = self._record(task_id)
        ref = payload_refs(record).get(rollout_id)
        if ref is not None:
            return self.ledger.do(get_payload(ref))
        for result in assemble(record, {}, Trajectories.REFS, {}).results:
            if result.rollout_id == rollout_id:
                return result
        raise TaskNotFound(f"rollout '{rollout_id}' has not ended, or does not exist")

    def head(self, task_id: str) -> TaskHead:
        """A task's state and counters, without its rollouts. Raises `TaskNotFound`."""
        return _known(self.ledger.do(self.ledger.calls.head(task_id)), task_id)

    def record(self, task_id: str) -> TaskRecord:
        """The ledger's own picture of a task. Raises `TaskNotFound`."""
        return self._record(task_id)

    def wait(
        self,
        task_id: str,
        timeout_s: float | None = None,
        trajectories: Trajectories | str = Trajectories.FULL,
    ) -> TaskResult:
        """Waits until every rollout of the task has ended. Raises `ResultTimeout`; the task then goes on."""
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        while True:
            after = self.ledger.do(self.ledger.calls.last_event_id())
            head = self.head(task_id)
            if head.state.terminal:
                return self.get(task_id, trajectories)
            self._next_event(task_id, after, _remaining(deadline, head))

    def _next_event(self, task_id: str, after: str, wait_s: float) -> None:
        """Returns when something happened to the task, or after `wait_s` (at most `_WAIT_STEP_S`)."""
        until = time.monotonic() + min(wait_s, _WAIT_STEP_S)
        while (left := until - time.monotonic()) > 0:
            events = self.ledger.wait_events(after, left)
            if any(event.data.get("task_id") == task_id for event in events):
                return
            after = events[-1].event_id if events else after

    def follow(self, task_id: str | None = None, after: str | None = None, wait_s: float = 15.0) -> Iterator[Event]:
        """Events as they happen, of one task (until it ends) or of everything (endless). Resumable with `after`."""
        last = after or self.ledger.do(self.ledger.calls.last_event_id())
        while True:
            events = self.ledger.wait_events(last, wait_s)
            for event in events:
                last = event.event_id
                if task_id is None or event.data.get("task_id") == task_id:
                    yield event
            if task_id is not None and not events and self.head(task_id).state.terminal:
                return

    def cancel(self, task_id: str, *, register_if_missing: bool = False) -> Cancelled:
        """Cancels a task, or one rollout when given a rollout id. Raises `TaskNotFound` unless registered ahead."""
        record_id, index = self._target(task_id)
        call = self.ledger.calls.cancel(record_id, index, 300 if register_if_missing else 0)
        done = self.ledger.do(call)
        if not done.known and not done.registered:
            raise TaskNotFound(f"no task '{task_id}' in the ledger")
        self.spread_word(record_id, done)
        return done

    def _target(self, any_id: str) -> tuple[str, int | None]:
        """A task id may itself end in `.<number>`: it is a rollout id only if there is no such task."""
        stem, dot, index = any_id.rpartition(".")
        if dot and index.isdecimal() and self.ledger.do(self.ledger.calls.task(any_id)) is None:
            return stem, int(index)
        return any_id, None

    def nodes(self) -> list[NodeRecord]:
        return self.ledger.nodes()

    def _record(self, task_id: str, *, with_request: bool = False) -> TaskRecord:
        return _known(self.ledger.do(self.ledger.calls.task(task_id, with_request=with_request)), task_id)

    def close(self) -> None:
        self.ledger.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _remaining(deadline: float | None, head: TaskHead) -> float:
    if deadline is None:
        return _WAIT_STEP_S
    left = deadline - time.monotonic()
    if left <= 0:
        ended = f"{head.counts.ended} of {head.counts.total} rollouts ended"
        raise ResultTimeout(f"task '{head.task_id}' has {ended}; it goes on, ask again later")
    return left


class AsyncClient(_Deployment, ReadsResultsAsync, ControlsAsync):
    """The same for asyncio. See `Client` for what each method does and raises."""

    def __init__(
        self, topology: Topology | None = None, settings: Settings | None = None, app: Celery | None = None
    ) -> None:
        super().__init__(topology, settings, app)
        self.ledger = AsyncLedger(self.url, calls_for(self.topology))

    async def submit(self, source: TaskSource, *, celery_id: str | None = None) -> Submitted:
        task = self.checked(source)
        try:
            queues = choose_queues(task, await self.ledger.nodes(), self.topology)
        except InvalidTask:
            if await self.ledger.do(self.ledger.calls.head(task.task_id)) is None:
                raise
            queues = []
        with _once_begun(task):
            done = await self.ledger.do(self.ledger.calls.submit(task, celery_id or task.task_id))
        if done.created:
            await asyncio.to_thread(self.ring, task, dict(enumerate(queues)))
        elif queues and not done.state.terminal:
            await asyncio.to_thread(self.ring, task, _waiting(await self.record(task.task_id), queues))
        return done

    async def waiting_for(self, task_id: str) -> str | None:
        keys = self.ledger.calls.keys
        task = await self.ledger.do(waiting_task(keys, task_id))
        if task is None:
            return None
        run = await self.ledger.do(run_state(keys, task.run_id))
        return why_waiting(task, await self.ledger.nodes(), self.topology, run)

    async def get(self, task_id: str, trajectories: Trajectories | str = Trajectories.FULL) -> TaskResult:
        wanted = Trajectories(trajectories)
        record = await self._record(task_id, with_request=True)
        payloads = {}
        if wanted is Trajectories.FULL:
            try:
                payloads = {i: await self.ledger.do(get_payload(ref)) for i, ref in payload_refs(record).items()}
            except PayloadMissing:
                if payload_refs(await self._record(task_id)) == payload_refs(record):
                    raise
                return await self.get(task_id, wanted)
        assert record.request is not None
        return assemble(record, payloads, wanted, record.request.metadata)

    async def head(self, task_id: str) -> TaskHead:
        return _known(await self.ledger.do(self.ledger.calls.head(task_id)), task_id)

    async def record(self, task_id: str) -> TaskRecord:
        return await self._record(task_id)

    async def wait(
        self,
        task_id: str,
        timeout_s: float | None = None,
        trajectories: Trajectories | str = Trajectories.FULL,
    ) -> TaskResult:
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        while True:
            after = await self.ledger.do(self.ledger.calls.last_event_id())
            head = await self.head(task_id)
            if head.state.terminal:
                return await self.get(task_id, trajectories)
            await self._next_event(task_id, after, _remaining(deadline, head))

    async def _next_event(self, task_id: str, after: str, wait_s: float) -> None:
        until = time.monotonic() + min(wait_s, _WAIT_STEP_S)
        while (left := until - time.monotonic()) > 0:
            events = await self.ledger.wait_events(after, left)
            if any(event.data.get("task_id") == task_id for event in events):
                return
            after = events[-1].event_id if events else after

    async def follow(self, task_id: str | None = None, after: str | None = None) -> AsyncIterator[Event]:
        last = await self.ledger.do(self.ledger.calls.last_event_id()) if after is None else after
        while True:
            events = await self.ledger.wait_events(last, 15.0)
            for event in events:
                last = event.event_id
                if task_id is None or event.data.get("task_id") == task_id:
                    yield event
            if task_id is not None and not events and (await self.head(task_id)).state.terminal:
                return

    async def cancel(self, task_id: str, *, register_if_missing: bool = False) -> Cancelled:
        record_id, index = await self._target(task_id)
        call = self.ledger.calls.cancel(record_id, index, 300 if register_if_missing else 0)
        done = await self.ledger.do(call)
        if not done.known and not done.registered:
            raise TaskNotFound(f"no task '{task_id}' in the ledger")
        await asyncio.to_thread(self.spread_word, record_id, done)
        return done

    async def _target(self, any_id: str) -> tuple[str, int | None]:
        stem, dot, index = any_id.rpartition(".")
        if dot and index.isdecimal() and await self.ledger.do(self.ledger.calls.task(any_id)) is None:
            return stem, int(index)
        return any_id, None

    async def nodes(self) -> list[NodeRecord]:
        return await self.ledger.nodes()

    async def inference_state(self, run_id: str | None = None) -> InferenceState:
        """Whether model calls are held back, and how many are in flight. With a run: its own pause, and its calls."""
        return await inference_state(self.ledger, await self.nodes(), run_id or "")

    async def pause_inference(
        self,
        *,
        mode: PauseMode = "drain",
        timeout_s: float = TIMEOUT_S,
        lease_s: float = LEASE_S,
        run_id: str | None = None,
    ) -> InferenceState:
        """Holds every model call back, and returns when none is in flight on any live node. Raises `NotPaused`. With a
        run: that run's calls only; the two kinds of pause end independently of each other.

        `drain` lets calls in flight end, `abort` cuts them (what they sampled is kept, and what no harness has seen
        is sampled anew after the pause). The pause ends by itself after `lease_s`.
        """
        return await pause_inference(
            self.ledger, self.nodes, mode=mode, timeout_s=timeout_s, lease_s=lease_s, run_id=run_id or ""
        )

    async def resume_inference(self, run_id: str | None = None) -> bool:
        """Ends the pause; whether there was one."""
        return await resume_inference(self.ledger, run_id or "")

    async def _record(self, task_id: str, *, with_request: bool = False) -> TaskRecord:
        return _known(await self.ledger.do(self.ledger.calls.task(task_id, with_request=with_request)), task_id)

    async def aclose(self) -> None:
        await self.ledger.aclose()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()
