"""Takes our shell's records out of a command's output."""

from __future__ import annotations

LONGEST = 512
"""No record is longer: what looks like the beginning of one but does not end is output."""


class Records:
    """One stream's. Bytes that are no record come through unchanged, cut as they may be."""

    def __init__(self, token: str) -> None:
        self._mark = b"\x01" + token.encode() + b" "
        self._held = b""

    def feed(self, data: bytes) -> tuple[bytes, list[str]]:
        """(output, records) as far as they are certain."""
        data = self._held + data
        self._held = b""
        output = bytearray()
        records: list[str] = []
        while (at := data.find(self._mark)) >= 0:
            end = data.find(b"\n", at)
            if end < 0:
                if len(data) - at > LONGEST:
                    break
                self._held = data[at:]
                return bytes(output + data[:at]), records
            output += data[:at]
            records.append(data[at + len(self._mark) : end].decode("ascii", "replace"))
            data = data[end + 1 :]
        keep = self._begun(data)
        if keep:
            self._held = data[-keep:]
            data = data[:-keep]
        return bytes(output + data), records

    def rest(self) -> bytes:
        """At the stream's end: what was held back was output."""
        held, self._held = self._held, b""
        return held

    def _begun(self, data: bytes) -> int:
        """How many of the last bytes may be the beginning of a mark."""
        at = data.rfind(b"\x01", max(len(data) - len(self._mark) + 1, 0))
        while at >= 0:
            if self._mark.startswith(data[at:]):
                return len(data) - at
            at = data.rfind(b"\x01", max(len(data) - len(self._mark) + 1, 0), at)
        return 0
