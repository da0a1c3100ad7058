"""Reads a tar stream as it comes, bit by bit: ustar, PAX and GNU headers.

The names and sizes in it are the sandbox's. Nothing is kept in memory but one header.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from polarq.errors import RuntimeFault

BLOCK = 512
LARGEST_HEADER = 1 << 20
"""Of the extended kind: names and attributes. A file system has no name longer than some thousand bytes."""


class Kind(StrEnum):
    FILE = "a file"
    FOLDER = "a folder"
    LINK = "a link"
    HARD_LINK = "a hard link"
    PIPE = "a named pipe"
    DEVICE = "a device"
    OTHER = "no regular file"


KINDS = {
    b"0": Kind.FILE, b"\0": Kind.FILE, b"7": Kind.FILE,
    b"1": Kind.HARD_LINK, b"2": Kind.LINK, b"3": Kind.DEVICE, b"4": Kind.DEVICE, b"5": Kind.FOLDER, b"6": Kind.PIPE,
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Entry:
    """Names are as the file system has them, odd bytes as surrogates."""

    name: str
    kind: Kind
    mode: int
    size: int
    """Bytes that follow in the stream."""
    link: str


class BrokenArchive(RuntimeFault):
    """What came is no whole tar stream."""


class TarReader:
    """Give it bytes with `feed`; it answers, in order, entries and the bytes of files."""

    def __init__(self) -> None:
        self._buffer = bytearray()
        self._body = 0
        """Bytes of the present entry that are still to come."""
        self._padding = 0
        self._pax: dict[str, bytes] = {}
        self._extended: tuple[bytes, bytearray] | None = None
        self._blank = False
        self.ended = False
        """The end mark was seen."""

    @property
    def left(self) -> int:
        """Bytes of the present entry that are still to come."""
        return self._body

    def feed(self, data: bytes) -> list[Entry | bytes]:
        """Raises `BrokenArchive`."""
        self._buffer += data
        found: list[Entry | bytes] = []
        while self._buffer and not self.ended:
            if self._body:
                self._take_body(found)
            elif self._padding:
                skipped = min(self._padding, len(self._buffer))
                del self._buffer[:skipped]
                self._padding -= skipped
            elif len(self._buffer) < BLOCK:
                break
            else:
                block = bytes(self._buffer[:BLOCK])
                del self._buffer[:BLOCK]
                self._take_header(block, found)
        if self.ended:
            self._buffer.clear()
        return found

    def _take_body(self, found: list[Entry | bytes]) -> None:
        part = bytes(self._buffer[: self._body])
        del self._buffer[: len(part)]
        self._body -= len(part)
        if self._extended is None:
            found.append(part)
            return
        kind, whole = self._extended
        whole += part
        if not self._body:
            self._extended = None
            self._take_extended(kind, bytes(whole))

    def _take_extended(self, kind: bytes, data: bytes) -> None:
        if kind == b"L":
            self._pax["path"] = data.rstrip(b"\0")
        elif kind == b"K":
            self._pax["linkpath"] = data.rstrip(b"\0")
        elif kind == b"x":
            self._pax.update(_pax(data))

    def _take_header(self, block: bytes, found: list[Entry | bytes]) -> None:
        if not block.strip(b"\0"):
            self.ended, self._blank = self._blank, True
            return
        self._blank = False
        if sum(block[:148]) + 8 * 32 + sum(block[156:]) != _number(block[148:156]):
            raise BrokenArchive("a header of the archive has a wrong checksum")
        kind = block[156:157]
        size = _number(block[124:136])
        if kind in b"xgLK":
            if size > LARGEST_HEADER:
                raise BrokenArchive(f"a header of the archive has {size} bytes")
            self._body, self._padding = size, -size % BLOCK
            self._extended = (kind, bytearray())
            return
        entry = self._entry(block, kind, size)
        self._pax = {}
        self._body, self._padding = entry.size, -entry.size % BLOCK
        found.append(entry)

    def _entry(self, block: bytes, kind: bytes, size: int) -> Entry:
        name = block[:100].split(b"\0")[0]
        prefix = block[345:500].split(b"\0")[0]
        if prefix and block[257:262] == b"ustar" and block[262:263] == b"\0":
            name = prefix + b"/" + name
        name = self._pax.get("path", name)
        link = self._pax.get("linkpath", block[157:257].split(b"\0")[0])
        if "size" in self._pax:
            try:
                size = int(self._pax["size"])
            except ValueError:
                raise BrokenArchive("a size in the archive is no number") from None
        is_what = KINDS.get(kind, Kind.OTHER)
        # Links, folders and special files have no bytes, whatever their header says.
        body = size if is_what in {Kind.FILE, Kind.OTHER} else 0
        if body < 0:
            raise BrokenArchive("a size in the archive is negative")
        return Entry(_text(name), is_what, _number(block[100:108]) & 0o7777, body, _text(link))


def _text(name: bytes) -> str:
    return name.decode("utf-8", "surrogateescape")


def _number(field: bytes) -> int:
    """Octal, or binary where the first bit says so."""
    if field[0] & 0x80:
        return int.from_bytes(bytes([field[0] & 0x7F]) + field[1:], "big")
    text = field.strip(b"\0 ")
    try:
        return int(text, 8) if text else 0
    except ValueError:
        raise BrokenArchive("a number in the archive is not octal") from None


def _pax(data: bytes) -> dict[str, bytes]:
    """`<length> <key>=<value>\\n`, again and again."""
    found = {}
    while data:
        digits, blank, _ = data.partition(b" ")
        if not blank or not digits.isdigit() or len(digits) > 8:
            raise BrokenArchive("an extended header of the archive is damaged")
        length = int(digits)
        record = data[len(digits) + 1 : length]
        key, equals, value = record[:-1].partition(b"=")
        if record[-1:] != b"\n" or not equals:
            raise BrokenArchive("an extended header of the archive is damaged")
        found[key.decode("utf-8", "replace")] = value
        data = data[length:]
    return found
