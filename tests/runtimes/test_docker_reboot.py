"""Rollouts whose daemon starts anew, whose disk is full, whose machine is started anew. Worker and daemon are real."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest

from polarq.contracts.rollout import Boundary, RolloutState
from polarq.testing.stack import LocalStack
from tests.worker.conftest import commands_with, write_scenario

from .docker_rig import Sandboxes, host_of, small_tree
from .own_daemon import PROGRAMS, SMALL, Daemon, disk
from .test_docker_killed import Node, becomes, nothing_is_left
from .test_docker_rollouts import PATIENCE_S

pytestmark = pytest.mark.docker

__all__ = ["disk"]


class OwnNode(Node):
    """Its daemon is the test's: what is there is asked of that."""

    def __init__(self, stack: LocalStack, daemon: Daemon) -> None:
        super().__init__(stack)
        self.daemon = daemon

    def containers(self, *more: str) -> list[str]:
        return self._said("ps", "-a", "--filter", self.ours, *more, "--format", "{{.Names}}")

    def images(self) -> list[str]:
        return self._said("images", "-a", "--filter", self.ours, "-q")

    def _said(self, *words: str) -> list[str]:
        return self.daemon.docker(*words).split()

    @property
    def log(self) -> str:
        return Path(self.stack.workers["node0"].log).read_text()


@pytest.fixture
def node(disk: Path, tmp_path: Path) -> Iterator[OwnNode]:
    daemon = Daemon(disk)
    sandboxes = Sandboxes(tmp_path)
    sandboxes.host = host_of(tmp_path, url=daemon.url)
    settings = {"runtimes": {"docker": {"url": daemon.url}}}
    sections = {"gateway": {"lease_s": 3, "heartbeat_interval_seconds": 1, "reap_interval_s": 1}}
    home = tmp_path / "stack"
    home.mkdir()

    async def begin() -> None:
        await daemon.start()
        await sandboxes.import_image(SMALL, small_tree(*PROGRAMS))

    try:
        asyncio.run(begin())
        with LocalStack(
            home, scenario=str(write_scenario(home)), nodes={"node0": settings}, sections=sections
        ) as stack:
            yield OwnNode(stack, daemon)
    finally:
        daemon.stop()


def test_a_daemon_that_starts_anew_costs_the_rollout_and_no_reward(node: OwnNode) -> None:
    node.submit("running", "exec sleep 97531", image=SMALL)
    becomes(lambda: commands_with("sleep 97531"))
    node.daemon.stop()
    asyncio.run(node.daemon.start())
    (result,) = node.stack.client.wait("running", PATIENCE_S).results
    assert (result.outcome.state, result.outcome.boundary) == (RolloutState.FAILED, Boundary.RUNTIME), result.outcome
    assert result.outcome.reason in {"sandbox_lost", "backend_away"}
    assert (result.reward, result.outcome.trainable) == (None, False)
    nothing_is_left(node)
    node.submit("next", "echo on", image=SMALL)
    (result,) = node.stack.client.wait("next", PATIENCE_S).results
    assert result.outcome.state is RolloutState.COMPLETED, result.outcome


def test_without_room_for_a_snapshot_rollouts_are_prepared_each_and_it_is_said_once(node: OwnNode) -> None:
    # It fits once, and not twice.
    prepare = [{"type": "exec", "command": "dd if=/dev/urandom of=data bs=1M count=85"}]
    for name in ("one", "two"):
        node.submit(name, "[ -s data ]", image=SMALL, prepare=prepare)
        (result,) = node.stack.client.wait(name, PATIENCE_S).results
        assert result.outcome.state is RolloutState.COMPLETED, result.outcome
        assert result.sandbox is not None
        assert result.sandbox.origin == "cold"
    assert node.log.count("is prepared for each rollout for the next") == 1
    assert node.images() == []
    nothing_is_left(node)


def test_a_machine_that_starts_anew_runs_the_rollout_again_and_keeps_nothing_of_the_first(node: OwnNode) -> None:
    node.submit("rebooted", "exec sleep 96420", image=SMALL)
    becomes(lambda: commands_with("sleep 96420"))
    before = node.containers()
    node.kill()
    node.daemon.kill_all()
    assert not commands_with("sleep 96420")
    # Another boot has another id, which says that nothing is known of the one before.
    for path in (node.state / "incarnations").iterdir():
        if path.name != "lock":
            word = path.read_bytes()
            path.write_bytes(b"0" * 36 + word[36:])
    asyncio.run(node.daemon.start())
    assert set(before) <= set(node.containers()), "or this test shows nothing"
    node.stack.start_worker("node0")
    becomes(lambda: commands_with("sleep 96420"))
    assert not set(before) & set(node.containers())
    node.stack.client.cancel("rebooted")
    (result,) = node.stack.client.wait("rebooted", PATIENCE_S).results
    assert (result.outcome.state, result.reward) == (RolloutState.CANCELLED, None)
    assert result.attempt == 2
    nothing_is_left(node)
