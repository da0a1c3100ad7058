"""polarq's proxy in front of the real server, and what it recorded of one rollout's calls."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

from aiohttp import web
from redis.asyncio import Redis

from polarq.contracts.completion import Completion
from polarq.ledger.keys import Keys
from polarq.store.completions import read_completions
from polarq.store.grants import GrantSpec, open_grant
from polarq.topology import InferenceEndpoint, Node
from polarq_proxy.app import Proxy

from .chat import Answer, ask
from .server import EngineName, Server
from .tap import Exchange, Tap, tapped

GRANT_TTL_S = 600.0
EXAMINED_S = 120.0


@dataclass
class Session:
    """One rollout's way to the model, as its harness sees it, and the record behind it."""

    rollout_id: str
    base_url: str
    """What OPENAI_BASE_URL holds, `/v1` included."""
    secret: str
    redis: Redis
    keys: Keys
    tap: Tap

    async def ask(self, body: Mapping[str, Any], *, streamed: bool = False) -> Answer:
        """What the harness gets. The model name is its own affair."""
        return await ask(f"{self.base_url}/chat/completions", {"model": "gpt-whatever", **body}, streamed=streamed)

    async def recorded(self) -> list[Completion]:
        return await read_completions(self.redis, self.keys, self.rollout_id, 1, 1)

    @property
    def engine(self) -> EngineName:
        return self.tap.server.engine

    @property
    def exchanges(self) -> list[Exchange]:
        """What the proxy asked the server, and the server's own words."""
        return self.tap.of(self.rollout_id)


@dataclass
class ProxyOnEngine:
    """A running proxy whose node infers on the real server, through a tap."""

    url: str
    proxy: Proxy
    redis: Redis
    keys: Keys
    tap: Tap

    async def session(self) -> Session:
        task_id = f"task-{secrets.token_hex(6)}"
        rollout_id = f"{task_id}.0"
        spec = GrantSpec(rollout_id=rollout_id, task_id=task_id, attempt=1, token=1, node_id="node0")
        secret = await open_grant(self.redis, self.keys, spec, GRANT_TTL_S)
        return Session(rollout_id, f"{self.url}/s/{secret}/v1", secret, self.redis, self.keys, self.tap)


async def _examined(proxy: Proxy) -> None:
    """The proxy knows what the server is: how to ask for ids depends on the release."""
    deadline = asyncio.get_running_loop().time() + EXAMINED_S
    while not all(endpoint.state.reachable for endpoint in proxy.fleet.endpoints):
        assert asyncio.get_running_loop().time() < deadline, [e.report() for e in proxy.fleet.endpoints]
        await asyncio.sleep(0.02)  # nothing announces it


@asynccontextmanager
async def proxy_on(engine: Server, redis: Redis, keys: Keys, **settings: Any) -> AsyncIterator[ProxyOnEngine]:
    """`settings` are the node's proxy section."""
    async with tapped(engine) as tap:
        inference = InferenceEndpoint(engine=engine.engine, base_url=tap.base_url, model=engine.model)
        node = Node(id="node0", host="127.0.0.1", inference=inference, proxy=settings)
        proxy = Proxy(node, redis, keys)
        runner = web.ServerRunner(proxy.server(), shutdown_timeout=5.0)
        await runner.setup()
        try:
            await proxy.start()
            await _examined(proxy)
            await web.TCPSite(runner, "127.0.0.1", 0).start()
            yield ProxyOnEngine(f"http://127.0.0.1:{runner.addresses[0][1]}", proxy, redis, keys, tap)
        finally:
            await runner.cleanup()
            await proxy.close()
