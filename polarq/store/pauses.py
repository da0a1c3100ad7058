"""A pause of all model calls, for a change of the policy's weights: one record in Redis that ends by itself.

Every node's proxy reads it, stops admitting calls and says in the acknowledgements that it did, and how many calls are
still in flight. The record's expiry is its lease: a trainer that dies cannot leave the nodes paused.
"""

from __future__ import annotations

import secrets
from typing import Literal

from pydantic import Field, ValidationError
from redis.asyncio import Redis

from polarq.contracts.base import Contract
from polarq.errors import LedgerUnavailable
from polarq.ledger.keys import Keys
from polarq.store.atomic import ledger_errors

PauseMode = Literal["drain", "abort"]
ACK_KEEP_S = 600


class Pause(Contract):
    """Why no call passes."""

    pause_id: str
    mode: PauseMode = "drain"
    """drain: calls in flight end by themselves. abort: they are cut; what they sampled is kept."""


class PauseAck(Contract):
    """What a node's proxy says of a pause. `pause_id` blank: it lets calls pass."""

    node_id: str
    process: int = 0
    """Which of the node's proxy processes."""
    processes: int = 1
    """How many the node has."""
    pause_id: str = ""
    in_flight: int = Field(0, ge=0)
    waiting: int = Field(0, ge=0)


async def set_pause(redis: Redis, keys: Keys, *, lease_s: float, mode: PauseMode = "drain") -> Pause:
    """Pauses, or prolongs and renews a pause. It ends after `lease_s`. Raises `LedgerUnavailable`."""
    pause = Pause(pause_id=secrets.token_hex(8), mode=mode)
    with ledger_errors():
        await redis.set(keys.pause, pause.model_dump_json(), px=max(1, int(lease_s * 1000)))
    return pause


async def clear_pause(redis: Redis, keys: Keys) -> bool:
    """Whether there was one. Raises `LedgerUnavailable`."""
    with ledger_errors():
        return bool(await redis.delete(keys.pause))


async def read_pause(redis: Redis, keys: Keys) -> Pause | None:
    """Raises `LedgerUnavailable`."""
    with ledger_errors():
        record = await redis.get(keys.pause)
    if record is None:
        return None
    try:
        return Pause.model_validate_json(record)
    except ValidationError as exc:
        raise LedgerUnavailable(f"the record of a pause cannot be read: {exc.errors()[0]['msg']}") from exc


async def acknowledge(redis: Redis, keys: Keys, ack: PauseAck) -> None:
    """Raises `LedgerUnavailable`."""
    with ledger_errors():
        async with redis.pipeline(transaction=False) as pipe:
            pipe.hset(keys.pause_acks, f"{ack.node_id}/{ack.process}", ack.model_dump_json())
            pipe.expire(keys.pause_acks, ACK_KEEP_S)
            await pipe.execute()


async def read_acks(redis: Redis, keys: Keys) -> list[PauseAck]:
    """One per proxy process. Raises `LedgerUnavailable`."""
    with ledger_errors():
        found = await redis.hgetall(keys.pause_acks)
    return [PauseAck.model_validate_json(record) for record in found.values()]
