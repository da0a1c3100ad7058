"""Server-sent events, read from bytes as they come.

Nothing is decoded here: a field's bytes are handed on when its event is whole, so that a character whose bytes lie in
two network reads is never seen in halves. One event may be as long as `max_event_bytes`; a longer one raises, so that
a peer that never ends an event costs a bounded amount of memory. Follows the WHATWG event-stream grammar: lines end in
LF, CR or CRLF, a first byte order mark is skipped, comments are dropped, data lines are joined by LF.
"""

from __future__ import annotations

from typing import NamedTuple

_LF = 0x0A
_BOM = b"\xef\xbb\xbf"


class EventTooLarge(ValueError):
    """An event grew beyond the limit without ending."""


class SseEvent(NamedTuple):
    data: bytes
    event: bytes = b""
    """The event's name; empty when it has none."""


class SseParser:
    """Feed it bytes, take events. Cost is linear in the bytes fed, however they are cut."""

    def __init__(self, max_event_bytes: int) -> None:
        self._max = max_event_bytes
        self._rest = bytearray()
        self._scanned = 0
        self._skip_lf = False
        self._at_start = True
        self._data: list[bytes] = []
        self._data_bytes = 0
        self._name = b""

    def feed(self, chunk: bytes) -> list[SseEvent]:
        """Events that ended in `chunk`. Raises `EventTooLarge`; the parser is of no use afterwards."""
        events: list[SseEvent] = []
        if self._rest and (end := chunk.find(b"\n\ndata: ") + 2) > 1:
            self._feed(chunk[:end], events)
            chunk = chunk[end:]
        if not self._rest and chunk.startswith(b"data: "):
            chunk = self._usual(chunk, events)
        if chunk:
            self._feed(chunk, events)
        return events

    def _feed(self, chunk: bytes, events: list[SseEvent]) -> None:
        rest = self._rest
        rest += chunk
        if self._at_start:
            if len(rest) < len(_BOM) and _BOM.startswith(rest):
                return
            self._at_start = False
            if rest.startswith(_BOM):
                del rest[: len(_BOM)]
        begin = 0
        if self._skip_lf and rest:
            begin = 1 if rest[0] == _LF else 0
            self._skip_lf = False
        scan = max(self._scanned, begin)
        lf, cr = rest.find(b"\n", scan), rest.find(b"\r", scan)
        while lf >= 0 or cr >= 0:
            end = lf if cr < 0 or 0 <= lf < cr else cr
            self._line(bytes(rest[begin:end]), events)
            begin = end + 1
            if end == cr:
                if begin == len(rest):
                    self._skip_lf = True  # it may be the first half of CRLF
                elif rest[begin] == _LF:
                    begin += 1
                cr = rest.find(b"\r", begin)
            if 0 <= lf < begin:
                lf = rest.find(b"\n", begin)
        del rest[:begin]
        self._scanned = len(rest)
        if len(rest) + self._data_bytes > self._max:
            raise EventTooLarge(f"an event is longer than {self._max} bytes")

    def _usual(self, chunk: bytes, events: list[SseEvent]) -> bytes:
        """Takes whole events of one data line each from the begin of `chunk`, which is all there is, and returns what
        follows. Nearly all reads of nearly all streams consist of such events."""
        if self._data or self._name or len(chunk) > self._max or b"\r" in chunk:
            return chunk
        *blocks, rest = chunk.split(b"\n\n")
        for block in blocks:
            if not block.startswith(b"data: ") or b"\n" in block:
                return chunk
        events += [SseEvent(block[6:]) for block in blocks]
        self._at_start = self._skip_lf = False
        return rest

    @property
    def unfinished(self) -> bool:
        """Bytes of an event are left that was never ended: at the end of a stream, it was cut."""
        return bool(self._rest or self._data)

    def _line(self, line: bytes, events: list[SseEvent]) -> None:
        if not line:
            if self._data:
                events.append(SseEvent(b"\n".join(self._data), self._name))
            self._data, self._data_bytes, self._name = [], 0, b""
            return
        name, _, value = line.partition(b":")
        value = value.removeprefix(b" ")
        if name == b"data":
            self._data.append(value)
            self._data_bytes += len(value) + 1
            if self._data_bytes > self._max:
                raise EventTooLarge(f"an event is longer than {self._max} bytes")
        elif name == b"event":
            self._name = value
