"""The Celery pool: any number of rollouts in flight, all on one asyncio loop, and few threads.

Celery hands a pool its tracer, a synchronous closure that does what belongs to a job (results, events, signals). A job
that waits for a coroutine is begun in one thread and ended, by that tracer, in another when the coroutine is over; in
between no thread stands for it, which would cost more memory than all the rest of it. At most `ENDING_THREADS` jobs
end at once: hundreds that do would keep the loop from turning. Any other job has a thread for as long as it takes.

What the stock thread pool cannot do, and this one does (each measured as a fault of the former):

- a job that ends while Redis is away frees its slot: whatever escapes the tracer goes to `error_callback`;
- `revoke(terminate=True)` and a cold stop cancel the job: each job has its own slot number as its process id;
- the capacity is live: `num_processes` is read before every fetch, so 0 pauses and a larger number takes more;
- a freed slot is used at once: the worker's hub is woken when a job ends.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import threading
import time
from collections.abc import Callable, Coroutine
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor, wait
from typing import Any, TypeVar

from billiard.einfo import ExceptionInfo
from celery.concurrency.base import BasePool, apply_target

log = logging.getLogger("polarq.worker.pool")

T = TypeVar("T")

HARD_CAP = 8192
"""Threads at most for jobs that begin or wait for nothing: no live change of the capacity ever meets a wall."""

ENDING_THREADS = 4
"""Each runs Python beside the engine's loop: more of them end nothing sooner."""

_ERROR_TRIES = 20


class ApplyResult:
    """What Celery holds of a job handed to the pool."""

    def __init__(self, future: Future[None]) -> None:
        self._future = future

    def get(self, timeout: float | None = None) -> None:
        return self._future.result(timeout)

    def wait(self, timeout: float | None = None) -> None:
        wait([self._future], timeout)


