"""HTTP/1.1 towards one server: connections that are kept, one exchange at a time on each.

Knows what an inference server needs and nothing else: POST and GET with a whole body, answers with a length, in chunks,
or up to the connection's end. What does not follow the grammar closes the connection. Nothing is decoded here.
"""

from __future__ import annotations

import asyncio
import socket
import ssl
import time
from collections.abc import Callable, Iterable
from enum import Enum, auto
from functools import lru_cache

from multidict import CIMultiDict

from polarq_proxy.pacing import Pace

CONNECT_TIMEOUT_S = 10.0
MAX_HEAD_BYTES = 64 * 1024
_MAX_SIZE_LINE = 1024
_MAX_UNREAD = 1 << 20
"""Bytes of a body that wait for their reader before the connection is no longer read."""

_LAST_CHUNK = b"\r\n0\r\n\r\n"
_MAX_LATER = 16


class Disconnected(ConnectionError):
    """The connection ended before the answer did. `silent`: before one byte of it had come."""

    def __init__(self, text: str, *, silent: bool = False) -> None:
        super().__init__(text)
        self.silent = silent


class Malformed(ConnectionError):
    """The answer is not HTTP."""


class _Expects(Enum):
    NOTHING = auto()
    HEAD = auto()
    LENGTH = auto()
    """Body bytes, as many as are left."""
    SIZE = auto()
    CHUNK = auto()
    CHUNK_END = auto()
    TRAILER = auto()
    CLOSE = auto()
    """Body bytes until the connection ends."""


