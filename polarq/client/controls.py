"""Holding work back and letting it go on, for both clients. Each word is a flag in the ledger; nodes read it with their
next heartbeat, and are told to look at once."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from polarq.contracts.node import NodeRecord
from polarq.errors import InvalidInput, NodeNotFound
from polarq.ledger import AsyncLedger, Call, Calls, Ledger
from polarq.ledger.control import RunState, drain_node, known_runs, pause_run, run_state, set_run_workers
from polarq.ledger.policy import set_policy_version

if TYPE_CHECKING:
    from celery import Celery

log = logging.getLogger("polarq.client")

LOOK = "polarq_look"
"""The broadcast that makes every node read its flags now, and look for work."""

MOST_RUN_WORKERS = 4096


def hurry(app: Celery) -> None:
    """Tells the nodes to look. That it does not reach one costs a heartbeat's time."""
    try:
        app.control.broadcast(LOOK)
    except Exception as exc:
        log.warning("the nodes could not be told at once; they see it with their next heartbeat: %s", exc)


def _found(nodes: Sequence[NodeRecord], node_id: str) -> NodeRecord:
    node = next((node for node in nodes if node.node_id == node_id), None)
    if node is None:
        raise NodeNotFound(f"no node '{node_id}' has announced itself")
    return node


def _drained(calls: Calls, node: NodeRecord, on: bool, deadline_s: float | None) -> tuple[Call[None], NodeRecord]:
    if deadline_s is not None and deadline_s < 0:
        raise InvalidInput("drain", ["deadline_s: must not be negative"])
    call = drain_node(calls.keys, node.node_id, on=on, deadline_s=deadline_s)
    return call, node.model_copy(update={"draining": on})


def _paused(calls: Calls, node: NodeRecord, on: bool) -> tuple[Call[None], NodeRecord]:
    return calls.set_node_flag(node.node_id, "paused", on), node.model_copy(update={"paused": on})


def _resized(calls: Calls, node: NodeRecord, run_workers: int | None) -> tuple[Call[None], NodeRecord]:
    if run_workers is not None and not 1 <= run_workers <= MOST_RUN_WORKERS:
        raise InvalidInput("capacity", [f"run_workers: {run_workers}; from 1 to {MOST_RUN_WORKERS}"])
    changed: dict[str, Any] = {} if run_workers is None else {"max_run_workers": run_workers}
    return set_run_workers(calls.keys, node.node_id, run_workers), node.model_copy(update=changed)


class Controls:
    """What `Client` can do to nodes and runs. Each raises `LedgerUnavailable`, and `NodeNotFound` for a node that never
    announced itself; each answers how it then is."""

    ledger: Ledger
    if TYPE_CHECKING:

        @property
        def app(self) -> Celery: ...

    def drain(self, node_id: str, on: bool = True, deadline_s: float | None = None) -> NodeRecord:
        """Sets or clears a node's drain: it takes nothing new and finishes what it has. What has not ended after
        `deadline_s` seconds goes back to the queue, for other nodes; without one there is no hurry."""
        return self._told(*_drained(self.ledger.calls, _found(self.ledger.nodes(), node_id), on, deadline_s))

    def pause_node(self, node_id: str, on: bool = True) -> NodeRecord:
        """A paused node takes nothing new; what it has goes on. `resume_node` ends it."""
        return self._told(*_paused(self.ledger.calls, _found(self.ledger.nodes(), node_id), on))

    def resume_node(self, node_id: str) -> NodeRecord:
        return self.pause_node(node_id, on=False)

    def set_capacity(self, node_id: str, run_workers: int | None) -> NodeRecord:
        """How many harnesses a node runs at once, from now on; None: what its topology says. Nothing that runs is
        interrupted by a smaller number."""
        return self._told(*_resized(self.ledger.calls, _found(self.ledger.nodes(), node_id), run_workers))

    def _told(self, call: Call[None], node: NodeRecord) -> NodeRecord:
        self.ledger.do(call)
        hurry(self.app)
        return node

    def pause_run(self, run_id: str) -> RunState:
        """Nothing of the run is started until `resume_run`; what runs goes on, and submits are taken."""
        keys = self.ledger.calls.keys
        self.ledger.do(pause_run(keys, run_id, on=True))
        return self.ledger.do(run_state(keys, run_id))

    def resume_run(self, run_id: str) -> RunState:
        keys = self.ledger.calls.keys
        if self.ledger.do(pause_run(keys, run_id, on=False)):
            hurry(self.app)
        return self.ledger.do(run_state(keys, run_id))

    def set_policy_version(self, run_id: str, version: int) -> RunState:
        """Says that the run's engines sample with policy `version` from now on. A rollout that is claimed later records
        it (`RolloutRecord.policy_version`), so that its staleness is the version now less that one. Raises
        `InvalidInput`."""
        self.ledger.do(set_policy_version(self.ledger.calls, run_id, version))
        return self.run(run_id)

    def run(self, run_id: str) -> RunState:
        """One run, whether anything of it was ever submitted or not."""
        return self.ledger.do(run_state(self.ledger.calls.keys, run_id))

    def runs(self) -> list[RunState]:
        """Runs that wait, are in flight or are paused."""
        keys = self.ledger.calls.keys
        return [self.ledger.do(run_state(keys, run_id)) for run_id in self.ledger.do(known_runs(keys))]


class ControlsAsync:
    """The same for `AsyncClient`. See `Controls`."""

    ledger: AsyncLedger
    if TYPE_CHECKING:

        @property
        def app(self) -> Celery: ...

    async def drain(self, node_id: str, on: bool = True, deadline_s: float | None = None) -> NodeRecord:
        return await self._told(
            *_drained(self.ledger.calls, _found(await self.ledger.nodes(), node_id), on, deadline_s)
        )

    async def pause_node(self, node_id: str, on: bool = True) -> NodeRecord:
        return await self._told(*_paused(self.ledger.calls, _found(await self.ledger.nodes(), node_id), on))

    async def resume_node(self, node_id: str) -> NodeRecord:
        return await self.pause_node(node_id, on=False)

    async def set_capacity(self, node_id: str, run_workers: int | None) -> NodeRecord:
        return await self._told(*_resized(self.ledger.calls, _found(await self.ledger.nodes(), node_id), run_workers))

    async def _told(self, call: Call[None], node: NodeRecord) -> NodeRecord:
        await self.ledger.do(call)
        await asyncio.to_thread(lambda: hurry(self.app))
        return node

    async def pause_run(self, run_id: str) -> RunState:
        keys = self.ledger.calls.keys
        await self.ledger.do(pause_run(keys, run_id, on=True))
        return await self.ledger.do(run_state(keys, run_id))

    async def resume_run(self, run_id: str) -> RunState:
        keys = self.ledger.calls.keys
        if await self.ledger.do(pause_run(keys, run_id, on=False)):
            await asyncio.to_thread(lambda: hurry(self.app))
        return await self.ledger.do(run_state(keys, run_id))

    async def set_policy_version(self, run_id: str, version: int) -> RunState:
        await self.ledger.do(set_policy_version(self.ledger.calls, run_id, version))
        return await self.run(run_id)

    async def run(self, run_id: str) -> RunState:
        return await self.ledger.do(run_state(self.ledger.calls.keys, run_id))

    async def runs(self) -> list[RunState]:
        keys = self.ledger.calls.keys
        return [await self.ledger.do(run_state(keys, run_id)) for run_id in await self.ledger.do(known_runs(keys))]