class EnginePool(BasePool):
    """See the module. Chosen by the app's settings; needs no flag."""

    signal_safe = False
    body_can_be_buffer = True
    is_green = False

    def on_start(self) -> None:
        self.loop = _new_loop()
        self._leaving = False
        self._loop_thread = threading.Thread(target=self._turn, name="polarq-engine", daemon=True)
        self._loop_thread.start()
        self._executor = ThreadPoolExecutor(HARD_CAP, thread_name_prefix="polarq-job")
        self._endings = ThreadPoolExecutor(ENDING_THREADS, thread_name_prefix="polarq-end")
        self._slots = itertools.count(1)
        self._live: set[int] = set()
        self._live_changed = threading.Condition()
        self._tasks: dict[int, asyncio.Task[Any]] = {}
        self._cancelled: set[int] = set()
        """Slots told to end before their coroutine began. Touched on the loop only."""
        self._current = threading.local()
        self._wake_hub: Callable[[], None] = lambda: None
        self.capacity: Callable[[], int] | None = None
        """Set by the node: how many rollouts may be in flight now. Without it, Celery's own number holds."""
        self.awaited: Callable[[Any], Coroutine[Any, Any, Any] | None] = lambda args: None
        """Set by the node: the coroutine that a job waits for, given the tracer's arguments; None for other jobs."""
        self.on_freed: Callable[[], None] = lambda: None
        """Set by the node: called when a job has ended, in its thread."""
        self.on_give_back: Callable[[], None] = lambda: None
        """Set by the node: called before jobs are cancelled because the worker leaves."""

    @property
    def num_processes(self) -> int:
        return self.limit if self.capacity is None else self.capacity()

    @property
    def in_flight(self) -> int:
        """Jobs it has and has not ended."""
        return len(self._live)

    def grow(self, n: int = 1) -> None:
        self.limit += n

    def shrink(self, n: int = 1) -> None:
        self.limit = max(0, self.limit - n)

    def wake_with(self, wake: Callable[[], None]) -> None:
        """`wake` makes the consumer look again whether there is a free slot."""
        self._wake_hub = wake

    def wake(self) -> None:
        self._wake_hub()

    def on_apply(  # type: ignore[override]
        self,
        target: Callable[..., Any],
        args: Any = None,
        kwargs: Any = None,
        callback: Any = None,
        accept_callback: Any = None,
        error_callback: Any = None,
        **_: Any,
    ) -> ApplyResult:
        slot = next(self._slots)
        with self._live_changed:
            self._live.add(slot)
        over: Future[None] = Future()

        def begin() -> None:
            """In a thread; the last thing, but for a job that waits for a coroutine."""
            self._current.slot, self._current.done = slot, None
            try:
                if accept_callback is not None:
                    accept_callback(slot, time.monotonic())
                work = self.awaited(args)
                if work is not None:
                    self._start(work, slot, lambda done: self._endings.submit(end, done, time.monotonic() - began))
                    return
                apply_target(target, args, kwargs, callback, pid=slot)
            except BaseException:
                self._report(ExceptionInfo(), error_callback)
            free()

        def end(done: asyncio.Task[Any], took_s: float) -> None:
            self._current.slot, self._current.done = slot, done
            try:
                apply_target(target, args, kwargs, _taking(took_s, callback), pid=slot)
            except BaseException:
                self._report(ExceptionInfo(), error_callback)
            finally:
                self._current.done = None
                free()

        def free() -> None:
            with self._live_changed:
                self._live.discard(slot)
                self._live_changed.notify_all()
            self._tasks.pop(slot, None)
            self._cancelled.discard(slot)
            over.set_result(None)
            self._wake_hub()
            self.on_freed()

        began = time.monotonic()
        self._executor.submit(begin)
        return ApplyResult(over)

    def _report(self, info: Any, error_callback: Any) -> None:
        """Tells Celery that a job broke. Redis may be the very reason, so this is tried for a while, then logged."""
        if error_callback is None:
            log.error("a job broke outside its task: %s", info)
            return
        pause = threading.Event()
        for tries in range(_ERROR_TRIES):
            try:
                error_callback(info)
            except Exception as exc:
                log.warning("cannot report a broken job yet: %s", exc)
                pause.wait(min(5.0, 0.2 * 2**tries))
            else:
                return
        log.error("a broken job could not be reported: %s", info)

    def result(self, work: Callable[[], Coroutine[Any, Any, T]]) -> T:
        """What the coroutine gave that the calling job waited for. A job that was begun without one runs `work` now.

        Cancelling the job cancels the coroutine, and still waits until it has wound down: what it returns then is the
        job's result. A coroutine that lets the cancellation through ends the job with `CancelledError`.
        """
        done: asyncio.Task[T] | None = getattr(self._current, "done", None)
        ended: Future[T] = Future()
        if done is not None:
            _copy(done, ended)
        else:
            self._start(work(), getattr(self._current, "slot", None), lambda done: _copy(done, ended))
        return ended.result()

    def _start(self, work: Coroutine[Any, Any, T], slot: int | None, then: Callable[[asyncio.Task[T]], object]) -> None:
        """Starts `work` on the loop from any thread; `then` is called on the loop when it is over."""

        def start() -> None:
            task = self.loop.create_task(work)
            if slot is not None:
                self._tasks[slot] = task
                if slot in self._cancelled:
                    task.cancel()
            task.add_done_callback(then)

        self.loop.call_soon_threadsafe(start)

    def call(self, work: Coroutine[Any, Any, T], timeout_s: float | None = None) -> T:
        """Runs `work` on the loop from any other thread."""
        return asyncio.run_coroutine_threadsafe(work, self.loop).result(timeout_s)

    def terminate_job(self, pid: int, signal: Any = None) -> None:
        self.loop.call_soon_threadsafe(self._cancel, pid)

    def _cancel(self, slot: int) -> None:
        task = self._tasks.get(slot)
        if task is not None:
            task.cancel()
        elif slot in self._live:
            self._cancelled.add(slot)

    def give_back(self, pid: int) -> None:
        """Celery is leaving and cancels what runs: the rollout goes back to the queue."""
        self.on_give_back()
        self.terminate_job(pid)

    def on_stop(self) -> None:
        # The loop goes on: the node still needs it to say goodbye, and Celery's cold stop calls this before that.
        self._wait_for_jobs()

    def on_terminate(self) -> None:
        for slot in list(self._live):
            self.terminate_job(slot)
        self._wait_for_jobs()
        self._stop_loop()

    def _wait_for_jobs(self) -> None:
        with self._live_changed:
            self._live_changed.wait_for(lambda: not self._live)
        self._executor.shutdown()
        self._endings.shutdown()

    def _turn(self) -> None:
        """The loop's thread. What exits in a coroutine ends that one, and not everything else that runs here."""
        while not self._leaving:
            try:
                self.loop.run_forever()
            except BaseException:
                log.exception("something tried to end the worker's loop; it goes on")

    def _stop_loop(self) -> None:
        self._leaving = True
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._loop_thread.join(timeout=5)

    def _get_info(self) -> dict[str, Any]:
        return {
            "implementation": f"{type(self).__module__}:{type(self).__name__}",
            "max-concurrency": self.num_processes,
            "in-flight": len(self._live),
        }


def _taking(took_s: float, callback: Callable[..., Any]) -> Callable[..., Any]:
    """The callback of a job whose tracer began only after `took_s` seconds of its run."""

    def called(result: Any) -> Any:
        failed, value, runtime_s = result
        # Celery gives no time for a job that it shall ignore.
        return callback((failed, value, None if runtime_s is None else runtime_s + took_s))

    return called


def _copy(done: asyncio.Task[T], ended: Future[T]) -> None:
    if done.cancelled():
        ended.set_exception(CancelledError())
    elif (exc := done.exception()) is not None:
        ended.set_exception(exc)
    else:
        ended.set_result(done.result())


def _new_loop() -> asyncio.AbstractEventLoop:
    try:
        import uvloop
    except ImportError:
        return asyncio.new_event_loop()
    loop: asyncio.AbstractEventLoop = uvloop.new_event_loop()
    return loop
