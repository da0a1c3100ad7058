"""A node's queue holds what the node can start soon; all else waits in the ledger, and nothing waits longer for it."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest

from polarq.client import Client
from polarq.client.routing import ahead
from polarq.contracts.node import NodeRecord, StageMetrics
from polarq.ledger import Keys
from polarq.ledger.admission import Place
from polarq.ledger.control import run_state
from polarq.testing.stack import LocalStack
from polarq.topology.models import Node
from polarq_worker.work import WorkSeeker
from tests.durable.gates import PATIENCE_S, Gates, ids
from tests.durable.test_doorbells import Fleet, waited
from tests.http.rig import a_task, settings_for, topology_for
from tests.worker.conftest import shell_task, wait_until, write_scenario

NODES: list[dict[str, Any]] = [
    {"id": "idle", "port": 8101, "model_served": "tiny"},
    {"id": "busy", "port": 8102, "model_served": "tiny"},
]
PLACES = 16
FULL = StageMetrics(run_inflight=PLACES)
SMALL = {"max_init_workers": 1, "max_run_workers": 2, "max_postrun_workers": 1, "ready_buffer": 1}


@pytest.fixture
def client(redis_url: str, keys: Keys) -> Iterator[Client]:
    with Client(topology_for(keys, gateway={"nodes": NODES}), settings_for(redis_url)) as made:
        yield made


def announce(client: Client, node_id: str, **more: Any) -> None:
    record = NodeRecord.model_validate(
        {"node_id": node_id, "model": "tiny", "runtimes": ["local"], "places": PLACES, **more}
    )
    client.ledger.do(client.ledger.calls.announce(record, 600))


def depth(client: Client, node_id: str) -> int:
    return client.ledger.do(client.ledger.calls.node_states([node_id]))[node_id][2]


def test_however_much_is_submitted_a_queue_holds_only_what_its_node_can_start_soon(client: Client) -> None:
    announce(client, "idle")
    announce(client, "busy", metrics=FULL)
    client.submit(a_task("one", 1))
    assert (depth(client, "idle"), depth(client, "busy")) == (1, 0)
    for number in range(5):
        client.submit(a_task(f"many{number}", 500))
    assert depth(client, "idle") == PLACES + ahead(PLACES)
    assert depth(client, "busy") == ahead(PLACES), "so that a place that gets free is taken at once"
    state = client.ledger.do(run_state(client.ledger.calls.keys, "default"))
    assert state.waiting == 2501, "what waits is counted in the ledger"
    assert client.waiting_for("many4") is None
    client.submit(a_task("many4", 500))
    assert depth(client, "idle") == PLACES + ahead(PLACES), "the same task again rings no more"


def test_a_group_that_shall_be_together_is_rung_on_one_node_and_no_further_than_that_one_can_start(
    client: Client,
) -> None:
    announce(client, "idle")
    announce(client, "busy", metrics=FULL)
    client.submit(a_task("t", 100, placement={"policy": "together"}))
    assert (depth(client, "idle"), depth(client, "busy")) == (PLACES + ahead(PLACES), 0)


@pytest.fixture
async def fleet(redis_url: str, keys: Keys) -> AsyncIterator[Fleet]:
    made = Fleet(redis_url, keys)
    yield made
    await made.aclose()


async def test_the_reaper_rings_no_more_than_there_are_free_places(fleet: Fleet) -> None:
    fleet.announce("node0", places=5)
    fleet.announce("node1", places=5, metrics={"run_inflight": 5})
    fleet.submit("t", 40)
    waited(fleet, "t.39")
    await fleet.turn()
    assert (len(fleet.queue("node0")), len(fleet.queue("node1"))) == (5, 0)
    await fleet.turn()
    assert len(fleet.queues()) == 5


async def test_the_reaper_rings_what_no_node_sees_behind_others_in_line(fleet: Fleet) -> None:
    fleet.announce("node0", "node1", places=2)
    for number in range(150):
        fleet.submit(f"pinned{number}", placement={"policy": "pinned", "node_id": "node1"})
    fleet.lose("node1")
    fleet.submit("free")
    waited(fleet, "free.0")
    await fleet.turn()
    assert fleet.queue("node0") == ["free.0"]


async def test_a_node_leaves_to_another_what_that_one_is_about_to_take_and_takes_it_if_it_does_not(
    fleet: Fleet,
) -> None:
    fleet.announce("node0", "node1", places=4)
    fleet.submit("t", 8, ring=True)
    assert (len(fleet.queue("node0")), len(fleet.queue("node1"))) == (4, 4)
    place = Place("node0", {}, "tiny", ["local"], True, {})
    seeker = WorkSeeker(
        fleet.ledger, fleet.client, fleet.topology, fleet.settings, place, capacity=lambda: 4, in_flight=lambda: 0
    )
    redis: Any = fleet.sync.redis
    redis.delete(*fleet.calls.keys.queue_lists("node0"))
    assert await seeker.seek() == 4, "what nobody else has a doorbell for"
    assert await seeker.seek() == 0
    # A while later they wait still.
    for rollout_id in redis.zrange(fleet.calls.keys.waiting, 0, -1):
        redis.zincrby(fleet.calls.keys.waiting, -10_000, rollout_id)
    redis.delete(*fleet.calls.keys.queue_lists("node0"))
    assert await seeker.seek() == 4 + ahead(4)
    await seeker.aclose()


@pytest.fixture
def stack(tmp_path: Path) -> Iterator[LocalStack]:
    """Neither heartbeats nor the reaper help: all that moves, moves by submissions, ends and starts."""
    never = {"heartbeat_interval_seconds": 3600.0, "ring_again_s": 3600.0, "lease_s": 3600.0}
    scenario = str(write_scenario(tmp_path))
    made = LocalStack(tmp_path, scenario=scenario, nodes={"node0": SMALL}, sections={"gateway": never})
    with made:
        yield made


def places(stack: LocalStack) -> int:
    node: Node | None = stack.topology.node("node0")
    assert node is not None
    return node.capacity


def test_a_backlog_is_worked_off_with_a_short_queue(stack: LocalStack) -> None:
    most, tasks = 0, [f"t{number}" for number in range(8)]
    for task_id in tasks:
        stack.client.submit(shell_task(task_id, "true", num_samples=5))
    deadline = time.monotonic() + PATIENCE_S
    while not all(stack.client.head(task_id).state.terminal for task_id in tasks):
        assert time.monotonic() < deadline, "the rest is not rung"
        most = max(most, depth(stack.client, "node0"))
    # Twice, as whoever submits and the node itself may fill it up in the same moment.
    assert 0 < most <= 2 * (places(stack) + ahead(places(stack))) < 40
    assert all(stack.client.head(task_id).counts.completed == 5 for task_id in tasks)


def test_a_node_that_said_it_was_full_and_is_idle_now_takes_all_at_once(stack: LocalStack, tmp_path: Path) -> None:
    gates, count = Gates(tmp_path / "gates"), places(stack)
    stack.client.submit(gates.task("before", count))
    wait_until(lambda: stack.client.record("before").counts.running == count, PATIENCE_S)
    wait_until(lambda: len(gates.starts()) == SMALL["max_run_workers"], PATIENCE_S)
    stack.client.set_capacity("node0", SMALL["max_run_workers"])  # makes it say how it is
    wait_until(lambda: stack.client.nodes()[0].metrics.run_inflight > 0, PATIENCE_S)
    gates.open(*ids("before", count))
    stack.client.wait("before", PATIENCE_S)
    assert stack.client.nodes()[0].metrics.run_inflight > 0, "what it said is out of date"
    stack.client.submit(gates.task("after", 2 * count))
    wait_until(lambda: stack.client.record("after").counts.running == count, PATIENCE_S)
    gates.open(*ids("after", 2 * count))
    assert stack.client.wait("after", PATIENCE_S).counts.completed == 2 * count


def test_a_node_works_on_what_it_can_run_behind_very_much_that_it_cannot(stack: LocalStack) -> None:
    client = stack.client
    record = NodeRecord(node_id="other", model="scripted", runtimes=["local"], places=1)
    client.ledger.do(client.ledger.calls.announce(record, 3600))
    elsewhere = shell_task("elsewhere", "true", num_samples=300, placement={"policy": "pinned", "node_id": "other"})
    client.submit({**elsewhere, "dispatch_priority": 100})
    client.submit(shell_task("here", "true", num_samples=4 * places(stack)))
    assert client.wait("here", PATIENCE_S).counts.completed == 4 * places(stack)
    assert client.head("elsewhere").counts.queued == 300


def test_what_waited_before_a_node_was_there_is_run_when_it_starts(stack: LocalStack) -> None:
    stack.workers["node0"].stop()
    stack.client.submit(shell_task("early", "true", num_samples=3))
    assert depth(stack.client, "node0") == 0
    stack.start_worker()
    assert stack.client.wait("early", PATIENCE_S).counts.completed == 3
