"""The HTTP client towards one inference server.

Never reads proxy settings from the environment, follows no redirect, asks for bodies that are not packed and unpacks
them all the same. An engine drops idle connections by its own clock; a call that meets such a connection as it
closes is sent once more, on a new connection, if not one byte of an answer had come. Everything that goes wrong here
is a `CallFault`.
"""

from __future__ import annotations

import asyncio
import base64
import os
import ssl
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping
from contextlib import aclosing, suppress
from types import TracebackType
from typing import Any
from urllib.parse import unquote, urlsplit

from polarq.topology import InferenceEndpoint
from polarq_proxy.bodies import BodyDamaged, BodyTooLarge, UnknownEncoding, read_body, unpacked
from polarq_proxy.faults import CallFault, FaultKind
from polarq_proxy.http1 import Connection, Disconnected, Pool
from polarq_proxy.jsons import NotJson, decode
from polarq_proxy.pacing import Pace

IDLE_S = 4.0
"""Idle connections are closed by us before common engines close them (after 5 s)."""
END_TIMEOUT_S = 0.25
"""How long a stream that said it is done may take to end, before its connection is given up."""
LARGEST_ANSWER = 256 * 1024 * 1024


class UpstreamResponse:
    """An answer whose head has come."""

    def __init__(self, connection: Connection, where: str) -> None:
        self._connection = connection
        self._where = where
        self.status = connection.status
        self.headers: Mapping[str, str] = connection.headers

    @property
    def is_stream(self) -> bool:
        kind = self.headers.get("Content-Type", "")
        return kind.partition(";")[0].strip().lower() == "text/event-stream"

    async def read(self) -> bytes:
        """The whole body. Raises `CallFault`."""
        if self._encoding:
            with self._faults():
                return await read_body(self._pieces(), self._encoding, LARGEST_ANSWER)
        pieces: list[bytes] = []

        def keep(piece: bytes) -> bool:
            pieces.append(piece)
            return True

        await self.each(keep)
        return pieces[0] if len(pieces) == 1 else b"".join(pieces)

    async def each(self, take: Callable[[bytes], bool]) -> None:
        """Gives the body to `take` as it comes, until its end or until `take` says that no more is wanted. Raises
        `CallFault`, and what `take` raises."""
        if self._encoding:
            async with aclosing(self.chunks()) as chunks:
                async for chunk in chunks:
                    if not take(chunk):
                        break
            return
        size = 0

        def bounded(piece: bytes) -> bool:
            nonlocal size
            size += len(piece)
            if size > LARGEST_ANSWER:
                raise BodyTooLarge(f"the body is larger than {LARGEST_ANSWER} bytes")
            return take(piece)

        with self._faults():
            await self._connection.each(bounded)

    async def chunks(self) -> AsyncGenerator[bytes, None]:
        """The body as it comes. Raises `CallFault`."""
        with self._faults():
            async for chunk in unpacked(self._pieces(), self._encoding, LARGEST_ANSWER):
                yield chunk

    def rest(self, pace: Pace) -> None:
        """What comes next of the body may wait for more of it."""
        self._connection.rest(pace)

    async def end(self) -> None:
        """Lets the connection be used again if the body's end is near, else closes it."""
        if self._connection.ended:
            return
        with suppress(TimeoutError, ConnectionError):
            async with asyncio.timeout(END_TIMEOUT_S):
                while await self._connection.some():
                    pass
                return
        self.close()

    def close(self) -> None:
        """Hangs up: the engine stops sampling."""
        self._connection.close()

    async def _pieces(self) -> AsyncIterator[bytes]:
        while piece := await self._connection.some():
            yield piece

    @property
    def _encoding(self) -> str:
        return self.headers.get("Content-Encoding", "")

    def _faults(self) -> _BodyFaults:
        return _BodyFaults(self._where)


class _BodyFaults:
    """What can go wrong while a body comes in, as `CallFault`."""

    def __init__(self, where: str) -> None:
        self._where = where

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: type[BaseException] | None, exc: BaseException | None, trace: object) -> None:
        if isinstance(exc, ConnectionError):
            text = f"{self._where} broke off its answer: {_reason(exc)}"
            raise CallFault(FaultKind.ENGINE_FAULT, text) from exc
        if isinstance(exc, (BodyTooLarge, BodyDamaged, UnknownEncoding)):
            raise CallFault(FaultKind.ENGINE_FAULT, f"{self._where} sent an answer that cannot be read: {exc}") from exc


