"""An HTTP proxy in a sandbox's loopback: CONNECT and plain http to whom the policy names, a clear no to everybody else.

One request a connection: what comes behind it is not carried, so nothing can be hidden in it. A name is resolved here,
once, and the address that was checked is the one that is connected to.
"""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import cast

from polarq.hosts import Address, as_address
from polarq_worker.network.body import BadBody, Body
from polarq_worker.network.denials import Denials
from polarq_worker.network.head import HEAD_BYTES, BadHead, Head, parse_head
from polarq_worker.network.model_door import ToProxy
from polarq_worker.network.pipes import LINGER_S, End, accepting
from polarq_worker.network.rules import Refused, Rules, Target

log = logging.getLogger("polarq.relay")

MOST_CONNECTIONS = 1024
BACKLOG = 1024
HEAD_S = 30.0
"""How long the head of a request may take."""
RESOLVE_S = 15.0
_RESOLVED_AT_ONCE = 4
"""Names of one sandbox: a slow name server must not keep the others from theirs."""
CONNECT_S = 20.0
_DRAIN_S = 5.0
"""How long a refused client's own bytes are still read, so that it sees the answer."""
_REASONS = {
    400: "Bad Request",
    403: "Refused by network policy",
    408: "Request Timeout",
    431: "Request Header Fields Too Large",
    501: "Not Implemented",
    502: "Bad Gateway",
    503: "Service Unavailable",
    504: "Gateway Timeout",
}

_LOOPBACK = frozenset({"127.0.0.1", "::1", "localhost"})

Resolve = Callable[[str, int], Awaitable[Sequence[str]]]


class Unreachable(Exception):
    """The policy allows it, and it was not reached. `status` is the answer's; the text is one line."""

    def __init__(self, status: int, text: str) -> None:
        self.status = status
        super().__init__(text)


async def resolved(host: str, port: int) -> list[str]:
    """Addresses of a name. Raises OSError."""
    found = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
    return list(dict.fromkeys(str(address[0]) for *_, address in found))


@dataclass(frozen=True, slots=True)
class Model:
    """The sandbox's own way to the model, for programs that send even that to the proxy."""

    port: int
    way: ToProxy

    def is_(self, target: Target) -> bool:
        return target.port == self.port and target.host in _LOOPBACK


class EgressDoor:
    """One sandbox's. `resolve` answers a name's addresses; without `model`, the sandbox has no way to it."""

    def __init__(
        self,
        rules: Rules,
        denials: Denials,
        *,
        model: Model | None = None,
        resolve: Resolve = resolved,
        head_s: float = HEAD_S,
        connect_s: float = CONNECT_S,
    ) -> None:
        self.rules = rules
        self.denials = denials
        self.model = model
        self.resolve = resolve
        self.head_s = head_s
        self.connect_s = connect_s
        self.ends: set[End] = set()
        self._resolving = asyncio.Semaphore(_RESOLVED_AT_ONCE)
        self._is_full = False
        self._server: asyncio.AbstractServer | None = None

    async def open(self, listener: socket.socket) -> None:
        self._server = await accepting(lambda: _Client(self), listener, BACKLOG)

    def close(self) -> None:
        """Also what is open."""
        if self._server is not None:
            self._server.close()
        for end in list(self.ends):
            end.abort()
            if end.other is not None:
                end.other.abort()

    def has_room(self) -> bool:
        """For one more connection. That there is none is logged once."""
        if len(self.ends) < MOST_CONNECTIONS:
            return True
        if not self._is_full:
            log.warning("a sandbox has %d connections to its HTTP proxy; more are hung up on", MOST_CONNECTIONS)
        self._is_full = True
        return False

    async def server_for(self, target: Target) -> End:
        """A connection to whom was asked for. Raises `Refused` and `Unreachable`."""
        if self.model is not None and self.model.is_(target):
            try:
                return await self.model.way.server()
            except TimeoutError:
                raise Unreachable(503, "the node's proxy is away and did not come back; try again") from None
        self.rules.check_name(target)
        usable = self.rules.checked(target, await self._addresses(target))
        loop = asyncio.get_running_loop()
        why = ""
        try:
            async with asyncio.timeout(self.connect_s):
                for address in usable:
                    server = End(linger_s=LINGER_S)
                    try:
                        await loop.create_connection(lambda end=server: end, str(address), target.port)  # type: ignore[misc]
                    except OSError as exc:
                        why = exc.strerror or str(exc)
                    else:
                        return server
        except TimeoutError:
            raise Unreachable(504, f"{target} did not answer within {self.connect_s:g} s") from None
        raise Unreachable(502, f"{target} cannot be reached: {why}")

    async def _addresses(self, target: Target) -> list[Address]:
        if (literal := as_address(target.host)) is not None:
            return [literal]
        try:
            async with asyncio.timeout(RESOLVE_S), self._resolving:
                found = await self.resolve(target.host, target.port)
        except (TimeoutError, OSError) as exc:
            raise Unreachable(502, f"the name {target.host} has no address: {exc or 'no answer in time'}") from None
        addresses = [address for text in found if (address := as_address(text.partition("%")[0])) is not None]
        if not addresses:
            raise Unreachable(502, f"the name {target.host} has no address")
        return addresses


