"""Pauses set and looked at straight in Redis."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TypeVar

from redis.asyncio import Redis

from polarq.ledger.calls import Call
from polarq.ledger.keys import Keys
from polarq.store.pauses import (
    Pause,
    PauseAck,
    PauseMode,
    Process,
    all_acks,
    pausing,
    presence,
    read_pauses,
    resuming,
)

T = TypeVar("T")


async def set_pause(redis: Redis, keys: Keys, *, lease_s: float, mode: PauseMode = "drain", run_id: str = "") -> Pause:
    return await _do(redis, pausing(keys, lease_s=lease_s, mode=mode, run_id=run_id))


async def clear_pause(redis: Redis, keys: Keys, run_id: str = "") -> bool:
    return await _do(redis, resuming(keys, run_id))


async def read_pause(redis: Redis, keys: Keys, run_id: str = "") -> Pause | None:
    """That of a run, or without a run that of all."""
    return (await read_pauses(redis, keys)).get(run_id)


async def read_acks(redis: Redis, keys: Keys) -> list[PauseAck]:
    return await _do(redis, all_acks(keys))


async def read_presence(redis: Redis, keys: Keys, processes: Iterable[Process]) -> dict[Process, int]:
    return await _do(redis, presence(keys, processes))


async def _do(redis: Redis, call: Call[T]) -> T:
    return call.read([await redis.execute_command(*command) for command in call.commands])
