"""Where a request's body ends: what comes behind it is another request, and goes nowhere."""

from __future__ import annotations

import re
from enum import Enum

_SIZE = re.compile(rb"([0-9A-Fa-f]{1,15})[ \t]*(?:;[^\x00-\x08\x0a-\x1f\x7f]*)?")
_LINE_BYTES = 4096
_MOST_TRAILERS = 100


class BadBody(Exception):
    """The framing of a chunked body cannot be read."""


class _In(Enum):
    SIZE = 1
    DATA = 2
    AFTER_DATA = 3
    TRAILERS = 4


class Body:
    """A request's body as it comes. `length` None: chunked."""

    def __init__(self, length: int | None) -> None:
        self.done = length == 0
        self._chunked = length is None
        self._left = length or 0
        self._state = _In.SIZE
        self._pending = bytearray()
        self._trailers = 0

    def take(self, data: bytes) -> bytes:
        """What of `data` belongs to it, as it is sent on; the rest is nobody's. Raises `BadBody`."""
        if self.done:
            return b""
        if not self._chunked:
            taken = data[: self._left]
            self._left -= len(taken)
            self.done = self._left == 0
            return taken
        self._pending += data
        out = bytearray()
        while not self.done and self._step(out):
            pass
        return bytes(out)

    def _step(self, out: bytearray) -> bool:
        """Whether it got further. Sizes are written anew and trailers are dropped: one way to read it is left."""
        if self._state is _In.DATA:
            taken = self._pending[: self._left]
            del self._pending[: len(taken)]
            out += taken
            self._left -= len(taken)
            if self._left == 0:
                self._state = _In.AFTER_DATA
            return bool(taken) or self._left == 0
        line = self._line()
        if line is None:
            return False
        if self._state is _In.SIZE:
            found = _SIZE.fullmatch(line)
            if found is None:
                raise BadBody("the size of a chunk cannot be read")
            self._left = int(found[1], 16)
            out += b"%x\r\n" % self._left
            self._state = _In.DATA if self._left else _In.TRAILERS
        elif self._state is _In.AFTER_DATA:
            if line:
                raise BadBody("a chunk is longer than it says")
            out += b"\r\n"
            self._state = _In.SIZE
        elif not line:
            out += b"\r\n"
            self.done = True
        else:
            self._trailers += 1
            if self._trailers > _MOST_TRAILERS:
                raise BadBody("too many trailers")
        return True

    def _line(self) -> bytes | None:
        end = self._pending.find(b"\r\n")
        if end > _LINE_BYTES or (end < 0 and len(self._pending) > _LINE_BYTES):
            raise BadBody("a line of a chunked body is too long")
        if end < 0:
            return None
        line = bytes(self._pending[:end])
        del self._pending[: end + 2]
        return line
