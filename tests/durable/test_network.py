"""A node whose link to Redis is cut and healed: its rollouts go on elsewhere, and what it brings late is refused."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from polarq.contracts import RolloutState, TaskResult
from polarq.testing.program import Program
from polarq.testing.redis import EmbeddedRedis
from polarq.testing.stack import LocalStack, free_port
from tests.durable.gates import PATIENCE_S, Gates, ids, wait_for_log
from tests.durable.namespaces import HUB, Cut, Network, network
from tests.worker.conftest import wait_until, write_scenario

S = RolloutState
NODES = ("node0", "node1")
LEASE_S = 5.0
CAPACITY = 6
GATEWAY = {"lease_s": LEASE_S, "reap_interval_s": 0.5, "ring_again_s": 2.0, "max_attempts": 50}


class SpreadStack(LocalStack):
    """Each node in its own namespace, with an inference server of its own on that namespace's loopback."""

    def __init__(self, home: Path, net: Network, redis: EmbeddedRedis) -> None:
        self.net = net
        self.engine_port = free_port()
        self.engines: list[Program] = []
        node = {
            "max_init_workers": CAPACITY,
            "max_run_workers": CAPACITY,
            "max_postrun_workers": CAPACITY,
            "inference": {"engine": "vllm", "base_url": f"http://127.0.0.1:{self.engine_port}"},
        }
        super().__init__(
            home,
            scenario=str(write_scenario(home)),
            nodes=dict.fromkeys(NODES, node),
            sections={"gateway": GATEWAY},
            redis=redis,
            before={node_id: net.inside(n) for n, node_id in enumerate(NODES)},
            env={"POLARQ_REDIS_URL": f"redis://{HUB}:{redis.port}/0"},
        )

    def start_inference(self, port: int = 0, *, wait: bool = True) -> None:
        """One in each namespace, all at the same port; their nodes wait for them."""
        for n in range(len(NODES)):
            command = [sys.executable, "-m", "polarq.testing.inference", "--scenario", self.scenario]
            command += ["--served-model-name", "scripted", "--port", str(self.engine_port)]
            self.engines.append(self._program(f"engine{n}", [*self.net.inside(n), *command], f"engine{n}.log").start())

    def stop(self) -> None:
        try:
            super().stop()
        finally:
            for engine in self.engines:
                engine.stop()


@pytest.fixture
def net() -> Iterator[Network]:
    with network(len(NODES)) as made:
        yield made


@pytest.fixture
def stack(tmp_path: Path, net: Network) -> Iterator[SpreadStack]:
    config = (f"bind 127.0.0.1 {HUB}", "protected-mode no")
    with EmbeddedRedis(config=config) as redis, SpreadStack(tmp_path, net, redis) as made:
        yield made


@pytest.fixture
def gates(tmp_path: Path) -> Gates:
    return Gates(tmp_path / "gates")


def pinned(node_id: str) -> dict[str, Any]:
    return {"placement": {"policy": "pinned", "node_id": node_id}}


def ended(stack: LocalStack, task_id: str) -> TaskResult:
    return stack.client.wait(task_id, PATIENCE_S)


def owners(stack: LocalStack, task_id: str) -> dict[str, str | None]:
    return {r.rollout_id: r.owner for r in stack.client.record(task_id).rollouts}


def runs_at(stack: LocalStack, task_id: str, node_id: str, count: int) -> bool:
    rollouts = stack.client.record(task_id).rollouts
    return sum(r.owner == node_id and r.state is S.RUNNING for r in rollouts) == count


@pytest.mark.parametrize("how", ["down", "silent"])
def test_a_node_behind_a_cut_link_loses_its_rollouts_to_the_other_and_works_again_when_it_is_healed(
    stack: SpreadStack, net: Network, gates: Gates, how: Cut
) -> None:
    stack.client.submit(gates.task("cut", CAPACITY))
    gates.wait_started(*ids("cut", CAPACITY))
    at_first = owners(stack, "cut")
    behind = [rollout_id for rollout_id, owner in at_first.items() if owner == "node0"]
    assert 0 < len(behind) < CAPACITY
    net.cut(0, how)
    gates.open(*(set(at_first) - set(behind)))
    wait_until(lambda: runs_at(stack, "cut", "node1", len(behind)), PATIENCE_S)
    wait_until(lambda: all(gates.starts()[rollout_id] == 2 for rollout_id in behind), PATIENCE_S)
    # Now both attempts of each end. The cut node cannot say so; the other one does.
    gates.open(*behind)
    result = ended(stack, "cut")
    assert {r.outcome.state for r in result.results} == {S.COMPLETED}
    assert {r.node_id for r in result.results} == {"node1"}
    assert [r.trajectory and r.trajectory.fidelity.calls for r in result.results] == [1] * CAPACITY
    wait_until(lambda: not {n.node_id: n.alive for n in stack.client.nodes()}["node0"], PATIENCE_S)
    before = {r.rollout_id: r.model_dump_json() for r in result.results}

    net.heal(0)
    wait_until(lambda: {n.node_id: n.alive for n in stack.client.nodes()}["node0"], PATIENCE_S)
    # As many as it can run at once: every slot is free again.
    stack.client.submit(gates.task("healed", CAPACITY, **pinned("node0")))
    gates.wait_started(*ids("healed", CAPACITY))
    gates.open(*ids("healed", CAPACITY))
    assert {r.node_id for r in ended(stack, "healed").results} == {"node0"}
    assert stack.workers["node0"].exit_code is None, "it lived through it"
    after = {r.rollout_id: r.model_dump_json() for r in ended(stack, "cut").results}
    assert after == before, "what came late changed nothing"


@pytest.mark.parametrize("how", ["down", "silent"])
def test_a_link_that_is_cut_for_less_than_a_lease_costs_no_work(
    stack: SpreadStack, net: Network, gates: Gates, how: Cut
) -> None:
    stack.client.submit(gates.task("short", CAPACITY, **pinned("node0")))
    gates.wait_started(*ids("short", CAPACITY))
    net.cut(0, how)
    net.heal(0)
    gates.open(*ids("short", CAPACITY))
    result = ended(stack, "short")
    assert {(r.outcome.state, r.attempt) for r in result.results} == {(S.COMPLETED, 1)}
    assert set(gates.starts().values()) == {1}


def test_two_nodes_that_are_both_cut_off_keep_their_work_when_nobody_could_take_it(
    stack: SpreadStack, net: Network, gates: Gates
) -> None:
    """Nobody is left to look for lost leases; a healed node's first look must not take what the other still has."""
    stack.client.submit(gates.task("both", CAPACITY))
    gates.wait_started(*ids("both", CAPACITY))
    for n in range(len(NODES)):
        net.cut(n, "silent")
    gates.open(*ids("both", CAPACITY))
    for node_id in NODES:
        wait_for_log(stack, "waiting for the ledger", node_id)
    wait_until(lambda: not any(n.alive for n in stack.client.nodes()), PATIENCE_S)
    for n in range(len(NODES)):
        net.heal(n)
    result = ended(stack, "both")
    assert {(r.outcome.state, r.attempt) for r in result.results} == {(S.COMPLETED, 1)}
    assert set(gates.starts().values()) == {1}
