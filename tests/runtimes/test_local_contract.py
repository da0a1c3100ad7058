"""The local runtime keeps the contract of every runtime, with and without walls."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator
from pathlib import Path
from typing import ClassVar

import pytest

from polarq.contracts.specs import RuntimeSpec
from polarq.testing.runtime_contract import CONTRACT_ENV, New, RuntimeContract
from polarq_worker.runtimes.base import Host
from polarq_worker.runtimes.local import LocalRuntime

from .local_here import needs_bubblewrap, settings


class Local(RuntimeContract):
    walls: ClassVar[str]

    @pytest.fixture
    async def new(self, tmp_path: Path) -> AsyncIterator[New]:
        made: list[LocalRuntime] = []
        spec = RuntimeSpec(backend="local", env=CONTRACT_ENV)
        host = Host("node0", "1", tmp_path / "kept", settings(self.walls))

        def new(runtime_id: str) -> LocalRuntime:
            made.append(LocalRuntime(spec, runtime_id=runtime_id, root=tmp_path / runtime_id, host=host))
            return made[-1]

        yield new
        for runtime in made:
            await runtime.stop()


class TestOpen(Local):
    walls = "none"
    no_users = "a process of the worker's own user cannot become another's"
    no_offline = "a network of its own is what bubblewrap makes"


class TestIsolated(Local):
    walls = "bubblewrap"
    no_users = "" if os.geteuid() == 0 else "only root can choose"

    @pytest.fixture(autouse=True)
    def _bubblewrap(self) -> None:
        needs_bubblewrap()
