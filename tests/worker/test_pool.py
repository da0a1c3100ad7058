"""The Celery pool: jobs wait on one loop, can be cancelled, free their slot whatever happens."""

from __future__ import annotations

import asyncio
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import CancelledError
from typing import Any

import pytest

from polarq.client.deployment import RUN_ROLLOUT
from polarq_worker import pool as pool_module
from polarq_worker.pool import ENDING_THREADS, EnginePool
from polarq_worker.requests import doorbell_of
from tests.worker.conftest import wait_until


@pytest.fixture
def pool() -> Iterator[EnginePool]:
    made = EnginePool(limit=2)
    made.start()
    yield made
    if made.loop.is_running():
        made.terminate()


class Job:
    """A job as Celery hands it over: a target that runs in the pool's thread, and callbacks."""

    def __init__(self, pool: EnginePool, body: Any, args: tuple[Any, ...] = ()) -> None:
        self.accepted: list[int] = []
        self.results: list[Any] = []
        self.errors: list[Any] = []
        self.ended = threading.Event()
        self.accepted_event = threading.Event()
        self._body = body
        self.handle = pool.apply_async(
            self._target,
            args,
            {},
            accept_callback=self._accept,
            callback=self.results.append,
            error_callback=self._error,
        )

    def _accept(self, pid: int, _time: float) -> None:
        self.accepted.append(pid)
        self.accepted_event.set()

    def _target(self, *_: Any) -> Any:
        return self._body()

    def _error(self, info: Any) -> None:
        self.errors.append(info)
        self.ended.set()


def test_many_jobs_wait_on_one_loop_at_once(pool: EnginePool) -> None:
    loops: set[int] = set()
    everybody = asyncio.run_coroutine_threadsafe(_barrier(50), pool.loop).result()

    async def work() -> int:
        loops.add(id(asyncio.get_running_loop()))
        await everybody.wait()
        return 7

    jobs = [Job(pool, lambda: pool.result(work)) for _ in range(50)]
    for job in jobs:
        job.handle.wait(10)
    assert [job.results for job in jobs] == [[7]] * 50
    assert len(loops) == 1


async def _barrier(parties: int) -> asyncio.Barrier:
    return asyncio.Barrier(parties)


def test_terminating_one_job_cancels_its_coroutine_and_no_other(pool: EnginePool) -> None:
    started: dict[str, threading.Event] = {"a": threading.Event(), "b": threading.Event()}
    cancelled: list[str] = []
    release = asyncio.run_coroutine_threadsafe(_event(), pool.loop).result()

    async def work(name: str) -> str:
        started[name].set()
        try:
            await release.wait()
        except asyncio.CancelledError:
            cancelled.append(name)
            raise
        return name

    a, b = Job(pool, lambda: pool.result(lambda: work("a"))), Job(pool, lambda: pool.result(lambda: work("b")))
    assert all(event.wait(10) for event in started.values())
    pool.terminate_job(a.accepted[0])
    assert a.ended.wait(10)
    assert a.errors[0].type is CancelledError
    pool.loop.call_soon_threadsafe(release.set)
    b.handle.wait(10)
    assert (cancelled, b.results) == (["a"], ["b"])


async def _event() -> asyncio.Event:
    return asyncio.Event()


def test_a_job_that_breaks_outside_its_task_is_reported_and_its_slot_freed(pool: EnginePool) -> None:
    """The stock thread pool loses the slot for ever when storing a result fails while Redis is away."""
    woken = threading.Event()
    pool.wake_with(woken.set)

    def body() -> None:
        raise ConnectionError("the result store is away")

    job = Job(pool, body)
    job.handle.wait(10)
    assert job.ended.wait(10)
    assert job.errors[0].type is ConnectionError
    assert woken.wait(10)
    assert pool._get_info()["in-flight"] == 0


def test_reporting_is_tried_again_while_it_fails(pool: EnginePool) -> None:
    tries: list[int] = []
    told = threading.Event()

    def error_callback(_info: Any) -> None:
        tries.append(1)
        if len(tries) < 3:
            raise ConnectionError("still away")
        told.set()

    def body() -> None:
        raise ValueError("broken")

    pool.apply_async(body, (), {}, error_callback=error_callback)
    assert told.wait(10)
    assert len(tries) == 3


