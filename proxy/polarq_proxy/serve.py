"""The proxy as a process: binds, says where, runs until it is told to stop, drains.

Where it listens: the node's host and port. A host of 0.0.0.0 or :: is narrowed to loopback unless the node has a
`public_url`, because sandboxes on this host need no more, and whoever can reach the proxy can spend the GPUs' time.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import signal
import socket
import sys
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from aiohttp import web
from redis.asyncio import Redis
from redis.asyncio.retry import Retry
from redis.backoff import ExponentialBackoff
from redis.exceptions import AuthenticationError, RedisError

from polarq.errors import LedgerUnavailable
from polarq.ledger.keys import Keys
from polarq.ledger.servers import async_client
from polarq.settings import Settings
from polarq.topology import Node, load_topology, redis_url
from polarq.topology.redis_address import without_password
from polarq_proxy.admin import admin_app
from polarq_proxy.app import Proxy
from polarq_proxy.front import READY, Front
from polarq_proxy.listening import ANYWHERE, CannotListen, Doors, abstract_socket, bound_host, tcp_sockets, unix_socket
from polarq_proxy.peers import Peers

log = logging.getLogger("polarq.proxy")

DRAIN_S = 10.0
REDIS_CONNECTIONS = 64


@dataclass(frozen=True, slots=True)
class ServeOptions:
    """What the command line says. `port` None: the topology's; 0: any free one."""

    node_id: str
    topology: Path | None = None
    port: int | None = None
    port_file: Path | None = None
    parent_pid: int | None = None
    process: int = 0
    """Which of `processes` this is."""
    processes: int = 1
    channel: int | None = None
    """File descriptor on which a front hands connections over; None: this process listens itself."""
    peers: Path | None = None
    """Folder of the sockets by which the processes reach each other."""
    relay: str = ""
    """Name of an abstract Unix socket, where the worker's relay brings what sandboxes send; empty: none. Who comes this
    way is never taken for the machine itself."""


async def serve(options: ServeOptions, settings: Settings, env: Mapping[str, str]) -> None:
    """Runs until SIGTERM, SIGINT or the parent's death. Raises `PolarqError` when it cannot begin."""
    topology = load_topology(options.topology, settings)
    node = topology.resolve(options.node_id)
    url = redis_url(topology, settings)
    stop = _stop_signals()
    redis = connect(url)
    try:
        await _answers(redis, url)
        if options.channel is None and node.proxy.processes > 1:
            await _lead(node, options, stop)
            return
        peers = None if options.peers is None else Peers(options.peers, options.process, options.processes)
        keys, keep_s = Keys(topology.redis.prefix), topology.retention.result_s
        replicas = topology.redis.wait_replicas
        proxy = Proxy(node, redis, keys, env=env, keep_s=keep_s, peers=peers, token=settings.token, replicas=replicas)
        await _run(proxy, node, options, stop, settings.token)
    finally:
        await redis.aclose()


def connect(url: str) -> Redis:
    """A client that waits for a free connection instead of failing, and retries for a second, not for ten."""
    return async_client(
        url,
        max_connections=REDIS_CONNECTIONS,
        timeout=5,
        socket_timeout=5,
        socket_connect_timeout=3,
        health_check_interval=30,
        retry=Retry(ExponentialBackoff(cap=0.5, base=0.05), 3),
    )


async def _run(proxy: Proxy, node: Node, options: ServeOptions, stop: asyncio.Event, token: str | None) -> None:
    """One process that serves: at its own sockets, or what the front hands to it."""
    runner = web.ServerRunner(proxy.server(), shutdown_timeout=DRAIN_S)
    await runner.setup()
    doors = Doors(runner)
    admin: web.AppRunner | None = None
    try:
        await proxy.start()
        admin = await _administrated(proxy, node, token, options.process)
        async with _until(stop, options.parent_pid):
            if options.channel is None:
                listening = _sockets(node, options)
                for one in listening:
                    await doors.open(one)
                with _announced(node, options, _url(node, listening[0])):
                    await stop.wait()
            else:
                assert proxy.peers is not None
                await doors.open(unix_socket(proxy.peers.path, 0o600))
                with _handed_over(options.channel, doors):
                    await stop.wait()
        log.info("stopping: calls in flight have %g s to end", DRAIN_S)
    finally:
        doors.close()
        await runner.cleanup()
        if admin is not None:
            await admin.cleanup()
        await proxy.close()


