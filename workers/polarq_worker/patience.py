"""Steps that must be answered: repeated while the ledger is away, until it answers or the worker leaves for good."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import TypeVar

from polarq.errors import LedgerUnavailable
from polarq.ledger import AsyncLedger, Call

log = logging.getLogger("polarq.worker.ledger")

T = TypeVar("T")

_FIRST_PAUSE_S = 0.2
_LONGEST_PAUSE_S = 5.0


class Patience:
    """One worker's patience with the ledger."""

    def __init__(self) -> None:
        self.over = False
        """The worker has to go: what is not answered now is not waited for any more."""

    async def until_answered(self, step: Callable[[], Awaitable[T]]) -> T:
        """The answer to `step`, which must be safe to repeat. Raises `LedgerUnavailable` only when patience is over."""
        pause = _FIRST_PAUSE_S
        while True:
            try:
                return await step()
            except LedgerUnavailable as exc:
                if self.over:
                    raise
                log.warning("waiting for the ledger: %s", exc)
                await asyncio.sleep(pause)
                pause = min(_LONGEST_PAUSE_S, pause * 2)

    async def insist(self, ledger: AsyncLedger, call: Call[T]) -> T:
        """The ledger's answer to a call, which is sent again and again while the ledger does not answer."""
        return await self.until_answered(lambda: ledger.do(call))
