"""The last resort: finds a sandbox's processes by their environment when its warden was killed.

A warden that lives proves by itself that nothing is left. A program under the same user can kill it, though; what it
kept then belongs to nobody, and only the marker that every command is started with tells whose it was.
"""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

KILL_S = 10.0


def kill(marker: tuple[bytes, ...]) -> bool:
    """Kills every process whose environment holds all of `marker`, until two scans in a row find none (blocks).

    False when some are still there after `KILL_S`.
    """
    deadline = time.monotonic() + KILL_S
    empty_scans = 0
    while empty_scans < 2:
        found = _marked(marker)
        empty_scans = 0 if found else empty_scans + 1
        for process in found:
            _kill(*process)
        if found and time.monotonic() > deadline:
            return False
        time.sleep(0.02)
    return True


def _marked(marker: tuple[bytes, ...]) -> list[tuple[int, str]]:
    found = []
    for folder in Path("/proc").iterdir():
        if not folder.name.isdecimal() or int(folder.name) == os.getpid():
            continue
        try:
            environment = (folder / "environ").read_bytes()
            started = start_time(folder)
        except OSError:
            # Gone meanwhile, or another user's.
            continue
        if all(part in environment for part in marker):
            found.append((int(folder.name), started))
    return found


def start_time(folder: Path) -> str:
    """Field 22 of /proc/PID/stat (proc(5)): tells a process from a later one with its number."""
    return (folder / "stat").read_text().rpartition(")")[2].split()[19]


def _kill(pid: int, started: str) -> None:
    try:
        handle = os.pidfd_open(pid)
    except OSError:
        return
    try:
        if start_time(Path(f"/proc/{pid}")) == started:
            signal.pidfd_send_signal(handle, signal.SIGKILL)
    except OSError:
        # It ended between the scan and the signal; the next scan tells.
        return
    finally:
        os.close(handle)
