"""What a command printed on one stream: its head and tail in memory, all of it in a capped log file."""

from __future__ import annotations

from pathlib import Path
from typing import BinaryIO

from polarq_worker.runtimes.capture import LOG_CAP_BYTES, HeadTail


class Printed:
    """Like `capture.Capture`, for bytes that are brought to it."""

    def __init__(self, limit: int, log: Path | None) -> None:
        self._kept = HeadTail(limit)
        self._path = log
        self._log: BinaryIO | None = None
        self._logged = 0
        self._frozen = False
        self.log_error = ""
        if log is not None:
            try:
                log.parent.mkdir(parents=True, exist_ok=True)
                self._log = log.open("wb", buffering=0)
            except OSError as exc:
                self._lose_log(exc)

    @property
    def total(self) -> int:
        return self._kept.total

    @property
    def truncated(self) -> bool:
        return self._kept.truncated

    def add(self, data: bytes) -> None:
        if not data:
            return
        if not self._frozen:
            self._kept.add(data)
        room = max(LOG_CAP_BYTES - self._logged, 0)
        self._logged += len(data[:room])
        self._write(data[:room])

    def value(self) -> bytes:
        """What is kept in memory. From here on nothing more is added to it; the log may still grow."""
        left_out = self._kept.total - self._logged
        if left_out > 0 and not self._frozen:
            tail = self._kept.tail[-left_out:]
            note = f"\n[... log capped at {LOG_CAP_BYTES} bytes; the last {len(tail)} of {self.total} follow ...]\n"
            self._write(note.encode() + tail)
        self._frozen = True
        return self._kept.value()

    def close(self) -> None:
        if self._log is not None:
            self._log.close()
        self._log = None

    def _write(self, data: bytes) -> None:
        try:
            while self._log is not None and data:
                data = data[self._log.write(data) :]
        except OSError as exc:
            self._lose_log(exc)

    def _lose_log(self, exc: OSError) -> None:
        # The command must not fail because its log cannot be kept; whoever reads the result is told.
        self.log_error = f"the log {self._path} is incomplete: {exc.strerror}"
        self._log = None
