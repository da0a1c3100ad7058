"""What a program wrote about itself, brought out of its sandbox."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from polarq.contracts.rollout import StepReport
from polarq_worker.runtimes.base import Runtime

_LAST_LINE_BYTES = 1024 * 1024


async def fetched_json(runtime: Runtime, source: str, name: str, max_bytes: int) -> Any:
    """The JSON of a file in the sandbox; the file is kept with the logs as `agent/<name>`. Raises `RuntimeFault`, and
    `ValueError` for what is none."""
    kept = runtime.host_log_dir / "agent" / name
    kept.parent.mkdir(parents=True, exist_ok=True)
    await runtime.get_file(source, kept, max_bytes)
    return await asyncio.to_thread(_read, kept)


async def last_words(runtime: Runtime, steps: Sequence[StepReport]) -> dict[str, Any]:
    """The last line that the last command printed, where that is an object in JSON; else empty."""
    if not steps or steps[-1].log is None:
        return {}
    return await asyncio.to_thread(_last_object, runtime.host_log_dir / f"{steps[-1].log}.stdout")


def _last_object(log: Path) -> dict[str, Any]:
    try:
        with log.open("rb") as file:
            file.seek(max(log.stat().st_size - _LAST_LINE_BYTES, 0))
            said = json.loads(file.read().rstrip().rpartition(b"\n")[2])
    except (OSError, ValueError):
        return {}
    return said if isinstance(said, dict) else {}


def _read(file: Path) -> Any:
    return json.loads(file.read_bytes())
