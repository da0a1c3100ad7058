"""Servers behind doors, and clients before them, all on this machine's loopback."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager

from polarq_worker.network.denials import Denials
from polarq_worker.network.egress_door import EgressDoor, Model
from polarq_worker.network.rules import Rules

LONG_S = 120.0
Handler = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


def listener() -> socket.socket:
    """As a backend's `open_door` answers one."""
    opened = socket.create_server(("127.0.0.1", 0))
    opened.setblocking(False)
    return opened


def port_of(opened: socket.socket | asyncio.Server) -> int:
    name = opened.getsockname() if isinstance(opened, socket.socket) else opened.sockets[0].getsockname()
    return int(name[1])


@asynccontextmanager
async def serving(handle: Handler, host: str = "127.0.0.1", port: int = 0, path: str = "") -> AsyncIterator[int]:
    """A server of the test's own, at the Unix socket `path` if there is one; its port."""

    async def handled(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            await handle(reader, writer)
        except (ConnectionError, asyncio.IncompleteReadError):
            pass
        finally:
            writer.close()

    if path:
        server = await asyncio.start_unix_server(handled, path, backlog=1024)
    else:
        server = await asyncio.start_server(handled, host, port, backlog=1024)
    try:
        yield 0 if path else port_of(server)
    finally:
        server.close()


async def until(true: Callable[[], bool]) -> None:
    """Waits for what another process does."""
    async with asyncio.timeout(LONG_S):
        while not true():  # noqa: ASYNC110
            await asyncio.sleep(0.01)


async def echo(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    while data := await reader.read(65536):
        writer.write(data)
        await writer.drain()


class Web:
    """An HTTP server that remembers what it was sent, byte for byte, and says who it is."""

    def __init__(self, name: str = "web") -> None:
        self.name = name
        self.heads: list[str] = []
        self.bodies: list[bytes] = []
        self.connections = 0

    async def handle(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        head = (await reader.readuntil(b"\r\n\r\n")).decode()
        self.heads.append(head)
        lower = head.lower()
        if "content-length:" in lower:
            length = int(lower.partition("content-length:")[2].split("\r\n")[0])
            self.bodies.append(await reader.readexactly(length))
        elif "chunked" in lower:
            self.bodies.append(await reader.readuntil(b"0\r\n\r\n"))
        said = f"{self.name} heard {head.split(' ')[1]}\n".encode()
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\nConnection: close\r\n\r\n%b" % (len(said), said))
        await writer.drain()


class Names:
    """A name server of the test's own; a name with several answers gives them in turn."""

    def __init__(self, answers: Mapping[str, Sequence[Sequence[str]]]) -> None:
        self._answers = {name: list(given) for name, given in answers.items()}
        self.asked: list[str] = []

    async def __call__(self, host: str, port: int) -> Sequence[str]:
        self.asked.append(host)
        if host not in self._answers:
            raise OSError("no such name")
        answers = self._answers[host]
        return answers.pop(0) if len(answers) > 1 else answers[0]


class Egress:
    """An egress door in this process, and who it refused."""

    def __init__(self, door: EgressDoor, port: int) -> None:
        self.door = door
        self.port = port
        self.url = f"http://127.0.0.1:{port}"

    @property
    def denied(self) -> dict[str, int]:
        return self.door.denials.counts

    async def ask(self, request: str | bytes) -> str:
        """Sends that, and reads to the end."""
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        writer.write(request.encode() if isinstance(request, str) else request)
        try:
            async with asyncio.timeout(LONG_S):
                return (await reader.read()).decode()
        finally:
            writer.close()

    async def connect(self, target: str) -> str:
        """CONNECT's status line, or all of a refusal."""
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        writer.write(f"CONNECT {target} HTTP/1.1\r\nHost: {target}\r\n\r\n".encode())
        try:
            async with asyncio.timeout(LONG_S):
                head = (await reader.readuntil(b"\r\n\r\n")).decode()
                return head if " 200 " in head else head + (await reader.read()).decode()
        finally:
            writer.close()

    async def get(self, url: str) -> str:
        return await self.ask(f"GET {url} HTTP/1.1\r\nHost: x\r\n\r\n")


@asynccontextmanager
async def egress(
    *allowed: str,
    policy: str = "allowlist",
    names: Names | None = None,
    closed: Sequence[tuple[str, int]] = (),
    head_s: float = LONG_S,
    model: Model | None = None,
) -> AsyncIterator[Egress]:
    opened = listener()
    port = port_of(opened)
    rules = Rules.of(policy, allowed, closed)
    door = EgressDoor(rules, Denials(), resolve=names or Names({}), head_s=head_s, model=model)
    await door.open(opened)
    try:
        yield Egress(door, port)
    finally:
        door.close()
