"""Token ids as the decimal text that engines write them in: `12,7,345`.

A long prompt is compared with an earlier one as text, and only what is new in it is ever read as numbers. A text is
canonical when it is exactly what `text_of` writes: no blanks, no signs, no leading zeros. Borders lie before a comma
and at a text's ends: `...,12` is no beginning of `...,123`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Self

import msgspec
import numpy as np

_COMMA = 0x2C
_decode = msgspec.json.Decoder(list[Annotated[int, msgspec.Meta(ge=0, lt=2**31)]]).decode
_encode = msgspec.json.Encoder().encode


class NotIds(ValueError):
    """Something else than token ids: 31-bit numbers that are not negative."""


def text_of(ids: Sequence[Any]) -> bytes:
    return _encode(ids)[1:-1]


def ids_of(text: bytes) -> list[int]:
    """Raises `NotIds`."""
    try:
        return _decode(b"[%b]" % text)
    except (msgspec.DecodeError, UnicodeDecodeError) as exc:
        raise NotIds(str(exc)) from None


class Border(msgspec.Struct, frozen=True):
    """A place in a `Line`: before `offset` of its part number `part`; `length` bytes lie before it."""

    part: int
    offset: int
    length: int


class Line(msgspec.Struct, frozen=True):
    """A long canonical text in parts, each but the first with its leading comma, so that a longer one shares them."""

    parts: tuple[bytes, ...] = ()
    counts: tuple[int, ...] = ()
    """Ids in each part."""
    length: int = 0
    """Bytes in all."""

    @property
    def count(self) -> int:
        return sum(self.counts)

    @property
    def text(self) -> bytes:
        return b"".join(self.parts)

    @property
    def end(self) -> Border:
        return Border(len(self.parts), 0, self.length)

    def common(self, data: bytes, begin: int, end: int, since: Border | None = None) -> Border:
        """Up to where the ids in `data[begin:end]` are those of this line. Up to `since` they are known to be, and
        `data` begins there."""
        number, offset, length = (since.part, since.offset, since.length) if since is not None else (0, 0, 0)
        at = begin
        while number < len(self.parts):
            part = self.parts[number]
            if not offset and data.startswith(part, at, end):
                at, length, number = at + len(part), length + len(part), number + 1
                continue
            same = _same_bytes(part, offset, data, at, end)
            if offset + same < len(part):
                if part[offset + same] == _COMMA and _is_border(data, at + same, end):
                    return Border(number, offset + same, length + same)
                return self._before(number, offset + same, length + same)
            at, length, number, offset = at + same, length + same, number + 1, 0
        return Border(number, 0, length) if _is_border(data, at, end) else self._before(number, 0, length)

    def before(self, border: Border) -> Self:
        """The ids before a border."""
        parts, counts = self.parts[: border.part], self.counts[: border.part]
        if border.offset:
            piece = self.parts[border.part][: border.offset]
            parts, counts = (*parts, piece), (*counts, _count(piece, first=not border.part))
        return type(self)(parts, counts, border.length)

    def plus(self, text: bytes, count: int) -> Self:
        """With `count` more ids, given as canonical text."""
        if not count:
            return self
        parts, counts = [*self.parts, b"," + text if self.parts else text], [*self.counts, count]
        # Few parts whatever the number of turns, and each byte is copied only a few times.
        while len(parts) > 1 and len(parts[-2]) <= 2 * len(parts[-1]):
            parts[-2:], counts[-2:] = [parts[-2] + parts[-1]], [counts[-2] + counts[-1]]
        return type(self)(tuple(parts), tuple(counts), self.length + len(text) + bool(self.parts))

    def with_part(self, text: bytes, count: int) -> Self:
        """As `plus`, but what is here stays the very same objects."""
        parts = (*self.parts, b"," + text if self.parts else text)
        return type(self)(parts, (*self.counts, count), self.length + len(text) + bool(self.parts))

    def _before(self, number: int, offset: int, length: int) -> Border:
        """The last border before a place in the middle of an id."""
        while True:
            if number < len(self.parts) and offset:
                comma = self.parts[number].rfind(b",", 0, offset)
                if comma >= 0:
                    return Border(number, comma, length - offset + comma)
                length -= offset
            if not number:
                return Border(0, 0, 0)
            number -= 1
            offset = len(self.parts[number])


def _is_border(data: bytes, at: int, end: int) -> bool:
    return at == end or data[at] == _COMMA


def _same_bytes(part: bytes, offset: int, data: bytes, at: int, end: int) -> int:
    """How many bytes of `part` from `offset` on are those of `data` from `at` on."""
    most = min(len(part) - offset, end - at)
    if not most:
        return 0
    different = np.frombuffer(part, np.uint8, most, offset) != np.frombuffer(data, np.uint8, most, at)
    return int(different.argmax()) if different.any() else most


def _count(text: bytes, *, first: bool) -> int:
    return int(np.count_nonzero(np.frombuffer(text, np.uint8) == _COMMA)) + first
