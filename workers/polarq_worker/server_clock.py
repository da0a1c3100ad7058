"""The ledger's time as a worker knows it. What this host's own clock says, or is set to meanwhile, does not matter."""

from __future__ import annotations

import time
from datetime import UTC, datetime, timedelta

from polarq.ledger import AsyncLedger, Call


class ServerClock:
    """Told with every heartbeat and carried on between by a clock that is never set. Read from any thread."""

    def __init__(self) -> None:
        self._told = (datetime.now(UTC), time.monotonic())

    def told(self, server_ms: float) -> None:
        """What the server said just now, in milliseconds since 1970."""
        self._told = (datetime.fromtimestamp(server_ms / 1000, UTC), time.monotonic())

    async def ask(self, ledger: AsyncLedger) -> None:
        """Raises `LedgerUnavailable`."""
        ask = Call(lambda replies: int(replies[0][0]) * 1000 + int(replies[0][1]) / 1000, commands=(("TIME",),))
        self.told(await ledger.do(ask))

    def now(self) -> datetime:
        """The server's time, in UTC. Before the first heartbeat: this host's."""
        at, since = self._told
        return at + timedelta(seconds=time.monotonic() - since)
