"""A sandbox's own folder on the host, for backends whose programs do not run in it."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from pathlib import Path

from polarq.errors import RuntimeFault
from polarq_worker.runtimes.folder import in_thread, remove_tree
from polarq_worker.runtimes.processes import uninterrupted
from polarq_worker.runtimes.texts import fault


class Root:
    """Nobody else's: it is made here, or there is none."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._made = False

    async def make(self, folders: Mapping[str, int]) -> None:
        """With folders in it, by name and mode. Raises `RuntimeFault`."""
        try:
            # Whoever gives up meanwhile removes what it made.
            await uninterrupted(in_thread(self._make, folders))
        except FileExistsError:
            raise RuntimeFault(f"{self.path} exists already; a sandbox's folder is never shared") from None
        except OSError as exc:
            raise fault(f"the sandbox's folder {self.path} cannot be made", exc) from exc

    def _make(self, folders: Mapping[str, int]) -> None:
        self.path.mkdir(mode=0o700, parents=True)
        self._made = True
        for name, mode in folders.items():
            (self.path / name).mkdir(mode=mode)

    async def remove(self) -> None:
        """Only if it was made here. Raises `RuntimeFault`."""
        if not self._made:
            return
        try:
            await asyncio.to_thread(remove_tree, self.path)
        except OSError as exc:
            raise fault(f"the sandbox's folder {self.path} cannot be removed", exc) from exc
