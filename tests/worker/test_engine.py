"""What a cancellation may and may not interrupt."""

from __future__ import annotations

import asyncio

import pytest

from polarq_worker.engine import to_its_end


async def test_what_must_be_finished_is_finished_whoever_cancels_and_however_often() -> None:
    go, done = asyncio.Event(), []

    async def work() -> str:
        await go.wait()
        done.append(1)
        return "committed"

    outer = asyncio.create_task(to_its_end(work()))
    for _ in range(3):
        await asyncio.sleep(0)
        outer.cancel()
    await asyncio.sleep(0)
    assert not outer.done()
    go.set()
    assert await outer == ("committed", True)
    assert done == [1]


async def test_without_a_cancellation_nothing_is_said_of_one() -> None:
    async def work() -> int:
        return 7

    assert await to_its_end(work()) == (7, False)


async def test_its_error_comes_through() -> None:
    async def work() -> None:
        raise ValueError("broken")

    with pytest.raises(ValueError, match="broken"):
        await to_its_end(work())
