"""What a program wrote about itself, brought out of its sandbox."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

from polarq_worker.runtimes.base import Runtime


async def fetched_json(runtime: Runtime, source: str, name: str, max_bytes: int) -> Any:
    """The JSON of a file in the sandbox; the file is kept with the logs as `agent/<name>`. Raises `RuntimeFault`, and
    `ValueError` for what is none."""
    kept = runtime.host_log_dir / "agent" / name
    kept.parent.mkdir(parents=True, exist_ok=True)
    await runtime.get_file(source, kept, max_bytes)
    return await asyncio.to_thread(_read, kept)


def _read(file: Path) -> Any:
    return json.loads(file.read_bytes())
