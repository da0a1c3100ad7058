"""The formats by name, and the files that can be read back."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

from polarq.contracts.base import ID_PATTERN, check_id
from polarq.contracts.rollout import RolloutResult
from polarq.errors import InvalidInput
from polarq.export.base import Record, cannot_read, problem_of
from polarq.export.from_atif import result_of_document
from polarq.export.jsonl import read_lines
from polarq.export.parquet import read_parquet
from polarq.export.polar import results_of_sessions
from polarq.export.rows import READ as ROWS
from polarq.export.rows import read_row, results_of_rows
from polarq.trainers.rows import Row

_ODD = (ArithmeticError, AttributeError, LookupError, RecursionError, TypeError, ValueError)
"""What comes of JSON that is nested, or made, as nothing of ours is."""
NAMES = ("parquet", "jsonl", "sft", "polar", "atif", "completions")


def read_results(path: Path) -> Iterator[RolloutResult]:
    """The rollouts of an exported file, or of a folder of ATIF documents, told by what is in it.

    Of rows there is no more than the rows have: no messages or lineage. Raises `InvalidInput`, also where its ids would
    lead out of an archive.
    """
    try:
        for result in _results(path):
            _check(result)
            yield result
    except _ODD as exc:
        raise InvalidInput(str(path), [f"cannot be read: {problem_of(exc)}"]) from None


def _check(result: RolloutResult) -> None:
    for name in ("task_id", "run_id"):
        check_id(name, getattr(result, name))
    if result.rollout_id != f"{result.task_id}.{result.index}":
        told = f"is not what rollout {result.index} of task '{result.task_id}' is called"
        raise InvalidInput(f"rollout_id '{result.rollout_id}'", [told])
    for trace in result.trajectory.traces if result.trajectory is not None else ():
        seqs = [turn.seq for turn in trace.turns]
        for name, numbers in (("prompt_ids", trace.prompt_ids), ("response_ids", trace.response_ids), ("seq", seqs)):
            if numbers and not -(2**31) <= min(numbers) <= max(numbers) < 2**31:
                told = f"{name} of trace {trace.index} holds something other than 32-bit whole numbers"
                raise InvalidInput(result.rollout_id, [told])
    if not result.outcome.state.terminal:
        raise InvalidInput(result.rollout_id, [f"has not ended (state {result.outcome.state.value})"])


def _results(path: Path) -> Iterator[RolloutResult]:
    if path.is_dir():
        return _of_documents(path)
    if not path.is_file():
        raise InvalidInput(str(path), ["there is no such file"])
    if path.suffix == ".parquet":
        return results_of_rows(read_parquet(path))
    if path.suffix == ".json":
        return _of_json(path)
    return _of_lines(path)


def read_rows(path: Path) -> Iterator[Row]:
    """The rows of a file of the formats `parquet` and `jsonl`, as they were exported. Raises `InvalidInput`."""
    records = read_parquet(path) if path.suffix == ".parquet" else read_lines(path)
    return map(read_row, records)


def _of_lines(path: Path) -> Iterator[RolloutResult]:
    lines = read_lines(path)
    first = next(lines, None)
    if first is None:
        return iter(())
    records = itertools.chain([first], lines)
    if first.get("schema") in ROWS:
        return results_of_rows(records)
    if "trajectory" in first and "session_id" in first:
        return results_of_sessions(records)
    schemas = ", ".join(sorted(ROWS))
    known = f"rows of {schemas}, or Polar's SessionResults; conversations (sft) and completions hold no results"
    raise InvalidInput(str(path), [f"its first line is of no format that can be read back: {known}"])


def _of_json(path: Path) -> Iterator[RolloutResult]:
    document = _document(path)
    if "trajectory" in document and "session_id" in document:
        return results_of_sessions([document])
    if isinstance(document.get("results"), list):  # Polar's TaskStatus or TaskResult
        return results_of_sessions(document["results"])
    return iter([result_of_document(document, _name(path))])


def _of_documents(folder: Path) -> Iterator[RolloutResult]:
    paths = sorted(folder.glob("*.json"))
    if not paths:
        raise InvalidInput(str(folder), ["holds no .json files"])
    return (result_of_document(_document(path), _name(path)) for path in paths)


def _document(path: Path) -> Record:
    try:
        return msgspec.json.decode(path.read_bytes(), type=dict[str, Any])
    except OSError as exc:
        raise cannot_read(path, exc) from None
    except (msgspec.DecodeError, RecursionError) as exc:
        raise InvalidInput(str(path), [f"is no JSON object: {exc}"]) from None


def _name(path: Path) -> str:
    """A document's file name as a task id."""
    name = re.sub(r"[^A-Za-z0-9_.-]", "-", path.stem).lstrip("_.-")[:100]
    return name if re.fullmatch(ID_PATTERN, name) else "imported"