class Connection(asyncio.Protocol):
    """`open`, then any number of exchanges: `send`, read the body, and while `reusable` again."""

    def __init__(self) -> None:
        self.status = 0
        self.headers: CIMultiDict[str] = CIMultiDict()
        self.used = False
        """An exchange on it has come to its end."""
        self.idle_since = 0.0
        self._transport: asyncio.Transport | None = None
        self._expects = _Expects.NOTHING
        self._rest = b""
        self._left = 0
        self._keep = True
        self._body: list[bytes] = []
        self._unread = 0
        self._paused = False
        self._silent = True
        self._lost: ConnectionError | None = None
        self._waiter: asyncio.Future[None] | None = None
        self.rests_until = 0.0
        self._pace: Pace | None = None
        """While it rests: who wakes it."""
        self._woken_later = False
        self._later: list[bytes] = []
        """What came while it rests, not looked at yet."""
        self._each: Callable[[bytes], bool] | None = None

    @property
    def ended(self) -> bool:
        """The answer has come to its end."""
        return self._expects is _Expects.NOTHING

    @property
    def reusable(self) -> bool:
        transport = self._transport
        free = self._expects is _Expects.NOTHING and self._keep and self._lost is None
        return free and transport is not None and not transport.is_closing() and not transport.get_write_buffer_size()

    def close(self) -> None:
        """Hangs up at once."""
        self._keep = False
        if self._transport is not None:
            self._transport.abort()

    async def send(self, pieces: Iterable[bytes]) -> None:
        """Sends a request and waits for the head of its answer. Raises `ConnectionError`."""
        if self._lost is not None:
            raise Disconnected(str(self._lost), silent=True)
        assert self._transport is not None
        self.expect_answer()
        self._transport.writelines(list(pieces))
        while self._expects is _Expects.HEAD:
            await self._news()

    def expect_answer(self) -> None:
        """What comes now is the answer to a request."""
        self._expects, self._silent = _Expects.HEAD, True

    async def some(self) -> bytes:
        """What has come of the body, at least one byte; empty at its end. Raises `ConnectionError`."""
        while not self._body:
            if self._expects is _Expects.NOTHING:
                return b""
            await self._news()
        return self._collected()

    async def each(self, take: Callable[[bytes], bool]) -> None:
        """Gives what comes of the body to `take`, where it arrives, until the body's end or until `take` returns False.
        Raises `ConnectionError`, and what `take` raises."""
        self._each = take
        try:
            while self._each is not None:
                if self._body:
                    if not take(self._collected()):
                        return
                elif self._expects is _Expects.NOTHING:
                    return
                else:
                    await self._news()
        finally:
            self._each = None

    def _collected(self) -> bytes:
        data = self._body[0] if len(self._body) == 1 else b"".join(self._body)
        self._body.clear()
        self._unread = 0
        self._pace = None
        if self._paused and self._transport is not None:
            self._paused = False
            self._transport.resume_reading()
        return data

    def rest(self, pace: Pace) -> None:
        """From now on for a while, what comes of the body is collected before its reader hears of it. The body's end,
        and what goes wrong, are told at once."""
        rest_s = pace.rest_s
        if rest_s:
            self._pace = pace
            self.rests_until = time.monotonic() + rest_s

    def wake(self) -> None:
        """Its rest is over."""
        self._woken_later = False
        if self._later:
            self.data_received(b"")
        else:
            self._tell()

    async def _news(self) -> None:
        if self._lost is not None:
            raise self._lost
        self._waiter = asyncio.get_running_loop().create_future()
        try:
            await self._waiter
        finally:
            self._waiter = None

    def _tell(self) -> None:
        waiter = self._waiter
        if waiter is None or waiter.done():
            return
        if self._each is not None and self._body:
            try:
                if not self._each(self._collected()):
                    self._each = None
                elif self._expects is not _Expects.NOTHING and self._lost is None:
                    return
            except Exception as exc:  # it is the reader's, who waits
                waiter.set_exception(exc)
                return
        waiter.set_result(None)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport  # type: ignore[assignment]  # uvloop's own class is no subclass of asyncio's
        sock = transport.get_extra_info("socket")
        if sock is not None:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)

    def connection_lost(self, exc: Exception | None) -> None:
        if self._later:
            self.data_received(b"")
        if self._expects is _Expects.CLOSE and exc is None:
            self._finish()
        if self._lost is None:
            text = str(exc) if exc is not None and str(exc) else "it closed the connection"
            self._lost = Disconnected(text, silent=self._silent)
        self._keep = False
        self._tell()

    def eof_received(self) -> bool:
        return False

    def data_received(self, data: bytes) -> None:
        rests = self._woken_later and self._pace is not None and len(self._later) < _MAX_LATER
        if rests and data and not data.endswith(_LAST_CHUNK):
            self._later.append(data)  # it is woken soon, and then all of it is read in one go
            return
        if self._later:
            data = b"".join([*self._later, data])
            self._later.clear()
        self._silent = False
        try:
            self._take(data)
        except Malformed as exc:
            self._lost = exc
            self.close()
        if self._unread > _MAX_UNREAD and not self._paused and self._transport is not None:
            self._paused = True
            self._transport.pause_reading()
        if self._pace is not None and self._may_rest():
            self._woken_later = self._woken_later or self._pace.wake_later(self)
            if self._woken_later:
                return
        self._tell()

    def _may_rest(self) -> bool:
        return self._expects is not _Expects.NOTHING and self._lost is None and not self._paused

    def _take(self, data: bytes) -> None:
        if self._rest:
            data, self._rest = self._rest + data, b""
        if self._expects is _Expects.HEAD:
            data = self._head(data)
        self._take_body(data)

    def _take_body(self, data: bytes) -> None:
        expects = self._expects
        if expects is _Expects.LENGTH:
            data = self._rest_of_length(data)
        elif expects is _Expects.CLOSE:
            self._add(data)
            data = b""
        elif expects is _Expects.HEAD:
            self._rest, data = data, b""
        elif expects is not _Expects.NOTHING:
            data = self._chunks(data)
        if data:
            raise Malformed("it sent more than one answer")

    def _add(self, data: bytes) -> None:
        if data:
            self._body.append(data)
            self._unread += len(data)

    def _rest_of_length(self, data: bytes) -> bytes:
        """Takes body bytes; returns what comes after the body."""
        if len(data) < self._left:
            self._left -= len(data)
            self._add(data)
            return b""
        taken, data = (data, b"") if len(data) == self._left else (data[: self._left], data[self._left :])
        self._add(taken)
        self._finish()
        return data

    def _finish(self) -> None:
        self._expects = _Expects.NOTHING
        self.used = True

    def _head(self, data: bytes) -> bytes:
        """Reads the head, interim ones skipped; returns what follows it."""
        while True:
            end = data.find(b"\r\n\r\n")
            if end < 0 or end > MAX_HEAD_BYTES:
                if len(data) > MAX_HEAD_BYTES:
                    raise Malformed("the head of its answer is too long")
                return data
            lines, data = data[:end].decode("latin-1").split("\r\n"), data[end + 4 :]
            version, _, rest = lines[0].partition(" ")
            code = rest[:3]
            if version not in {"HTTP/1.1", "HTTP/1.0"} or not (code.isascii() and code.isdecimal() and len(code) == 3):
                raise Malformed("it does not speak HTTP/1.1")
            self.status = int(code)
            if self.status >= 200:
                break
            if self.status == 101:
                raise Malformed("it changed the protocol")
        headers: CIMultiDict[str] = CIMultiDict()
        for line in lines[1:]:
            name, colon, value = line.partition(":")
            if not colon or not name or name != name.strip():
                raise Malformed("a header of its answer cannot be read")
            headers.add(name, value.strip())
        self.headers = headers
        connection = headers.get("Connection", "").lower()
        self._keep = "keep-alive" in connection if version == "HTTP/1.0" else "close" not in connection
        self._expect_body(headers)
        return data

    def _expect_body(self, headers: CIMultiDict[str]) -> None:
        coding = headers.get("Transfer-Encoding")
        lengths = set(headers.getall("Content-Length", []))
        if self.status in {204, 304}:
            self._finish()
        elif coding is not None:
            if coding.strip().lower() != "chunked":
                raise Malformed(f"its Transfer-Encoding '{coding}' is not understood")
            self._expects = _Expects.SIZE
            self._keep = self._keep and not lengths
        elif lengths:
            value = lengths.pop()
            if lengths or not (value.isascii() and value.isdecimal() and len(value) < 19):
                raise Malformed("its Content-Length is no number")
            self._left, self._expects = int(value), _Expects.LENGTH
        else:
            self._expects, self._keep = _Expects.CLOSE, False

    def _chunks(self, data: bytes) -> bytes:
        """Takes chunks; returns what comes after the last one."""
        at = 0
        while self._expects is not _Expects.NOTHING:
            while self._expects is _Expects.SIZE and (line_end := data.find(b"\r\n", at, at + _MAX_SIZE_LINE + 2)) > 0:
                # Chunks that are whole, as events of a stream nearly always are.
                begin, size = line_end + 2, _size(data[at:line_end])
                if not size or data[begin + size : begin + size + 2] != b"\r\n":
                    break
                self._body.append(data[begin : begin + size])
                self._unread += size
                at = begin + size + 2
            if self._expects is _Expects.CHUNK:
                piece = data[at : at + self._left]
                self._add(piece)
                at, self._left = at + len(piece), self._left - len(piece)
                if self._left:
                    return b""
                self._expects = _Expects.CHUNK_END
            most = 0 if self._expects is _Expects.CHUNK_END else _MAX_SIZE_LINE
            end = data.find(b"\r\n", at, at + most + 2)
            if end < 0:
                if len(data) - at > most + 1:
                    raise Malformed("a chunk of its answer has no end")
                self._rest = data[at:]
                return b""
            line, at = data[at:end], end + 2
            if self._expects is _Expects.CHUNK_END:
                self._expects = _Expects.SIZE
            elif self._expects is _Expects.SIZE:
                self._left = _size(line)
                self._expects = _Expects.CHUNK if self._left else _Expects.TRAILER
            elif not line:
                self._finish()
        return data[at:]


