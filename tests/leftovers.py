"""What is still running of what a program started."""

from __future__ import annotations

import os
import select
from pathlib import Path


def running(folder: Path) -> dict[int, str]:
    """Process id and command line of everything that has this folder in its environment, command line or as its own."""
    found = {}
    for process in Path("/proc").glob("[0-9]*"):
        try:
            command = (process / "cmdline").read_bytes()
            words = (process / "environ").read_bytes() + command + os.fsencode((process / "cwd").readlink())
        except OSError:  # gone meanwhile
            continue
        if os.fsencode(folder) in words and int(process.name) != os.getpid():
            found[int(process.name)] = command.replace(b"\0", b" ").decode()
    return found


def wait_for_end(pid: int, timeout_s: float) -> None:
    """Of any process, ours or not."""
    try:
        process = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    ended, _, _ = select.select([process], [], [], timeout_s)
    os.close(process)
    assert ended, f"{pid} goes on"
