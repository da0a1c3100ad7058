"""Callbacks over hours, deaths and slow receivers: rounds of tries, between which only a line in Redis is held."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from polarq.callback.delivery import CallbackPolicy
from polarq.callback.lanes import Lanes
from polarq.callback.outbox import deliver_task_callback
from polarq.callback.record import Ending, attempts
from polarq.cli.main import main
from polarq.ledger import Keys
from polarq.ledger.reaping import left_to_tell
from polarq.ledger.retention import server_ms
from polarq.testing.stack import LocalStack
from tests.durable.hand import Hand
from tests.http.rig import Rig, a_task, running_shim
from tests.test_callback import FAST, SECRET, Received, Receiver, receiving, status
from tests.worker.conftest import ask, shell_task, write_scenario

PATIENCE_S = 150.0
ONE_BY_ONE = CallbackPolicy(backoff_s=0.001, patience_s=0.0)
"""Every try is a round of its own."""


@pytest.fixture
async def shim(redis_url: str, keys: Keys) -> AsyncIterator[Rig]:
    async with running_shim(redis_url, keys, secret=SECRET) as rig:
        yield rig


async def deliver(rig: Rig, policy: CallbackPolicy = FAST, *, claim_s: float = 30.0, task_id: str = "t") -> bool | None:
    client = rig.client
    return await deliver_task_callback(
        client.ledger, client.topology, task_id, secret=SECRET, policy=policy, claim_s=claim_s
    )


async def ended(rig: Rig, url: str, task_id: str = "t") -> None:
    await rig.submit(a_task(task_id, callback_url=url))
    await rig.end(f"{task_id}.0")


async def due_in_s(rig: Rig) -> float:
    """When the reaper looks at the task's last words, from now on."""
    ledger = rig.client.ledger
    due = await ledger.redis.zscore(ledger.calls.keys.untold, "t")
    assert due is not None
    return (float(due) - await ledger.do(server_ms())) / 1000


async def word(rig: Rig, *, told: bool = False) -> str:
    ledger = rig.client.ledger
    return await ledger.do(left_to_tell(ledger.calls, "t", told=told))


def test_as_it_is_a_receiver_is_tried_for_a_day_and_never_left_alone_for_longer_than_five_minutes() -> None:
    policy = CallbackPolicy()
    waits = [policy.wait_s(number, None) for number in range(1, policy.tries)]
    assert waits[:5] == [1, 2, 4, 8, 16]
    assert max(waits) == 300
    assert sum(waits) > 23 * 3600
    assert policy.wait_s(1, 90.0) == 90
    assert policy.wait_s(1, 10**9) == 3600, "a receiver cannot ask for years"


