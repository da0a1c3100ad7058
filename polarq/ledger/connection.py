"""Carries out calls, sync or async, and turns Redis' errors into one clear line.

A script is called by its digest; when Redis has lost it (restart, failover, SCRIPT FLUSH) it is sent in full, once.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from typing import Any, Self, TypeVar

from redis import Redis
from redis import exceptions as redis_errors
from redis.asyncio import Redis as AsyncRedis
from redis.asyncio.retry import Retry as AsyncRetry
from redis.backoff import ExponentialBackoff
from redis.retry import Retry

from polarq.contracts.event import Event
from polarq.contracts.node import NodeRecord
from polarq.errors import LedgerUnavailable, NotReplicated
from polarq.ledger.admission import Admission
from polarq.ledger.calls import Call, Calls, Server, read_event
from polarq.ledger.keys import Keys
from polarq.ledger.refusal import unavailable
from polarq.ledger.scripts import Script
from polarq.ledger.servers import REPLICAS_WAIT_MS, async_client, sync_client
from polarq.topology.models import Topology
from polarq.topology.redis_address import with_tls

T = TypeVar("T")

log = logging.getLogger("polarq.ledger")

SOCKET_OPTIONS: dict[str, Any] = {
    "socket_connect_timeout": 5.0,
    "socket_timeout": 30.0,
    "socket_keepalive": True,
    "health_check_interval": 10,
}
_RETRIED: tuple[type[redis_errors.RedisError], ...] = (redis_errors.ConnectionError, redis_errors.TimeoutError)


def calls_for(topology: Topology) -> Calls:
    """Key layout and retention of a deployment."""
    retention = topology.retention
    admission = Admission.of(topology.limits, topology.redis.memory_budget)
    redis = topology.redis
    addresses: dict[Server, str | None] = {"payloads": redis.payload_url, "queues": redis.broker_url}
    elsewhere = {server: with_tls(url, redis.tls_ca) for server, url in addresses.items() if url is not None}
    keep_s = int(retention.result_s)
    return Calls(Keys(redis.prefix), retention.events, keep_s, admission, elsewhere, redis.wait_replicas)


@contextmanager
def _translated(url: str) -> Iterator[None]:
    try:
        yield
    except (redis_errors.RedisError, OSError) as exc:
        raise unavailable(exc, url) from exc


@asynccontextmanager
async def _translated_async(url: str) -> AsyncIterator[None]:
    """As `_translated`; and a cancellation that came meanwhile ends the caller.

    The client library sends through `asyncio.wait_for`, which before Python 3.12 swallows a cancellation that comes
    just when the send is done: the caller would go on as if nobody had stopped it.
    """
    task = asyncio.current_task()
    before = task.cancelling() if task is not None else 0
    with _translated(url):
        yield
    if task is not None and task.cancelling() > before:
        raise asyncio.CancelledError


async def _at_once(blocking: Awaitable[T]) -> T:
    """Awaits a call that blocks at the server; a cancellation ends it now and not when the server answers."""
    calling = asyncio.ensure_future(blocking)
    try:
        await asyncio.wait({calling})
    finally:
        while not calling.done():
            calling.cancel()
            await asyncio.wait({calling}, timeout=0.05)
        if not calling.cancelled():
            calling.exception()  # seen; a caller that was cancelled does not ask for it
    return calling.result()


class Ledger:
    """The ledger for threads: trainers, the command line, Celery tasks."""

    def __init__(self, url: str, calls: Calls) -> None:
        self.url = url
        self.calls = calls
        self.redis = _sync(url)
        self._others = {server: _sync(other) for server, other in calls.elsewhere.items()}

    def do(self, call: Call[T]) -> T:
        """Carries out one call. Raises `LedgerUnavailable`, and what the call itself raises."""
        with _translated(self.calls.elsewhere.get(call.at, self.url)):
            reply = self._send(call, self._others.get(call.at, self.redis))
        return call.read(reply)

    def _send(self, call: Call[Any], redis: Redis) -> Any:
        if call.script is None:
            pipe = redis.pipeline(transaction=False)
            for command in call.commands:
                pipe.execute_command(*command)
            return pipe.execute() if call.commands else []
        if call.replicas:
            pipe = redis.pipeline(transaction=False)
            for known in (True, False):
                for command in _to_replicas(call, call.script, self.calls.keys, known=known):
                    pipe.execute_command(*command)
                replies = pipe.execute(raise_on_error=False)
                if not isinstance(replies[0], redis_errors.NoScriptError):
                    break
            return _on_replicas(call, replies)
        tail = (len(call.keys), *call.keys, *call.args)
        try:
            return redis.execute_command("EVALSHA", call.script.sha1, *tail)
        except redis_errors.NoScriptError:
            return redis.execute_command("EVAL", call.script.source, *tail)

    def nodes(self) -> list[NodeRecord]:
        """Every node that announced itself, with liveness, flags and queue depth."""
        rows = self.do(self.calls.node_records())
        states = self.do(self.calls.node_states([i for i, _ in rows]))
        depths = self.calls.depths_elsewhere(list(states))
        if depths is None:
            return merge_nodes(rows, states)
        try:
            known = self.do(depths)
        except LedgerUnavailable as exc:
            log.warning("how much waits in the queues is not known: %s", exc)
            known = {}
        return merge_nodes(rows, states, known)

    def wait_events(self, after: str, timeout_s: float) -> list[Event]:
        """Blocks until there are events after `after`, at most `timeout_s`; empty when there were none."""
        with _translated(self.url):
            reply = self.redis.xread({self.calls.keys.events: after}, count=500, block=max(1, int(timeout_s * 1000)))
        return stream_entries(reply)

    def close(self) -> None:
        for client in (self.redis, *self._others.values()):
            client.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class AsyncLedger:
    """The ledger for one asyncio loop: the worker's engine, the shim."""

    def __init__(self, url: str, calls: Calls, *, max_connections: int = 64) -> None:
        self.url = url
        self.calls = calls
        self.redis = _async(url, max_connections)
        self._others = {server: _async(other, max_connections) for server, other in calls.elsewhere.items()}

    async def do(self, call: Call[T]) -> T:
        """Carries out one call. Raises `LedgerUnavailable`, and what the call itself raises."""
        async with _translated_async(self.calls.elsewhere.get(call.at, self.url)):
            reply = await self._send(call, self._others.get(call.at, self.redis))
        return call.read(reply)

    async def do_blocking(self, call: Call[T]) -> T:
        """As `do`, for a call that may wait at the server: cancelling it ends it at once."""
        return await _at_once(self.do(call))

    async def _send(self, call: Call[Any], redis: AsyncRedis) -> Any:
        if call.script is None:
            pipe = redis.pipeline(transaction=False)
            for command in call.commands:
                pipe.execute_command(*command)
            return await pipe.execute() if call.commands else []
        if call.replicas:
            pipe = redis.pipeline(transaction=False)
            for known in (True, False):
                for command in _to_replicas(call, call.script, self.calls.keys, known=known):
                    pipe.execute_command(*command)
                replies = await pipe.execute(raise_on_error=False)
                if not isinstance(replies[0], redis_errors.NoScriptError):
                    break
            return _on_replicas(call, replies)
        tail = (len(call.keys), *call.keys, *call.args)
        try:
            return await redis.execute_command("EVALSHA", call.script.sha1, *tail)
        except redis_errors.NoScriptError:
            return await redis.execute_command("EVAL", call.script.source, *tail)

    async def nodes(self) -> list[NodeRecord]:
        """Every node that announced itself, with liveness, flags and queue depth."""
        rows = await self.do(self.calls.node_records())
        states = await self.do(self.calls.node_states([i for i, _ in rows]))
        depths = self.calls.depths_elsewhere(list(states))
        if depths is None:
            return merge_nodes(rows, states)
        try:
            known = await self.do(depths)
        except LedgerUnavailable as exc:
            log.warning("how much waits in the queues is not known: %s", exc)
            known = {}
        return merge_nodes(rows, states, known)

    async def wait_events(self, after: str, timeout_s: float) -> list[Event]:
        """Waits until there are events after `after`, at most `timeout_s`; empty when there were none."""
        async with _translated_async(self.url):
            block = max(1, int(timeout_s * 1000))
            reply = await _at_once(self.redis.xread({self.calls.keys.events: after}, count=500, block=block))
        return stream_entries(reply)

    async def aclose(self) -> None:
        for client in (self.redis, *self._others.values()):
            await client.aclose()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()