class _Client(End):
    """A connection of the sandbox: its request's head, then what is tied to the server."""

    def __init__(self, door: EgressDoor) -> None:
        super().__init__()
        self._door = door
        self._head = bytearray()
        self._body: Body | None = None
        """Of a plain request; None: a tunnel, or nothing yet."""
        self._answered = False
        self._limit: asyncio.TimerHandle | None = None
        self._serving: asyncio.Task[None] | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)
        if not self._door.has_room():
            self.abort()
            return
        self._door.ends.add(self)
        late = (408, f"the head of the request did not come within {self._door.head_s:g} s")
        self._limit = asyncio.get_running_loop().call_later(self._door.head_s, self._answer, *late)

    def data_received(self, data: bytes) -> None:
        if self._answered:
            return
        if self.other is not None and self._body is not None:
            self._pass_on(data)
        elif self._serving is not None:
            super().data_received(data)
        else:
            self._head += data
            self._look_for_head()

    def eof_received(self) -> bool | None:
        if self._answered or self._serving is None:
            self.close()
            return None
        if self._body is not None:
            # Many servers take a half-closed connection for one that is gone, and a request is whole or never will be.
            self.ended = True
            return self._body.done
        return super().eof_received()

    def connection_lost(self, exc: BaseException | None) -> None:
        self._door.ends.discard(self)
        self._stop_waiting()
        if self._serving is not None:
            self._serving.cancel()
        super().connection_lost(exc)

    def _look_for_head(self) -> None:
        end = self._head.find(b"\r\n\r\n")
        if end < 0 and len(self._head) <= HEAD_BYTES:
            return
        self._stop_waiting()
        try:
            if end < 0 or end > HEAD_BYTES:
                raise BadHead(431, f"the head of the request is larger than {HEAD_BYTES} bytes")
            head = parse_head(bytes(self._head[:end]))
        except BadHead as exc:
            if exc.target:
                self._door.denials.note(exc.target)
            self._answer(exc.status, str(exc))
            return
        self.pause_reading()
        self._early += self._head[end + 4 :]
        self._head.clear()
        self._serving = asyncio.get_running_loop().create_task(self._serve(head))

    async def _serve(self, head: Head) -> None:
        try:
            server = await self._door.server_for(head.target)
        except Refused as exc:
            self._door.denials.note(head.asked)
            self._answer(403, str(exc))
            return
        except Unreachable as exc:
            self._answer(exc.status, str(exc))
            return
        if self.transport is None or self.transport.is_closing():
            server.abort()
            return
        if head.tunnel:
            self.write(b"HTTP/1.1 200 Connection established\r\n\r\n")
        else:
            self._body = Body(head.body_bytes)
            server.write(head.forwarded)
        self.tie(server)

    def _pass_on(self, data: bytes) -> None:
        assert self._body is not None
        assert self.other is not None
        try:
            taken = self._body.take(data)
        except BadBody:
            self.other.abort()
            self.abort()
            return
        if taken:
            self.other.write(taken)
        elif self._body.done:
            self.pause_reading()

    def _answer(self, status: int, text: str) -> None:
        """Says no, and waits a little for the client to have read it."""
        self._stop_waiting()
        if self.transport is None or self.transport.is_closing():
            return
        self._answered = True
        body = f"polarq: {text}\n".encode()
        lines = [f"HTTP/1.1 {status} {_REASONS[status]}", "Content-Type: text/plain; charset=utf-8"]
        lines += [f"Content-Length: {len(body)}", "Connection: close", "", ""]
        self.write("\r\n".join(lines).encode() + body)
        self.write_eof()
        self.resume_reading()
        self._limit = asyncio.get_running_loop().call_later(_DRAIN_S, self.close)

    def _stop_waiting(self) -> None:
        if self._limit is not None:
            self._limit.cancel()
            self._limit = None
