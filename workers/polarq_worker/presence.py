"""The node as the ledger sees it: its record, announced with every heartbeat, and the flags it reads in return."""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import polarq
from polarq.contracts.node import NodeHealth, NodeRecord
from polarq.errors import LedgerUnavailable
from polarq.registry import names
from polarq.settings import Settings
from polarq_worker.engine import Engine, Stop
from polarq_worker.flags import Flags
from polarq_worker.health import ask_health, asker, with_disk
from polarq_worker.lease_watch import LoopWatch
from polarq_worker.server_clock import ServerClock

log = logging.getLogger("polarq.worker.node")

_ALIVE_FACTOR = 2.5
"""A node counts as gone after this many missed heartbeats."""

_PATIENCE_S = 5.0
"""How long something that may as well not be said is tried to be said."""


class Presence:
    """One node's. Used on the engine's loop; the numbers may be read from any thread."""

    def __init__(self, engine: Engine, watch: LoopWatch, settings: Settings) -> None:
        services = engine.services
        self.health = NodeHealth()
        self.flags = Flags()
        self._engine = engine
        self._watch = watch
        self._http = asker(settings.token)
        self._node = services.node
        self._ledger = services.ledger
        self._incarnation = services.place.incarnation
        self.superseded = False
        """Another worker has taken the node's place."""
        self.on_superseded: Callable[[], None] = lambda: None
        """Set by the bootstep: the worker has to go."""
        self.alive_s = services.topology.gateway.heartbeat_interval_seconds * _ALIVE_FACTOR
        self.clock = ServerClock()
        self._began = time.monotonic()

    # --- how much it takes

    @property
    def capacity(self) -> int:
        """Rollouts that may be in flight now. 0 while draining, paused, stopping, blocked, or without inference
        or room on the disk."""
        if self._engine.stopping or self._watch.blocked:
            return 0
        if self.flags.holds_back:
            return 0
        return 0 if self.health.unusable else self.places

    @property
    def places(self) -> int:
        """Rollouts it may hold at once."""
        return self.flags.resized(self._node).capacity

    # --- what it says

    async def announce(self) -> None:
        """Says how the node is, and does what its flags say. Raises `LedgerUnavailable`."""
        before = self.flags
        said = await self._ledger.do(self._ledger.calls.announce(self.record(), self.alive_s, self._incarnation))
        self.clock.told(float(said["server_ms"]))
        if "taken_by" in said:
            await self._give_way(said["taken_by"])
        self.flags = Flags.read(said)
        if before.holds_back != self.flags.holds_back:
            await self.note("node.paused" if self.flags.holds_back else "node.resumed")
        if before.run_workers != self.flags.run_workers:
            now = self.flags.resized(self._node)
            self._engine.services.slots.resize(run=now.max_run_workers, ready=now.ready_places)
            await self.note("node.resized", run_workers=now.max_run_workers)
        if self.flags.drain_over and self._engine.held:
            log.info("the drain's deadline has passed: %d rollouts are given back", len(self._engine.held))
            self._engine.stop_all(Stop.RELEASE)

    async def _give_way(self, other: str) -> None:
        """Takes nothing any more. What it holds it may finish: its leases are its own."""
        if self.superseded:
            return
        self.superseded = True
        if not self._engine.stopping:
            log.error(
                "node %s: another worker (%s) has taken this one's place while nothing was heard of it; this one takes "
                "nothing new, finishes what it has, and stops",
                self._node.id,
                other,
            )
            self._engine.stopping = True
            self.on_superseded()
        await self.note("node.superseded", by=other)

    async def say_leaving(self) -> None:
        """Announces the node as it is now and not at the next heartbeat."""
        try:
            async with asyncio.timeout(_PATIENCE_S):
                await self.announce()
        except (LedgerUnavailable, TimeoutError) as exc:
            log.warning("the ledger could not be told that the node is stopping: %s", exc)

    async def depart(self) -> None:
        """Takes the node's record out of the ledger."""
        try:
            async with asyncio.timeout(_PATIENCE_S):
                await self._ledger.do(self._ledger.calls.depart(self._node.id, self._incarnation))
        except (LedgerUnavailable, TimeoutError) as exc:
            log.warning("could not say goodbye to the ledger (%s); the node's record expires by itself", exc)

    async def note(self, kind: str, **data: Any) -> None:
        """Writes an event about this node; a ledger that is away costs the event only."""
        try:
            async with asyncio.timeout(_PATIENCE_S):
                await self._ledger.do(self._ledger.calls.note(kind, {"node_id": self._node.id, **data}))
        except (LedgerUnavailable, TimeoutError) as exc:
            log.warning("event %s not written: %s", kind, exc)

    async def aclose(self) -> None:
        await self._http.aclose()

    def record(self) -> NodeRecord:
        """What this node says of itself."""
        node, endpoint, now = self._node, self._node.endpoints[0], self.clock.now()
        return NodeRecord(
            node_id=node.id,
            stopping=self._engine.stopping,
            max_init_workers=node.max_init_workers,
            max_run_workers=self.flags.resized(node).max_run_workers,
            max_postrun_workers=node.max_postrun_workers,
            metrics=self._engine.services.slots.metrics(),
            pool=self._engine.services.warm.pool.metrics(),
            loop_lag_s=round(self._watch.lag_s, 4),
            proxy_url=node.proxy_url,
            inference_url=endpoint.base_url,
            engine=endpoint.engine,
            model=node.model_served or endpoint.model,
            places=self.places,
            labels=node.labels,
            runtimes=names("runtimes"),
            default_runtime=node.default_runtime is not None,
            health=self.health,
            version=polarq.__version__,
            hostname=socket.gethostname(),
            pid=os.getpid(),
            started_at=now - timedelta(seconds=time.monotonic() - self._began),
            last_seen_at=now,
        )

    async def look_around(self) -> None:
        """Asks the proxy how it and the inference behind it are, and looks at the disk. Nothing new is taken by a node
        on which every rollout would be wasted."""
        before = self.health
        now = await ask_health(self._http, self._node.proxy_url, before)
        least_mb = self._node.min_free_disk_mb
        if least_mb:
            now = await asyncio.to_thread(with_disk, now, self._engine.services.state_dir, least_mb)
        self.health = now
        if now.unusable and now.unusable != before.unusable:
            log.error("node %s takes no rollouts: %s", self._node.id, now.message)
        elif before.unusable and not now.unusable:
            log.info("node %s takes rollouts again", self._node.id)
