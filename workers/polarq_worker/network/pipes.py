"""Two connections tied together: bytes both ways as they come, half-closes kept, a slow reader slows the writer."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable
from typing import cast

HIGH_WATER_BYTES = 256 * 1024
"""What may wait for a reader before its writer is held."""
LINGER_S = 60.0
"""How long a connection stays when the server's side has ended and the client says nothing more."""


async def accepting(make: Callable[[], End], listener: socket.socket, backlog: int) -> asyncio.AbstractServer:
    """Takes what comes to a socket, of whichever family."""
    loop = asyncio.get_running_loop()
    if listener.family == socket.AF_UNIX:
        return await loop.create_unix_server(make, sock=listener, backlog=backlog)
    return await loop.create_server(make, sock=listener, backlog=backlog)


class End(asyncio.Protocol):
    """One connection of a pair. Before it is tied it is not read."""

    def __init__(self, *, linger_s: float | None = None) -> None:
        """`linger_s`: how long the other end may keep this pair when this end has ended and nothing moves."""
        self.transport: asyncio.Transport | None = None
        self.other: End | None = None
        self.ended = False
        """It sends nothing more."""
        self._early = bytearray()
        """What had come before it was tied."""
        self._linger_s = linger_s
        self._timer: asyncio.TimerHandle | None = None
        self._moved = False

    # --- asyncio's side

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)  # uvloop's is one by its methods only
        self.transport.set_write_buffer_limits(HIGH_WATER_BYTES)
        self.transport.pause_reading()

    def data_received(self, data: bytes) -> None:
        if self.other is None:
            self._early += data
        else:
            self.other.write(data)

    def eof_received(self) -> bool | None:
        self.ended = True
        if self.other is None:
            return True
        if self.other.ended:
            self.close()
            self.other.close()
            return True
        self.other.write_eof()
        if self._linger_s is not None:
            self._look_again()
        return True

    def connection_lost(self, exc: BaseException | None) -> None:
        self.ended = True
        if self._timer is not None:
            self._timer.cancel()
        other, self.other = self.other, None
        if other is not None:
            if exc is None:
                other.close()
            else:
                other.abort()

    def pause_writing(self) -> None:
        if self.other is not None:
            self.other.pause_reading()

    def resume_writing(self) -> None:
        if self.other is not None:
            self.other.resume_reading()

    # --- the other end's side

    def tie(self, other: End) -> None:
        """From now on what comes from one goes to the other."""
        self.other, other.other = other, self
        for end in (self, other):
            if end._early:
                end.data_received(bytes(end._early))
                end._early.clear()
            if end.ended:
                if not end.eof_received():
                    self.abort()
                    other.abort()
            else:
                end.resume_reading()

    def write(self, data: bytes) -> None:
        self._moved = True
        if self.transport is not None and not self.transport.is_closing():
            self.transport.write(data)

    def write_eof(self) -> None:
        if self.transport is not None and not self.transport.is_closing():
            self.transport.write_eof()

    def close(self) -> None:
        """After what waits to be written."""
        if self.transport is not None:
            self.transport.close()

    def abort(self) -> None:
        if self.transport is not None:
            self.transport.abort()

    def pause_reading(self) -> None:
        if self.transport is not None and not self.transport.is_closing():
            self.transport.pause_reading()

    def resume_reading(self) -> None:
        if self.transport is not None and not self.transport.is_closing():
            self.transport.resume_reading()

    def _look_again(self) -> None:
        """Ends the pair when nothing has moved since the last look."""
        if self._timer is not None and not self._moved:
            self._timer = None
            self.abort()
            if self.other is not None:
                self.other.abort()
            return
        self._moved = False
        assert self._linger_s is not None
        self._timer = asyncio.get_running_loop().call_later(self._linger_s, self._look_again)