def _to_replicas(call: Call[Any], script: Script, keys: Keys, *, known: bool) -> Iterator[tuple[Any, ...]]:
    """A script, and the wait for replicas of what its connection wrote."""
    first = ("EVALSHA", script.sha1) if known else ("EVAL", script.source)
    yield (*first, len(call.keys), *call.keys, *call.args)
    yield ("SET", keys.replicated, 1, "PX", 60_000)
    yield ("WAIT", call.replicas, REPLICAS_WAIT_MS)


def _on_replicas(call: Call[Any], replies: list[Any]) -> Any:
    for reply in replies:
        if isinstance(reply, Exception):
            raise reply
    answer, _, have = replies
    if int(have) < call.replicas:
        raise NotReplicated(int(have), call.replicas)
    return answer


def _sync(url: str) -> Redis:
    try:
        return sync_client(url, **SOCKET_OPTIONS, retry=Retry(ExponentialBackoff(1.0, 0.05), 3, _RETRIED))
    except (ValueError, redis_errors.RedisError) as exc:
        raise unavailable(exc, url) from exc


def _async(url: str, max_connections: int) -> AsyncRedis:
    retry = AsyncRetry(ExponentialBackoff(1.0, 0.05), 3, _RETRIED)
    try:
        return async_client(url, max_connections=max_connections, timeout=30, **SOCKET_OPTIONS, retry=retry)
    except ValueError as exc:
        raise unavailable(exc, url) from exc


def merge_nodes(
    rows: list[tuple[str, str]],
    states: dict[str, tuple[bool, dict[str, str], int]],
    depths: Mapping[str, int] | None = None,
) -> list[NodeRecord]:
    """The records with what is true of them now; `depths` of queues that are elsewhere."""
    records = []
    for node_id, body in rows:
        alive, flags, depth = states[node_id]
        record = NodeRecord.stored(body)
        records.append(
            record.model_copy(
                update={
                    "alive": alive,
                    "draining": flags.get("draining") == "1",
                    "paused": flags.get("paused") == "1",
                    "queue_depth": (depths or {}).get(node_id, depth),
                }
            )
        )
    return records


def stream_entries(reply: Any) -> list[Event]:
    """The events in a reply to XREAD of one stream."""
    streams = reply.values() if isinstance(reply, dict) else [entries for _, entries in reply or []]
    events = []
    for entries in streams:
        # RESP3 wraps the entries of a stream once more.
        flat = entries[0] if entries and isinstance(entries[0], list) else entries
        events += [read_event(event_id, fields) for event_id, fields in flat]
    return events
