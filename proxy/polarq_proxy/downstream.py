"""The harness's end of a streamed answer."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress
from types import TracebackType
from typing import Self

from aiohttp import web


class HungUp(Exception):
    """The harness closed its connection."""


class Downstream:
    """Sends whole events. Status 200 goes out with the first of them, so that until then an error can still be a plain
    one; while nothing is sent for `keepalive_s`, a comment is."""

    def __init__(
        self,
        request: web.BaseRequest,
        headers: dict[str, str],
        keepalive_s: float,
        comment: Callable[[], bytes],
        content_type: str = "text/event-stream; charset=utf-8",
    ) -> None:
        self._request = request
        self._response = web.StreamResponse(
            headers={
                "Content-Type": content_type,
                "Cache-Control": "no-cache",
                "X-Accel-Buffering": "no",
                **headers,
            }
        )
        self._keepalive_s = keepalive_s
        self._loop = asyncio.get_running_loop()
        self._last = self._loop.time()
        self._sending = asyncio.Lock()
        self._plain: asyncio.Transport | None = None
        """Where chunks go straight to once the head is out; None: aiohttp has to write them."""
        self._waiting: asyncio.TimerHandle | None = None
        self._commenting: asyncio.Task[None] | None = None
        self._comment = comment

    @property
    def started(self) -> bool:
        return self._response.prepared

    @property
    def response(self) -> web.StreamResponse:
        return self._response

    def send_now(self, events: bytes) -> bool:
        """Without waiting. False: the head is not out yet, or the harness has not taken all that was sent. Raises
        `HungUp`."""
        plain = self._plain
        if plain is None or plain.get_write_buffer_size() or self._sending.locked():
            return False
        if plain.is_closing():
            raise HungUp
        self._last = self._loop.time()
        plain.write(b"%x\r\n%b\r\n" % (len(events), events))
        return True

    async def send(self, events: bytes) -> None:
        """Raises `HungUp`."""
        if not events:
            return
        self._last = self._loop.time()
        try:
            async with self._sending:
                if not self._response.prepared:
                    await self._response.prepare(self._request)
                await self._response.write(events)
                if self._plain is None and self._response.headers.get("Transfer-Encoding") == "chunked":
                    self._plain = self._request.transport
        except ConnectionError as exc:
            raise HungUp from exc

    async def finish(self) -> bool:
        """Ends the body. Whether the harness was still there; one that is gone has had all that it wanted."""
        try:
            await self._response.write_eof()
        except ConnectionError:
            return False
        return True

    async def __aenter__(self) -> Self:
        self._waiting = self._loop.call_later(self._keepalive_s, self._look)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.quiet()

    async def quiet(self) -> None:
        """No more comments: whether something was sent no longer changes by itself."""
        if self._waiting is not None:
            self._waiting.cancel()
            self._waiting = None
        if self._commenting is not None:
            self._commenting.cancel()
            await asyncio.wait({self._commenting})

    def _look(self) -> None:
        """Comments if it is time to; looks again when it may be."""
        rest = self._last + self._keepalive_s - self._loop.time()
        if rest > 0:
            self._waiting = self._loop.call_later(rest, self._look)
            return
        self._waiting = None
        self._commenting = asyncio.create_task(self._keep_alive())

    async def _keep_alive(self) -> None:
        with suppress(HungUp):
            await self.send(self._comment())
            self._waiting = self._loop.call_later(self._keepalive_s, self._look)