@lru_cache(1024)
def _size(line: bytes) -> int:
    digits = line.partition(b";")[0].strip()
    if not 0 < len(digits) <= 15 or digits.strip(b"0123456789abcdefABCDEF"):
        raise Malformed("the size of a chunk of its answer is no number")
    return int(digits, 16)


class Pool:
    """Connections to one address. Idle ones are closed after `idle_s`."""

    def __init__(self, host: str, port: int, tls: ssl.SSLContext | None, idle_s: float) -> None:
        self._host, self._port, self._tls = host, port, tls
        self._idle_s = idle_s
        self._idle: list[Connection] = []
        self._busy: set[Connection] = set()
        self._sweep: asyncio.TimerHandle | None = None

    def kept(self) -> Connection | None:
        """A connection that was used before and seems alive."""
        now = asyncio.get_running_loop().time()
        while self._idle:
            connection = self._idle.pop()
            if connection.reusable and now - connection.idle_since < self._idle_s:
                self._busy.add(connection)
                return connection
            connection.close()
        return None

    async def fresh(self) -> Connection:
        """Raises `OSError`."""
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(CONNECT_TIMEOUT_S):
                _, connection = await loop.create_connection(Connection, self._host, self._port, ssl=self._tls)
        except TimeoutError:
            raise ConnectionError(f"no connection within {CONNECT_TIMEOUT_S:g} s") from None
        self._busy.add(connection)
        return connection

    def release(self, connection: Connection) -> None:
        """Its exchange is over. One that cannot be used again is closed."""
        self._busy.discard(connection)
        if not connection.reusable:
            connection.close()
            return
        loop = asyncio.get_running_loop()
        connection.idle_since = loop.time()
        self._idle.append(connection)
        if self._sweep is None:
            self._sweep = loop.call_later(self._idle_s, self._close_idle)

    def close(self) -> None:
        if self._sweep is not None:
            self._sweep.cancel()
            self._sweep = None
        for connection in [*self._idle, *self._busy]:
            connection.close()
        self._idle.clear()
        self._busy.clear()

    def _close_idle(self) -> None:
        loop = asyncio.get_running_loop()
        since = loop.time() - self._idle_s
        for connection in self._idle:
            if connection.idle_since <= since:
                connection.close()
        self._idle = [connection for connection in self._idle if connection.idle_since > since]
        self._sweep = loop.call_later(self._idle_s / 4, self._close_idle) if self._idle else None
