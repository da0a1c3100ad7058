"""Renews all leases of a worker in one call, and stops what the ledger says is no longer ours."""

from __future__ import annotations

import asyncio

from polarq.errors import LedgerUnavailable
from polarq.ledger import AsyncLedger
from polarq_worker.engine import Engine, Stop
from polarq_worker.lease import steady_s


class Renewal:
    """One worker's. It has connections of its own: a renewal must not wait behind rollouts that wait for an answer."""

    def __init__(self, engine: Engine, lease_s: float) -> None:
        of_rollouts = engine.services.ledger
        self._engine = engine
        self._lease_s = lease_s
        self._ledger = AsyncLedger(of_rollouts.url, of_rollouts.calls, max_connections=2)
        self.period_s = lease_s / 4

    async def renew(self) -> None:
        """Once for everything held. Raises `LedgerUnavailable` when there is no answer before the next turn: a
        connection that went silent (a cut link) is dropped then, in time to renew through another."""
        held = self._engine.leases
        if not held:
            return
        asked_at = steady_s()
        try:
            async with asyncio.timeout(self.period_s):
                answers = await self._ledger.do(self._ledger.calls.renew(held, self._lease_s))
        except TimeoutError:
            raise LedgerUnavailable(f"leases were not renewed: no answer within {self.period_s:g} s") from None
        for (rollout_id, token), answer in zip(held, answers, strict=True):
            rollout = self._engine.held.get(rollout_id)
            if rollout is None or rollout.claim.token != token:
                continue
            if answer == "lost":
                rollout.stop(Stop.LOST)
                continue
            rollout.lease.renewed(asked_at)
            if answer == "cancel":
                rollout.stop(Stop.CANCEL)

    async def aclose(self) -> None:
        await self._ledger.aclose()
