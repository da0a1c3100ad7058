"""A node whose disk is full: work folder, logs and the spool of finished results lie on it. What ended is not lost."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from polarq.contracts import Boundary, RolloutState
from polarq.testing.redis import EmbeddedRedis
from polarq.testing.stack import LocalStack
from tests.durable.gates import PATIENCE_S, Gates, ids, wait_for_log
from tests.needs import not_here
from tests.worker.conftest import wait_until, write_scenario

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

S = RolloutState
DISK = "24m"
NODES = {"node0": {"max_run_workers": 4, "min_free_disk_mb": 0}}
REPOSITORY = Path(__file__).parents[2]
LARGE: dict[str, Any] = {"evaluator": {"strategy": "tests.durable.plugins:Large", "config": {"size": 2_000_000}}}
"""A result that does not fit into what a sandbox leaves behind when it is removed."""


@pytest.fixture
def server() -> Iterator[EmbeddedRedis]:
    with EmbeddedRedis(appendonly=True) as made:
        yield made


class Disk:
    """The state folder of one worker, on a small file system that nobody else sees and that ends with the worker."""

    def __init__(self, folder: Path) -> None:
        if os.geteuid() != 0 or shutil.which("unshare") is None:
            not_here("a small disk of its own needs root and unshare")
        self.folder = folder
        folder.mkdir()
        self.pid = 0

    @property
    def before(self) -> list[str]:
        mount = f'mount -t tmpfs -o size={DISK},mode=700 disk {self.folder} && exec "$@"'
        return ["unshare", "--mount", "--propagation", "private", "sh", "-c", mount, "sh"]

    @property
    def inside(self) -> Path:
        """The folder as the worker sees it."""
        return Path(f"/proc/{self.pid}/root{self.folder}")

    @property
    def free_bytes(self) -> int:
        found = os.statvfs(self.inside)
        return found.f_bavail * found.f_frsize

    def fill(self) -> None:
        """Until not one byte more goes in."""
        with (self.inside / "filler").open("ab", buffering=0) as file:
            for size in (1 << 20, 1 << 12, 1):
                try:
                    while True:
                        file.write(b"\0" * size)
                except OSError:
                    continue
        assert self.free_bytes == 0

    def empty(self) -> None:
        (self.inside / "filler").unlink()


@pytest.fixture
def disk(tmp_path: Path) -> Disk:
    return Disk(tmp_path / "small")


@pytest.fixture
def gates(tmp_path: Path) -> Gates:
    return Gates(tmp_path / "gates")


@pytest.fixture
def stack(request: pytest.FixtureRequest, tmp_path: Path, server: EmbeddedRedis, disk: Disk) -> Iterator[LocalStack]:
    with LocalStack(
        tmp_path,
        scenario=str(write_scenario(tmp_path)),
        redis=server,
        nodes=getattr(request, "param", NODES),
        sections={
            "gateway": {"lease_s": 30.0, "reap_interval_s": 0.5},
            "security": {"allowed_modules": ["tests.durable.plugins"]},
        },
        env={
            "POLARQ_STATE_DIR": str(disk.folder),
            "PYTHONPATH": os.pathsep.join([str(REPOSITORY), os.environ.get("PYTHONPATH", "")]),
        },
        before={"node0": disk.before},
    ) as made:
        disk.pid = made.workers["node0"].pid
        yield made


def log_of(stack: LocalStack) -> str:
    return stack.workers["node0"].log.read_text(errors="replace")


def loud(gates: Gates, task_id: str, samples: int = 1, **more: Any) -> dict[str, Any]:
    """Prints a lot once its gate is open, which the node would keep as a log."""
    task = gates.task(task_id, samples, **more)
    task["agent"]["custom_shell"]["command"] += "\nhead -c 3000000 /dev/zero | tr '\\0' x\n"
    return task


def test_what_ends_while_the_disk_is_full_is_committed_and_the_operator_is_told(
    stack: LocalStack, disk: Disk, gates: Gates
) -> None:
    stack.client.submit(loud(gates, "full", 3, **LARGE))
    gates.wait_started(*ids("full", 3))
    disk.fill()
    gates.open(*ids("full", 3))
    result = stack.client.wait("full", PATIENCE_S)
    assert [(r.outcome.state, r.attempt) for r in result.results] == [(S.COMPLETED, 1)] * 3, result.results[0].outcome
    assert [r.trajectory and r.trajectory.fidelity.calls for r in result.results] == [1] * 3
    assert "its result cannot be kept on disk until it is committed (No space left on device)" in log_of(stack)
    assert f"Make room in {disk.folder}/node0/spool" in log_of(stack)

    # What begins on it cannot: it says so, as the fault of the node's disk, and what to do about it.
    disk.fill()
    stack.client.submit(gates.task("begins"))
    gates.open("begins.0")
    outcome = stack.client.wait("begins", PATIENCE_S).results[0].outcome
    assert (outcome.state, outcome.boundary) == (S.FAILED, Boundary.RUNTIME)
    assert "No space left on device; free some space" in outcome.message

    disk.empty()
    stack.client.submit(gates.task("again"))
    gates.open("again.0")
    assert stack.client.wait("again", PATIENCE_S).counts.completed == 1
    assert stack.workers["node0"].exit_code is None
    wait_until(lambda: not list(disk.inside.glob("node0/spool/*")), PATIENCE_S)
    wait_until(lambda: not list(disk.inside.glob("node0/rollouts/*")), PATIENCE_S)


@pytest.mark.parametrize("stack", [{"node0": {"max_run_workers": 4, "min_free_disk_mb": 4}}], indirect=True)
def test_a_node_without_room_takes_nothing_new_until_there_is_some(stack: LocalStack, disk: Disk, gates: Gates) -> None:
    stack.client.submit(gates.task("before"))
    gates.wait_started("before.0")
    disk.fill()
    wait_until(lambda: stack.client.nodes()[0].health.disk is False, PATIENCE_S)
    assert "min_free_disk_mb is 4: make room" in stack.client.nodes()[0].health.message
    stack.client.submit(gates.task("waits"))
    wait_for_log(stack, "node node0 takes no rollouts")
    gates.open("before.0", "waits.0")
    assert stack.client.wait("before", PATIENCE_S).counts.completed == 1
    assert stack.client.record("waits").counts.queued == 1

    disk.empty()
    result = stack.client.wait("waits", PATIENCE_S).results[0]
    assert (result.outcome.state, result.attempt) == (S.COMPLETED, 1)
    assert "node node0 takes rollouts again" in log_of(stack)


def test_with_the_disk_full_and_redis_away_a_result_waits_in_memory_and_says_what_a_crash_would_cost(
    stack: LocalStack, server: EmbeddedRedis, disk: Disk, gates: Gates
) -> None:
    stack.client.submit(gates.task("both", 2, **LARGE))
    gates.wait_started(*ids("both", 2))
    disk.fill()
    # The last stages need the ledger; with it away the rollouts wait where they are.
    server.kill()
    gates.open(*ids("both", 2))
    wait_for_log(stack, "waiting for the ledger", times=2)
    server.start()
    result = stack.client.wait("both", PATIENCE_S)
    assert [(r.outcome.state, r.attempt) for r in result.results] == [(S.COMPLETED, 1)] * 2
    assert "(No space left on device); a crash of this worker now would lose this attempt" in log_of(stack)
    assert stack.workers["node0"].exit_code is None


def test_a_worker_that_dies_with_a_result_it_could_keep_nowhere_costs_that_attempt_and_no_rollout(
    stack: LocalStack, server: EmbeddedRedis, disk: Disk, gates: Gates
) -> None:
    stack.client.submit(gates.task("dies", **LARGE))
    gates.wait_started("dies.0")
    disk.fill()
    server.kill()
    gates.open("dies.0")
    wait_for_log(stack, "waiting for the ledger")
    stack.workers["node0"].kill()
    server.start()
    disk.pid = stack.start_worker("node0").pid
    result = stack.client.wait("dies", PATIENCE_S)
    assert [(r.outcome.state, r.attempt) for r in result.results] == [(S.COMPLETED, 2)]
    assert gates.starts() == {"dies.0": 2}
