"""Where a task may run: what no node can ever run is refused, what none can run now waits and says what for."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from polarq.client import Client
from polarq.contracts.node import NodeHealth, NodeRecord
from polarq.errors import InvalidTask
from polarq.ledger import Keys
from polarq.ledger.control import pause_run
from polarq.topology import Topology
from tests.http.rig import a_task, running_shim, settings_for, topology_for

NODES: list[dict[str, Any]] = [
    {"id": "cpu", "port": 8101, "model_served": "small"},
    {"id": "gpu", "port": 8102, "model_served": "large", "labels": {"gpu": "yes"}},
]


@pytest.fixture
def topology(keys: Keys) -> Topology:
    limits = {"runs": {"narrow": {"max_in_flight": 1}}}
    return topology_for(keys, gateway={"nodes": NODES}, limits=limits)


@pytest.fixture
def client(redis_url: str, topology: Topology) -> Iterator[Client]:
    with Client(topology, settings_for(redis_url)) as made:
        yield made


def announce(client: Client, node_id: str, alive_s: float = 60.0, **more: Any) -> None:
    node = client.topology.node(node_id)
    assert node is not None
    known = {"labels": node.labels, "model": node.model_served, "runtimes": ["local"], "default_runtime": False}
    record = NodeRecord.model_validate({"node_id": node_id, **known, **more})
    client.ledger.do(client.ledger.calls.announce(record, alive_s))


def queue_of(client: Client, node_id: str) -> int:
    return client.ledger.do(client.ledger.calls.node_states([node_id]))[node_id][2]


@pytest.mark.parametrize(
    ("more", "problem"),
    [
        (
            {"placement": {"policy": "pinned", "node_id": "tpu"}},
            r"placement.node_id: no node 'tpu' \(known: cpu, gpu\)",
        ),
        ({"placement": {"labels": {"gpu": "no"}}}, "placement.labels: no node carries gpu=no"),
        ({"placement": {"model": "huge"}}, r"placement.model: no node serves 'huge' \(served: large, small\)"),
        (
            {"placement": {"labels": {"gpu": "yes"}, "model": "small"}},
            "placement.model: no node serves 'small' .* of those that carry gpu=yes",
        ),
        (
            {"runtime": {"backend": "docker", "image": "x"}},
            r"runtime.backend: no node has 'docker' \(installed: local\)",
        ),
        ({"runtime": None}, "runtime: the task names none, and no node has a default_runtime"),
    ],
)
def test_what_no_node_can_ever_run_is_refused_with_the_reason(
    client: Client, more: dict[str, Any], problem: str
) -> None:
    announce(client, "cpu")
    announce(client, "gpu", alive_s=0.001)
    with pytest.raises(InvalidTask, match=problem):
        client.submit(a_task("t", 1, **more))
    assert client.ledger.redis.zcard(client.ledger.calls.keys.waiting) == 0


def test_what_is_not_known_of_a_node_is_not_held_against_it(client: Client) -> None:
    announce(client, "cpu")
    client.submit(a_task("t", 1, runtime={"backend": "docker", "image": "x"}))
    waits = "a node that can run it (gpu is not alive)"
    assert client.waiting_for("t") == waits, "the only one that may have docker"
    assert (queue_of(client, "cpu"), queue_of(client, "gpu")) == (0, 0), "it looks for work when it starts"


def test_a_task_goes_only_to_nodes_that_can_run_it(client: Client) -> None:
    announce(client, "cpu")
    announce(client, "gpu")
    client.submit(a_task("labels", 4, placement={"labels": {"gpu": "yes"}}))
    assert (queue_of(client, "cpu"), queue_of(client, "gpu")) == (0, 4)
    client.submit(a_task("model", 3, placement={"model": "small"}))
    assert (queue_of(client, "cpu"), queue_of(client, "gpu")) == (3, 4)


def test_doorbells_go_to_nodes_that_take_work_while_there_are_any(client: Client) -> None:
    announce(client, "cpu")
    announce(client, "gpu", health=NodeHealth(inference=False))
    client.submit(a_task("t", 4))
    assert (queue_of(client, "cpu"), queue_of(client, "gpu")) == (4, 0)


def test_what_no_live_node_can_run_waits_and_says_what_for(client: Client) -> None:
    announce(client, "cpu")
    client.submit(a_task("t", 1, placement={"labels": {"gpu": "yes"}}))
    assert client.waiting_for("t") == "a node that can run it (gpu is not alive)"
    announce(client, "gpu", health=NodeHealth(inference=False))
    assert client.waiting_for("t") == "a node that can run it (gpu has no usable inference)"
    announce(client, "gpu")
    assert client.waiting_for("t") is None
    client.drain("gpu")
    assert client.waiting_for("t") == "a node that can run it (gpu is draining)"


def test_a_task_that_was_taken_is_the_same_task_after_its_only_node_has_left(redis_url: str, keys: Keys) -> None:
    template = topology_for(keys, gateway={"nodes": [{"id": "template"}]})
    with Client(template, settings_for(redis_url)) as client:
        for node_id, labels in (("a", {}), ("b", {"gpu": "yes"})):
            record = NodeRecord(node_id=node_id, labels=labels)
            client.ledger.do(client.ledger.calls.announce(record, 60))
        wanted = a_task("t", 1, placement={"labels": {"gpu": "yes"}})
        assert client.submit(wanted).created
        client.ledger.do(client.ledger.calls.depart("b"))
        assert not client.submit(wanted).created
        assert client.waiting_for("t") == "a node that can run it (placement.labels: no node carries gpu=yes)"
        with pytest.raises(InvalidTask, match="no node carries gpu=yes"):
            client.submit({**wanted, "task_id": "u"})


def test_a_run_that_is_paused_or_at_its_quota_is_what_its_rollouts_wait_for(client: Client) -> None:
    announce(client, "cpu")
    calls = client.ledger.calls
    client.submit(a_task("t", 2, run_id="narrow"))
    assert client.waiting_for("t") is None
    client.ledger.do(calls.claim("t.0", "cpu", 30, "job"))
    assert client.waiting_for("t") == "run 'narrow', of which 1 rollouts are in flight and at most 1 may be"
    client.ledger.do(pause_run(calls.keys, "narrow", on=True))
    assert client.waiting_for("t") == "run 'narrow' to be resumed"


async def test_a_tasks_status_over_http_says_what_it_waits_for(redis_url: str, keys: Keys) -> None:
    async with running_shim(redis_url, keys, topology={"gateway": {"nodes": NODES}}) as shim:
        await shim.submit(a_task("t", 1, placement={"labels": {"gpu": "yes"}}))
        status = (await shim.http.get("/rollout/task/t")).json()
        assert status["waiting_for"] == "a node that can run it (gpu is not alive)"
        await shim.announce("gpu", labels={"gpu": "yes"})
        assert (await shim.http.get("/rollout/task/t")).json()["waiting_for"] is None
