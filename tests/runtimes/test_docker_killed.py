"""Workers that are killed while they prepare, commit or pull: the next one leaves nothing of it. All of it is real."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from polarq.contracts.rollout import RolloutState
from polarq.ledger.sandboxes import sandboxes_of
from polarq.testing.stack import LocalStack
from polarq_worker.runtimes.base import Host
from polarq_worker.runtimes.docker import config
from tests.worker.conftest import commands_with, shell_task, wait_until, write_scenario

from .docker_registry import NAME, Registry
from .docker_rig import IMAGE, daemon_is_here, small_tree
from .test_docker_rollouts import PATIENCE_S, docker

pytestmark = pytest.mark.docker


class Node:
    """`node0` of a stack, and all that it may leave."""

    def __init__(self, stack: LocalStack) -> None:
        self.stack = stack
        self.state = stack.home / "state/node0"
        self.ours = f"label={config.PLACE}={config.place(Host(folder=self.state / 'runtimes'))}"

    def submit(self, name: str, command: str, **runtime: Any) -> None:
        runtime = {"backend": "docker", "image": IMAGE, **runtime}
        self.stack.client.submit(shell_task(name, command, runtime=runtime, timeout_seconds=600))

    def kill(self) -> None:
        worker = self.stack.workers["node0"]
        worker.signal(signal.SIGKILL)
        worker.wait(PATIENCE_S)

    def containers(self, *more: str) -> list[str]:
        return docker("ps", "-a", "--filter", self.ours, *more, "--format", "{{.Names}}").split()

    def images(self) -> list[str]:
        return docker("images", "-a", "--filter", self.ours, "-q").split()

    def left(self) -> dict[str, list[str]]:
        """What there is, by kind."""
        ledger = self.stack.client.ledger
        records = ledger.do(sandboxes_of(ledger.calls.keys, ["node0"]))
        folders = [self.state / "rollouts", self.state / "runtimes/recipes"]
        found = {
            "containers": self.containers(),
            "images": self.images(),
            "records": [record.runtime_id for record in records],
            "files": [str(path) for folder in folders if folder.is_dir() for path in folder.iterdir()],
        }
        return {kind: what for kind, what in found.items() if what}

    def begins_anew(self, name: str) -> None:
        """Another worker comes, when the rollout is not wanted any more."""
        self.stack.client.cancel(name)
        self.stack.start_worker("node0")
        (result,) = self.stack.client.wait(name, PATIENCE_S).results
        assert result.outcome.state is RolloutState.CANCELLED
        assert result.reward is None


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalStack]:
    daemon_is_here()
    home = tmp_path_factory.mktemp("killed")
    sections = {"gateway": {"lease_s": 3, "heartbeat_interval_seconds": 1}}
    with LocalStack(home, scenario=str(write_scenario(home)), sections=sections) as made:
        yield made


@pytest.fixture
def node(stack: LocalStack) -> Node:
    return Node(stack)


def becomes(true: Callable[[], object]) -> None:
    wait_until(lambda: bool(true()), PATIENCE_S)


def nothing_is_left(node: Node) -> None:
    try:
        wait_until(lambda: not node.left(), PATIENCE_S)
    except AssertionError:
        raise AssertionError(node.left(), Path(node.stack.workers["node0"].log).read_text()[-3000:]) from None


def test_while_it_prepares(node: Node) -> None:
    node.submit("preparing", "true", prepare=[{"type": "exec", "command": "exec sleep 98765"}])
    becomes(lambda: commands_with("sleep 98765"))
    assert node.left().keys() == {"containers", "records", "files"}
    node.kill()
    node.begins_anew("preparing")
    nothing_is_left(node)


def test_while_a_snapshot_is_committed(node: Node) -> None:
    write = {"type": "exec", "command": "head -c 400000000 /dev/urandom > data"}
    node.submit("committing", "true", prepare=[write])
    becomes(lambda: node.containers("--filter", "status=paused"))
    node.kill()
    assert not node.images(), "or this test shows nothing"
    # The daemon goes on, and its image comes when the next worker has looked already, or before.
    node.begins_anew("committing")
    nothing_is_left(node)


async def test_while_an_image_is_pulled(node: Node) -> None:
    gate = asyncio.Event()
    async with Registry(small_tree("/bin/dash"), gate=gate) as registry:
        await asyncio.to_thread(node.submit, "pulling", "true", image=registry.image())
        while not registry.asked[registry.layer]:  # noqa: ASYNC110  (the daemon tells nobody)
            await asyncio.sleep(0.05)
        await asyncio.to_thread(node.kill)
        await asyncio.to_thread(node.begins_anew, "pulling")
        gate.set()
        await asyncio.to_thread(nothing_is_left, node)
    assert f"{registry.host}/{NAME}" not in docker("images", "--format", "{{.Repository}}").split()
