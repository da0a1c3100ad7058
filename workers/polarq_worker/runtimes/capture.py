"""Takes in what a command prints: all of it into a capped log file, its head and tail into memory."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path
from typing import BinaryIO

LOG_CAP_BYTES = 32 * 1024 * 1024
"""Most that is written of one stream into a log file; the end of what was printed follows behind a note."""
READ_BYTES = 64 * 1024


class HeadTail:
    """The first and last bytes of a stream, at most `limit` together."""

    def __init__(self, limit: int) -> None:
        self._half = max(limit // 2, 1)
        self._head = bytearray()
        self._tail = bytearray()
        self.total = 0

    def add(self, data: bytes) -> None:
        self.total += len(data)
        room = self._half - len(self._head)
        if room > 0:
            self._head += data[:room]
            data = data[room:]
        self._tail += data
        if len(self._tail) > 2 * self._half:
            del self._tail[: len(self._tail) - self._half]

    @property
    def truncated(self) -> bool:
        return self.total > 2 * self._half

    @property
    def tail(self) -> bytes:
        return bytes(self._tail[-self._half :])

    def value(self) -> bytes:
        if not self.truncated:
            return bytes(self._head + self._tail)
        left_out = self.total - 2 * self._half
        return bytes(self._head) + f"\n[... {left_out} bytes left out ...]\n".encode() + self.tail


class Capture:
    """Reads one pipe on the event loop until its end, which may come long after the command's.

    A process that the command left behind may go on writing: it must be read for ever, or it would block on a full
    pipe, or die of a broken one (a service that an agent left to be graded).
    """

    def __init__(self, fd: int, limit: int, log: Path | None) -> None:
        self._loop = asyncio.get_running_loop()
        self._fd = fd
        self._kept = HeadTail(limit)
        self._log_path = log
        self._log: BinaryIO | None = None
        self._logged = 0
        self._frozen = False
        self.log_error = ""
        self.finished = asyncio.Event()
        os.set_blocking(fd, False)
        if log is not None:
            self._open_log(log)
        self._loop.add_reader(fd, self._ready)

    @property
    def total(self) -> int:
        return self._kept.total

    @property
    def truncated(self) -> bool:
        return self._kept.truncated

    def value(self) -> bytes:
        """What is kept in memory. From here on nothing more is added to it."""
        left_out = self._kept.total - self._logged
        if self._log_path is not None and left_out > 0 and not self._frozen:
            tail = self._kept.tail[-left_out:]
            note = f"\n[... log capped at {LOG_CAP_BYTES} bytes; the last {len(tail)} of {self.total} follow ...]\n"
            self._put(note.encode() + tail)
        self._frozen = True
        if self.finished.is_set():
            self._close_log()
        return self._kept.value()

    def close(self) -> None:
        """Stops reading, if the end was not reached before."""
        if not self.finished.is_set():
            self._finish()
        self._close_log()

    def _ready(self) -> None:
        try:
            data = os.read(self._fd, READ_BYTES)
        except BlockingIOError:
            return
        if not data:
            self._finish()
            return
        if not self._frozen:
            self._kept.add(data)
        self._write(data)

    def _finish(self) -> None:
        self._loop.remove_reader(self._fd)
        os.close(self._fd)
        self.finished.set()
        if self._frozen:
            self._close_log()

    def _write(self, data: bytes) -> None:
        if self._log is None:
            return
        data = data[: max(LOG_CAP_BYTES - self._logged, 0)]
        self._logged += len(data)
        self._put(data)

    def _open_log(self, path: Path) -> None:
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._log = path.open("wb", buffering=0)
        except OSError as exc:
            self._lose_log(exc)

    def _put(self, data: bytes) -> None:
        try:
            while self._log is not None and data:
                data = data[self._log.write(data) :]
        except OSError as exc:
            self._lose_log(exc)

    def _close_log(self) -> None:
        try:
            if self._log is not None:
                self._log.close()
        except OSError as exc:
            self._lose_log(exc)
        self._log = None

    def _lose_log(self, exc: OSError) -> None:
        # The command must not fail because its log cannot be kept; whoever reads the result is told.
        self.log_error = f"the log {self._log_path} is incomplete: {exc.strerror}"
        self._log = None
