"""A node rings itself for what waits: with every place that gets free, and whenever it begins to take work.

Whoever submits rings only for places that are free now. All else waits in the ledger, in the order in which it shall
start, and a node's queue stays as short as the node can empty it soon.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable

from polarq.client import Client
from polarq.client.routing import ahead, fleet_of
from polarq.ledger import AsyncLedger
from polarq.ledger.admission import Place
from polarq.ledger.control import how_many_wait
from polarq.ledger.reaping import queue_depths
from polarq.registry import names
from polarq.settings import Settings
from polarq.topology import Node, Topology, broker_url

log = logging.getLogger("polarq.worker.work")

_DEEP = 10_000
"""Rollouts of each run, when a look at the first ones has shown too little."""
_AT_WORK = 0.02
"""Share of the time that may go into that."""
_HEARD_WITHIN_S = 2.0
"""So long a rollout is left to other nodes that have free places."""
_FLEET_FOR_S = 1.0
"""How long what is known of the other nodes is used."""
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
    """`capacity`: rollouts that the node may have in flight now; `in_flight`: those it has."""

    def __init__(
        self,
        ledger: AsyncLedger,
        client: Client,
        topology: Topology,
        settings: Settings,
        place: Place,
        capacity: Callable[[], int],
        in_flight: Callable[[], int],
    ) -> None:
        self.ledger = ledger
        self.client = client
        self.place = place
        self._topology = topology
        self._others_free = 0
        """Places of other nodes that take work, when they last said."""
        self._others_until = 0.0
        self._look_deep_at = 0.0
        self.again_s: float | None = None
        """When to seek again, in seconds: a deeper look would have come too soon."""
        self.capacity = capacity
        self.in_flight = in_flight
        url = broker_url(topology, settings)
        self._broker = ledger if url == ledger.url else AsyncLedger(url, ledger.calls, max_connections=1)

    async def seek(self) -> int:
        """Rings for what waits, so that the node's own queue holds as much as it has free places and a few more, for
        those that get free next. Answers how many.

        Raises `LedgerUnavailable`, `NotQueued`.
        """
        calls, node_id, capacity = self.ledger.calls, self.place.node_id, self.capacity()
        self.again_s = None
        if capacity <= 0:
            return 0
        free, more = max(0, capacity - self.in_flight()), ahead(capacity)
        waiting, lately = await self.ledger.do(how_many_wait(calls.keys, _HEARD_WITHIN_S))
        if not waiting:
            return 0
        heard = (await self._broker.do(queue_depths(calls, [node_id])))[node_id]
        if heard >= min(free + more // 2, waiting):
            # Enough for a while: many rings at once cost less than one at a time.
            return 0
        # What stands first in line is what the messages in the queue will be answered with.
        found = (await self._look(min(free + more, heard + _MOST_AT_ONCE), waiting))[heard:]
        if found:
            unheard = waiting - heard - min(await self._coming_to_others(), lately)
            found = found[: max(0, unheard)]
        if found:
            log.debug("node %s has %d free places and rings for %d waiting rollouts", node_id, free, len(found))
            await asyncio.to_thread(self.client.ring_node, node_id, found)
        return len(found)

    async def _coming_to_others(self) -> int:
        """How many rollouts other nodes have free places for. They were rung for what has just come, and a doorbell
        that one of them has heard and not answered yet is seen by nobody. What waits for longer is anybody's."""
        now = time.monotonic()
        if now >= self._others_until:
            others = fleet_of(await self.ledger.nodes(), self._topology)
            self._others_until = now + _FLEET_FOR_S
            self._others_free = sum(
                max(0, other.capacity - other.in_hand)
                for other in others
                if other.node_id != self.place.node_id and other.idle_because is None
            )
        return self._others_free

    async def _look(self, most: int, waiting: int) -> list[str]:
        """What the node would take; where little is in sight, also behind what it cannot run, now and then."""
        calls = self.ledger.calls
        found = await self.ledger.do(calls.look(self.place, most))
        if len(found) >= min(most, waiting):
            return found
        began = time.monotonic()
        if began < self._look_deep_at:
            self.again_s = self._look_deep_at - began
            return found
        found = await self.ledger.do(calls.look(self.place, most, _DEEP))
        now = time.monotonic()
        self._look_deep_at = now + (now - began) / _AT_WORK
        return found

    async def aclose(self) -> None:
        if self._broker is not self.ledger:
            await self._broker.aclose()
