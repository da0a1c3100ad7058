"""Runs the shim until it is told to stop: what `polarq serve` does."""

from __future__ import annotations

import asyncio
import errno
import logging
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from aiohttp import web

from polarq.client import AsyncClient
from polarq.errors import LedgerUnavailable, PolarqError
from polarq.http.access import Access
from polarq.http.app import build_app
from polarq.settings import Settings
from polarq.topology import Topology

log = logging.getLogger(__name__)

SHUTDOWN_S = 10.0
"""Time for requests in flight when the shim is told to stop."""


class CannotListen(PolarqError):
    """The address or port cannot be listened on."""


def _to_stderr(line: str) -> None:
    sys.stderr.write(f"{line}\n")
    sys.stderr.flush()


async def serve(
    topology: Topology,
    settings: Settings,
    host: str | None = None,
    port: int | None = None,
    *,
    say: Callable[[str], None] = _to_stderr,
) -> None:
    """Serves until SIGINT or SIGTERM, or until it is cancelled. `host` and `port` default to the topology's.

    Says its address once it listens, and the token when it had to make one up. Redis may be away at the start: the shim
    then answers 503 until it is there. Raises `CannotListen`.
    """
    host = topology.rollout.host if host is None else host
    port = topology.rollout.port if port is None else port
    rule = Access.for_bind(host, settings.token)
    async with AsyncClient(topology, settings) as client:
        app = build_app(client, topology, settings, rule=rule)
        runner = web.AppRunner(app, access_log=None, shutdown_timeout=SHUTDOWN_S)
        with _stop_signals() as stop:
            await runner.setup()
            try:
                address = await _listen(runner, host, port)
                await _announce(client, rule, address, say)
                await stop.wait()
            finally:
                await runner.cleanup()


async def _listen(runner: web.AppRunner, host: str, port: int) -> str:
    try:
        await web.TCPSite(runner, host, port).start()
    except OSError as exc:
        why = "the port is taken; stop what uses it or choose another with --port"
        if exc.errno != errno.EADDRINUSE:
            why = exc.strerror or str(exc)
        raise CannotListen(f"cannot listen on {host}:{port}: {why}") from None
    bound = runner.addresses[0][1]
    return f"http://{f'[{host}]' if ':' in host else host}:{bound}"


async def _announce(client: AsyncClient, rule: Access, address: str, say: Callable[[str], None]) -> None:
    say(f"polarq serves {address}")
    if rule.made_up:
        say(
            f"token of this run: {rule.token} (send it as 'Authorization: Bearer ...';"
            " set POLARQ_TOKEN to choose your own, or listen on 127.0.0.1 to need none)"
        )
    try:
        async with asyncio.timeout(2.0):
            await client.ledger.do(client.ledger.calls.last_event_id())
    except LedgerUnavailable as exc:
        say(f"serving without Redis until it is there: {exc}")
    except TimeoutError:
        say("serving without Redis until it is there: it did not answer within 2 s")


@contextmanager
def _stop_signals() -> Iterator[asyncio.Event]:
    """An event that SIGINT and SIGTERM set."""
    loop = asyncio.get_running_loop()
    stop = asyncio.Event()
    caught = (signal.SIGINT, signal.SIGTERM)
    for number in caught:
        loop.add_signal_handler(number, stop.set)
    try:
        yield stop
    finally:
        for number in caught:
            loop.remove_signal_handler(number)
