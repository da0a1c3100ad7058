"""HTTP bodies, unpacked step by step and never beyond a limit.

The limit holds for what comes over the wire and for what it unpacks to, so that a small body that unpacks to a huge one
costs no more memory than the limit. Understood: gzip (several members too), deflate (with and without zlib's header),
zstd (several frames), and chains of them.
"""

from __future__ import annotations

import asyncio
import sys
import zlib
from abc import ABC, abstractmethod
from collections.abc import AsyncIterable, AsyncIterator, Iterator, Sequence

if sys.version_info >= (3, 14):
    from compression import zstd
else:
    from backports import zstd

STEP = 1 << 20
"""Bytes unpacked between two looks at other work."""


class BodyTooLarge(ValueError):
    """More bytes than the limit, packed or unpacked."""


class BodyDamaged(ValueError):
    """The body is not what its Content-Encoding says, or is cut."""


class UnknownEncoding(ValueError):
    """A Content-Encoding that polarq does not read."""


async def read_body(chunks: AsyncIterable[bytes], encoding: str, limit: int) -> bytes:
    """The whole body, unpacked. Raises the errors above."""
    pieces = [piece async for piece in unpacked(chunks, encoding, limit)]
    return pieces[0] if len(pieces) == 1 else b"".join(pieces)


async def unpacked(chunks: AsyncIterable[bytes], encoding: str, limit: int) -> AsyncIterator[bytes]:
    """The body in pieces as they come. `encoding` is the value of Content-Encoding, "" for none."""
    unpackers = _unpackers(encoding)
    packed = plain = 0
    async for chunk in chunks:
        packed += len(chunk)
        if packed > limit:
            raise BodyTooLarge(f"the body is larger than {limit} bytes")
        if not unpackers:
            yield chunk
            continue
        since = 0
        for piece in _through(unpackers, chunk):
            plain += len(piece)
            if plain > limit:
                raise BodyTooLarge(f"the unpacked body is larger than {limit} bytes")
            yield piece
            since += len(piece)
            if since >= STEP:
                since = 0
                await asyncio.sleep(0)
    if packed and not all(unpacker.ended for unpacker in unpackers):
        raise BodyDamaged(f"the body ends before its {encoding} data do")


def _unpackers(encoding: str) -> Sequence[_Unpacker]:
    names = [name.strip().lower() for name in encoding.split(",")]
    unknown = [name for name in names if name not in _KINDS]
    if unknown:
        raise UnknownEncoding(f"Content-Encoding '{unknown[0]}' is not understood (gzip, deflate, zstd or none)")
    return [kind() for name in reversed(names) if (kind := _KINDS[name]) is not None]


def _through(unpackers: Sequence[_Unpacker], data: bytes) -> Iterator[bytes]:
    if not unpackers:
        yield data
        return
    for piece in unpackers[0].feed(data):
        yield from _through(unpackers[1:], piece)


class _Unpacker(ABC):
    """One encoding. `ended` is true where the data may rightly end."""

    ended = False

    @abstractmethod
    def feed(self, data: bytes) -> Iterator[bytes]: ...


class _Gzip(_Unpacker):
    def __init__(self) -> None:
        self._member = zlib.decompressobj(wbits=31)

    def feed(self, data: bytes) -> Iterator[bytes]:
        while data:
            if self._member.eof:
                data = data.lstrip(b"\0")  # padding after a member is allowed
                if not data:
                    return
                self._member = zlib.decompressobj(wbits=31)
                self.ended = False
            piece = _step(self._member, data)
            if piece:
                yield piece
            self.ended = self._member.eof
            data = self._member.unused_data if self.ended else self._member.unconsumed_tail


class _Deflate(_Unpacker):
    def __init__(self) -> None:
        self._first = b""
        self._stream: zlib._Decompress | None = None

    def feed(self, data: bytes) -> Iterator[bytes]:
        if self._stream is None:
            self._first += data
            if len(self._first) < 2:
                return
            data = self._first
            # Both forms are called deflate; zlib's has a checked header of two bytes.
            headed = data[0] & 0x0F == 8 and (data[0] << 8 | data[1]) % 31 == 0
            self._stream = zlib.decompressobj(wbits=15 if headed else -15)
        while data and not self.ended:
            piece = _step(self._stream, data)
            if piece:
                yield piece
            self.ended = self._stream.eof
            data = self._stream.unconsumed_tail


class _Zstd(_Unpacker):
    def __init__(self) -> None:
        self._frame = zstd.ZstdDecompressor()

    def feed(self, data: bytes) -> Iterator[bytes]:
        while data or not (self._frame.eof or self._frame.needs_input):
            if self._frame.eof:
                self._frame = zstd.ZstdDecompressor()
                self.ended = False
            try:
                piece = self._frame.decompress(data, max_length=STEP)
            except zstd.ZstdError as exc:
                raise BodyDamaged(f"the body is not zstd: {exc}") from None
            if piece:
                yield piece
            self.ended = self._frame.eof
            data = self._frame.unused_data if self.ended else b""


def _step(stream: zlib._Decompress, data: bytes) -> bytes:
    try:
        return stream.decompress(data, STEP)
    except zlib.error as exc:
        raise BodyDamaged(f"the body is not what its Content-Encoding says: {exc}") from None


_KINDS: dict[str, type[_Unpacker] | None] = {
    "": None,
    "identity": None,
    "gzip": _Gzip,
    "x-gzip": _Gzip,
    "deflate": _Deflate,
    "zstd": _Zstd,
}
