"""The Celery tasks, by name. No worker code is imported here: the worker lends its engine to the app.

`submit_rollout.delay(task)` validates, records and rings in the caller's process, so that a bad task raises where it
was written. A client that knows only the name may instead send `polarq.submit_rollout` to the queue `polarq`; then a
worker does the same for it, and the Celery result becomes ready when the task's last rollout has ended.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Protocol

from celery import Task as CeleryTask
from celery.exceptions import Ignore
from celery.result import AsyncResult

from polarq.celery import app
from polarq.client import Client
from polarq.client.deployment import FINISH_TASK, RUN_ROLLOUT, SUBMIT_ROLLOUT, TaskSource
from polarq.client.results import Trajectories
from polarq.client.states import PROGRESS, STARTED, publish_state
from polarq.contracts.rollout import TaskResult
from polarq.contracts.task import Task, new_task_id
from polarq.errors import InvalidTask, PolarqError, TaskNotFound


class RolloutRunner(Protocol):
    """What a worker lends to the app: runs one doorbell to its end in the calling thread."""

    def __call__(self, rollout_id: str, job_id: str) -> dict[str, Any] | None:
        """A small JSON summary; None when there was nothing to do (stale doorbell, lost or released rollout)."""


class Batch(AsyncResult):  # type: ignore[type-arg]
    """The result of `submit_rollout.delay(task)`: a Celery AsyncResult whose truth is the ledger.

    `.get()` gives the complete `TaskResult` with trajectories. `.state` and `.info` show progress. A failed rollout is
    data in the result, never an exception here.
    """

    def __init__(self, task_id: str, client: Client | None = None, celery_id: str | None = None) -> None:
        super().__init__(celery_id or task_id, app=app)
        self.rollout_task_id = task_id
        """The task's id in the ledger (also the Celery id, unless another was asked for)."""
        self._client = client

    @property
    def client(self) -> Client:
        if self._client is None:
            self._client = Client(app=app)
        return self._client

    def get(  # type: ignore[override]
        self,
        timeout: float | None = None,
        *,
        trajectories: Trajectories | str = Trajectories.FULL,
        **_: Any,
    ) -> TaskResult:
        """Waits for the last rollout (at most `timeout` seconds, then `ResultTimeout`; the task goes on)."""
        return self.client.wait(self.rollout_task_id, timeout, trajectories)

    wait = get  # type: ignore[assignment]

    def progress(self) -> dict[str, Any]:
        """Rollouts by where they are, as JSON."""
        head = self.client.head(self.rollout_task_id)
        return {"task_id": head.task_id, "state": head.state.value, **head.counts.model_dump()}

    @property
    def state(self) -> str:  # type: ignore[override]
        """Celery's words: PENDING, STARTED, PROGRESS, SUCCESS (every rollout ended, whatever its outcome), REVOKED."""
        try:
            head = self.client.head(self.rollout_task_id)
        except TaskNotFound:
            return "PENDING"
        if head.state.terminal:
            return "REVOKED" if head.state == "cancelled" else "SUCCESS"
        if head.counts.ended:
            return PROGRESS
        return STARTED if head.counts.running else "PENDING"

    status = state  # type: ignore[assignment]

    @property
    def result(self) -> Any:
        """The `TaskResult` when ready, else the progress."""
        return self.get() if self.ready() else self.progress()

    info = result

    def ready(self) -> bool:
        return self.state in {"SUCCESS", "REVOKED"}

    def successful(self) -> bool:
        """Every rollout ended. Read the counts for how."""
        return self.state == "SUCCESS"

    def failed(self) -> bool:
        return False

    def revoke(self, *_: Any, **__: Any) -> None:
        """Cancels the task at whatever stage it is."""
        self.client.cancel(self.rollout_task_id)


class SubmitRollout(CeleryTask):  # type: ignore[type-arg]
    """Takes a dict, a `Task` or the path of a task file."""

    name = SUBMIT_ROLLOUT
    # Whatever a foreign sender shows of its arguments, Flower gets none of it: they hold the instruction.
    Request = "polarq_worker.requests:QuietRequest"
    ignore_result = False
    track_started = False
    # A bad task is its sender's business: one line in the log, no traceback.
    throws = (PolarqError,)

    def apply_async(  # type: ignore[override]
        self,
        args: tuple[Any, ...] | list[Any] | None = None,
        kwargs: Mapping[str, Any] | None = None,
        task_id: str | None = None,
        **_: Any,
    ) -> Batch:
        """Records and rings now. Raises `InvalidTask`, `TaskConflict`, `QueueFull`: then nothing is recorded."""
        source = _only_argument(args or (), kwargs or {})
        client = Client(app=self.app)
        done = client.submit(source, celery_id=task_id)
        return Batch(done.task_id, client, task_id)

    def run(self, task: Mapping[str, Any]) -> None:
        """On a worker, for a foreign client's message. The result is stored when the last rollout has ended."""
        celery_id = str(self.request.id)
        if not isinstance(task, Mapping):
            raise InvalidTask("task", ["over Celery messages a task is a mapping of its fields"])
        named = task if "task_id" in task else {"task_id": celery_id or new_task_id(), **task}
        with Client(app=self.app) as client:
            done = client.submit(named, celery_id=celery_id)
            publish_state(self.app, client, done.task_id)
        raise Ignore


class RunRollout(CeleryTask):  # type: ignore[type-arg]
    """One doorbell: runs a rollout if the ledger grants it, else ends at once."""

    name = RUN_ROLLOUT
    Request = "polarq_worker.requests:RolloutRequest"
    ignore_result = False
    # Its body runs when the rollout is over; that it began is told by an event, and by the ledger.
    track_started = False

    def run(self, rollout_id: str, attempt: int = 0) -> dict[str, Any]:
        runner: RolloutRunner | None = getattr(self.app, "rollout_runner", None)
        if runner is None:
            raise RuntimeError("run_rollout runs inside `celery -A polarq worker` only")
        summary = runner(rollout_id, str(self.request.id))
        if summary is None:
            raise Ignore
        return summary


class FinishTask(CeleryTask):  # type: ignore[type-arg]
    """Tells the Celery results and the callback of a task that has ended, or how far it is. Harmless to repeat."""

    name = FINISH_TASK
    ignore_result = True

    def run(self, task_id: str) -> None:
        finisher: Callable[[str], None] | None = getattr(self.app, "task_finisher", None)
        if finisher is None:
            raise RuntimeError("finish_task runs inside `celery -A polarq worker` only")
        finisher(task_id)


def _only_argument(args: tuple[Any, ...] | list[Any], kwargs: Mapping[str, Any]) -> TaskSource:
    values = [*args, *kwargs.values()]
    if len(values) != 1 or (kwargs and next(iter(kwargs)) != "task"):
        raise InvalidTask("submit_rollout", ["takes exactly one argument: the task (a dict, a Task or a path)"])
    source: TaskSource = values[0]
    return Task.load(source)


submit_rollout = app.register_task(SubmitRollout())
run_rollout = app.register_task(RunRollout())
finish_task = app.register_task(FinishTask())
