"""How long a lease certainly holds, by this worker's own clock, and what is not done when it may have ended.

The ledger judges leases by its own time. A worker that cannot reach it knows only this: a lease holds at least until
`lease_s` after the moment at which the last answered request for it was *sent*, because the server counted from a
later moment. The rule while that time is past, until the ledger says again that the token is ours:

- No stage begins. Entering one asks the ledger (`advance`, by token); where time passes between that answer and the
  start of something a second attempt could start too (a sandbox is prepared, a harness runs), `Lease.certainty` is
  awaited first. So nothing outside the sandbox (an evaluator's judge, a prepare action) is begun twice by a worker that
  was cut off, stopped or suspended.
- What was begun goes on: the harness, its sandbox, a build, a score. All of it lies in folders of this attempt alone.
  Its model calls are recorded by the ledger or not answered, and a record under a closed grant is refused. A long
  outage thus costs no work: when the ledger is back and nobody has taken the rollout, the renewal revives its lease.
- A finished result is kept, in memory and in the spool, and its commit is repeated until the ledger answers. The
  ledger takes it if the token is still the current one, else it is discarded. The same goes for a rollout that is
  given back.
- What follows a commit (Celery's result, the callback) is done by whoever won it, so it never needs this rule.

A renewal that says `lost` ends the rollout at once: cancelled, torn down, its grant closed, nothing committed.
"""

from __future__ import annotations

import asyncio
import time


def steady_s() -> float:
    """Seconds of a clock that is never set and goes on while the machine is suspended."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


class Lease:
    """One rollout's lease as its worker knows it. See the module for the rule."""

    def __init__(self, lease_s: float, asked_at: float) -> None:
        """`asked_at`: when the claim was first sent, by `steady_s`."""
        self._lease_s = lease_s
        self._until = asked_at + lease_s
        self._renewed = asyncio.Event()

    @property
    def certain(self) -> bool:
        """Nobody else can have this rollout now."""
        return steady_s() < self._until

    def renewed(self, asked_at: float) -> None:
        """The ledger renewed it; the request was sent at `asked_at`."""
        self._until = max(self._until, asked_at + self._lease_s)
        self._renewed.set()

    async def certainty(self) -> None:
        """Returns when the lease is certain: at once, or after the next renewal. Whoever loses it is cancelled."""
        while not self.certain:
            self._renewed.clear()
            await self._renewed.wait()
