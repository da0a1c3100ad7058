"""Frozen models beside the policy: asked for by alias, with a key that the node holds, never trained on."""

from __future__ import annotations

from collections.abc import Mapping

from polarq.registry import plugin
from polarq.topology import InferenceEndpoint, Node
from polarq.topology.models import PoolModel
from polarq_proxy.endpoints import Endpoint
from polarq_proxy.faults import CallFault, FaultKind

PREFIX = "pool/"


class Pool:
    """The node's frozen models, by alias. Their servers are not watched: each call finds out for itself."""

    def __init__(self, node: Node, env: Mapping[str, str]) -> None:
        self._endpoints = {entry.alias: _endpoint(entry, env) for entry in node.model_pool}

    @property
    def aliases(self) -> list[str]:
        return sorted(self._endpoints)

    async def start(self) -> None:
        for endpoint in self._endpoints.values():
            await endpoint.upstream.start()

    async def close(self) -> None:
        for endpoint in self._endpoints.values():
            await endpoint.upstream.close()

    def find(self, alias: str) -> Endpoint:
        """Raises `CallFault`."""
        endpoint = self._endpoints.get(alias)
        if endpoint is None:
            known = ", ".join(self.aliases) or "none"
            text = f"the node has no model '{alias}' (model_pool of its topology has: {known})"
            raise CallFault(FaultKind.MISCONFIGURED, text)
        return endpoint


def _endpoint(entry: PoolModel, env: Mapping[str, str]) -> Endpoint:
    spec = InferenceEndpoint(
        base_url=entry.base_url.removesuffix("/").removesuffix("/v1"),
        model=entry.model,
        max_concurrency=entry.max_concurrency,
    )
    key = env.get(entry.api_key_env) if entry.api_key_env else None
    return Endpoint(spec, plugin("engines", "openai")(), key, entry.model)
