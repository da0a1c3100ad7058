"""Signals that end a command which has programs of its own to stop.

They arrive as an exception, so that everything opened closes itself. Not while a program is being started, though: one
that was started and not yet noted could not be stopped, and an exception raised in a fork's own callbacks is lost.
"""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager

from polarq.cli.outcome import Signalled

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Interrupts:
    """Raises `Signalled` for a signal: at once, or at the end of the outermost `held` block."""

    def __init__(self) -> None:
        self._holds = 0
        self._pending: int | None = None

    @contextmanager
    def caught(self) -> Iterator[None]:
        """While this block runs, signals are ours."""
        before = {number: signal.signal(number, self._arrived) for number in SIGNALS}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    @contextmanager
    def held(self) -> Iterator[None]:
        """What the block does is not torn apart. Keep it short."""
        self._holds += 1
        try:
            yield
        finally:
            self._holds -= 1
        if self._pending is not None and not self._holds:
            number, self._pending = self._pending, None
            raise Signalled(number)

    def _arrived(self, number: int, _frame: object) -> None:
        if self._holds:
            self._pending = number
        else:
            raise Signalled(number)
