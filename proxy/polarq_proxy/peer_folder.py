"""The folder of the sockets by which the processes of a proxy reach each other. One that was left behind is cleared."""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
from contextlib import suppress
from pathlib import Path

PREFIX = "polarq-proxy-"


class PeerFolder:
    """A folder of its own until `close`. It is in use as long as any process holds `held`, whichever pids these have:
    a lock ends with its last holder, also where containers share the folder and not the pids."""

    def __init__(self) -> None:
        clear_abandoned()
        self.path, self.held = _new()

    def close(self) -> None:
        shutil.rmtree(self.path, ignore_errors=True)
        os.close(self.held)


def clear_abandoned() -> None:
    """Removes the folders whose proxies were killed."""
    for path in Path(tempfile.gettempdir()).glob(f"{PREFIX}*"):
        with suppress(OSError):  # another user's, or somebody else is clearing it
            held = _opened(path)
            try:
                fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(path)
            finally:
                os.close(held)


def _new() -> tuple[Path, int]:
    while True:
        path = Path(tempfile.mkdtemp(prefix=PREFIX))
        try:
            held = _opened(path)
        except FileNotFoundError:
            continue  # another start took it for abandoned before it was held
        fcntl.flock(held, fcntl.LOCK_EX)
        if path.is_dir():
            return path, held
        os.close(held)


def _opened(path: Path) -> int:
    return os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
