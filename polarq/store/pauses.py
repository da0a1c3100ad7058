"""A pause of all model calls, or of one run's, for a change of the policy's weights: a record in Redis that ends by
itself.

Every node's proxy reads it, stops admitting calls and says in the acknowledgements that it did, and how many calls are
still in flight. The record's expiry is its lease: a trainer that dies cannot leave the nodes paused.

Each proxy process also keeps a key that says it is there, so that one that hangs is waited for although it says nothing
and whatever its node's worker says, and one that is gone is not waited for any longer than the key lasts.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterable
from typing import Any, Literal, TypeVar

from pydantic import Field, ValidationError
from redis.asyncio import Redis

from polarq.contracts.base import Contract
from polarq.errors import LedgerUnavailable
from polarq.ledger.calls import Call, read_hash
from polarq.ledger.keys import Keys
from polarq.store.atomic import ledger_errors

T = TypeVar("T")

PauseMode = Literal["drain", "abort"]
ACK_KEEP_S = 600
PRESENCE_S = 60.0
"""How long a proxy process that says nothing may still have calls in flight."""

Process = tuple[str, int]
"""(node id, which of its proxy processes)"""

# What processes said that are there no longer: as long as any proxy runs, the hash would keep it for ever.
_FORGET = """
for _, field in ipairs(redis.call('HKEYS', KEYS[1])) do
  if redis.call('EXISTS', ARGV[1] .. field) == 0 then redis.call('HDEL', KEYS[1], field) end
end
"""

_NOW = "local t = redis.call('TIME') local now = t[1] * 1000 + math.floor(t[2] / 1000)"

# A run's pause is a field of a hash, with its end in front of it.
_PAUSE_RUN = f"""{_NOW}
local left = redis.call('PTTL', KEYS[1])
redis.call('HSET', KEYS[1], ARGV[1], string.format('%.0f', now + ARGV[2]) .. ' ' .. ARGV[3])
redis.call('PEXPIRE', KEYS[1], math.max(left, tonumber(ARGV[2])))
"""

_RESUME_RUN = f"""{_NOW}
local found = redis.call('HGET', KEYS[1], ARGV[1])
redis.call('HDEL', KEYS[1], ARGV[1])
return found and tonumber(string.match(found, '^%d+')) > now and 1 or 0
"""

_READ_ALL = f"""{_NOW}
local pauses = {{redis.call('GET', KEYS[1]) or ''}}
local runs = redis.call('HGETALL', KEYS[2])
for i = 2, #runs, 2 do
  local till, pause = string.match(runs[i], '^(%d+) (.*)$')
  if tonumber(till) > now then pauses[#pauses + 1] = pause else redis.call('HDEL', KEYS[2], runs[i - 1]) end
end
return pauses
"""


class Pause(Contract):
    """Why no call passes."""

    pause_id: str
    run_id: str = ""
    """Whose calls; blank: all."""
    mode: PauseMode = "drain"
    """drain: calls in flight end by themselves. abort: they are cut; what they sampled is kept."""


class RunAck(Contract):
    """What a node's proxy says of a pause of one run."""

    run_id: str
    pause_id: str
    in_flight: int = Field(0, ge=0)
    waiting: int = Field(0, ge=0)


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
    runs: tuple[RunAck, ...] = ()
    """The same of each run that is paused by itself."""

    def of_run(self, run_id: str) -> PauseAck:
        """What it says of that run's pause alone."""
        said = next((run for run in self.runs if run.run_id == run_id), RunAck(run_id=run_id, pause_id=""))
        update = {"pause_id": said.pause_id, "in_flight": said.in_flight, "waiting": said.waiting, "runs": ()}
        return self.model_copy(update=update)


# --- what is asked of Redis


def pausing(keys: Keys, *, lease_s: float, mode: PauseMode = "drain", run_id: str = "") -> Call[Pause]:
    """Pauses a run's calls, or without a run all, or prolongs and renews that pause. It ends after `lease_s`."""
    pause = Pause(pause_id=secrets.token_hex(8), run_id=run_id, mode=mode)
    lease_ms = max(1, int(lease_s * 1000))
    record = pause.model_dump_json()
    commands = (
        ("EVAL", _FORGET, 1, keys.pause_acks, keys.proxy_present("", 0).removesuffix("/0")),
        ("EVAL", _PAUSE_RUN, 1, keys.run_pauses, run_id, lease_ms, record)
        if run_id
        else ("SET", keys.pause, record, "PX", lease_ms),
    )
    return Call(lambda _: pause, commands=commands)


def resuming(keys: Keys, run_id: str = "") -> Call[bool]:
    """Whether there was a pause, of that run, or without a run of all."""
    command = ("EVAL", _RESUME_RUN, 1, keys.run_pauses, run_id) if run_id else ("DEL", keys.pause)
    return Call(lambda replies: bool(replies[0]), commands=(command,))


def all_pauses(keys: Keys) -> Call[dict[str, Pause]]:
    """Every pause by its run, under "" that of all. Raises `LedgerUnavailable` for a record that cannot be read."""

    def read(replies: list[Any]) -> dict[str, Pause]:
        try:
            pauses = [Pause.model_validate_json(record) for record in replies[0] if record]
        except ValidationError as exc:
            raise LedgerUnavailable(f"the record of a pause cannot be read: {exc.errors()[0]['msg']}") from exc
        return {pause.run_id: pause for pause in pauses}

    return Call(read, commands=(("EVAL", _READ_ALL, 2, keys.pause, keys.run_pauses),))


def all_acks(keys: Keys) -> Call[list[PauseAck]]:
    """What was said last, one per proxy process."""

    def read(replies: list[Any]) -> list[PauseAck]:
        return [PauseAck.model_validate_json(record) for record in read_hash(replies[0]).values()]

    return Call(read, commands=(("HGETALL", keys.pause_acks),))


def presence(keys: Keys, processes: Iterable[Process]) -> Call[dict[Process, int]]:
    """How many processes its node has, for each of these that is there."""
    asked = list(processes)

    def read(replies: list[Any]) -> dict[Process, int]:
        return {process: int(count) for process, count in zip(asked, replies, strict=True) if count is not None}

    return Call(read, commands=tuple(("GET", keys.proxy_present(*process)) for process in asked))


# --- the same, carried out; what a proxy does


async def _do(redis: Redis, call: Call[T]) -> T:
    if not call.commands:
        return call.read([])
    with ledger_errors():
        async with redis.pipeline(transaction=False) as pipe:
            for command in call.commands:
                pipe.execute_command(*command)
            replies = await pipe.execute()
    return call.read(replies)


async def read_pauses(redis: Redis, keys: Keys) -> dict[str, Pause]:
    """Raises `LedgerUnavailable`."""
    return await _do(redis, all_pauses(keys))


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


def _field(node_id: str, process: int) -> str:
    return f"{node_id}/{process}"
