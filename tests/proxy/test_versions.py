"""Policy versions read around calls: shared, and never too old."""

from __future__ import annotations

import asyncio

from polarq_proxy.versions import PolicyVersions


class Engine:
    """Answers each read when the test says so."""

    def __init__(self) -> None:
        self.reads: list[asyncio.Future[str | None]] = []
        self.asked = asyncio.Event()

    async def fetch(self) -> str | None:
        future: asyncio.Future[str | None] = asyncio.get_running_loop().create_future()
        self.reads.append(future)
        self.asked.set()
        return await future

    async def next_read(self) -> asyncio.Future[str | None]:
        await self.asked.wait()
        self.asked.clear()
        return self.reads[-1]


async def test_a_read_that_began_before_the_call_ended_is_not_believed() -> None:
    engine = Engine()
    versions = PolicyVersions(engine.fetch)
    early = asyncio.create_task(versions.after())
    first = await engine.next_read()
    late = asyncio.create_task(versions.after())
    also_late = asyncio.create_task(versions.after())
    await asyncio.sleep(0)
    first.set_result("old")
    assert await early == "old"
    second = await engine.next_read()
    second.set_result("new")
    assert await late == "new"
    assert await also_late == "new"
    assert len(engine.reads) == 2


async def test_a_fresh_read_serves_the_start_of_the_next_call() -> None:
    engine = Engine()
    versions = PolicyVersions(engine.fetch)
    reading = asyncio.create_task(versions.before())
    (await engine.next_read()).set_result("1")
    assert await reading == "1"
    assert await versions.before() == "1"
    assert len(engine.reads) == 1


async def test_a_read_from_before_a_pause_does_not_serve_the_calls_after_it() -> None:
    engine = Engine()
    versions = PolicyVersions(engine.fetch)
    reading = asyncio.create_task(versions.before())
    (await engine.next_read()).set_result("1")
    assert await reading == "1"
    resumed_at = asyncio.get_running_loop().time()
    reading = asyncio.create_task(versions.before(resumed_at))
    (await engine.next_read()).set_result("2")
    assert await reading == "2"
    assert await versions.before(resumed_at) == "2"
    assert len(engine.reads) == 2


async def test_one_caller_that_gives_up_does_not_spoil_the_read_for_another() -> None:
    engine = Engine()
    versions = PolicyVersions(engine.fetch)
    leaving = asyncio.create_task(versions.after())
    read = await engine.next_read()
    leaving.cancel()
    await asyncio.wait({leaving})
    read.set_result("1")
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert await versions.before() == "1"
