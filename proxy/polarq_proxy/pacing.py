"""How often the proxy looks at each of many streams.

An event that is read, parsed and written by itself costs this one process about a tenth of a millisecond, engine's and
harness's sides included, so that a few hundred streams of a hundred tokens a second each would take more than there is.
Some events that are read together cost little more than one. So each stream rests for a while after it was
looked at, the longer the more streams there are: what comes meanwhile is collected and handled at once. Few streams
never rest; a stream's first token and its end wait for nobody.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

REST_PER_STREAM_S = 0.0006
"""About six times what one look costs: so looks leave most of the time to calls that begin and end."""
LONGEST_REST_S = 0.05
"""More would be seen by who reads along."""
TICK_S = 0.002
"""One timer wakes all whose rest is over. A rest that is shorter is none."""


class Resting(Protocol):
    rests_until: float
    """Of `time.monotonic`."""

    def wake(self) -> None: ...


class Pace:
    """One for all streams of a process."""

    def __init__(self) -> None:
        self._streams = 0
        self._resting: list[Resting] = []
        self._timer: asyncio.TimerHandle | None = None

    @contextmanager
    def one_more(self) -> Iterator[None]:
        """A stream is under way."""
        self._streams += 1
        try:
            yield
        finally:
            self._streams -= 1

    @property
    def rest_s(self) -> float:
        rest_s = min(self._streams * REST_PER_STREAM_S, LONGEST_REST_S)
        return rest_s if rest_s >= TICK_S else 0.0

    def wake_later(self, stream: Resting) -> bool:
        """Wakes it when its rest is over. False: it is over now."""
        if stream.rests_until <= time.monotonic():
            return False
        self._resting.append(stream)
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(TICK_S, self._tick)
        return True

    def _tick(self) -> None:
        now = time.monotonic()
        rested = [stream for stream in self._resting if stream.rests_until <= now]
        self._resting = [stream for stream in self._resting if stream.rests_until > now]
        self._timer = asyncio.get_running_loop().call_later(TICK_S, self._tick) if self._resting else None
        for stream in rested:
            stream.wake()