async def _lead(node: Node, options: ServeOptions, stop: asyncio.Event) -> None:
    """The front of several processes."""
    listening = _sockets(node, options)
    arguments = ["--node", options.node_id]
    if options.topology is not None:
        arguments += ["--topology", str(options.topology)]
    front = Front(listening, node.proxy.processes, arguments)
    try:
        await front.start()
        async with _until(stop, options.parent_pid):
            with _announced(node, options, _url(node, listening[0])):
                await stop.wait()
    finally:
        await front.stop()


def _sockets(node: Node, options: ServeOptions) -> list[socket.socket]:
    """Every socket the node listens on, the TCP one first. Raises `CannotListen`."""
    port = node.port if options.port is None else options.port
    found = tcp_sockets(bound_host(node), port, host_from="the node's host", port_from="the node's port")
    if node.proxy.unix_socket:
        # Sandboxes run under other users, and a session's secret is what opens it.
        found.append(unix_socket(Path(node.proxy.unix_socket).expanduser(), 0o666))
    if options.relay:
        found.append(abstract_socket(options.relay))
    return found


def _url(node: Node, listening: socket.socket) -> str:
    host = bound_host(node)
    reach = "127.0.0.1" if host in ANYWHERE else host
    return f"http://{f'[{reach}]' if ':' in reach else reach}:{listening.getsockname()[1]}"


@contextmanager
def _announced(node: Node, options: ServeOptions, url: str) -> Iterator[None]:
    if options.port_file is not None:
        write_port_file(options.port_file, url)
    sys.stdout.write(f"polarq proxy of {node.id} is ready on {url}\n")
    sys.stdout.flush()
    try:
        yield
    finally:
        if options.port_file is not None:
            options.port_file.unlink(missing_ok=True)


@contextmanager
def _handed_over(channel_fd: int, doors: Doors) -> Iterator[None]:
    """Takes the connections that the front sends through the channel, from now on."""
    loop = asyncio.get_running_loop()
    adopting: set[asyncio.Task[None]] = set()
    with socket.socket(fileno=channel_fd) as channel:
        channel.setblocking(False)

        def take() -> None:
            try:
                _, fds, _, _ = socket.recv_fds(channel, 1, 1)
            except BlockingIOError:
                return
            if not fds:
                loop.remove_reader(channel.fileno())  # the front is gone; so will be its pid
            for fd in fds:
                task = loop.create_task(doors.adopt(socket.socket(fileno=fd)))
                adopting.add(task)
                task.add_done_callback(adopting.discard)

        loop.add_reader(channel.fileno(), take)
        channel.send(READY)
        try:
            yield
        finally:
            loop.remove_reader(channel.fileno())


@asynccontextmanager
async def _until(stop: asyncio.Event, parent_pid: int | None) -> AsyncIterator[None]:
    """Sets `stop` when the parent ends."""
    watching = None if parent_pid is None else asyncio.create_task(_parent_gone(parent_pid, stop))
    try:
        yield
    finally:
        if watching is not None:
            watching.cancel()


async def _administrated(proxy: Proxy, node: Node, token: str | None, process: int) -> web.AppRunner | None:
    """The operator's side, if the node has one. Each further process has the next port."""
    port, host = node.proxy.admin_port, node.proxy.admin_host
    if port is None:
        return None
    if token is None:
        raise CannotListen("proxy.admin_port needs a token: set POLARQ_TOKEN where the node's worker or proxy runs")
    runner = web.AppRunner(admin_app(proxy, token), access_log=None)
    await runner.setup()
    try:
        setting = f"proxy.admin_port ({port}; each process has the next one)" if process else "proxy.admin_port"
        for one in tcp_sockets(host, port + process, host_from="proxy.admin_host", port_from=setting):
            await web.SockSite(runner, one).start()
    except CannotListen:
        await runner.cleanup()
        raise
    log.info("the operator's side is on http://%s:%d", host, port + process)
    return runner


def write_port_file(path: Path, url: str) -> None:
    """`{"url", "pid"}`, whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    draft.write_text(json.dumps({"url": url, "pid": os.getpid()}) + "\n", encoding="utf-8")
    draft.replace(path)


async def _answers(redis: Redis, url: str) -> None:
    where = f"Redis at {without_password(url.partition('?')[0])}"
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
