"""Lua scripts that Redis runs as one step, and what an unusable Redis is called."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

from redis.asyncio import Redis
from redis.asyncio.connection import AbstractConnection
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import NoScriptError, RedisError, ResponseError

from polarq.errors import LedgerUnavailable, NotReplicated
from polarq.ledger.servers import REPLICAS_WAIT_MS


class Script:
    """Called by digest; sent in full when the server does not know it (a restart, a failover, SCRIPT FLUSH)."""

    def __init__(self, source: str) -> None:
        self.source = source
        self.sha1 = hashlib.sha1(source.encode(), usedforsecurity=False).hexdigest()

    async def run(self, redis: Redis, keys: Sequence[str], args: Sequence[str | bytes | int | float]) -> Any:
        with ledger_errors():
            try:
                return await redis.evalsha(self.sha1, len(keys), *keys, *args)
            except NoScriptError:
                return await redis.eval(self.source, len(keys), *keys, *args)


MAX_BATCH = 64
LIMIT_S = 10.0
"""How long a call of a `ScriptLine` waits for Redis."""


@dataclass(slots=True)
class _Waiting:
    arguments: list[bytes]
    """Of EVALSHA or EVAL: what follows the script."""
    answer: asyncio.Future[Any]
    deadline: float
    """In the loop's time."""

    def settle(self, answer: Any) -> None:
        if self.answer.done():
            return
        if isinstance(answer, ResponseError):
            self.answer.set_exception(answer)
        else:
            self.answer.set_result(answer)


class ScriptLine:
    """One script called by many at once: those who call while Redis is busy with others share the next round trip.

    Holds one connection of the client's pool, because taking one out for each call costs more than the call. A round
    whose connection breaks is sent again, so that the script may run twice: it must be one that bears it.
    """

    def __init__(self, redis: Redis, script: Script, limit_s: float = LIMIT_S, *, replicas: int = 0) -> None:
        """`replicas`: how many must have what the script wrote before it counts as done."""
        self._pool = redis.connection_pool
        self._script = script
        self._replicas = replicas
        self._limit_s = limit_s
        self._connection: AbstractConnection | None = None
        self._used = False
        self._waiting: list[_Waiting] = []
        self._work: asyncio.Task[None] | None = None

    async def run(self, keys: Sequence[str], args: Sequence[bytes]) -> Any:
        """What the script returns. Raises `LedgerUnavailable`."""
        loop = asyncio.get_running_loop()
        arguments = [b"%d" % len(keys), *[key.encode() for key in keys], *args]
        call = _Waiting(arguments, loop.create_future(), loop.time() + self._limit_s)
        self._waiting.append(call)
        if self._work is None or self._work.done():
            self._work = asyncio.create_task(self._rounds())
        with ledger_errors():
            return await call.answer

    async def _rounds(self) -> None:
        while self._waiting:
            calls, self._waiting = self._waiting[:MAX_BATCH], self._waiting[MAX_BATCH:]
            try:
                async with asyncio.timeout_at(calls[0].deadline) as limit:
                    await self._round([b"EVALSHA", self._script.sha1.encode()], calls)
                    await self._round([b"EVAL", self._script.source.encode()], calls)
            except Exception as exc:  # whatever it is, it is the callers' to raise: none of them may wait for ever
                if isinstance(exc, TimeoutError) and limit.expired():
                    await self._given_up(calls)
                    continue
                for call in calls:
                    if not call.answer.done():
                        call.answer.set_exception(exc)

    async def _given_up(self, calls: list[_Waiting]) -> None:
        """Redis took longer than the first of them may wait; the others are asked again, on a new connection."""
        now = asyncio.get_running_loop().time()
        left = [call for call in calls if not call.answer.done()]
        for call in left:
            if call.deadline <= now:
                call.answer.set_exception(LedgerUnavailable(f"Redis did not answer within {self._limit_s:g} s"))
        self._waiting[:0] = [call for call in left if call.deadline > now]
        self._used = False
        if self._connection is not None:
            with suppress(RedisError, OSError):
                await self._connection.disconnect(nowait=True)

    async def _round(self, command: list[bytes], calls: list[_Waiting]) -> None:
        """Sends the calls and answers them; those for which Redis did not know the script stay open."""
        if all(call.answer.done() for call in calls):
            return
        if self._connection is None:
            self._connection = await self._pool.get_connection()
        connection = self._connection
        if self._used:
            # An idle connection may have been closed meanwhile, which says nothing about whether Redis is there.
            try:
                await self._exchange(connection, command, calls)
            except (RedisConnectionError, OSError):
                self._used = False
                await connection.disconnect()
            else:
                return
        await connection.retry.call_with_retry(
            lambda: self._exchange(connection, command, calls), lambda error: connection.disconnect()
        )
        self._used = True

    async def _exchange(self, connection: AbstractConnection, command: list[bytes], calls: list[_Waiting]) -> None:
        open_calls = [call for call in calls if not call.answer.done()]
        packed = [_packed([*command, *call.arguments]) for call in open_calls]
        if self._replicas:
            packed.append(_packed([b"WAIT", b"%d" % self._replicas, b"%d" % REPLICAS_WAIT_MS]))
        await connection.send_packed_command(packed)
        held: list[tuple[_Waiting, Any]] = []
        for call in open_calls:
            answer: Any
            try:
                answer = await connection.read_response(disable_decoding=True)
            except NoScriptError:
                continue
            except ResponseError as exc:
                answer = exc
            if self._replicas:
                held.append((call, answer))
            else:
                call.settle(answer)
        if self._replicas:
            have = int(await connection.read_response(disable_decoding=True))
            if held and have < self._replicas:
                raise NotReplicated(have, self._replicas)
        for call, answer in held:
            call.settle(answer)


def _packed(parts: Sequence[bytes]) -> bytes:
    """A command as Redis reads it."""
    pieces = [b"*%d\r\n" % len(parts)]
    for part in parts:
        pieces += (b"$%d\r\n" % len(part), part, b"\r\n")
    return b"".join(pieces)


@contextmanager
def ledger_errors() -> Iterator[None]:
    """Whatever keeps Redis from answering becomes `LedgerUnavailable`."""
    try:
        yield
    except (RedisError, OSError) as exc:
        raise LedgerUnavailable(f"Redis did not do its part: {type(exc).__name__}: {exc}") from exc
