"""The proxy as a process: binds, says where, runs until it is told to stop, drains.

Where it listens: the node's host and port. A host of 0.0.0.0 or :: is narrowed to loopback unless the node has a
`public_url`, because sandboxes on this host need no more, and whoever can reach the proxy can spend the GPUs' time.
"""

from __future__ import annotations

import asyncio
import errno
import json
import logging
import os
import signal
import sys
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

from aiohttp import web
from redis.asyncio import BlockingConnectionPool, Redis
from redis.asyncio.retry import Retry
from redis.backoff import ExponentialBackoff
from redis.exceptions import AuthenticationError, RedisError

from polarq.errors import LedgerUnavailable, PolarqError
from polarq.ledger.keys import Keys
from polarq.settings import Settings
from polarq.topology import Node, load_topology, redis_url
from polarq_proxy.admin import admin_app
from polarq_proxy.app import SERVER_OPTIONS, Proxy

log = logging.getLogger("polarq.proxy")

DRAIN_S = 10.0
BACKLOG = 4096
REDIS_CONNECTIONS = 64
_ANYWHERE = frozenset({"0.0.0.0", "::", ""})


class CannotListen(PolarqError):
    """The address is taken or not ours."""


@dataclass(frozen=True, slots=True)
class ServeOptions:
    """What the command line says. `port` None: the topology's; 0: any free one."""

    node_id: str
    topology: Path | None = None
    port: int | None = None
    port_file: Path | None = None
    parent_pid: int | None = None


async def serve(options: ServeOptions, settings: Settings, env: Mapping[str, str]) -> None:
    """Runs until SIGTERM, SIGINT or the parent's death. Raises `PolarqError` when it cannot begin."""
    topology = load_topology(options.topology, settings)
    node = topology.resolve(options.node_id)
    url = redis_url(topology, settings)
    stop = _stop_signals()
    redis = connect(url)
    try:
        await _answers(redis, url)
        proxy = Proxy(node, redis, Keys(topology.redis.prefix), env=env, keep_s=topology.retention.result_s)
        await _run(proxy, node, options, stop, settings.token)
    finally:
        await redis.aclose()


def connect(url: str) -> Redis:
    """A client that waits for a free connection instead of failing, and retries for a second, not for ten."""
    pool = BlockingConnectionPool.from_url(
        url,
        max_connections=REDIS_CONNECTIONS,
        timeout=5,
        socket_timeout=5,
        socket_connect_timeout=3,
        health_check_interval=30,
        retry=Retry(ExponentialBackoff(cap=0.5, base=0.05), 3),
    )
    return Redis.from_pool(pool)


def bound_host(node: Node) -> str:
    if node.host in _ANYWHERE and not node.public_url.strip():
        return "::1" if node.host == "::" else "127.0.0.1"
    return node.host


async def _run(proxy: Proxy, node: Node, options: ServeOptions, stop: asyncio.Event, token: str | None) -> None:
    runner = web.AppRunner(proxy.app(), shutdown_timeout=DRAIN_S, **SERVER_OPTIONS)
    await runner.setup()
    watching: asyncio.Task[None] | None = None
    admin: web.AppRunner | None = None
    try:
        await proxy.start()
        url = await _listen(runner, node, options)
        await _listen_on_socket(runner, node)
        admin = await _administrated(proxy, node, token)
        if options.port_file is not None:
            write_port_file(options.port_file, url)
        if options.parent_pid is not None:
            watching = asyncio.create_task(_parent_gone(options.parent_pid, stop))
        sys.stdout.write(f"polarq proxy of {node.id} is ready on {url}\n")
        sys.stdout.flush()
        await stop.wait()
        log.info("stopping: calls in flight have %g s to end", DRAIN_S)
    finally:
        if watching is not None:
            watching.cancel()
        await runner.cleanup()
        if admin is not None:
            await admin.cleanup()
        await proxy.close()
        if options.port_file is not None:
            options.port_file.unlink(missing_ok=True)


