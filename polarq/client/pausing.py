"""Holding back every model call of a deployment while a trainer changes the policy's weights.

    with Client() as client:
        client.pause_inference()     # returns when nothing is in flight on any node
        ...                          # update the engines
        client.resume_inference()

With a `run_id` only that run's calls are held back: for runs whose policies are served side by side.

A pause ends by itself after its lease, so that a trainer that dies leaves nobody paused.

Waited for is every proxy process that is there or has said that it has calls in flight, whatever the node's worker says
of it: a worker may hang, or take a slow proxy for a dead one, while calls are being sampled.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

from polarq.client.steps import Sleep, Steps, all_nodes, ask
from polarq.contracts.base import check_id
from polarq.contracts.node import NodeRecord
from polarq.errors import InvalidInput, NotPaused
from polarq.ledger import Calls
from polarq.store.pauses import Pause, PauseAck, PauseMode, all_acks, all_pauses, pausing, presence, resuming

TIMEOUT_S = 300.0
LEASE_S = 900.0
LONGEST_S = 7 * 24 * 3600.0
"""Of a lease, and of waiting for it."""
_STEP_S = 0.05


def of_run(run_id: str | None) -> str:
    """How a pause names whose calls it holds back: a run's, or "" for all. Raises `InvalidInput`."""
    return "" if run_id is None else check_id("run", run_id)


@dataclass(frozen=True, slots=True)
class NodeInference:
    """One node's share. `in_flight` None: its proxy has not said."""

    node_id: str
    alive: bool
    paused: bool
    in_flight: int | None
    waiting: int
    usable: bool | None
    """Whether its inference server is there; None: not known yet."""
    counted: bool
    """Whether a pause waits for it."""

    @property
    def late(self) -> bool:
        return self.counted and self.in_flight != 0


@dataclass(frozen=True, slots=True)
class InferenceState:
    """`paused`: no node lets a call pass. `in_flight` None while some node that counts has not said."""

    paused: bool
    in_flight: int | None
    nodes: tuple[NodeInference, ...]

    @property
    def drained(self) -> bool:
        return self.paused and self.in_flight == 0


def inference_state(calls: Calls, run_id: str) -> Steps[InferenceState]:
    """Of the pause of a run, or without a run of that of all."""
    return (yield from state_of(calls, (yield from all_nodes(calls)), run_id))


def state_of(calls: Calls, nodes: Sequence[NodeRecord], run_id: str) -> Steps[InferenceState]:
    """The same, for nodes as they are known."""
    keys = calls.keys
    pause = (yield from ask(all_pauses(keys))).get(run_id)
    acks: dict[str, list[PauseAck]] = {}
    for ack in (yield from ask(all_acks(keys))):
        acks.setdefault(ack.node_id, []).append(ack.of_run(run_id) if run_id else ack)
    # Every process that ever said something, and the first one of each node that is listed.
    asked = {(ack.node_id, ack.process) for said in acks.values() for ack in said}
    asked |= {(node.node_id, 0) for node in nodes}
    present: dict[str, dict[int, int]] = {}
    for (node_id, process), processes in (yield from ask(presence(keys, sorted(asked)))).items():
        present.setdefault(node_id, {})[process] = processes
    listed = {node.node_id for node in nodes}
    shares = [_share(node, pause, acks.get(node.node_id, []), present.get(node.node_id, {})) for node in nodes]
    for node_id in sorted({*acks, *present} - listed):
        share = _share(NodeRecord(node_id=node_id), pause, acks.get(node_id, []), present.get(node_id, {}))
        if share.counted:
            shares.append(share)
    counted = [share for share in shares if share.counted]
    known = [share.in_flight for share in counted if share.in_flight is not None]
    return InferenceState(
        paused=pause is not None and all(share.paused for share in counted),
        in_flight=sum(known) if pause is not None and len(known) == len(counted) else None,
        nodes=tuple(shares),
    )


def _share(node: NodeRecord, pause: Pause | None, acks: Sequence[PauseAck], present: dict[int, int]) -> NodeInference:
    """`present`: the node's proxy processes that are there, and how many each of them says there are."""
    said = [ack for ack in acks if pause is not None and ack.pause_id == pause.pause_id]
    in_flight = sum(ack.in_flight for ack in said)
    processes = max(present.values() or [ack.processes for ack in said], default=1)
    whole = {*range(processes), *present} <= {ack.process for ack in said}
    return NodeInference(
        node_id=node.node_id,
        alive=node.alive,
        paused=whole,
        in_flight=in_flight if whole else None,
        waiting=sum(ack.waiting for ack in said),
        usable=node.health.inference,
        counted=bool(present) or in_flight > 0 or (node.alive and node.health.proxy is not False),
    )


def pause_inference(
    calls: Calls, *, mode: PauseMode, timeout_s: float, lease_s: float, run_id: str
) -> Steps[InferenceState]:
    """Returns when no node lets a call (of the run) pass and none is in flight. Raises `NotPaused`."""
    wrong = [
        f"{name}: {value:g}; more than 0, at most {LONGEST_S:.0f}"
        for name, value in (("timeout_s", timeout_s), ("lease_s", lease_s))
        if not 0 < value <= LONGEST_S
    ]
    if wrong:
        raise InvalidInput("pause", wrong)
    yield from ask(pausing(calls.keys, lease_s=lease_s, mode=mode, run_id=run_id))
    until = time.monotonic() + timeout_s
    while not (state := (yield from inference_state(calls, run_id))).drained:
        if time.monotonic() >= until:
            raise NotPaused(_too_late(state, timeout_s, lease_s))
        yield Sleep(_STEP_S)
    return state


def _too_late(state: InferenceState, timeout_s: float, lease_s: float) -> str:
    late = [f"{n.node_id} ({n.in_flight or 'its proxy has not said'})" for n in state.nodes if n.late]
    where = ", ".join(late) or "some node"
    return (
        f"after {timeout_s:g} s there are perhaps still model calls in flight on {where}; the pause holds for "
        f"{lease_s:g} s: resume to end it"
    )


def resume_inference(calls: Calls, run_id: str) -> Steps[bool]:
    """Whether there was a pause."""
    return (yield from ask(resuming(calls.keys, run_id)))
