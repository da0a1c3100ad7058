"""The Celery pool: jobs wait on one loop, can be cancelled, free their slot whatever happens."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from concurrent.futures import CancelledError
from typing import Any

import pytest

from polarq_worker.pool import EnginePool


@pytest.fixture
def pool() -> Iterator[EnginePool]:
    made = EnginePool(limit=2)
    made.start()
    yield made
    if made.loop.is_running():
        made.terminate()


class Job:
    """A job as Celery hands it over: a target that runs in the pool's thread, and callbacks."""

    def __init__(self, pool: EnginePool, body: Any) -> None:
        self.accepted: list[int] = []
        self.results: list[Any] = []
        self.errors: list[Any] = []
        self.ended = threading.Event()
        self.accepted_event = threading.Event()
        self._body = body
        self.handle = pool.apply_async(
            self._target, (), {}, accept_callback=self._accept, callback=self.results.append, error_callback=self._error
        )

    def _accept(self, pid: int, _time: float) -> None:
        self.accepted.append(pid)
        self.accepted_event.set()

    def _target(self) -> Any:
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

    jobs = [Job(pool, lambda: pool.run(work())) for _ in range(50)]
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

    a, b = Job(pool, lambda: pool.run(work("a"))), Job(pool, lambda: pool.run(work("b")))
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

    job = Job(pool, lambda: pool.run(work()))
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

    job = Job(pool, lambda: pool.run(work()))
    assert started.wait(10)
    stopping = threading.Thread(target=pool.stop)
    stopping.start()
    assert not job.results
    pool.loop.call_soon_threadsafe(release.set)
    stopping.join(10)
    assert job.results == ["done"]
    assert pool.loop.is_running()
