"""Fixtures that every area shares: a real Redis, private key prefixes, a client."""

from __future__ import annotations

import secrets
import signal
from collections.abc import AsyncIterator, Iterator

import pytest
from hypothesis import settings
from redis.asyncio import Redis

from polarq.ledger.keys import Keys
from polarq.testing.redis import EmbeddedRedis
from polarq_proxy.serve import connect
from tests.needs import in_ci

# How long one example takes says more about the machine than about the code. CI judges a change by the same examples
# each time; a laptop looks for new ones.
settings.register_profile("polarq", deadline=None)
settings.register_profile("polarq-ci", settings.get_profile("polarq"), derandomize=True)
settings.load_profile("polarq-ci" if in_ci() else "polarq")


if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    # Started in the background of a shell, which turns Ctrl-C off for all that descends from it; tests type it.
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="session")
def redis_server() -> Iterator[EmbeddedRedis]:
    """One server per test process. Tests that stop or kill Redis start their own."""
    with EmbeddedRedis() as server:
        yield server


@pytest.fixture
def redis_url(redis_server: EmbeddedRedis) -> str:
    return redis_server.url


@pytest.fixture
def keys() -> Keys:
    """Keys under a prefix that no other test uses."""
    return Keys(f"test-{secrets.token_hex(6)}")


@pytest.fixture
async def redis_client(redis_url: str) -> AsyncIterator[Redis]:
    """As patient as the proxy's own: a connection that was made while this loop stood still counts as timed out."""
    client = connect(redis_url)
    try:
        yield client
    finally:
        await client.aclose()
