from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from polarq.ledger import Keys
from tests.http.rig import Rig, running_shim


@pytest.fixture
async def shim(redis_url: str, keys: Keys) -> AsyncIterator[Rig]:
    """An open shim on loopback over keys of its own."""
    async with running_shim(redis_url, keys) as rig:
        yield rig
