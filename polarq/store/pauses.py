"""A pause of all model calls, for a change of the policy's weights: one record in Redis that ends by itself.

Every node's proxy reads it, stops admitting calls and says in the acknowledgements that it did, and how many calls are
still in flight. The record's expiry is its lease: a trainer that dies cannot leave the nodes paused.

Each proxy process also keeps a key that says it is there, so that one that hangs is waited for although it says nothing
and whatever its node's worker says, and one that is gone is not waited for any longer than the key lasts.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterable
from typing import Literal

from pydantic import Field, ValidationError
from redis.asyncio import Redis

from polarq.contracts.base import Contract
from polarq.errors import LedgerUnavailable
from polarq.ledger.keys import Keys
from polarq.store.atomic import Script, ledger_errors

PauseMode = Literal["drain", "abort"]
ACK_KEEP_S = 600
PRESENCE_S = 60.0
"""How long a proxy process that says nothing may still have calls in flight."""

Process = tuple[str, int]
"""(node id, which of its proxy processes)"""

_FORGET = Script("""
for i, field in ipairs(ARGV) do
  if redis.call('EXISTS', KEYS[i + 1]) == 0 then redis.call('HDEL', KEYS[1], field) end
end
""")


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
    await _forget_the_gone(redis, keys)
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
    """Also says that the process is there. Raises `LedgerUnavailable`."""
    with ledger_errors():
        async with redis.pipeline(transaction=False) as pipe:
            pipe.hset(keys.pause_acks, _field(ack.node_id, ack.process), ack.model_dump_json())
            pipe.expire(keys.pause_acks, ACK_KEEP_S)
            pipe.set(keys.proxy_present(ack.node_id, ack.process), ack.processes, px=int(PRESENCE_S * 1000))
            await pipe.execute()


async def withdraw(redis: Redis, keys: Keys, node_id: str, process: int) -> None:
    """The process ends with nothing in flight: nobody need wait for it. Raises `LedgerUnavailable`."""
    with ledger_errors():
        async with redis.pipeline(transaction=False) as pipe:
            pipe.hdel(keys.pause_acks, _field(node_id, process))
            pipe.delete(keys.proxy_present(node_id, process))
            await pipe.execute()


async def read_presence(redis: Redis, keys: Keys, processes: Iterable[Process]) -> dict[Process, int]:
    """How many processes its node has, for each of these that is there. Raises `LedgerUnavailable`."""
    asked = list(processes)
    with ledger_errors():
        async with redis.pipeline(transaction=False) as pipe:
            for node_id, process in asked:
                pipe.get(keys.proxy_present(node_id, process))
            found = await pipe.execute()
    return {process: int(count) for process, count in zip(asked, found, strict=True) if count is not None}


async def read_acks(redis: Redis, keys: Keys) -> list[PauseAck]:
    """One per proxy process. Raises `LedgerUnavailable`."""
    with ledger_errors():
        found = await redis.hgetall(keys.pause_acks)
    return [PauseAck.model_validate_json(record) for record in found.values()]


def _field(node_id: str, process: int) -> str:
    return f"{node_id}/{process}"


async def _forget_the_gone(redis: Redis, keys: Keys) -> None:
    """What processes said that are there no longer: as long as any proxy runs, the hash would keep it for ever."""
    acks = await read_acks(redis, keys)
    if acks:
        present = [keys.proxy_present(ack.node_id, ack.process) for ack in acks]
        await _FORGET.run(redis, [keys.pause_acks, *present], [_field(ack.node_id, ack.process) for ack in acks])