async def _listen(runner: web.AppRunner, node: Node, options: ServeOptions) -> str:
    host = bound_host(node)
    port = node.port if options.port is None else options.port
    try:
        await web.TCPSite(runner, host, port, backlog=BACKLOG).start()
    except OSError as exc:
        if exc.errno == errno.EADDRINUSE:
            text = f"{host}:{port} is taken: stop what listens there, or change the node's port in the topology"
        else:
            text = f"cannot listen on {host}:{port}: {exc.strerror or exc}; see the node's host in the topology"
        raise CannotListen(text) from None
    port = runner.addresses[0][1]
    reach = "127.0.0.1" if host in _ANYWHERE else host
    return f"http://{f'[{reach}]' if ':' in reach else reach}:{port}"


async def _listen_on_socket(runner: web.AppRunner, node: Node) -> None:
    """Also on the node's Unix socket, if it has one. A socket that a dead proxy left is replaced."""
    if not node.proxy.unix_socket:
        return
    path = Path(node.proxy.unix_socket).expanduser()
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.is_socket():
            if await _somebody_listens(path):
                raise CannotListen(f"{path} is taken by another proxy: see proxy.unix_socket in the topology")
            path.unlink()
        await web.UnixSite(runner, path, backlog=BACKLOG).start()
        path.chmod(0o666)  # sandboxes run under other users, and a session's secret is what opens it
    except OSError as exc:
        raise CannotListen(f"cannot listen on {path}: {exc.strerror or exc}; see proxy.unix_socket") from None


async def _somebody_listens(path: Path) -> bool:
    try:
        _, writer = await asyncio.open_unix_connection(path)
    except OSError:
        return False
    writer.close()
    return True


async def _administrated(proxy: Proxy, node: Node, token: str | None) -> web.AppRunner | None:
    """The operator's side, if the node has one."""
    port, host = node.proxy.admin_port, node.proxy.admin_host
    if port is None:
        return None
    if token is None:
        raise CannotListen("proxy.admin_port needs a token: set POLARQ_TOKEN where the node's worker or proxy runs")
    runner = web.AppRunner(admin_app(proxy, token), access_log=None)
    await runner.setup()
    try:
        await web.TCPSite(runner, host, port).start()
    except OSError as exc:
        await runner.cleanup()
        raise CannotListen(f"cannot listen on {host}:{port}: {exc.strerror or exc}; see proxy.admin_port") from None
    log.info("the operator's side is on http://%s:%d", host, port)
    return runner


def write_port_file(path: Path, url: str) -> None:
    """`{"url", "pid"}`, whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    draft.write_text(json.dumps({"url": url, "pid": os.getpid()}) + "\n", encoding="utf-8")
    draft.replace(path)


async def _answers(redis: Redis, url: str) -> None:
    parts = urlsplit(url)
    where = f"Redis at {parts.scheme}://{parts.hostname or ''}{f':{parts.port}' if parts.port else ''}{parts.path}"
    try:
        await redis.ping()
    except AuthenticationError:
        text = f"{where} refuses the user or password: correct them in POLARQ_REDIS_URL or redis.url in the topology"
        raise LedgerUnavailable(text) from None
    except (RedisError, OSError) as exc:
        text = f"{where} does not answer ({exc}): start it, or set POLARQ_REDIS_URL or redis.url in the topology"
        raise LedgerUnavailable(text) from None


def _stop_signals() -> asyncio.Event:
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    return stop


async def _parent_gone(pid: int, stop: asyncio.Event) -> None:
    """Sets `stop` when process `pid` ends."""
    loop = asyncio.get_running_loop()
    gone = asyncio.Event()
    try:
        handle = os.pidfd_open(pid)
    except ProcessLookupError:
        stop.set()
        return
    except (AttributeError, OSError):  # not Linux, or an old kernel
        await _poll(pid, stop)
        return
    loop.add_reader(handle, gone.set)
    try:
        await gone.wait()
        stop.set()
    finally:
        loop.remove_reader(handle)
        os.close(handle)


async def _poll(pid: int, stop: asyncio.Event) -> None:
    with suppress(ProcessLookupError):
        while True:
            os.kill(pid, 0)
            await asyncio.sleep(0.5)
    stop.set()