class Upstream:
    """Connections to one endpoint. `start` and `close` frame its life."""

    def __init__(self, endpoint: InferenceEndpoint, api_key: str | None) -> None:
        self.where = f"the inference server at {endpoint.base_url}"
        parts = urlsplit(endpoint.base_url)
        self._prefix = parts.path.rstrip("/")
        tls = ssl.create_default_context() if parts.scheme == "https" else None
        port = parts.port or (443 if tls is not None else 80)
        self._pool = Pool(parts.hostname or "", port, tls, IDLE_S)
        headers = {
            "Host": parts.netloc.rpartition("@")[2].encode("idna").decode(),
            "Accept": "*/*",
            "Accept-Encoding": "identity",
            "User-Agent": "polarq",
        }
        if api_key:
            headers["Authorization"] = f"Bearer {api_key}"
        elif parts.username is not None:
            user = f"{unquote(parts.username)}:{unquote(parts.password or '')}"
            headers["Authorization"] = f"Basic {base64.b64encode(user.encode()).decode()}"
        self._lines = [f"{name}: {value}" for name, value in headers.items()]

    async def start(self) -> None:
        """Nothing is connected before the first request."""

    async def close(self) -> None:
        self._pool.close()

    def post(self, path: str, body: bytes, headers: Mapping[str, str]) -> Exchange:
        """POSTs JSON: `async with` gives the answer."""
        whole = {**headers, "Content-Type": "application/json", "Content-Length": str(len(body))}
        return Exchange(self, [self._head("POST", path, whole), body])

    def release(self, connection: Connection) -> None:
        """Its exchange is over."""
        self._pool.release(connection)

    async def get_json(self, path: str, timeout_s: float) -> Any:
        """The JSON at `path`, or None where there is no such route or no JSON. Raises `CallFault` when there is no
        answer at all, or status 5xx."""
        try:
            async with asyncio.timeout(timeout_s):
                connection = await self.answered([self._head("GET", path, {})])
                try:
                    response = UpstreamResponse(connection, self.where)
                    data = await response.read()
                except BaseException:
                    connection.close()
                    raise
                finally:
                    self._pool.release(connection)
        except TimeoutError:
            raise CallFault(FaultKind.TIMED_OUT, f"{self.where} did not answer {path} in {timeout_s:g} s") from None
        if response.status >= 500:
            raise CallFault(FaultKind.ENGINE_FAULT, f"{self.where} answered {path} with {response.status}")
        try:
            return decode(data) if response.status == 200 else None
        except NotJson:
            return None

    def _head(self, method: str, path: str, headers: Mapping[str, str]) -> bytes:
        lines = [f"{method} {self._prefix}{path} HTTP/1.1", *self._lines]
        lines += [f"{name}: {value}" for name, value in headers.items()]
        head = "\r\n".join(lines)
        if head.count("\n") >= len(lines) or head.count("\r") >= len(lines):
            raise CallFault(
                FaultKind.MISCONFIGURED, f"a header for {self.where} holds a line break: correct its API key"
            )
        return f"{head}\r\n\r\n".encode()

    async def answered(self, request: list[bytes]) -> Connection:
        """A connection on which the head of the answer has come. Raises `CallFault`."""
        kept = self._pool.kept()
        if kept is not None:
            try:
                return await self._sent(kept, request)
            except Disconnected as exc:
                if not exc.silent:
                    raise self._down(exc) from exc
            except OSError as exc:
                raise self._down(exc) from exc
        try:
            return await self._sent(await self._pool.fresh(), request)
        except OSError as exc:
            raise self._down(exc) from exc

    async def _sent(self, connection: Connection, request: list[bytes]) -> Connection:
        try:
            await connection.send(request)
        except BaseException:
            connection.close()
            self._pool.release(connection)
            raise
        return connection

    def _down(self, exc: OSError) -> CallFault:
        return CallFault(FaultKind.ENGINE_DOWN, f"{self.where} does not answer: {_reason(exc)}")


class Exchange:
    """One request and its answer. Leaving the block by an exception hangs up on the engine."""

    def __init__(self, upstream: Upstream, request: list[bytes]) -> None:
        self._upstream = upstream
        self._request = request
        self._connection: Connection | None = None
        self._response: UpstreamResponse | None = None

    async def __aenter__(self) -> UpstreamResponse:
        connection = self._connection = await self._upstream.answered(self._request)
        self._request.clear()  # as long as the answer may take, nobody needs it any more
        response = self._response = UpstreamResponse(connection, self._upstream.where)
        return response

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._connection is not None and self._response is not None
        try:
            if kind is not None:
                self._response.close()
            else:
                await self._response.end()
        except BaseException:
            self._response.close()
            raise
        finally:
            self._upstream.release(self._connection)


def _reason(exc: OSError) -> str:
    if isinstance(exc, Disconnected) and exc.silent:
        return "it closed the connection without an answer"
    if exc.errno is not None and exc.errno > 0:
        return os.strerror(exc.errno)
    return str(exc) or type(exc).__name__
