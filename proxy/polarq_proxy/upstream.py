"""The HTTP client towards one inference server.

Never reads proxy settings from the environment, follows no redirect, asks for bodies that are not packed and unpacks
them all the same. An engine drops idle connections by its own clock; a call that meets such a connection as it
closes is sent once more, on a new connection, if not one byte of an answer had come. Everything that goes wrong here
is a `CallFault`.
"""

from __future__ import annotations

import asyncio
import io
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import aiohttp

from polarq.topology import InferenceEndpoint
from polarq_proxy.bodies import BodyDamaged, BodyTooLarge, UnknownEncoding, read_body, unpacked
from polarq_proxy.faults import CallFault, FaultKind
from polarq_proxy.jsons import NotJson, decode

CONNECT_TIMEOUT_S = 10.0
IDLE_S = 4.0
"""Idle connections are closed by us before common engines close them (after 5 s)."""
END_TIMEOUT_S = 0.25
"""How long a stream that said it is done may take to end, before its connection is given up."""
LARGEST_ANSWER = 256 * 1024 * 1024
_LARGE_BODY = 512 * 1024
_CLIENT_ERRORS = (aiohttp.ClientError, ConnectionError, asyncio.IncompleteReadError)


@dataclass(slots=True)
class _Attempt:
    """What the connection's trace told about one request."""

    reused: bool = False


class UpstreamResponse:
    """An answer whose head has come."""

    def __init__(self, response: aiohttp.ClientResponse, where: str) -> None:
        self._response = response
        self._where = where
        self.status = response.status
        self.headers: Mapping[str, str] = response.headers

    @property
    def is_stream(self) -> bool:
        return self._response.content_type == "text/event-stream"

    async def read(self) -> bytes:
        """The whole body. Raises `CallFault`."""
        with self._faults():
            return await read_body(self._response.content.iter_any(), self._encoding, LARGEST_ANSWER)

    async def chunks(self) -> AsyncIterator[bytes]:
        """The body as it comes. Raises `CallFault`."""
        with self._faults():
            async for chunk in unpacked(self._response.content.iter_any(), self._encoding, LARGEST_ANSWER):
                yield chunk

    async def end(self) -> None:
        """Lets the connection be used again if the body's end is near, else closes it."""
        content = self._response.content
        with suppress(TimeoutError, *_CLIENT_ERRORS):
            async with asyncio.timeout(END_TIMEOUT_S):
                while not content.at_eof():
                    await content.readany()
                return
        self.close()

    def close(self) -> None:
        """Hangs up: the engine stops sampling."""
        self._response.close()

    @property
    def _encoding(self) -> str:
        encoding: str = self._response.headers.get("Content-Encoding", "")
        return encoding

    def _faults(self) -> _BodyFaults:
        return _BodyFaults(self._where)


class _BodyFaults:
    """What can go wrong while a body comes in, as `CallFault`."""

    def __init__(self, where: str) -> None:
        self._where = where

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: type[BaseException] | None, exc: BaseException | None, trace: object) -> None:
        if isinstance(exc, _CLIENT_ERRORS):
            text = f"{self._where} broke off its answer: {_reason(exc)}"
            raise CallFault(FaultKind.ENGINE_FAULT, text) from exc
        if isinstance(exc, (BodyTooLarge, BodyDamaged, UnknownEncoding)):
            raise CallFault(FaultKind.ENGINE_FAULT, f"{self._where} sent an answer that cannot be read: {exc}") from exc


