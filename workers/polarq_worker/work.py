"""A node with free places rings itself for what waits: for a busy node, after a pause, with its doorbell lost."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from polarq.client import Client
from polarq.ledger import AsyncLedger
from polarq.ledger.admission import Place
from polarq.ledger.reaping import queue_depths
from polarq.registry import names
from polarq.settings import Settings
from polarq.topology import Node, Topology, broker_url

log = logging.getLogger("polarq.worker.work")

_MOST_AT_ONCE = 64
"""What is left over is found when these have been heard."""


def place_of(node: Node, topology: Topology, incarnation: str = "") -> Place:
    """What the ledger chooses work for this node by."""
    return Place(
        node_id=node.id,
        labels=node.labels,
        model=node.model_served or node.endpoints[0].model,
        runtimes=names("runtimes"),
        default_runtime=node.default_runtime is not None,
        runs=topology.limits.runs,
        incarnation=incarnation,
    )


class WorkSeeker:
    """`free` says how many more rollouts the node would take now."""

    def __init__(
        self,
        ledger: AsyncLedger,
        client: Client,
        topology: Topology,
        settings: Settings,
        place: Place,
        free: Callable[[], int],
    ) -> None:
        self.ledger = ledger
        self.client = client
        self.place = place
        self.free = free
        url = broker_url(topology, settings)
        self._broker = ledger if url == ledger.url else AsyncLedger(url, ledger.calls, max_connections=1)

    async def seek(self) -> int:
        """Rings for as many rollouts as there are places that nothing in the node's own queue is for. Answers how many.

        Raises `LedgerUnavailable`, `NotQueued`.
        """
        calls, node_id = self.ledger.calls, self.place.node_id
        if self.free() <= 0:
            return 0
        heard = (await self._broker.do(queue_depths(calls, [node_id])))[node_id]
        wanted = min(self.free() - heard, _MOST_AT_ONCE)
        if wanted <= 0:
            return 0
        found = await self.ledger.do(calls.look(self.place, wanted))
        if found:
            log.info("node %s has free places and rings for %d waiting rollouts", node_id, len(found))
            await asyncio.to_thread(self.client.ring_node, node_id, found)
        return len(found)

    async def aclose(self) -> None:
        if self._broker is not self.ledger:
            await self._broker.aclose()
