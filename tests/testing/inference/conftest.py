"""A running scripted server for each test, and a client for it."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack
from typing import Any

import httpx
import pytest

from polarq.testing.inference import Scenario, ScriptedInference
from tests.testing.inference.asking import Client

Serve = Callable[..., Awaitable[Client]]


@pytest.fixture
async def serve() -> AsyncIterator[Serve]:
    """`await serve(scenario, **options)` starts a server and gives a client of it; both end with the test."""
    async with AsyncExitStack() as stack:

        async def start(scenario: Scenario | str = "echo", **options: Any) -> Client:
            options.setdefault("served_model_name", "tiny")
            server = await stack.enter_async_context(ScriptedInference(scenario=scenario, **options))
            http = await stack.enter_async_context(
                httpx.AsyncClient(base_url=server.base_url, timeout=20, trust_env=False)
            )
            return Client(server, http)

        yield start
