"""Runs a program on a pseudo-terminal and keeps what it would have drawn."""

from __future__ import annotations

import fcntl
import os
import pty
import select
import struct
import subprocess
import termios
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Drawn:
    """How the program ended, and the bytes that reached the terminal."""

    code: int
    data: bytes

    @property
    def text(self) -> str:
        return self.data.decode("utf-8", "replace")


class Terminal:
    """A program on a terminal of a given width."""

    def __init__(self, command: Sequence[str], *, columns: int = 80, env: Mapping[str, str] | None = None) -> None:
        self._ours, theirs = pty.openpty()
        fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 50, columns, 0, 0))
        full = {**os.environ, "TERM": "xterm-256color", **(env or {})}
        full.pop("COLUMNS", None)
        self.process = subprocess.Popen(
            list(command), stdin=theirs, stdout=theirs, stderr=theirs, env=full, start_new_session=True, close_fds=True
        )
        os.close(theirs)
        self.data = b""

    def read_until(self, words: bytes, timeout_s: float = 60.0) -> None:
        """Reads until the terminal has shown `words`."""
        deadline = time.monotonic() + timeout_s
        while words not in self.data:
            if not self._read(deadline):
                raise AssertionError(f"{words!r} was never shown: {self.data!r}")

    def end(self, timeout_s: float = 60.0) -> Drawn:
        """Reads to the end."""
        deadline = time.monotonic() + timeout_s
        while self._read(deadline):
            pass
        os.close(self._ours)
        return Drawn(self.process.wait(max(0.1, deadline - time.monotonic())), self.data)

    def _read(self, deadline: float) -> bool:
        ready, _, _ = select.select([self._ours], [], [], max(0.0, deadline - time.monotonic()))
        if not ready:
            self.process.kill()
            raise AssertionError(f"the program did not go on: {self.data!r}")
        try:
            chunk = os.read(self._ours, 65536)
        except OSError:  # the other side is closed
            return False
        self.data += chunk
        return bool(chunk)
