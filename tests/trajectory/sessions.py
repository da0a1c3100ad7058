"""Recorded sessions of real agent programs, of 24 turns each (tests/fixtures/sessions).

`NAME.exact` was recorded in exact mode, of a model that thinks and samples other ids than its texts encode to;
`NAME.observe` where the engine renders every prompt, of one that does neither: whether its prompts go on is up to the
program alone. `NAME.drift` where the engine renders, of a model that samples other ids in each answer, as real ones do
in some: no prompt goes on. `tests.trajectory.record_sessions` makes them anew.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable
from functools import cache
from pathlib import Path

from polarq.contracts.completion import Completion
from polarq.export.base import Record
from polarq.export.completions import read_completions_file

if sys.version_info >= (3, 14):
    from compression import zstd
else:
    from backports import zstd

FOLDER = Path(__file__).parents[1] / "fixtures" / "sessions"
CONTEXTS = ("exact", "observe")
DRIFT = "drift"


def harnesses(context: str) -> tuple[str, ...]:
    """Of which there is a session in this context."""
    return tuple(sorted(path.name.partition(".")[0] for path in FOLDER.glob(f"*.{context}.jsonl.zst")))


def file_of(harness: str, context: str) -> Path:
    return FOLDER / f"{harness}.{context}.jsonl.zst"


def keep(harness: str, context: str, lines: Iterable[Record]) -> int:
    """Writes a recording; its size in bytes."""
    text = "".join(json.dumps(line, ensure_ascii=False, separators=(",", ":")) + "\n" for line in lines)
    return file_of(harness, context).write_bytes(zstd.compress(text.encode(), level=19))


@cache
def session(harness: str, context: str) -> tuple[Completion, ...]:
    """The session's captured calls, in order of arrival."""
    lines = zstd.decompress(file_of(harness, context).read_bytes()).splitlines()
    ((_, calls, _),) = read_completions_file(map(json.loads, lines))
    return tuple(calls)
