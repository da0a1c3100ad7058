"""Holding back every model call of a deployment while a trainer changes the policy's weights.

    async with AsyncClient() as client:
        await client.pause_inference()     # returns when nothing is in flight on any node
        ...                                # update the engines
        await client.resume_inference()

With a `run_id` only that run's calls are held back: for runs whose policies are served side by side.

A pause ends by itself after its lease, so that a trainer that dies leaves nobody paused.

Waited for is every proxy process that is there or has said that it has calls in flight, whatever the node's worker says
of it: a worker may hang, or take a slow proxy for a dead one, while calls are being sampled.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

from polarq.contracts.node import NodeRecord
from polarq.errors import PolarqError
from polarq.ledger import AsyncLedger
from polarq.store.pauses import (
    Pause,
    PauseAck,
    PauseMode,
    clear_pause,
    read_acks,
    read_pause,
    read_presence,
    set_pause,
)

TIMEOUT_S = 300.0
LEASE_S = 900.0
_STEP_S = 0.05

Nodes = Callable[[], Awaitable[Sequence[NodeRecord]]]


class NotPaused(PolarqError):
    """Calls were still in flight when the time was up. The pause holds until it is resumed or its lease ends."""


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


async def inference_state(ledger: AsyncLedger, nodes: Sequence[NodeRecord], run_id: str = "") -> InferenceState:
    """Of the pause of a run, or without a run of that of all. Raises `LedgerUnavailable`."""
    keys = ledger.calls.keys
    pause = await read_pause(ledger.redis, keys, run_id)
    acks: dict[str, list[PauseAck]] = {}
    for ack in await read_acks(ledger.redis, keys):
        acks.setdefault(ack.node_id, []).append(ack.of_run(run_id) if run_id else ack)
    # Every process that ever said something, and the first one of each node that is listed.
    asked = {(ack.node_id, ack.process) for said in acks.values() for ack in said}
    asked |= {(node.node_id, 0) for node in nodes}
    present: dict[str, dict[int, int]] = {}
    for (node_id, process), processes in (await read_presence(ledger.redis, keys, sorted(asked))).items():
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


async def pause_inference(
    ledger: AsyncLedger,
    nodes: Nodes,
    *,
    mode: PauseMode = "drain",
    timeout_s: float = TIMEOUT_S,
    lease_s: float = LEASE_S,
    run_id: str = "",
) -> InferenceState:
    """Returns when no node lets a call (of the run) pass and none is in flight. Raises `NotPaused`,
    `LedgerUnavailable`."""
    await set_pause(ledger.redis, ledger.calls.keys, lease_s=lease_s, mode=mode, run_id=run_id)
    state = await inference_state(ledger, await nodes(), run_id)
    try:
        async with asyncio.timeout(timeout_s):
            while not state.drained:
                await asyncio.sleep(_STEP_S)
                state = await inference_state(ledger, await nodes(), run_id)
    except TimeoutError:
        late = [f"{n.node_id} ({n.in_flight or 'its proxy has not said'})" for n in state.nodes if n.late]
        text = (
            f"after {timeout_s:g} s there are perhaps still model calls in flight on {', '.join(late) or 'some node'}"
        )
        raise NotPaused(f"{text}; the pause holds for {lease_s:g} s: resume to end it") from None
    return state


async def resume_inference(ledger: AsyncLedger, run_id: str = "") -> bool:
    """Whether there was a pause. Raises `LedgerUnavailable`."""
    return await clear_pause(ledger.redis, ledger.calls.keys, run_id)
