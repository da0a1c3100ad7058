"""Whoever cancels a coroutine that talks to the ledger gets it cancelled, at whatever point it was."""

from __future__ import annotations

import asyncio

import pytest

from polarq.ledger import AsyncLedger, Calls, Keys


@pytest.mark.parametrize("steps", range(40))
async def test_a_cancellation_is_never_swallowed(redis_url: str, keys: Keys, steps: int) -> None:
    async with AsyncLedger(redis_url, Calls(keys)) as ledger:

        async def read_for_ever() -> None:
            last = await ledger.do(ledger.calls.last_event_id())
            while True:
                await ledger.wait_events(last, 25.0)

        reading = asyncio.create_task(read_for_ever())
        for _ in range(steps):
            await asyncio.sleep(0)
        reading.cancel()
        done, _ = await asyncio.wait({reading}, timeout=10)
        assert done
        assert reading.cancelled()


async def test_what_is_done_after_a_cancellation_was_seen_still_works(redis_url: str, keys: Keys) -> None:
    async with AsyncLedger(redis_url, Calls(keys)) as ledger:

        async def tidy_up() -> str:
            try:
                await asyncio.Event().wait()
            except asyncio.CancelledError:
                return await ledger.do(ledger.calls.last_event_id())
            raise AssertionError("never woken")

        working = asyncio.create_task(tidy_up())
        await asyncio.sleep(0)
        working.cancel()
        assert await working == "0-0"
