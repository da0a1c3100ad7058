"""Sandboxes of a real Docker daemon, stopped with the test that made them."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from .docker_rig import Sandboxes, daemon_is_here


@pytest.fixture
async def sandboxes(tmp_path: Path) -> AsyncIterator[Sandboxes]:
    daemon_is_here()
    made = Sandboxes(tmp_path)
    yield made
    await made.stop()
