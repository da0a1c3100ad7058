"""Watches the engine's loop from outside it.

Leases are renewed on the loop, so a loop that is blocked (a plug-in that computes or sleeps in its coroutine) loses its
leases by itself: what does nothing must not look alive. This thread only says so, with the stack of what blocks, while
it lasts; the loop says how long it was when it turns again.
"""

from __future__ import annotations

import asyncio
import logging
import sys
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable

log = logging.getLogger("polarq.worker.lease_watch")

_BEAT_S = 0.1
_KEPT_BEATS = 600
"""About a minute of beats: what `lag_s` looks back on."""
_FRAMES = 12


class LoopWatch:
    """One loop's heartbeat. `start` and `stop` are called on the loop.

    A loop counts as blocked when it did not turn for `bound_s`. `on_return` is called on the loop when it turns again,
    with the seconds it stood still and whether the whole process did (stopped, suspended, no processor time).
    """

    def __init__(self, bound_s: float, on_return: Callable[[float, bool], None]) -> None:
        self.bound_s = bound_s
        self.blocked = False
        """Seen by the thread, and not over yet. Read from any thread."""
        self._on_return = on_return
        self._lags: deque[float] = deque(maxlen=_KEPT_BEATS)
        self._ended = threading.Event()
        self._beating: asyncio.Task[None] | None = None

    def start(self) -> None:
        self._loop_thread = threading.get_ident()
        self._turned_at = time.monotonic()
        self._beating = asyncio.create_task(self._beat(), name="loop watch")
        threading.Thread(target=self._watch, name="polarq-loop-watch", daemon=True).start()

    def stop(self) -> None:
        self._ended.set()
        if self._beating is not None:
            self._beating.cancel()

    @property
    def lag_s(self) -> float:
        """How late the loop turns: the 99th percentile of the last minute, in seconds. 0 before the first beat."""
        lags = sorted(self._lags)
        return lags[int(0.99 * (len(lags) - 1))] if lags else 0.0

    async def _beat(self) -> None:
        while True:
            due = time.monotonic() + _BEAT_S
            await asyncio.sleep(_BEAT_S)
            now = time.monotonic()
            stood_s, self._turned_at = now - self._turned_at, now
            self._lags.append(max(0.0, now - due))
            if stood_s > self.bound_s:
                alone, self.blocked = self.blocked, False
                self._returned(stood_s, whole_process=not alone)

    def _returned(self, stood_s: float, *, whole_process: bool) -> None:
        if whole_process:
            what = "the whole process stood still (stopped, suspended, or without processor time)"
        else:
            what = "the engine's loop was blocked"
        log.error("%s for %.1f s; leases that ended meanwhile may be lost", what, stood_s)
        self._on_return(stood_s, whole_process)

    def _watch(self) -> None:
        step_s = self.bound_s / 4
        seen_at = time.monotonic()
        while not self._ended.wait(step_s):
            now = time.monotonic()
            late, seen_at = now - seen_at > 2 * step_s, now
            turned_at = self._turned_at
            # A thread that comes late itself saw the whole process stand still; the loop gets time to turn.
            if late or self.blocked or now - turned_at <= self.bound_s:
                continue
            self.blocked = True
            if self._turned_at != turned_at:
                # It turned just now and may have read the flag before it was set.
                self.blocked = False
                continue
            log.error(
                "the engine's loop has been blocked for %.1f s, and no lease is renewed until it turns again. At:\n%s",
                now - turned_at,
                self._stack(),
            )

    def _stack(self) -> str:
        """Where the loop's thread is now, innermost call last."""
        frame = sys._current_frames().get(self._loop_thread)
        return "".join(traceback.format_stack(frame)[-_FRAMES:]) if frame is not None else "(its thread has ended)\n"