async def test_a_dead_deliverer_s_task_is_due_when_its_claim_ends_and_not_much_later(shim: Rig) -> None:
    arrived, stop = asyncio.Event(), asyncio.Event()

    async def hang(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        arrived.set()
        await stop.wait()

    async with receiving(hang, status(200)) as receiver:
        await ended(shim, receiver.url)
        assert await word(shim, told=True) == "wait"
        first = asyncio.create_task(deliver(shim, claim_s=20.0))
        await arrived.wait()
        assert await due_in_s(shim) <= 20
        assert await word(shim) == "wait"
        assert await due_in_s(shim) <= 20.2
        # As if it had been killed: its claim runs out, and it never says another word.
        ledger = shim.client.ledger
        await ledger.redis.delete(ledger.calls.keys.callback_claim("t"))
        assert await word(shim) == "call"
        assert await deliver(shim) is True
        assert await word(shim) == "nothing"
        stop.set()
        first.cancel()
        await asyncio.gather(first, return_exceptions=True)
    assert len({got.headers["x-polarq-delivery"] for got in receiver.got}) == 1


async def test_a_receiver_that_was_away_for_long_gets_it_when_it_is_back(shim: Rig) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    await ended(shim, f"http://127.0.0.1:{port}/")
    redis, keys = shim.client.ledger.redis, shim.client.ledger.calls.keys
    for _ in range(60):
        assert await deliver(shim, ONE_BY_ONE) is False
        assert not await redis.exists(keys.callback_claim("t")), "nobody holds it while it waits"
    async with receiving(status(200), port=port) as receiver:
        assert await deliver(shim, ONE_BY_ONE) is True
    assert len(receiver.got) == 1
    tries = await shim.client.ledger.do(attempts(keys, "t"))
    assert len(tries) == 50, "the newest are kept"
    assert [attempt.number for attempt in tries] == list(range(12, 62))
    assert {attempt.delivery_id for attempt in tries} == {receiver.got[0].headers["x-polarq-delivery"]}
    assert tries[-1].ending is Ending.DELIVERED
    assert await deliver(shim, ONE_BY_ONE) is None


async def test_the_last_try_of_all_gives_it_up(shim: Rig) -> None:
    async with receiving(status(500)) as receiver:
        await ended(shim, receiver.url)
        for _ in range(3):
            assert await deliver(shim, CallbackPolicy(tries=3, backoff_s=0.001, patience_s=0.0)) is False
        assert await deliver(shim) is None
    assert len(receiver.got) == 3
    assert await shim.client.ledger.redis.get(shim.client.ledger.calls.keys.callback_claim("t")) == b"done"


async def test_a_receiver_that_asks_for_time_gets_it_and_it_is_shown(
    shim: Rig, capsys: pytest.CaptureFixture[str]
) -> None:
    async with receiving(status(429, b"", **{"Retry-After": "120"}), status(200)) as receiver:
        await ended(shim, receiver.url)
        assert await deliver(shim) is False
        assert 100 < await due_in_s(shim) <= 120
        [attempt] = await shim.client.ledger.do(attempts(shim.client.ledger.calls.keys, "t"))
        assert (attempt.ending, attempt.status, attempt.retry_after_s) == (Ending.UNWELL, 429, 120)
        assert "callback unwell (429) at 127.0.0.1:" in await shown(shim, capsys)
        assert await deliver(shim) is True
    assert len(receiver.got) == 2
    assert "callback delivered (200) to 127.0.0.1:" in await shown(shim, capsys)


async def shown(rig: Rig, capsys: pytest.CaptureFixture[str]) -> str:
    assert await asyncio.to_thread(main, ["show", "t", "--url", rig.url]) == 0
    return capsys.readouterr().out


async def test_one_slow_receiver_has_few_places_and_holds_up_no_other(shim: Rig) -> None:
    open_now, most, go_on = 0, 0, asyncio.Event()
    full = asyncio.Event()

    async def slow(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal open_now, most
        open_now += 1
        most = max(most, open_now)
        if open_now == 3:
            full.set()
        await go_on.wait()
        open_now -= 1
        writer.write(status(200))
        await writer.drain()

    lanes = Lanes(to_one=3, in_all=5)
    client = shim.client

    async def with_a_place(task_id: str) -> bool | None:
        return await deliver_task_callback(
            client.ledger, client.topology, task_id, secret=SECRET, policy=FAST, lanes=lanes
        )

    async with receiving(slow) as receiver, receiving(status(200)) as quick:
        for number in range(8):
            await ended(shim, receiver.url, f"slow-{number}")
        await ended(shim, quick.url, "quick")
        waiting = [asyncio.create_task(with_a_place(f"slow-{number}")) for number in range(8)]
        await full.wait()
        assert await with_a_place("quick") is True
        go_on.set()
        assert await asyncio.gather(*waiting) == [True] * 8
    assert most == 3


def tasks_called_for(receiver: Receiver) -> set[str]:
    def of(got: Received) -> str:
        return got.headers["x-polarq-delivery"]

    return {of(got) for got in receiver.got}


@pytest.mark.slow
@pytest.mark.timeout(900)
async def test_three_thousand_callbacks_to_one_receiver_that_hangs_hold_up_no_commit(tmp_path: Path) -> None:
    go_on, begun = asyncio.Event(), asyncio.Event()
    open_now, most = 0, 0

    async def hang(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal open_now, most
        open_now += 1
        most = max(most, open_now)
        begun.set()
        try:
            await go_on.wait()
        finally:
            open_now -= 1
        writer.write(status(200))
        await writer.drain()

    stack = LocalStack(tmp_path, scenario=str(write_scenario(tmp_path)))
    await asyncio.to_thread(stack.start)
    try:
        async with receiving(hang) as receiver:
            hand = Hand(stack.client.ledger)

            def end_many() -> None:
                for number in range(3000):
                    hand.submit(
                        f"many-{number}",
                        callback_url=receiver.url,
                        placement={"policy": "pinned", "node_id": "nowhere"},
                    )
                    hand.ledger.do(hand.calls.cancel(f"many-{number}"))

            await asyncio.to_thread(end_many)
            async with asyncio.timeout(PATIENCE_S):
                await begun.wait()
            for number in range(3):
                task = shell_task(f"real-{number}", ask(1), num_samples=2, callback_url=receiver.url)
                await asyncio.to_thread(stack.client.submit, task)
                done = await asyncio.to_thread(stack.client.wait, f"real-{number}", PATIENCE_S)
                assert done.counts.completed == 2
            before = len(tasks_called_for(receiver))
            assert most <= 4, "one worker's places for one receiver"
            go_on.set()
            async with asyncio.timeout(PATIENCE_S):
                while len(tasks_called_for(receiver)) < before + 20:  # noqa: ASYNC110 - told by a socket
                    await asyncio.sleep(0.1)
    finally:
        await asyncio.to_thread(stack.stop)