def test_capacity_is_live(pool: EnginePool) -> None:
    assert pool.num_processes == 2
    pool.grow(3)
    assert pool.num_processes == 5
    pool.shrink(9)
    assert pool.num_processes == 0
    room = 7
    pool.capacity = lambda: room
    assert pool.num_processes == 7
    room = 0
    assert pool.num_processes == 0


def test_a_cold_stop_cancels_everything_and_returns(pool: EnginePool) -> None:
    started = threading.Event()

    async def work() -> None:
        started.set()
        await asyncio.Event().wait()

    job = Job(pool, lambda: pool.result(work))
    assert started.wait(10)
    pool.terminate()
    assert job.ended.is_set()
    assert not pool.loop.is_running()


def test_a_warm_stop_waits_for_what_runs(pool: EnginePool) -> None:
    release = asyncio.run_coroutine_threadsafe(_event(), pool.loop).result()
    started = threading.Event()

    async def work() -> str:
        started.set()
        await release.wait()
        return "done"

    job = Job(pool, lambda: pool.result(work))
    assert started.wait(10)
    stopping = threading.Thread(target=pool.stop)
    stopping.start()
    assert not job.results
    pool.loop.call_soon_threadsafe(release.set)
    stopping.join(10)
    assert job.results == ["done"]
    assert pool.loop.is_running()


# --- jobs that wait for a coroutine


class Awaiting:
    """Jobs whose tracer's first argument names what they wait for; their target takes its result, as polarq's does."""

    def __init__(self, pool: EnginePool, work: Any) -> None:
        self.pool = pool
        self.work = work
        pool.awaited = lambda args: self.work(*args) if args else None

    def job(self, name: str) -> Job:
        return Job(self.pool, lambda: (0, self.pool.result(lambda: self.work("begun late")), 0.0), args=(name,))


def test_a_job_that_waits_for_a_coroutine_takes_no_thread_meanwhile(pool: EnginePool) -> None:
    release = asyncio.run_coroutine_threadsafe(_event(), pool.loop).result()
    everybody = asyncio.run_coroutine_threadsafe(_barrier(200), pool.loop).result()
    together = threading.Event()

    async def work(name: str) -> str:
        await everybody.wait()
        together.set()
        await release.wait()
        return name

    awaiting = Awaiting(pool, work)
    jobs = [awaiting.job(str(n)) for n in range(200)]
    assert together.wait(30)
    assert pool.in_flight == 200
    assert all(job.accepted for job in jobs)
    wait_until(lambda: not any(_stands(thread) for thread in threading.enumerate()), 30)
    pool.loop.call_soon_threadsafe(release.set)
    for job in jobs:
        job.handle.wait(30)
    assert [job.results[0][1] for job in jobs] == [str(n) for n in range(200)]
    assert pool.in_flight == 0


def _stands(thread: threading.Thread) -> bool:
    """Whether it is in the middle of a job."""
    frame = sys._current_frames().get(thread.ident or 0)
    while frame is not None:
        if frame.f_code.co_filename == pool_module.__file__ and frame.f_code.co_name in {"begin", "end"}:
            return True
        frame = frame.f_back
    return False


def test_of_jobs_that_are_over_at_once_only_a_few_end_at_once(pool: EnginePool) -> None:
    release = asyncio.run_coroutine_threadsafe(_event(), pool.loop).result()
    go_on, full = threading.Event(), threading.Barrier(ENDING_THREADS + 1)
    threads: set[int] = set()

    async def work(name: str) -> str:
        await release.wait()
        return name

    awaiting = Awaiting(pool, work)
    jobs = [awaiting.job(str(n)) for n in range(3 * ENDING_THREADS)]

    def take() -> tuple[int, str, float]:
        if not go_on.is_set() and threading.get_ident() not in threads:
            threads.add(threading.get_ident())
            full.wait(30)
        assert go_on.wait(30)
        return 0, pool.result(lambda: work("begun late")), 0.0

    for job in jobs:
        job._body = take
    pool.loop.call_soon_threadsafe(release.set)
    full.wait(30)
    pool.call(asyncio.sleep(0))
    wait_until(lambda: pool._endings._work_queue.qsize() == len(jobs) - ENDING_THREADS)
    assert pool.in_flight == len(jobs)
    go_on.set()
    for job in jobs:
        job.handle.wait(30)
    assert len(threads) == ENDING_THREADS


