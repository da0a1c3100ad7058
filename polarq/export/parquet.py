"""`parquet`: rows (`polarq.export.rows`) in typed columns; the schema's name is in the file's metadata."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Any

from polarq.contracts.rollout import RolloutResult
from polarq.errors import InvalidInput
from polarq.export.base import Format, MissingPackage, Record, cannot_read
from polarq.export.rows import READ, SCHEMA, row_images, row_records

_BATCH_ROWS = 64


class Parquet(Format):
    """See the module."""

    name = "parquet"
    suffix = ".parquet"

    def __init__(self, *, everything: bool = False) -> None:
        _arrow()
        self._everything = everything

    @property
    def settings(self) -> Mapping[str, Any]:
        return {"schema": SCHEMA, "all": self._everything}

    def records(self, result: RolloutResult) -> list[Record]:
        return row_records(result, everything=self._everything)

    def images(self, result: RolloutResult, records: Sequence[Record]) -> Mapping[str, bytes]:
        return row_images(result, records)

    def write(self, file: IO[bytes], records: Sequence[Record]) -> None:
        arrow, parquet = _arrow()
        try:
            table = arrow.Table.from_pylist(list(records), schema=_schema())
        except (arrow.ArrowException, OverflowError) as exc:
            some = f"rollouts '{records[0]['rollout_id']}' to '{records[-1]['rollout_id']}'"
            raise InvalidInput(some, [f"have what no column holds ({exc}); name others, or export as jsonl"]) from None
        with parquet.ParquetWriter(file, _schema(), compression="zstd") as writer:
            writer.write_table(table)

    def join(self, parts: Sequence[Path], file: IO[bytes]) -> None:
        _, parquet = _arrow()
        with parquet.ParquetWriter(file, _schema(), compression="zstd") as writer:
            for part in parts:
                with parquet.ParquetFile(part) as one:
                    for batch in one.iter_batches(_BATCH_ROWS):
                        writer.write_batch(batch)


def read_parquet(path: Path) -> Iterator[Record]:
    """The records of a file. Raises `InvalidInput` where it is none of `SCHEMA`."""
    arrow, parquet = _arrow()
    try:
        with parquet.ParquetFile(path) as file:
            told = (file.schema_arrow.metadata or {}).get(b"polarq.schema", b"").decode()
            if told not in READ:
                raise InvalidInput(str(path), [f"its metadata names the schema '{told}'; this polarq reads {SCHEMA}"])
            for batch in file.iter_batches(_BATCH_ROWS):
                yield from batch.to_pylist()
    except PermissionError as exc:
        raise cannot_read(path, exc) from None
    except (arrow.ArrowException, OSError, ValueError) as exc:
        raise InvalidInput(str(path), [f"is no parquet file, or a damaged one: {exc}"]) from None


def _arrow() -> tuple[Any, Any]:
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError:
        raise MissingPackage("pyarrow") from None
    return pyarrow, pyarrow.parquet


@functools.cache
def _schema() -> Any:
    arrow, _ = _arrow()
    text, int32 = arrow.string(), arrow.int32()
    span = arrow.struct([("version", text), ("start", int32), ("end", int32)])
    turn = arrow.struct(
        [
            ("seq", int32), ("start", int32), ("end", int32), ("finish_reason", text), ("untrainable", text),
            ("grammar", text), ("reward", arrow.float64()),
        ]
    )  # fmt: skip
    image = arrow.struct(
        [("sha256", text), ("media_type", text), ("size", arrow.int64()), ("start", int32), ("end", int32)]
    )
    required = [
        ("schema", text), ("run", text), ("group", text), ("rollout", int32), ("rollout_id", text), ("trace", int32),
        ("prompt_ids", arrow.list_(int32)), ("response_ids", arrow.list_(int32)),
        ("loss_mask", arrow.list_(arrow.uint8())), ("logprobs", arrow.list_(arrow.float32())),
        ("weight", arrow.float64()), ("versions", arrow.list_(span)),
        ("turns", arrow.list_(turn)), ("images", arrow.list_(image)), ("state", text), ("boundary", text),
        ("outcome", text),
    ]  # fmt: skip
    may_miss = [
        ("reward", arrow.float64()), ("outcome_reward", arrow.float64()), ("oldest", arrow.int64()),
        ("newest", arrow.int64()), ("finish_reason", text), ("unused", text),
        ("teacher_logprobs", arrow.list_(arrow.float32())),
    ]  # fmt: skip
    fields = [
        *(arrow.field(name, kind, nullable=False) for name, kind in required),
        *(arrow.field(name, kind) for name, kind in may_miss),
    ]
    return arrow.schema(fields, metadata={"polarq.schema": SCHEMA})
