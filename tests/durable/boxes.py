"""Runtimes whose sandboxes outlive their worker, as containers do: each has a process that no worker keeps."""

from __future__ import annotations

import os
import signal
import subprocess
from contextlib import suppress
from pathlib import Path
from typing import ClassVar

from polarq.contracts.sandbox import Reach, SandboxRecord
from polarq_worker.runtimes.local import LocalRuntime


class Box(LocalRuntime):
    """A local sandbox beside which a `sleep` runs on; `env.BOXES` of the task names the folder where its number is."""

    reach: ClassVar[Reach] = Reach.NODE

    @property
    def handle(self) -> str:
        return f"{self.spec.env['BOXES']}/{self.runtime_id}"

    async def start(self, *, snapshot: str | None = None, online: bool = True) -> None:
        await super().start(snapshot=snapshot, online=online)
        begin(Path(self.handle))

    async def stop(self) -> None:
        end(Path(self.handle))
        await super().stop()

    @classmethod
    async def stop_orphan(cls, record: SandboxRecord) -> None:
        end(Path(record.handle))


class RemoteBox(Box):
    """One that any worker can stop."""

    reach: ClassVar[Reach] = Reach.ANYWHERE


def begin(handle: Path) -> None:
    process = subprocess.Popen(["/bin/sleep", "86400"], env={}, start_new_session=True, close_fds=True)
    handle.write_text(str(process.pid))


def end(handle: Path) -> None:
    """Harmless to repeat."""
    with suppress(FileNotFoundError, ProcessLookupError):
        os.kill(int(handle.read_text()), signal.SIGKILL)
    handle.unlink(missing_ok=True)


def alive(handle: Path) -> bool:
    try:
        state = Path(f"/proc/{handle.read_text()}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False
    return state != "Z"
