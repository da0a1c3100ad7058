"""A daemon that dies, comes back, or whose disk is full: one of the test's own, on a small file system."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from polarq.contracts.rollout import ExecKind
from polarq.errors import BackendAway, DiskFull, RuntimeFault
from polarq_worker.runtimes.docker.runtime import DockerRuntime

from .docker_rig import LONG_S, Sandboxes, host_of, small_tree
from .own_daemon import PROGRAMS, SMALL, Daemon, disk

pytestmark = pytest.mark.docker

__all__ = ["disk"]


@pytest.fixture
async def own(disk: Path, tmp_path: Path) -> AsyncIterator[tuple[Daemon, Sandboxes]]:
    daemon = Daemon(disk)
    sandboxes = Sandboxes(tmp_path)
    sandboxes.host = host_of(tmp_path, url=daemon.url)
    try:
        await daemon.start()
        await sandboxes.import_image(SMALL, small_tree(*PROGRAMS))
        yield daemon, sandboxes
        await sandboxes.stop()
    finally:
        daemon.stop()


async def test_a_full_disk_is_said_and_harms_no_other_sandbox(own: tuple[Daemon, Sandboxes], tmp_path: Path) -> None:
    _, sandboxes = own
    sandbox = await sandboxes.started("full", image=SMALL, network="none")
    full = await sandbox.exec("dd if=/dev/zero of=big bs=1M", timeout_s=LONG_S)
    assert not full.ok
    assert "No space left" in full.stderr_text
    with pytest.raises(DiskFull, match="no space left"):
        await sandbox.put_bytes(b"x" * 3_000_000, "more")
    script = await sandbox.exec("x" * 3_000_000, timeout_s=LONG_S)
    assert script.kind is ExecKind.COULD_NOT_START
    assert "no space left" in script.message
    assert not (await sandbox.exec(["cat", "more"], timeout_s=LONG_S)).ok
    with pytest.raises(DiskFull):
        await sandbox.snapshot("recipe")
    await sandbox.stop()
    other = await sandboxes.started("other", image=SMALL, network="none")
    assert (await other.exec("echo on", timeout_s=LONG_S)).stdout == b"on\n"


async def test_a_daemon_that_dies_loses_its_sandboxes_and_nothing_is_left_when_it_is_back(
    own: tuple[Daemon, Sandboxes],
) -> None:
    daemon, sandboxes = own
    sandbox = await sandboxes.started("lost", image=SMALL, network="none")
    kept = await sandbox.snapshot("recipe")
    running = asyncio.ensure_future(sandbox.exec("echo x > up; echo out; sleep 1000", timeout_s=LONG_S))
    assert (await sandbox.exec("until [ -s up ]; do sleep 0.01; done", timeout_s=LONG_S)).ok
    daemon.kill()
    result = await running
    assert (result.kind, result.stdout) == (ExecKind.SANDBOX_LOST, b"out\n"), result
    assert "daemon" in result.message
    with pytest.raises(RuntimeFault, match="lost"):
        await sandbox.put_bytes(b"x", "file")
    with pytest.raises(BackendAway):
        await sandbox.stop()
    assert not sandbox.root.exists()
    await daemon.start()
    # It is not alive again, whatever the daemon did with it: what ran in it is not as it was.
    assert (await sandbox.exec("true", timeout_s=LONG_S)).kind is ExecKind.SANDBOX_LOST
    assert await DockerRuntime.sweep(sandboxes.host, ()) == ["lost"]
    await sandbox.stop()
    again = sandboxes.new("again", image=SMALL, network="none")
    await again.start(snapshot=kept.reference)
    assert (await again.exec(["cat", "/polar/session/up"], timeout_s=LONG_S)).exit_code == 1
    assert await DockerRuntime.sweep(sandboxes.host, {"again"}) == []
