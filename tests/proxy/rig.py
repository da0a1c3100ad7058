"""A proxy in the test's own loop, in front of any engine, with a session open."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import aiohttp
from aiohttp import web
from redis.asyncio import Redis

from polarq.contracts.completion import Completion
from polarq.ledger.keys import Keys
from polarq.store.completions import read_completions
from polarq.store.grants import GrantSpec, digest_of, open_grant
from polarq.topology import InferenceEndpoint, Node
from polarq.topology.models import PoolModel, ProxySection
from polarq_proxy.app import Proxy
from polarq_proxy.relay import MAX_EVENT_BYTES

HELLO: list[dict[str, Any]] = [{"role": "user", "content": "hello"}]


@dataclass
class Sse:
    """A streamed answer as a harness reads it."""

    status: int
    headers: dict[str, str]
    raw: bytes
    events: list[Any] = field(default_factory=list)
    ended: bool = False
    """It carried [DONE]."""

    @classmethod
    def of(cls, status: int, headers: dict[str, str], raw: bytes) -> Sse:
        stream = cls(status, headers, raw)
        for block in raw.decode("utf-8").split("\n\n"):
            for line in block.split("\n"):
                if line == "data: [DONE]":
                    stream.ended = True
                elif line.startswith("data: "):
                    stream.events.append(json.loads(line[6:], parse_constant=refuse))
        return stream

    @property
    def choices(self) -> list[dict[str, Any]]:
        return [choice for event in self.events for choice in event.get("choices", [])]

    def text(self, key: str = "content", index: int = 0) -> str:
        return "".join(c["delta"].get(key) or "" for c in self.choices if c["index"] == index)

    @property
    def finish_reasons(self) -> list[str]:
        return [choice["finish_reason"] for choice in self.choices if choice["finish_reason"]]

    @property
    def errors(self) -> list[dict[str, Any]]:
        return [event["error"] for event in self.events if "error" in event]


def refuse(word: str) -> Any:
    raise AssertionError(f"{word} is not strict JSON")


@dataclass
class Rig:
    """A running proxy and one open session."""

    proxy: Proxy
    url: str
    redis: Redis
    keys: Keys
    spec: GrantSpec
    secret: str
    http: aiohttp.ClientSession

    @property
    def base_url(self) -> str:
        return f"{self.url}/s/{self.secret}"

    @property
    def digest(self) -> str:
        """What Redis knows the session's secret by."""
        return digest_of(self.secret)

    async def post(self, body: Any, path: str = "/v1/chat/completions", **options: Any) -> tuple[int, Any]:
        """(status, JSON) of one call that is not streamed."""
        status, _, data = await self.raw(body, path, **options)
        return status, json.loads(data, parse_constant=refuse)

    async def raw(
        self, body: Any, path: str = "/v1/chat/completions", *, base: str | None = None, **options: Any
    ) -> tuple[int, dict[str, str], bytes]:
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        url = (self.base_url if base is None else base) + path
        async with self.http.post(url, data=data, **options) as answer:
            return answer.status, {k.lower(): v for k, v in answer.headers.items()}, await answer.read()

    async def ask(self, messages: Sequence[Any] = HELLO, **fields: Any) -> Any:
        """The answer to a call that must succeed."""
        status, answer = await self.post({"model": "asked", "messages": list(messages), **fields})
        assert status == 200, answer
        return answer

    async def stream(self, messages: Sequence[Any] = HELLO, **fields: Any) -> Sse:
        status, headers, raw = await self.raw({"model": "asked", "messages": list(messages), "stream": True, **fields})
        return Sse.of(status, headers, raw)

    async def records(self) -> list[Completion]:
        return await read_completions(self.redis, self.keys, self.spec.rollout_id, self.spec.attempt, self.spec.token)

    async def session(self, index: int = 1, **fields: Any) -> Rig:
        """The same proxy with another session."""
        spec = GrantSpec(rollout_id=f"task.{index}", task_id="task", attempt=1, token=1, node_id="node0", **fields)
        secret = await open_grant(self.redis, self.keys, spec, ttl_s=600)
        return Rig(self.proxy, self.url, self.redis, self.keys, spec, secret, self.http)


@asynccontextmanager
async def running(
    redis: Redis,
    keys: Keys,
    *engines: str,
    event_limit: int | None = None,
    grant: dict[str, Any] | None = None,
    endpoint: dict[str, Any] | None = None,
    model_pool: list[dict[str, Any]] | None = None,
    env: dict[str, str] | None = None,
    **proxy_section: Any,
) -> AsyncIterator[Rig]:
    """A proxy before the engines at these addresses; `proxy_section` as in the topology."""
    node = Node(
        id="node0",
        inference=[InferenceEndpoint(base_url=url, **{"engine": "vllm", **(endpoint or {})}) for url in engines],
        proxy=ProxySection(**proxy_section),
        model_pool=[PoolModel.model_validate(entry) for entry in model_pool or []],
    )
    proxy = Proxy(node, redis, keys, env=env, max_event_bytes=event_limit or MAX_EVENT_BYTES)
    runner = web.ServerRunner(proxy.server(), shutdown_timeout=1.0)
    await runner.setup()
    await proxy.start()
    try:
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        url = f"http://127.0.0.1:{runner.addresses[0][1]}"
        spec = GrantSpec(rollout_id="task.0", task_id="task", attempt=1, token=1, node_id="node0", **(grant or {}))
        secret = await open_grant(redis, keys, spec, ttl_s=600)
        async with aiohttp.ClientSession() as http:
            yield Rig(proxy, url, redis, keys, spec, secret, http)
    finally:
        await runner.cleanup()
        await proxy.close()


async def until(condition: Any, timeout_s: float = 10.0) -> None:
    """Waits until a condition (maybe asynchronous) that another task brings about holds."""
    async with asyncio.timeout(timeout_s):
        while True:
            value = condition()
            if asyncio.iscoroutine(value):
                value = await value
            if value:
                return
            await asyncio.sleep(0.005)
