"""Whole rollouts in containers: their worker, proxy and Redis are real, and so is what is left when the worker dies."""

from __future__ import annotations

import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from polarq.contracts.endings import Ending
from polarq.contracts.rollout import Boundary, RolloutResult, RolloutState
from polarq.contracts.specs import NetworkPolicy
from polarq.contracts.task import Task
from polarq.testing.ports import free_port
from polarq.testing.stack import LocalStack
from polarq_worker.runtimes.base import Host
from polarq_worker.runtimes.docker import config
from tests.worker.conftest import ask, commands_with, shell_task, wait_until, write_scenario

from .docker_rig import IMAGE, daemon_is_here

pytestmark = pytest.mark.docker

PATIENCE_S = 150.0


def docker(*words: str) -> str:
    return subprocess.run(["docker", *words], check=True, capture_output=True, text=True, timeout=60).stdout.strip()


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalStack]:
    """Its node's proxy is reached at the bridge's address too, as on any machine whose containers have a network."""
    daemon_is_here()
    gateway = docker("network", "inspect", "bridge", "--format", "{{(index .IPAM.Config 0).Gateway}}")
    port = free_port()
    home = tmp_path_factory.mktemp("docker")
    node = {
        "host": "0.0.0.0",
        "port": port,
        "public_url": f"http://{gateway}:{port}",
        "default_runtime": {"backend": "docker", "image": IMAGE},
    }
    with LocalStack(home, scenario=str(write_scenario(home)), nodes={"node0": node}) as made:
        yield made
    # The snapshots of its recipes are the node's own, and it is gone.
    ours = f"label={config.PLACE}={config.place(Host(folder=made.home / 'state/node0/runtimes'))}"
    left = docker("images", "--filter", "label=polarq.snapshot", "--filter", ours, "-q")
    if left:
        subprocess.run(["docker", "rmi", "-f", *left.split()], check=False, capture_output=True)


def rollout(
    stack: LocalStack, name: str, command: str, more: dict[str, Any] | None = None, **runtime: Any
) -> RolloutResult:
    place = {"backend": "docker", "image": IMAGE, **runtime}
    task = shell_task(name, command, **{"runtime": place, "timeout_seconds": 120, **(more or {})})
    stack.client.submit(Task.parse(task))
    (result,) = stack.client.wait(name, PATIENCE_S).results
    return result


def containers(stack: LocalStack) -> list[str]:
    ours = f"label={config.PLACE}={config.place(Host(folder=stack.home / 'state/node0/runtimes'))}"
    return docker("ps", "-a", "--filter", ours, "--format", "{{.Names}}").split()


def test_an_offline_harness_asks_the_model_through_its_door(stack: LocalStack) -> None:
    result = rollout(stack, "offline", ask() + "tail -n +3 /proc/net/dev | cut -d: -f1")
    assert result.outcome.state is RolloutState.COMPLETED, result.outcome
    assert result.harness is not None
    assert result.harness.steps[0].stdout_tail.split("\n")[0] == "First answer."
    assert result.harness.steps[0].stdout_tail.split()[-1] == "lo"
    assert result.sandbox is not None
    assert (result.sandbox.network, result.sandbox.isolation) == (NetworkPolicy.PROXY_ONLY, "container")
    assert result.sandbox.image_id.startswith("sha256:")


def test_a_harness_with_the_machines_network_reaches_the_nodes_public_address(stack: LocalStack) -> None:
    result = rollout(stack, "online", ask(), network_policy="full")
    assert result.outcome.state is RolloutState.COMPLETED, result.outcome
    assert result.sandbox is not None
    assert result.sandbox.network is NetworkPolicy.FULL


def test_the_second_rollout_of_a_recipe_starts_from_what_the_first_one_prepared(stack: LocalStack) -> None:
    prepare = [{"type": "exec", "command": "date +%s%N > /opt/prepared; echo x > /polar/session/too"}]
    seen = [
        rollout(stack, f"prepared{number}", ask() + "cat /opt/prepared too", prepare=prepare) for number in range(2)
    ]
    first, second = (result.harness.steps[0].stdout_tail for result in seen if result.harness is not None)
    assert first == second
    assert first.endswith("x\n")
    assert seen[1].sandbox is not None
    assert seen[1].sandbox.origin in {"snapshot", "warm"}


def test_an_image_that_is_missing_fails_at_the_runtime_without_a_reward(stack: LocalStack) -> None:
    port = free_port()
    result = rollout(stack, "missing", ask(), image=f"127.0.0.1:{port}/no/such:image")
    assert result.outcome.state is RolloutState.FAILED
    assert result.outcome.boundary is Boundary.RUNTIME, result.outcome
    assert "no/such" in result.outcome.message
    assert result.reward is None


def test_what_uses_up_its_memory_is_said_in_the_result(stack: LocalStack) -> None:
    hungry = "python3 -c \"x = b'x' * (1 << 30)\""
    result = rollout(stack, "hungry", ask() + hungry, memory_mb=96)
    said = result.model_dump_json()
    assert "memory (96 MB)" in said, said[:2000]


def test_an_evaluator_that_hangs_ends_at_its_time_without_a_reward(stack: LocalStack) -> None:
    hang = "echo 1 > $POLARQ_REWARD_FILE; trap '' TERM INT; setsid -f sleep 4321.7 & sleep 4321.7"
    evaluator = {"strategy": "script", "config": {"command": hang, "reward_from": "file"}}
    result = rollout(stack, "hanging", ask(), {"evaluator": evaluator, "timeouts": {"evaluate_s": 3}})
    outcome = result.outcome
    assert result.trajectory is not None
    assert (outcome.state, outcome.boundary) == (RolloutState.TIMED_OUT, Boundary.EVALUATOR), outcome
    assert (outcome.reason, outcome.ending, outcome.trainable) == ("evaluate_timeout", Ending.EVALUATOR, False)
    assert (result.reward, [trace.reward for trace in result.trajectory.traces]) == (None, [None])
    wait_until(lambda: not [name for name in containers(stack) if "hanging" in name], PATIENCE_S)
    assert commands_with("4321.7") == []


def test_what_a_killed_worker_leaves_the_next_one_removes(stack: LocalStack) -> None:
    task = shell_task(
        "killed", ask() + "sleep 1000", runtime={"backend": "docker", "image": IMAGE}, timeout_seconds=600
    )
    stack.client.submit(Task.parse(task))
    deadline = time.monotonic() + PATIENCE_S
    while not (before := [name for name in containers(stack) if "killed" in name]):
        assert time.monotonic() < deadline
        time.sleep(0.1)
    stack.workers["node0"].signal(signal.SIGKILL)
    stack.workers["node0"].wait(PATIENCE_S)
    assert set(before) <= set(containers(stack))
    stack.start_worker("node0")
    while set(before) & set(containers(stack)):
        assert time.monotonic() < deadline + PATIENCE_S, Path(stack.workers["node0"].log).read_text()[-3000:]
        time.sleep(0.1)
    stack.client.cancel("killed")
    stack.client.wait("killed", PATIENCE_S)
