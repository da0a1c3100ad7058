"""Messages with file descriptors between a worker and its relay, over a Unix socket pair.

A message is JSON behind its length in four bytes; `fds` says how many descriptors come with its first byte.
"""

from __future__ import annotations

import asyncio
import json
import os
import socket
import struct
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

Message = dict[str, Any]
_LENGTH = struct.Struct("!I")
_READ_BYTES = 65536
_MOST_FDS = 64


class Channel:
    """One end. `socket` is its own from now on."""

    def __init__(self, end: socket.socket) -> None:
        end.setblocking(False)
        self._end = end
        self._turn = asyncio.Lock()
        self._received = bytearray()
        self._fds: deque[int] = deque()

    async def send(self, message: Message, fds: Sequence[int] = ()) -> None:
        """Messages come whole and in order. Raises OSError when the other end is gone."""
        body = json.dumps({**message, "fds": len(fds)}).encode()
        rest = memoryview(_LENGTH.pack(len(body)) + body)
        async with self._turn:
            loop = asyncio.get_running_loop()
            handed = list(fds)
            while rest:
                try:
                    sent = socket.send_fds(self._end, [rest], handed) if handed else self._end.send(rest)
                except BlockingIOError:
                    await _when(loop.add_writer, loop.remove_writer, self._end.fileno())
                    continue
                handed = []
                rest = rest[sent:]

    async def receive(self) -> tuple[Message, list[int]] | None:
        """The next message and its descriptors, which are the caller's; None when the other end is gone."""
        while (message := self._next()) is None:
            try:
                data, fds, _, _ = socket.recv_fds(self._end, _READ_BYTES, _MOST_FDS, socket.MSG_CMSG_CLOEXEC)
            except BlockingIOError:
                loop = asyncio.get_running_loop()
                await _when(loop.add_reader, loop.remove_reader, self._end.fileno())
                continue
            except ConnectionError:
                return None
            self._fds.extend(fds)
            if not data:
                return None
            self._received += data
        return message

    def close(self) -> None:
        self._end.close()
        while self._fds:
            os.close(self._fds.popleft())

    def _next(self) -> tuple[Message, list[int]] | None:
        if len(self._received) < _LENGTH.size:
            return None
        end = _LENGTH.size + _LENGTH.unpack_from(self._received)[0]
        if len(self._received) < end:
            return None
        message: Message = json.loads(self._received[_LENGTH.size : end])
        del self._received[:end]
        return message, [self._fds.popleft() for _ in range(message.pop("fds"))]


async def _when(add: Callable[..., Any], remove: Callable[[int], Any], fd: int) -> None:
    """Waits until the descriptor can be read or written, whichever `add` watches."""
    ready = asyncio.get_running_loop().create_future()
    add(fd, lambda: None if ready.done() else ready.set_result(None))
    try:
        await ready
    finally:
        remove(fd)
