"""A node whose link to Redis is cut and healed: its rollouts go on elsewhere, what it brings late counts nothing."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import get_args

import pytest

from polarq.contracts import RolloutState
from polarq.testing.program import Program
from polarq.testing.redis import EmbeddedRedis
from polarq.testing.stack import LocalStack
from tests.durable.gates import PATIENCE_S, Gates, ids
from tests.durable.namespaces import HUB, Cut, Network, network
from tests.worker.conftest import wait_until, write_scenario

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

S = RolloutState
NODES = ("node0", "node1")


class SpreadStack(LocalStack):
    """Each node in a namespace of its own; Redis and inference in the hub, where both reach them."""

    def _program(self, name: str, command: list[str], log: str) -> Program:
        everywhere = ["--host", "0.0.0.0"] if name == "inference" else []
        return super()._program(name, [*command, *everywhere], log)

    def wait_for_inference(self) -> None:
        super().wait_for_inference()
        self.inference_url = self.inference_url.replace("127.0.0.1", HUB)


@pytest.fixture
def net() -> Iterator[Network]:
    with network(len(NODES)) as made:
        yield made


@pytest.fixture
def stack(tmp_path: Path, net: Network) -> Iterator[LocalStack]:
    listens = [f"bind {HUB} 127.0.0.1", "protected-mode no"]
    with (
        EmbeddedRedis(appendonly=True, config=listens) as server,
        SpreadStack(
            tmp_path,
            scenario=str(write_scenario(tmp_path)),
            redis_url=server.url.replace("127.0.0.1", HUB),
            nodes={node: {"max_run_workers": 6} for node in NODES},
            sections={
                "gateway": {
                    "lease_s": 4.0,
                    "reap_interval_s": 0.5,
                    "ring_again_s": 2.0,
                    "heartbeat_interval_seconds": 1.0,
                    "max_attempts": 50,
                }
            },
            before={node: net.inside(n) for n, node in enumerate(NODES)},
        ) as made,
    ):
        yield made


@pytest.mark.parametrize("how", get_args(Cut))
def test_a_node_that_is_cut_off_loses_its_rollouts_to_another_and_works_again_when_the_link_is_healed(
    stack: LocalStack, net: Network, tmp_path: Path, how: Cut
) -> None:
    client, gates, lost, others = stack.client, Gates(tmp_path / "gates"), ids("cut", 3), ids("others", 2)
    client.pause_node("node1")
    client.submit(gates.task("cut", len(lost)))
    gates.wait_started(*lost)
    client.resume_node("node1")
    client.submit(gates.task("others", len(others), placement={"policy": "pinned", "node_id": "node1"}))
    gates.wait_started(*others)
    net.cut(0, how)
    wait_until(lambda: all(gates.starts()[rollout_id] == 2 for rollout_id in lost), PATIENCE_S)
    # All harnesses end now, also those of the node that can tell nobody.
    gates.open(*lost, *others)
    result = client.wait("cut", PATIENCE_S)
    assert [(r.outcome.state, r.node_id, r.attempt) for r in result.results] == [(S.COMPLETED, "node1", 2)] * 3
    assert [r.attempt for r in client.wait("others", PATIENCE_S).results] == [1, 1]
    net.heal(0)

    def let_go(rollout_id: str) -> bool:
        said = stack.workers["node0"].log.read_text(errors="replace")
        words = ("its lease went to another worker", "a late commit was refused")
        return any(f"rollout {rollout_id}: {word}" in said for word in words)

    wait_until(lambda: all(let_go(rollout_id) for rollout_id in lost), PATIENCE_S)
    assert client.wait("cut", PATIENCE_S) == result, "what came late changed nothing"
    assert gates.starts() == {**dict.fromkeys(lost, 2), **dict.fromkeys(others, 1)}
    wait_until(lambda: all(node.alive for node in client.nodes()), PATIENCE_S)
    client.submit(gates.task("after", 2, placement={"policy": "pinned", "node_id": "node0"}))
    gates.open(*ids("after", 2))
    assert {r.node_id for r in client.wait("after", PATIENCE_S).results} == {"node0"}
    assert [worker.exit_code for worker in stack.workers.values()] == [None, None]
    wait_until(lambda: not list(tmp_path.glob("state/node0/rollouts/*")), PATIENCE_S)


@pytest.mark.parametrize("how", get_args(Cut))
def test_a_link_that_is_cut_for_less_than_a_lease_costs_no_work(
    stack: LocalStack, net: Network, tmp_path: Path, how: Cut
) -> None:
    gates, rollouts = Gates(tmp_path / "gates"), ids("short", 3)
    stack.client.submit(gates.task("short", len(rollouts), placement={"policy": "pinned", "node_id": "node0"}))
    gates.wait_started(*rollouts)
    net.cut(0, how)
    net.heal(0)
    gates.open(*rollouts)
    result = stack.client.wait("short", PATIENCE_S)
    assert {(r.outcome.state, r.attempt) for r in result.results} == {(S.COMPLETED, 1)}
    assert set(gates.starts().values()) == {1}