class Upstream:
    """Connections to one endpoint. `start` and `close` frame its life."""

    def __init__(self, endpoint: InferenceEndpoint, api_key: str | None) -> None:
        self.where = f"the inference server at {endpoint.base_url}"
        self._base_url = endpoint.base_url
        self._headers = {"Accept-Encoding": "identity", "User-Agent": "polarq"}
        if api_key:
            self._headers["Authorization"] = f"Bearer {api_key}"
        self._kept: aiohttp.ClientSession | None = None
        self._fresh: aiohttp.ClientSession | None = None

    async def start(self) -> None:
        self._kept = self._session(aiohttp.TCPConnector(limit=0, keepalive_timeout=IDLE_S))
        self._fresh = self._session(aiohttp.TCPConnector(limit=0, force_close=True))

    async def close(self) -> None:
        for session in (self._kept, self._fresh):
            if session is not None:
                await session.close()

    def _session(self, connector: aiohttp.TCPConnector) -> aiohttp.ClientSession:
        trace = aiohttp.TraceConfig()
        trace.on_connection_reuseconn.append(_note_reuse)
        return aiohttp.ClientSession(
            connector=connector,
            headers=self._headers,
            trust_env=False,
            auto_decompress=False,
            cookie_jar=aiohttp.DummyCookieJar(),
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_TIMEOUT_S),
            read_bufsize=1 << 18,
            trace_configs=[trace],
        )

    @asynccontextmanager
    async def post(self, path: str, body: bytes, headers: Mapping[str, str]) -> AsyncIterator[UpstreamResponse]:
        """POSTs JSON. Leaving the block by an exception hangs up on the engine."""
        response = UpstreamResponse(await self._opened(path, body, headers), self.where)
        try:
            yield response
        except BaseException:
            response.close()
            raise
        await response.end()

    async def get_json(self, path: str, timeout_s: float) -> Any:
        """The JSON at `path`, or None where there is no such route or no JSON. Raises `CallFault` when there is no
        answer at all, or status 5xx."""
        assert self._kept is not None
        try:
            async with asyncio.timeout(timeout_s):
                async with self._kept.get(self._base_url + path, allow_redirects=False) as answer:
                    response = UpstreamResponse(answer, self.where)
                    data = await response.read()
        except TimeoutError:
            raise CallFault(FaultKind.TIMED_OUT, f"{self.where} did not answer {path} in {timeout_s:g} s") from None
        except _CLIENT_ERRORS as exc:
            raise CallFault(FaultKind.ENGINE_DOWN, f"{self.where} does not answer: {_reason(exc)}") from exc
        if response.status >= 500:
            raise CallFault(FaultKind.ENGINE_FAULT, f"{self.where} answered {path} with {response.status}")
        try:
            return decode(data) if response.status == 200 else None
        except NotJson:
            return None

    async def _opened(self, path: str, body: bytes, headers: Mapping[str, str]) -> aiohttp.ClientResponse:
        assert self._kept is not None
        assert self._fresh is not None
        attempt = _Attempt()
        try:
            return await self._send(self._kept, path, body, headers, attempt)
        except aiohttp.ClientConnectorError as exc:
            raise self._down(exc) from exc
        except _CLIENT_ERRORS as exc:
            if not attempt.reused or _began(exc):
                raise self._down(exc) from exc
        try:
            return await self._send(self._fresh, path, body, headers, _Attempt())
        except _CLIENT_ERRORS as exc:
            raise self._down(exc) from exc

    async def _send(
        self,
        session: aiohttp.ClientSession,
        path: str,
        body: bytes,
        headers: Mapping[str, str],
        attempt: _Attempt,
    ) -> aiohttp.ClientResponse:
        # aiohttp writes a large bytes object in one piece, which holds up every other call.
        data = io.BytesIO(body) if len(body) > _LARGE_BODY else body
        return await session.post(
            self._base_url + path,
            data=data,
            headers={"Content-Type": "application/json", **headers},
            allow_redirects=False,
            trace_request_ctx=attempt,
        )

    def _down(self, exc: BaseException) -> CallFault:
        return CallFault(FaultKind.ENGINE_DOWN, f"{self.where} does not answer: {_reason(exc)}")


async def _note_reuse(session: aiohttp.ClientSession, context: SimpleNamespace, params: object) -> None:
    if isinstance(context.trace_request_ctx, _Attempt):
        context.trace_request_ctx.reused = True


def _began(exc: BaseException) -> bool:
    """Bytes of an answer had come, so that the engine has the request."""
    if isinstance(exc, aiohttp.ServerDisconnectedError):
        return not isinstance(exc.message, str)  # it holds what there is of the head
    return isinstance(exc, aiohttp.ClientResponseError)


def _reason(exc: BaseException) -> str:
    if isinstance(exc, aiohttp.ClientConnectorError):
        return exc.strerror or str(exc.os_error)
    if isinstance(exc, aiohttp.ServerDisconnectedError):
        return "it closed the connection without an answer"
    return str(exc) or type(exc).__name__
