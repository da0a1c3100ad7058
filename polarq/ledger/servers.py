"""Clients of Redis by its address: of one server, or of whichever the Sentinels say is the primary now.

Behind Sentinels every new connection asks them first, also one that a broken one is replaced by while it sends: by
itself the client library would send again to the server that was there before, which may hang and not refuse. A primary
that was demoted refuses writes; its connections are then made anew, to the one that was promoted.
"""

from __future__ import annotations

from typing import Any

import redis
import redis.asyncio
from redis import sentinel
from redis.asyncio import sentinel as asyncio_sentinel
from redis.asyncio.retry import Retry as AsyncRetry
from redis.backoff import NoBackoff
from redis.retry import Retry

from polarq.topology.redis_address import Sentinels

REPLICAS_WAIT_MS = 2000
"""How long one try waits for replicas."""

_NONE = "no Sentinel names a primary of '{}' that answers"
"""In one line; the client library lists its Sentinels with all of their settings."""


def sync_client(url: str, **options: Any) -> redis.Redis:
    """A client for threads; `options` are those of its connections. Raises ValueError for what is no address."""
    address = Sentinels.parse(url)
    if address is None:
        return redis.Redis.from_url(url, **options)
    asked = {**address.sentinel_options, "retry": Retry(NoBackoff(), 0)}
    manager = _Sentinels(address.hosts, sentinel_kwargs=asked)  # type: ignore[no-untyped-call]
    kind = _Connection if address.tls is None else _TLSConnection
    said = _connections(address, options)
    pool = _Pool(address.master, manager, connection_class=kind, **said)  # type: ignore[no-untyped-call]
    return redis.Redis.from_pool(pool)


def async_client(url: str, *, max_connections: int, timeout: float, **options: Any) -> redis.asyncio.Redis:
    """A client for one event loop, which waits up to `timeout` seconds for one of `max_connections` to be free.

    Raises ValueError for what is no address.
    """
    limits = {"max_connections": max_connections, "timeout": timeout}
    address = Sentinels.parse(url)
    if address is None:
        return redis.asyncio.Redis.from_pool(redis.asyncio.BlockingConnectionPool.from_url(url, **limits, **options))
    asked = {**address.sentinel_options, "retry": AsyncRetry(NoBackoff(), 0)}
    manager = _AsyncSentinels(address.hosts, sentinel_kwargs=asked)  # type: ignore[no-untyped-call]
    kind = _AsyncConnection if address.tls is None else _AsyncTLSConnection
    said = {**limits, **_connections(address, options)}
    pool = _AsyncPool(address.master, manager, connection_class=kind, **said)  # type: ignore[no-untyped-call]
    return redis.asyncio.Redis.from_pool(pool)


def _connections(address: Sentinels, options: dict[str, Any]) -> dict[str, Any]:
    return {**options, **address.login, "db": address.db, **(address.tls or {})}


class _Sentinels(sentinel.Sentinel):
    def discover_master(self, service_name: str) -> Any:
        try:
            return super().discover_master(service_name)  # type: ignore[no-untyped-call]
        except sentinel.MasterNotFoundError:
            raise sentinel.MasterNotFoundError(_NONE.format(service_name)) from None


class _AsyncSentinels(asyncio_sentinel.Sentinel):
    async def discover_master(self, service_name: str) -> Any:
        try:
            return await super().discover_master(service_name)
        except asyncio_sentinel.MasterNotFoundError:
            raise asyncio_sentinel.MasterNotFoundError(_NONE.format(service_name)) from None


class _Connection(sentinel.SentinelManagedConnection):
    def send_packed_command(self, command: Any, check_health: bool = True) -> Any:
        if not self.is_connected:
            self.connect()  # type: ignore[no-untyped-call]
        return super().send_packed_command(command, check_health)  # type: ignore[no-untyped-call]


class _TLSConnection(_Connection, sentinel.SentinelManagedSSLConnection):
    pass


class _AsyncConnection(asyncio_sentinel.SentinelManagedConnection):
    async def send_packed_command(self, command: Any, check_health: bool = True) -> None:
        if not self.is_connected:
            await self.connect()  # type: ignore[no-untyped-call]
        await super().send_packed_command(command, check_health)


class _AsyncTLSConnection(_AsyncConnection, asyncio_sentinel.SentinelManagedSSLConnection):
    pass


class _Pool(sentinel.SentinelConnectionPool):
    def close(self) -> None:
        super().close()
        self.sentinel_manager.close()


class _AsyncPool(asyncio_sentinel.SentinelConnectionPool, redis.asyncio.BlockingConnectionPool):
    """A full pool waits, as that of a single server does."""

    async def aclose(self) -> None:
        await super().aclose()
        await self.sentinel_manager.aclose()
