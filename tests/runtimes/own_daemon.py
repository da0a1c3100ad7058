"""A Docker daemon of the test's own, on a small file system: to be killed, or to run out of room."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from polarq.errors import RuntimeFault
from polarq_worker.runtimes.docker.runtime import DockerRuntime

from ..needs import not_here
from .docker_rig import host_of

SMALL = "polarq-small:test"
"""An image of a few programs; `small_tree(*PROGRAMS)` is what is in it."""
PROGRAMS = tuple(f"/bin/{name}" for name in ("dash", "bash", "sleep", "cat", "rm", "dd"))
DISK = "size=160m"


class Daemon:
    """dockerd without a network, its data on a file system in memory."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.url = f"unix://{folder}/docker.sock"
        self._process: subprocess.Popen[bytes] | None = None

    async def start(self) -> None:
        for left in ("dockerd.pid", "exec/containerd/containerd.pid"):
            (self.folder / left).unlink(missing_ok=True)
        folder = self.folder
        # A network of its own: a daemon without a bridge takes away the one that another daemon has made.
        command = ["unshare", "--net", "dockerd", "--host", self.url, "--data-root", f"{folder}/data"]
        command += ["--exec-root", f"{folder}/exec"]
        command += ["--pidfile", f"{folder}/dockerd.pid", "--bridge=none", "--iptables=false", "--ip-forward=false"]
        with (folder / "log").open("ab") as log:
            self._process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
        while not await self._answers():
            assert self._process.poll() is None, (folder / "log").read_text()[-2000:]
            await asyncio.sleep(0.05)

    async def _answers(self) -> bool:
        try:
            await DockerRuntime.snapshots(host_of(self.folder, url=self.url))
        except RuntimeFault:
            return False
        return True

    def kill(self) -> None:
        assert self._process is not None
        self._process.kill()
        self._process.wait()

    def docker(self, *words: str) -> str:
        """What the command line says of it."""
        command = ["docker", "--host", self.url, *words]
        return subprocess.run(command, check=True, capture_output=True, text=True, timeout=60).stdout.strip()

    def kill_all(self) -> None:
        """As the machine's end does it: no process of it is left, none of its containers' either."""
        self.kill()
        while mine := [pid for pid in _pids() if _is_of(pid, self.folder)]:
            for pid in [one for shim in mine for one in _below(shim)] + mine:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)

    def stop(self) -> None:
        if self._process is not None and self._process.poll() is None:
            self._process.send_signal(signal.SIGTERM)
            self._process.wait(timeout=60)


def _pids() -> list[int]:
    return [int(path.name) for path in Path("/proc").iterdir() if path.name.isdecimal()]


def _is_of(pid: int, folder: Path) -> bool:
    """containerd and its shims name the daemon's folder, which nobody else does."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        return state != "Z" and os.fsencode(folder / "exec") in Path(f"/proc/{pid}/cmdline").read_bytes()
    except (FileNotFoundError, ProcessLookupError):
        return False


def _below(pid: int) -> list[int]:
    try:
        words = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    except (FileNotFoundError, ProcessLookupError):
        return []
    return [one for child in map(int, words) for one in (child, *_below(child))]


@pytest.fixture
def disk() -> Iterator[Path]:
    if shutil.which("dockerd") is None or os.geteuid() != 0:
        not_here("dockerd is not installed, or this is not root")
    # A short path: a socket's has no more than 107 bytes.
    with tempfile.TemporaryDirectory(prefix="pqd") as name:
        data = Path(name, "data")
        data.mkdir()
        subprocess.run(["mount", "-t", "tmpfs", "-o", DISK, "tmpfs", str(data)], check=True)
        try:
            yield Path(name)
        finally:
            mounts = [line.split()[1] for line in Path("/proc/mounts").read_text().splitlines()]
            for mount in sorted((mount for mount in mounts if mount.startswith(f"{name}/")), reverse=True):
                subprocess.run(["umount", "--lazy", mount], check=True)