def test_what_a_job_waited_for_counts_as_its_time(pool: EnginePool) -> None:
    async def work(_: str) -> float:
        began = time.monotonic()
        await asyncio.sleep(0.05)
        return time.monotonic() - began

    job = Awaiting(pool, work).job("a")
    job.handle.wait(30)
    failed, slept_s, took_s = job.results[0]
    assert not failed
    assert took_s >= slept_s


def test_a_job_that_celery_shall_ignore_has_no_time(pool: EnginePool) -> None:
    async def work(_: str) -> None:
        return None

    Awaiting(pool, work)
    job = Job(pool, lambda: (0, "ignored", None), args=("a",))
    job.handle.wait(30)
    assert not job.errors
    assert job.results == [(0, "ignored", None)]


def test_terminating_a_job_cancels_the_coroutine_it_waits_for(pool: EnginePool) -> None:
    started = threading.Event()

    async def work(name: str) -> str:
        started.set()
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            return f"{name} was given back"
        raise AssertionError

    awaiting = Awaiting(pool, work)
    job = awaiting.job("a")
    assert started.wait(10)
    pool.terminate_job(job.accepted[0])
    job.handle.wait(10)
    assert job.results[0][1] == "a was given back"


def test_a_coroutine_that_breaks_or_lets_the_cancellation_through_breaks_its_job(pool: EnginePool) -> None:
    started = threading.Event()

    async def work(name: str) -> None:
        if name == "breaks":
            raise ValueError(name)
        started.set()
        await asyncio.Event().wait()

    awaiting = Awaiting(pool, work)
    broken, cancelled = awaiting.job("breaks"), awaiting.job("waits")
    assert broken.ended.wait(10)
    assert broken.errors[0].type is ValueError
    assert started.wait(10)
    pool.terminate_job(cancelled.accepted[0])
    assert cancelled.ended.wait(10)
    assert cancelled.errors[0].type is CancelledError
    broken.handle.wait(10)
    cancelled.handle.wait(10)
    assert pool.in_flight == 0


@pytest.mark.parametrize("cold", [False, True])
def test_a_stop_waits_for_jobs_that_have_no_thread(pool: EnginePool, cold: bool) -> None:
    release = asyncio.run_coroutine_threadsafe(_event(), pool.loop).result()
    started = threading.Event()

    async def work(_: str) -> str:
        started.set()
        try:
            await release.wait()
        except asyncio.CancelledError:
            return "given back"
        return "done"

    job = Awaiting(pool, work).job("a")
    assert started.wait(10)
    stopping = threading.Thread(target=pool.terminate if cold else pool.stop)
    stopping.start()
    if not cold:
        stopping.join(0.3)
        assert stopping.is_alive()
        pool.loop.call_soon_threadsafe(release.set)
    stopping.join(10)
    assert not stopping.is_alive()
    assert job.results[0][1] == ("given back" if cold else "done")


@pytest.mark.parametrize(
    "body", [b'[["t.0", 0], {}, {"chain": null}]', memoryview(b'[["t.0"], {}, {}]')], ids=["bytes", "buffer"]
)
def test_a_doorbells_job_is_known_by_what_its_tracer_gets(body: Any) -> None:
    assert doorbell_of((RUN_ROLLOUT, "job-1", {}, body, "application/json", "utf-8")) == ("t.0", "job-1")


@pytest.mark.parametrize(
    "args",
    [
        (),
        ("polarq.finish_task", "job-1", {}, b'[["t.0"], {}, {}]', "application/json", "utf-8"),
        (RUN_ROLLOUT, "job-1", {}, b"no json", "application/json", "utf-8"),
        (RUN_ROLLOUT, "job-1", {}, b'[[], {"rollout_id": "t.0"}, {}]', "application/json", "utf-8"),
        (RUN_ROLLOUT, "job-1", {}, b"[[7, 0], {}, {}]", "application/json", "utf-8"),
        (RUN_ROLLOUT, "job-1", {}, (["t.0"], {}, {}), None, None),
    ],
)
def test_any_other_message_is_left_to_celery(args: Any) -> None:
    assert doorbell_of(args) is None
