"""A worker that grows beyond its memory limit is killed by the kernel; its rollouts are run elsewhere."""

from __future__ import annotations

import os
import secrets
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from polarq.contracts import RolloutState
from polarq.testing.stack import LocalStack
from tests.durable.cgroup import MemoryCgroup, memory_limit
from tests.durable.gates import PATIENCE_S, Gates, ids
from tests.worker.conftest import wait_until, write_scenario

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

REPOSITORY = Path(__file__).parents[2]
MB = 1 << 20


@pytest.fixture
def group() -> Iterator[MemoryCgroup]:
    with memory_limit(f"polarq-test-{secrets.token_hex(4)}", 700 * MB) as made:
        yield made


@pytest.fixture
def stack(tmp_path: Path, group: MemoryCgroup) -> Iterator[LocalStack]:
    """Only the first node's worker is limited."""
    path = os.pathsep.join([str(REPOSITORY), os.environ.get("PYTHONPATH", "")])
    with LocalStack(
        tmp_path,
        scenario=str(write_scenario(tmp_path)),
        nodes={node: {"max_run_workers": 4} for node in ("node0", "node1")},
        sections={
            "gateway": {"lease_s": 4.0, "reap_interval_s": 0.5},
            "security": {"allowed_modules": ["tests.durable.plugins"]},
        },
        env={"PYTHONPATH": path},
        before={"node0": group.before},
    ) as made:
        yield made


def test_the_rollouts_of_a_worker_that_the_kernel_kills_for_its_memory_go_on_elsewhere(
    stack: LocalStack, group: MemoryCgroup, tmp_path: Path
) -> None:
    gates = Gates(tmp_path / "gates")
    stack.client.pause_node("node1")
    stack.client.submit(gates.task("bystander", 2))
    gates.wait_started(*ids("bystander", 2))
    greedy = {"strategy": "tests.durable.plugins:GrowsOnce", "config": {"gate": str(tmp_path / "grown")}}
    gates.open("greedy.0")
    stack.client.submit(gates.task("greedy", evaluator=greedy))
    assert stack.workers["node0"].wait(PATIENCE_S) == -signal.SIGKILL
    assert group.kills >= 1
    stack.client.resume_node("node1")
    gates.open(*ids("bystander", 2))
    for task_id in ("bystander", "greedy"):
        for rollout in stack.client.wait(task_id, PATIENCE_S).results:
            assert (rollout.outcome.state, rollout.node_id) == (RolloutState.COMPLETED, "node1"), rollout.outcome
            assert rollout.attempt == 2
    assert gates.starts() == dict.fromkeys([*ids("bystander", 2), "greedy.0"], 2)
    # Started again, it takes work, and has cleared what it left.
    stack.start_worker("node0")
    pin = {"policy": "pinned", "node_id": "node0"}
    gates.open("after.0")
    stack.client.submit(gates.task("after", placement=pin))
    assert stack.client.wait("after", PATIENCE_S).counts.completed == 1
    wait_until(lambda: not list(tmp_path.glob("state/node0/rollouts/*")), PATIENCE_S)
