"""A callback outlives whoever delivers it: the claim is short, is renewed meanwhile, and can be taken over."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from polarq.callback.delivery import signature_holds
from polarq.callback.outbox import deliver_task_callback
from polarq.ledger import Keys
from polarq.testing.stack import LocalStack
from tests.http.rig import Rig, a_task, running_shim
from tests.test_callback import FAST, SECRET, receiving, status
from tests.worker.conftest import ask, shell_task, write_scenario


@pytest.fixture
async def shim(redis_url: str, keys: Keys) -> AsyncIterator[Rig]:
    async with running_shim(redis_url, keys, secret=SECRET) as rig:
        yield rig


async def deliver(rig: Rig, claim_s: float) -> bool | None:
    client = rig.client
    return await deliver_task_callback(client.ledger, client.topology, "t", secret=SECRET, policy=FAST, claim_s=claim_s)


async def ended_with_callback(rig: Rig, url: str) -> None:
    await rig.submit(a_task(callback_url=url))
    await rig.end("t.0")


async def test_a_claim_is_renewed_as_long_as_the_delivery_takes(shim: Rig) -> None:
    claim_s = 3.0
    arrived, go_on = asyncio.Event(), asyncio.Event()

    async def slow(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        arrived.set()
        await go_on.wait()
        writer.write(status(200))
        await writer.drain()

    async with receiving(slow) as receiver:
        await ended_with_callback(shim, receiver.url)
        delivering = asyncio.create_task(deliver(shim, claim_s))
        await arrived.wait()
        redis, claim = shim.client.ledger.redis, shim.client.ledger.calls.keys.callback_claim("t")
        # It is seen to be renewed more often than its whole length allows.
        renewals, before = 0, await redis.pttl(claim)
        while renewals < 4:
            await asyncio.sleep(0.01)
            left = await redis.pttl(claim)
            renewals += left > before
            before = left
        assert await deliver(shim, claim_s) is None
        go_on.set()
        assert await delivering is True
    assert len(receiver.got) == 1
    assert await redis.get(claim) == b"done"


async def test_whoever_lost_the_claim_leaves_the_delivery_to_who_has_it(shim: Rig) -> None:
    arrived, stop = asyncio.Event(), asyncio.Event()

    async def hang(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        arrived.set()
        await stop.wait()

    async with receiving(hang, status(200)) as receiver:
        await ended_with_callback(shim, receiver.url)
        first = asyncio.create_task(deliver(shim, 0.3))
        await arrived.wait()
        redis, claim = shim.client.ledger.redis, shim.client.ledger.calls.keys.callback_claim("t")
        await redis.delete(claim)  # as if it had run out while Redis was away
        assert await deliver(shim, 30.0) is True
        assert await first is None
        stop.set()
    assert len(receiver.got) == 2
    assert len({got.headers["x-polarq-delivery"] for got in receiver.got}) == 1
    assert await redis.get(claim) == b"done"


@pytest.mark.slow
async def test_a_killed_worker_s_callback_is_delivered_by_another_one(tmp_path: Path) -> None:
    arrived, again = asyncio.Event(), asyncio.Event()

    async def hang(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        arrived.set()
        await again.wait()

    async def take(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(status(200))
        await writer.drain()
        again.set()

    stack = LocalStack(
        tmp_path,
        scenario=str(write_scenario(tmp_path)),
        nodes={"node0": {}, "node1": {}},
        env={"POLARQ_CALLBACK_SECRET": SECRET},
    )
    await asyncio.to_thread(stack.start)
    try:
        async with receiving(hang, take) as receiver:
            task = shell_task(
                "t", ask(1), callback_url=receiver.url, placement={"policy": "pinned", "node_id": "node0"}
            )
            await asyncio.to_thread(stack.client.submit, task)
            async with asyncio.timeout(150):
                await arrived.wait()
                await asyncio.to_thread(stack.workers["node0"].kill)
                await again.wait()
    finally:
        await asyncio.to_thread(stack.stop)
    first, second = receiver.got
    assert first.headers["x-polarq-delivery"] == second.headers["x-polarq-delivery"]
    assert signature_holds(
        SECRET, second.headers["x-polarq-timestamp"], second.body, second.headers["x-polarq-signature"]
    )
