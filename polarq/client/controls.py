"""Holding work back and letting it go on: the steps, for both clients. Each word is a flag in the ledger; nodes read it
with their next heartbeat, and are told to look at once."""

from __future__ import annotations

from typing import Any

from polarq.client.deployment import Deployment
from polarq.client.steps import Steps, all_nodes, ask, work
from polarq.contracts.base import check_id
from polarq.contracts.node import NodeRecord
from polarq.errors import InvalidInput, NodeNotFound
from polarq.ledger import Call
from polarq.ledger.control import RunState, drain_node, known_runs, run_state, run_states, set_run_workers
from polarq.ledger.control import pause_run as paused_run

MOST_RUN_WORKERS = 4096
LONGEST_DRAIN_S = 30 * 24 * 3600.0


def _node(at: Deployment, node_id: str) -> Steps[NodeRecord]:
    """Raises `NodeNotFound`."""
    nodes = yield from all_nodes(at.calls)
    found = next((node for node in nodes if node.node_id == node_id), None)
    if found is None:
        raise NodeNotFound(f"no node '{node_id}' has announced itself")
    return found


def _told(at: Deployment, call: Call[None]) -> Steps[None]:
    yield from ask(call)
    yield from work(at.hurry)


def drain(at: Deployment, node_id: str, on: bool, deadline_s: float | None) -> Steps[NodeRecord]:
    if deadline_s is not None and not 0 <= deadline_s <= LONGEST_DRAIN_S:
        raise InvalidInput("drain", [f"deadline_s: {deadline_s:g}; from 0 to {LONGEST_DRAIN_S:.0f}"])
    node = yield from _node(at, node_id)
    yield from _told(at, drain_node(at.calls.keys, node_id, on=on, deadline_s=deadline_s))
    return node.model_copy(update={"draining": on})


def pause_node(at: Deployment, node_id: str, on: bool) -> Steps[NodeRecord]:
    node = yield from _node(at, node_id)
    yield from _told(at, at.calls.set_node_flag(node_id, "paused", on))
    return node.model_copy(update={"paused": on})


def set_capacity(at: Deployment, node_id: str, run_workers: int | None) -> Steps[NodeRecord]:
    if run_workers is not None and not 1 <= run_workers <= MOST_RUN_WORKERS:
        raise InvalidInput("capacity", [f"run_workers: {run_workers}; from 1 to {MOST_RUN_WORKERS}"])
    node = yield from _node(at, node_id)
    yield from _told(at, set_run_workers(at.calls.keys, node_id, run_workers))
    changed: dict[str, Any] = {} if run_workers is None else {"max_run_workers": run_workers}
    return node.model_copy(update=changed)


def pause_run(at: Deployment, run_id: str, on: bool) -> Steps[RunState]:
    changed = yield from ask(paused_run(at.calls.keys, check_id("run", run_id), on=on))
    if changed and not on:
        yield from work(at.hurry)
    return (yield from ask(run_state(at.calls.keys, run_id)))


def runs(at: Deployment) -> Steps[list[RunState]]:
    keys = at.calls.keys
    return (yield from ask(run_states(keys, (yield from ask(known_runs(keys))))))
