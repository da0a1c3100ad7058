"""Holding back every model call of a deployment while a trainer changes the policy's weights.

    async with AsyncClient() as client:
        await client.pause_inference()     # returns when nothing is in flight on any live node
        ...                                # update the engines
        await client.resume_inference()

A pause ends by itself after its lease, so that a trainer that dies leaves nobody paused.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

from polarq.contracts.node import NodeRecord
from polarq.errors import PolarqError
from polarq.ledger import AsyncLedger
from polarq.store.pauses import PauseAck, PauseMode, clear_pause, read_acks, read_pause, set_pause

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


@dataclass(frozen=True, slots=True)
class InferenceState:
    """`paused`: no live node lets a call pass. `in_flight` None while some live node has not said."""

    paused: bool
    in_flight: int | None
    nodes: tuple[NodeInference, ...]

    @property
    def drained(self) -> bool:
        return self.paused and self.in_flight == 0


async def inference_state(ledger: AsyncLedger, nodes: Sequence[NodeRecord]) -> InferenceState:
    """Raises `LedgerUnavailable`."""
    keys = ledger.calls.keys
    pause = await read_pause(ledger.redis, keys)
    acks: dict[str, list[PauseAck]] = {}
    for ack in await read_acks(ledger.redis, keys):
        acks.setdefault(ack.node_id, []).append(ack)
    shares = []
    for node in nodes:
        said = [ack for ack in acks.get(node.node_id, []) if pause is not None and ack.pause_id == pause.pause_id]
        whole = bool(said) and len(said) >= said[0].processes
        shares.append(
            NodeInference(
                node_id=node.node_id,
                alive=node.alive,
                paused=whole,
                in_flight=sum(ack.in_flight for ack in said) if whole else None,
                waiting=sum(ack.waiting for ack in said),
                usable=node.health.inference,
            )
        )
    asked = [share for share, node in zip(shares, nodes, strict=True) if node.alive and node.health.proxy is not False]
    counts = [share.in_flight for share in asked]
    known = [count for count in counts if count is not None]
    return InferenceState(
        paused=pause is not None and all(share.paused for share in asked),
        in_flight=sum(known) if pause is not None and len(known) == len(counts) else None,
        nodes=tuple(shares),
    )


async def pause_inference(
    ledger: AsyncLedger,
    nodes: Nodes,
    *,
    mode: PauseMode = "drain",
    timeout_s: float = TIMEOUT_S,
    lease_s: float = LEASE_S,
) -> InferenceState:
    """Returns when no live node lets a call pass and none is in flight. Raises `NotPaused`, `LedgerUnavailable`."""
    await set_pause(ledger.redis, ledger.calls.keys, lease_s=lease_s, mode=mode)
    state = await inference_state(ledger, await nodes())
    try:
        async with asyncio.timeout(timeout_s):
            while not state.drained:
                await asyncio.sleep(_STEP_S)
                state = await inference_state(ledger, await nodes())
    except TimeoutError:
        late = [n.node_id for n in state.nodes if n.alive and (not n.paused or n.in_flight)]
        text = f"after {timeout_s:g} s there are still model calls in flight on {', '.join(late) or 'some node'}"
        raise NotPaused(f"{text}; the pause holds for {lease_s:g} s: resume to end it") from None
    return state


async def resume_inference(ledger: AsyncLedger) -> bool:
    """Whether there was a pause. Raises `LedgerUnavailable`."""
    return await clear_pause(ledger.redis, ledger.calls.keys)
