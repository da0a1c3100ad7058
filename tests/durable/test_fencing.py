"""A rollout whose lease may have ended: what it began goes on, and nothing new begins until the lease is certain."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from polarq.contracts.rollout import RolloutState
from polarq.contracts.task import Task
from polarq.ledger import AsyncLedger, Calls, Claim, Keys
from polarq.settings import Settings
from polarq.testing.redis import EmbeddedRedis
from polarq.topology import Topology
from polarq_worker.lease import Lease, steady_s
from polarq_worker.network.sandbox_network import Networks
from polarq_worker.patience import Patience
from polarq_worker.services import Services
from polarq_worker.slots import Slots
from polarq_worker.spool import Spool
from polarq_worker.walk import Walk
from polarq_worker.warm.parts import Warm
from polarq_worker.work import place_of
from tests.worker.conftest import shell_task

LONG_AGO_S = 1000.0


@pytest.fixture
async def ledger(redis_url: str, keys: Keys) -> AsyncIterator[AsyncLedger]:
    async with AsyncLedger(redis_url, Calls(keys)) as made:
        yield made


async def nothing(*_: Any) -> None:
    """Nobody has to be told."""


def services(ledger: AsyncLedger, home: Path) -> Services:
    # What these rollouts wait for are host files.
    open_to_files = {"id": "node0", "runtimes": {"local": {"isolation": "none"}}}
    topology = Topology.parse({"gateway": {"nodes": [open_to_files]}})
    node = topology.resolve(topology.gateway.nodes[0].id)
    (home / "rollouts").mkdir(parents=True)
    patience = Patience()
    return Services(
        topology=topology,
        node=node,
        place=place_of(node, topology),
        ledger=ledger,
        slots=Slots(prepare=1, ready=1, run=1, post=1),
        warm=Warm.of(topology, node, "", ledger, patience, home),
        networks=Networks(node, topology, Settings.from_env({}), home / "relay.log"),
        patience=patience,
        spool=Spool(home / "spool", 60),
        state_dir=home,
        proxy_there=lambda: asyncio.sleep(0),
        tell=lambda _: None,
        ring=nothing,
    )


async def claimed(ledger: AsyncLedger, task_id: str, folder: Path, lease_s: float) -> Claim:
    """A rollout whose preparation and harness each leave a file, and wait for a file."""
    waits = "touch {0}/{1}.began; while [ ! -e {0}/{1} ]; do sleep 0.02; done"
    runtime = {"backend": "local", "prepare": [{"type": "exec", "command": waits.format(folder, "prepare")}]}
    task = Task.load(shell_task(task_id, waits.format(folder, "harness"), runtime=runtime, timeout_seconds=600))
    await ledger.do(ledger.calls.submit(task, task_id))
    claim = await ledger.do(ledger.calls.claim(f"{task_id}.0", "node0", lease_s, "job"))
    assert isinstance(claim, Claim)
    return claim


async def appears(path: Path) -> None:
    async with asyncio.timeout(120):
        while not path.exists():  # noqa: ASYNC110 - another process makes it
            await asyncio.sleep(0.02)


async def grants(ledger: AsyncLedger) -> list[bytes]:
    return [key async for key in ledger.redis.scan_iter(ledger.calls.keys.grant("*"))]


async def test_no_sandbox_is_prepared_under_a_lease_that_may_have_ended(ledger: AsyncLedger, tmp_path: Path) -> None:
    claim = await claimed(ledger, "prepare", tmp_path, 60)
    lease = Lease(60, steady_s() - LONG_AGO_S)
    walk = asyncio.create_task(Walk(claim, services(ledger, tmp_path / "home"), lease).run())
    done, _ = await asyncio.wait({walk}, timeout=0.5)
    assert not done
    assert list((tmp_path / "home" / "rollouts").iterdir()) == []
    lease.renewed(steady_s())
    await appears(tmp_path / "prepare.began")
    (tmp_path / "prepare").touch()
    (tmp_path / "harness").touch()
    assert (await walk).outcome.state is RolloutState.COMPLETED


async def test_no_harness_starts_and_no_model_opens_to_it_under_a_lease_that_may_have_ended(
    ledger: AsyncLedger, tmp_path: Path
) -> None:
    claim = await claimed(ledger, "harness", tmp_path, 60)
    lease = Lease(60, steady_s())
    walk = asyncio.create_task(Walk(claim, services(ledger, tmp_path / "home"), lease).run())
    await appears(tmp_path / "prepare.began")
    lease._until = steady_s()  # its minute is over, and no renewal was answered
    (tmp_path / "prepare").touch()

    async def running() -> bool:
        record = await ledger.do(ledger.calls.task("harness"))
        return record is not None and record.rollouts[0].state is RolloutState.RUNNING

    async with asyncio.timeout(120):
        while not await running():  # noqa: ASYNC110 - the ledger says it
            await asyncio.sleep(0.02)
    done, _ = await asyncio.wait({walk}, timeout=0.5)
    assert not done
    assert not (tmp_path / "harness.began").exists()
    assert await grants(ledger) == []
    lease.renewed(steady_s())
    await appears(tmp_path / "harness.began")
    assert len(await grants(ledger)) == 1
    lease._until = steady_s()
    (tmp_path / "harness").touch()
    assert (await walk).outcome.state is RolloutState.COMPLETED, "what was begun goes on"


async def test_a_grant_whose_opening_took_longer_than_the_lease_is_closed_and_opened_anew(
    keys: Keys, tmp_path: Path
) -> None:
    with EmbeddedRedis() as server:
        async with AsyncLedger(server.url, Calls(keys)) as ledger:
            claim = await claimed(ledger, "anew", tmp_path, 60)
            lease = Lease(60, steady_s())
            walk = Walk(claim, services(ledger, tmp_path / "home"), lease)
            assert server.pid is not None
            os.kill(server.pid, signal.SIGSTOP)
            try:
                opening = asyncio.create_task(walk.access.open(60))
                await asyncio.sleep(0)
                lease._until = steady_s()
            finally:
                os.kill(server.pid, signal.SIGCONT)
            async with asyncio.timeout(120):
                while not (closed := await grants(ledger)):  # noqa: ASYNC110 - the ledger says it
                    await asyncio.sleep(0.02)
            done, _ = await asyncio.wait({opening}, timeout=0.5)
            assert not done
            lease.renewed(steady_s())
            await opening
            states = {key: await ledger.redis.hget(key, "state") for key in await grants(ledger)}
            assert states.pop(closed[0]) == b"closed"
            assert list(states.values()) == [b"open"]
