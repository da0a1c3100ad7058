"""The docker runtime keeps the contract of every runtime, on a real daemon."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from polarq.testing.runtime_contract import New, RuntimeContract

from .docker_rig import Sandboxes, daemon_is_here

pytestmark = pytest.mark.docker


class TestDockerRuntime(RuntimeContract):
    @pytest.fixture
    async def new(self, tmp_path: Path) -> AsyncIterator[New]:
        daemon_is_here()
        sandboxes = Sandboxes(tmp_path)
        yield sandboxes.new
        await sandboxes.stop()
