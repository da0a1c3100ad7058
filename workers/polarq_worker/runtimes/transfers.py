"""Files in and out of a sandbox whose folders the worker can open itself."""

from __future__ import annotations

import abc
from pathlib import Path
from typing import Any

from polarq_worker.runtimes import confined
from polarq_worker.runtimes.base import Runtime
from polarq_worker.runtimes.confined import Progress
from polarq_worker.runtimes.fetched import Fetched


class OpenedRuntime(Runtime):
    """A backend says how it gets to a path."""

    @abc.abstractmethod
    async def _transfer(
        self, what: str, progress: Progress, function: confined.Transfer, path: str, *args: object
    ) -> Any:
        """Runs `function(base, parts, *args)` of `confined` for a path of the sandbox; when cancelled, it stops first.
        Raises `RuntimeFault`, which says `what` was being done."""

    async def put_file(self, source: Path, target: str) -> None:
        progress = Progress()
        await self._transfer("upload to", progress, confined.put_file, target, source, progress)

    async def put_dir(self, source: Path, target: str) -> None:
        progress = Progress()
        await self._transfer("upload to", progress, confined.put_dir, target, source, progress)

    async def put_bytes(self, data: bytes, target: str, mode: int = 0o644) -> None:
        await self._transfer("write", Progress(), confined.put_bytes, target, data, mode)

    async def get_file(self, source: str, target: Path, max_bytes: int) -> None:
        progress = Progress(max_bytes=max_bytes)
        await self._transfer("fetch", progress, confined.get_file, source, target, progress)

    async def get_dir(self, source: str, target: Path, max_bytes: int, max_files: int) -> Fetched:
        progress = Progress(max_bytes=max_bytes, max_files=max_files)
        fetched: Fetched = await self._transfer("fetch", progress, confined.get_dir, source, target, progress)
        return fetched
