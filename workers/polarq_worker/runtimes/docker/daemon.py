"""The daemon: where it is, how it is spoken to, and its answers as errors of ours."""

from __future__ import annotations

import asyncio
import os
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import aiohttp
from aiodocker import Docker, DockerError

from polarq.docker_daemon import daemon_address
from polarq.errors import BackendAway, DiskFull, RuntimeFault
from polarq_worker.runtimes.base import Host

ANSWER_S = 120.0
"""How long the daemon may take for something that is done at once (it is slow when its disk is)."""
NOT_CONNECTED = 900
"""Status that aiodocker gives an answer that never came."""


class Refusal(RuntimeFault):
    """The daemon answered, and said no. `status` is HTTP's."""

    def __init__(self, message: str, status: int) -> None:
        self.status = status
        super().__init__(message)


def address(host: Host) -> str:
    """The daemon's: the topology's, DOCKER_HOST, or the first of the usual sockets. Raises `BackendAway`."""
    if url := daemon_address(host.settings.docker.url):
        return url
    raise BackendAway("no Docker daemon is found on this node; start one, or set runtimes.docker.url of the node")


def connect(host: Host) -> Docker:
    """Connects when it is first asked something; whoever called closes it. Raises `BackendAway`."""
    url = address(host)
    scheme, _, place = url.partition("://")
    if scheme == "unix":
        # A connection stays open for as long as something that a command left behind may print: no limit.
        return _OverOurs("http://docker", aiohttp.UnixConnector(place, limit=0))
    if scheme in {"tcp", "http", "https"} and place:
        context = _certificates() if scheme == "https" or os.environ.get("DOCKER_TLS_VERIFY") else None
        connector = aiohttp.TCPConnector(limit=0, ssl=True if context is None else context)
        return _OverOurs(f"{'http' if context is None else 'https'}://{place}", connector)
    raise BackendAway(f"'{url}' is no address of a Docker daemon; give unix://PATH or tcp://HOST:PORT")


class _OverOurs(Docker):
    """With a connector that is closed with it: aiodocker leaves one that it was given to the giver."""

    def __init__(self, url: str, connector: aiohttp.BaseConnector) -> None:
        super().__init__(url, connector=connector)
        self._ours = connector

    async def close(self) -> None:
        await super().close()
        await self._ours.close()


def _certificates() -> ssl.SSLContext:
    folder = Path(os.environ.get("DOCKER_CERT_PATH") or Path.home() / ".docker")
    try:
        context = ssl.create_default_context(cafile=str(folder / "ca.pem"))
        context.load_cert_chain(str(folder / "cert.pem"), str(folder / "key.pem"))
    except OSError as exc:
        text = f"the daemon's TLS files (ca.pem, cert.pem, key.pem) in {folder}: {exc.strerror or exc}"
        raise BackendAway(f"{text}; set DOCKER_CERT_PATH") from exc
    return context


@asynccontextmanager
async def connected(host: Host) -> AsyncIterator[Docker]:
    docker = connect(host)
    try:
        yield docker
    finally:
        await docker.close()


@asynccontextmanager
async def asking(what: str, limit_s: float | None = ANSWER_S) -> AsyncIterator[None]:
    """Turns what the daemon answers, or does not, into a `RuntimeFault` that begins with `what`."""
    try:
        async with asyncio.timeout(limit_s):
            yield
    except TimeoutError:
        raise BackendAway(f"{what}: the Docker daemon does not answer within {limit_s:g} s") from None
    except DockerError as exc:
        raise fault(what, exc) from None
    except (aiohttp.ClientError, ConnectionError) as exc:
        raise BackendAway(
            f"{what}: the Docker daemon does not answer ({_line(str(exc)) or type(exc).__name__})"
        ) from exc


def fault(what: str, exc: DockerError) -> RuntimeFault:
    """What the daemon said, as one of ours."""
    text = f"{what}: {_line(exc.message)}"
    if exc.status == NOT_CONNECTED:
        return BackendAway(f"{text}; is the Docker daemon running?")
    # The daemon has a number for neither this nor anything else that the kernel told it.
    if "no space left on device" in exc.message or "disk quota exceeded" in exc.message:
        return DiskFull(f"{text}; free some space where the daemon keeps its data (docker system df)")
    return Refusal(text, exc.status)


def _line(text: str) -> str:
    return " ".join(text.split())[:500]
