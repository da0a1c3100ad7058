"""`jsonl`: rows (`polarq.export.rows`) as JSON, one a line, and what every format of JSON lines shares."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Any

import msgspec

from polarq.contracts.rollout import RolloutResult
from polarq.errors import InvalidInput
from polarq.export.base import Format, Record, appended, cannot_read
from polarq.export.rows import SCHEMA, row_images, row_records


class Lines(Format):
    """One JSON object a line, in UTF-8."""

    suffix = ".jsonl"

    def write(self, file: IO[bytes], records: Sequence[Record]) -> None:
        encode = msgspec.json.Encoder().encode
        for record in records:
            file.write(encode(record) + b"\n")

    def join(self, parts: Sequence[Path], file: IO[bytes]) -> None:
        appended(parts, file)


class JsonLines(Lines):
    """See the module."""

    name = "jsonl"

    def __init__(self, *, everything: bool = False) -> None:
        self._everything = everything

    @property
    def settings(self) -> Mapping[str, Any]:
        return {"schema": SCHEMA, "all": self._everything}

    def records(self, result: RolloutResult) -> list[Record]:
        return row_records(result, everything=self._everything)

    def images(self, result: RolloutResult, records: Sequence[Record]) -> Mapping[str, bytes]:
        return row_images(result, records)


def read_lines(path: Path) -> Iterator[Record]:
    """The objects of a file. Raises `InvalidInput` with the line's number."""
    decode = msgspec.json.Decoder(dict).decode
    try:
        with path.open("rb") as file:
            for number, line in enumerate(file, 1):
                if not line.strip():
                    continue
                try:
                    yield decode(line)
                except (msgspec.DecodeError, RecursionError) as exc:
                    raise InvalidInput(str(path), [f"line {number} is no JSON object: {exc}"]) from None
    except OSError as exc:
        raise cannot_read(path, exc) from None
