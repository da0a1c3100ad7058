"""Isolated local sandboxes of real workers: one that is killed while it copies a snapshot, and a disk without room."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from polarq.contracts import RolloutState
from polarq.testing.stack import LocalStack
from tests.durable.gates import PATIENCE_S
from tests.needs import not_here
from tests.runtimes.local_here import needs_bubblewrap
from tests.worker.conftest import shell_task, wait_until, write_scenario

NODE = {"runtimes": {"local": {"isolation": "bubblewrap"}}}
SECTIONS = {"gateway": {"lease_s": 3, "heartbeat_interval_seconds": 1}}


def stack_of(home: Path) -> LocalStack:
    return LocalStack(home, scenario=str(write_scenario(home)), nodes={"node0": NODE}, sections=SECTIONS)


def left(stack: LocalStack) -> list[str]:
    """All that a node keeps on disk of sandboxes and recipes."""
    state = stack.home / "state/node0"
    folders = ("rollouts", "runtimes/recipes", "runtimes/local/snapshots", "runtimes/local/sandboxes")
    return [str(path) for name in folders if (state / name).is_dir() for path in (state / name).iterdir()]


def test_a_worker_that_is_killed_while_it_copies_a_snapshot_leaves_none(tmp_path: Path) -> None:
    needs_bubblewrap()
    with stack_of(tmp_path) as stack:
        snapshots = tmp_path / "state/node0/runtimes/local/snapshots"
        many = "for i in $(seq 200); do mkdir $i; for j in $(seq 100); do echo x > $i/$j; done; done"
        prepare = [{"type": "exec", "command": many}]
        stack.client.submit(shell_task("killed", "true", runtime={"backend": "local", "prepare": prepare}))
        wait_until(lambda: snapshots.is_dir() and any(snapshots.iterdir()), PATIENCE_S)
        stack.workers["node0"].signal(signal.SIGKILL)
        stack.workers["node0"].wait(PATIENCE_S)
        assert [path.name[:8] for path in snapshots.iterdir()] == [".making-"], "or this test shows nothing"
        stack.client.cancel("killed")
        stack.start_worker("node0")
        (result,) = stack.client.wait("killed", PATIENCE_S).results
        assert (result.outcome.state, result.reward) == (RolloutState.CANCELLED, None)
        wait_until(lambda: not left(stack), PATIENCE_S)


@pytest.fixture
def full(tmp_path: Path) -> Iterator[Path]:
    """A home whose node has little room for what it keeps."""
    if os.geteuid() != 0:
        not_here("this is not root, who alone mounts a small file system")
    small = tmp_path / "state/node0/runtimes"
    small.mkdir(parents=True)
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=16m", "tmpfs", str(small)], check=True)
    try:
        yield tmp_path
    finally:
        subprocess.run(["umount", "--lazy", str(small)], check=True)


def test_without_room_for_a_snapshot_rollouts_are_prepared_each_and_it_is_said_once(full: Path) -> None:
    needs_bubblewrap()
    with stack_of(full) as stack:
        prepare = [{"type": "exec", "command": "head -c 30000000 /dev/urandom > data"}]
        for name in ("one", "two"):
            stack.client.submit(shell_task(name, "[ -s data ]", runtime={"backend": "local", "prepare": prepare}))
            (result,) = stack.client.wait(name, PATIENCE_S).results
            assert result.outcome.state is RolloutState.COMPLETED, result.outcome
            assert result.sandbox is not None
            assert result.sandbox.origin == "cold"
        log = Path(stack.workers["node0"].log).read_text()
        assert log.count("is prepared for each rollout for the next") == 1, log[-3000:]
        wait_until(lambda: not left(stack), PATIENCE_S)
