"""The deployment's limits, by which this worker takes work: published at its start, learnt anew with each heartbeat.

With them it says what it lets tasks ask for, so that a task that asks for more is refused where it is submitted.
"""

from __future__ import annotations

import logging

from polarq.ledger import AsyncLedger
from polarq.ledger.limits import publish, published
from polarq.ledger.rules import say_rules
from polarq.topology import Topology
from polarq.topology.models import RunShare
from polarq.topology.rules import Rules

log = logging.getLogger("polarq.worker.limits")


class Limits:
    """One worker's. `runs` is what its place in the ledger refers to: it changes while the worker runs."""

    def __init__(self, ledger: AsyncLedger, topology: Topology, node_id: str) -> None:
        self._ledger = ledger
        self._own = topology.limits
        self._node_id = node_id
        self._rules = Rules.of(topology)
        self._version: int | None = None
        self.runs: dict[str, RunShare] = dict(topology.limits.runs)

    async def publish(self) -> None:
        """Says what the file says, where nobody else has; then learns what holds. Raises `LedgerUnavailable`."""
        await self._ledger.do(publish(self._ledger.calls, self._own, self._node_id))
        await self.step()

    async def step(self) -> None:
        """Goes by what the ledger says now. Raises `LedgerUnavailable`."""
        # Said again each time: a Redis that lost what it had gets it back.
        await self._ledger.do(say_rules(self._ledger.calls.keys, self._node_id, self._rules))
        now = await self._ledger.do(published(self._ledger.calls.keys, self._own))
        if now.version == self._version:
            return
        if self._version is not None:
            log.info("the deployment's limits are version %d now, published by %s", now.version, now.by)
        self._version = now.version
        self.runs.clear()
        self.runs.update(now.limits.runs)
        if not now.agrees(self._own):
            log.warning("%s", now.mismatch)
