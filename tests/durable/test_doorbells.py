"""What a reaper's turn does to queues, on a real Redis with real messages; nodes are records, no worker takes part."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import pytest

from polarq.client import Client
from polarq.contracts import Task
from polarq.contracts.node import NodeRecord
from polarq.ledger import AsyncLedger, Claim, Keys, calls_for
from polarq.ledger.control import pause_run
from polarq.ledger.reaping import look, rollout_of, server_life
from polarq.settings import Settings
from polarq.topology import Topology
from polarq_worker.reaper import Reaper
from tests.http.rig import a_task, settings_for, topology_for
from tests.worker.conftest import wait_until

NODES = [{"id": f"node{i}", "port": 8200 + i, "model_served": "tiny"} for i in range(3)]
LEASE_S = 1.001
LIFE = server_life()


class Fleet:
    """A deployment of three nodes without a worker, and one reaper."""

    def __init__(self, url: str, keys: Keys, **redis: Any) -> None:
        gateway = {"nodes": NODES, "ring_again_s": 0.001, "lease_s": LEASE_S}
        limits = {"runs": {"narrow": {"max_in_flight": 1}}}
        self.topology: Topology = topology_for(keys, gateway=gateway, limits=limits)
        if redis:
            section = self.topology.redis.model_copy(update=redis)
            self.topology = self.topology.model_copy(update={"redis": section})
        self.settings: Settings = settings_for(url)
        self.client = Client(self.topology, self.settings)
        self.sync = self.client.ledger
        self.calls = self.sync.calls
        self.ledger = AsyncLedger(url, calls_for(self.topology))
        self.reaper = Reaper(self.ledger, self.client, self.topology, self.settings, "node0")

    def announce(self, *node_ids: str, **more: Any) -> None:
        for node_id in node_ids:
            record = NodeRecord.model_validate({"node_id": node_id, "model": "tiny", "runtimes": ["local"], **more})
            self.sync.do(self.calls.announce(record, 600))

    def lose(self, node_id: str) -> None:
        self.sync.redis.delete(self.calls.keys.node_alive(node_id))

    def submit(self, task_id: str, samples: int = 1, *, ring: bool = False, **more: Any) -> None:
        task = Task.load(a_task(task_id, samples, **more))
        if ring:
            self.client.submit(task)
        else:
            self.sync.do(self.calls.submit(task, task_id))

    def queue(self, node_id: str) -> list[str | None]:
        redis: Any = self.sync.redis
        return [rollout_of(m) for name in self.calls.keys.queue_lists(node_id) for m in redis.lrange(name, 0, -1)]

    def queues(self) -> list[str]:
        found = [i for node in NODES for i in self.queue(str(node["id"]))]
        return sorted(i for i in found if i is not None)

    async def turn(self) -> None:
        """A turn that finds all that has waited until now."""
        self.reaper.read_queues_at = 0
        await self.reaper.step()

    async def aclose(self) -> None:
        await self.reaper.aclose()
        await self.ledger.aclose()
        self.client.close()


@pytest.fixture
async def fleet(redis_url: str, keys: Keys) -> AsyncIterator[Fleet]:
    made = Fleet(redis_url, keys)
    yield made
    await made.aclose()


def waited(fleet: Fleet, *rollout_ids: str) -> None:
    """Returns when so long has passed for them that they may be rung."""
    wait_until(lambda: set(rollout_ids) <= set(fleet.sync.do(look(fleet.calls, 0.01)).waiting))


async def test_what_is_in_no_queue_is_rung_and_what_is_in_one_is_not(fleet: Fleet) -> None:
    fleet.announce("node0", "node1")
    fleet.submit("rung", 3, ring=True)
    fleet.submit("lost", 3)
    waited(fleet, "rung.2", "lost.2")
    before = fleet.queues()
    assert before == ["rung.0", "rung.1", "rung.2"]
    for _ in range(3):
        await fleet.turn()
    assert fleet.queues() == ["lost.0", "lost.1", "lost.2", *before]
    assert not fleet.queue("node2"), "a node that never came gets none"
    assert fleet.queue("node0"), "they are spread"
    assert fleet.queue("node1")


async def test_nothing_is_rung_while_no_node_takes_work(fleet: Fleet) -> None:
    fleet.announce("node0")
    fleet.submit("t", 2)
    waited(fleet, "t.1")
    fleet.sync.do(fleet.calls.set_node_flag("node0", "draining", True))
    await fleet.turn()
    assert fleet.queues() == []
    fleet.sync.do(fleet.calls.set_node_flag("node0", "draining", False))
    await fleet.turn()
    assert fleet.queues() == ["t.0", "t.1"]


async def test_nothing_is_rung_for_a_run_of_which_nothing_may_start(fleet: Fleet) -> None:
    keys = fleet.calls.keys
    fleet.announce("node0")
    fleet.submit("held", run_id="paused")
    fleet.submit("one", run_id="narrow")
    fleet.submit("two", run_id="narrow")
    claim = fleet.sync.do(fleet.calls.claim("one.0", "node0", 600, "job"))
    assert isinstance(claim, Claim)
    fleet.sync.do(pause_run(keys, "paused", True))
    waited(fleet, "held.0", "two.0")
    await fleet.turn()
    assert fleet.queues() == []
    fleet.sync.do(pause_run(keys, "paused", False))
    fleet.sync.do(fleet.calls.release("one.0", claim.token, counted=False, reason="drain"))
    await fleet.turn()
    assert {"held.0", "two.0"} <= set(fleet.queues())


async def test_the_queue_of_a_node_that_is_gone_goes_when_all_of_it_is_elsewhere(fleet: Fleet) -> None:
    fleet.announce("node0", "node1")
    for number in range(3):
        fleet.submit(f"t{number}", ring=True)
    fleet.submit("t3", ring=True, placement={"policy": "pinned", "node_id": "node1"})
    ended = fleet.sync.do(fleet.calls.cancel("t0"))
    assert ended.known
    fleet.lose("node1")
    waited(fleet, "t1.0", "t2.0", "t3.0")
    there = [i for i in fleet.queue("node1") if i != "t3.0"]
    assert there
    await fleet.turn()
    assert set(there) - {"t0.0"} <= set(fleet.queue("node0"))
    assert "t3.0" in fleet.queue("node1"), "what only that node may run waits there"
    fleet.sync.do(fleet.calls.cancel("t3"))
    await fleet.turn()
    assert fleet.queue("node1") == []
    assert not fleet.sync.redis.exists(*fleet.calls.keys.queue_lists("node1"))


async def test_a_lost_rollout_is_rung_at_once_on_another_node(fleet: Fleet) -> None:
    fleet.announce("node0", "node1", "node2")
    fleet.submit("t", 3)
    for index in range(3):
        fleet.sync.do(fleet.calls.claim(f"t.{index}", "node1", 0.001, "job"))
    wait_until(lambda: len(fleet.sync.do(look(fleet.calls, 0)).expired) == 3)
    wait_until(lambda: fleet.sync.do(LIFE).up_s > LEASE_S)
    await fleet.turn()
    assert fleet.queues() == ["t.0", "t.1", "t.2"]
    assert fleet.queue("node1") == []
    await fleet.turn()
    assert len(fleet.queues()) == 3


async def test_a_lease_that_ran_out_while_redis_was_away_is_left_to_its_owner_for_a_while(fleet: Fleet) -> None:
    fleet.announce("node0", "node1")
    fleet.submit("t")
    claim = fleet.sync.do(fleet.calls.claim("t.0", "node1", 0.001, "job"))
    assert isinstance(claim, Claim)
    wait_until(lambda: bool(fleet.sync.do(look(fleet.calls, 0)).expired))
    fleet.reaper.server = "the one that was there before"
    await fleet.turn()
    assert fleet.sync.do(fleet.calls.renew([("t.0", claim.token)], 600)) == ["ok"]


async def test_one_of_two_reapers_is_at_it_and_the_other_takes_over(fleet: Fleet) -> None:
    fleet.announce("node0", "node1")
    other = Reaper(fleet.ledger, fleet.client, fleet.topology, fleet.settings, "node1")
    await fleet.turn()
    fleet.submit("t")
    waited(fleet, "t.0")
    await other.step()
    assert fleet.queues() == []
    await fleet.reaper.aclose()
    await other.step()
    assert fleet.queues() == ["t.0"]
    await other.aclose()


async def test_queues_in_a_redis_of_their_own_are_read_there(redis_url: str, keys: Keys) -> None:
    broker = redis_url.removesuffix("/0") + "/1"
    fleet = Fleet(redis_url, keys, broker_url=broker)
    try:
        fleet.announce("node0")
        fleet.submit("rung", ring=True)
        fleet.submit("lost")
        waited(fleet, "rung.0", "lost.0")
        await fleet.turn()
        await fleet.turn()
        async with AsyncLedger(broker, fleet.calls) as queues:
            redis: Any = queues.redis
            found = [rollout_of(m) for name in keys.queue_lists("node0") for m in await redis.lrange(name, 0, -1)]
        assert sorted(str(i) for i in found) == ["lost.0", "rung.0"]
    finally:
        await fleet.aclose()
