"""What the node's proxy says of itself and of the inference behind it."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import httpx

from polarq.contracts.node import NodeHealth

_TIMEOUT_S = 5.0


def asker(token: str | None) -> httpx.AsyncClient:
    """What asks, with a new connection each time. Made once: that takes tens of milliseconds (certificates)."""
    return httpx.AsyncClient(
        timeout=_TIMEOUT_S,
        trust_env=False,
        headers={"Authorization": f"Bearer {token}"} if token else {},
        limits=httpx.Limits(max_keepalive_connections=0),
    )


async def ask_health(http: httpx.AsyncClient, proxy_url: str, before: NodeHealth) -> NodeHealth:
    """Asks the proxy. One that does not answer leaves what was known of the inference."""
    try:
        answer = (await http.get(f"{proxy_url}/health")).json()
    except (httpx.HTTPError, ValueError) as exc:
        text = f"the proxy at {proxy_url} does not answer: {type(exc).__name__}"
        return NodeHealth(proxy=False, inference=before.inference, message=text)
    return read_health(answer)


def with_disk(health: NodeHealth, folder: Path, least_mb: int) -> NodeHealth:
    """The same, with what there is to say of the disk that `folder` is on (blocks)."""
    try:
        free_mb = shutil.disk_usage(folder).free >> 20
    except OSError as exc:
        problem = f"{folder} cannot be looked at: {exc.strerror}"
    else:
        if free_mb >= least_mb:
            return health.model_copy(update={"disk": True})
        problem = f"{free_mb} MB are free in {folder}, and min_free_disk_mb is {least_mb}: make room, or set it lower"
    return health.model_copy(update={"disk": False, "message": "; ".join(filter(None, [health.message, problem]))})


def read_health(answer: Any) -> NodeHealth:
    """The proxy's /health as a node's health: inference is usable when one endpoint answers and gives token ids."""
    endpoints = answer.get("inference") if isinstance(answer, dict) else None
    if not isinstance(endpoints, list) or not endpoints:
        return NodeHealth(proxy=True)
    problems = [_problem(endpoint) for endpoint in endpoints]
    if all(problems):
        return NodeHealth(proxy=True, inference=False, message="; ".join(p for p in problems if p))
    if any(e.get("reachable") and e.get("ids") for e in endpoints):
        return NodeHealth(proxy=True, inference=True)
    return NodeHealth(proxy=True)


def _problem(endpoint: Any) -> str | None:
    """Why every rollout on this endpoint would be wasted; None when it would not, or is not known yet."""
    url, served, model = endpoint.get("url"), endpoint.get("served") or [], endpoint.get("model")
    if endpoint.get("reachable") is False:
        return str(endpoint.get("problem") or f"{url} does not answer")
    if served and model not in served:
        return f"{url} serves {', '.join(served)} and not '{model}'; set the node's model_served to what it serves"
    if endpoint.get("ids") is False:
        return str(endpoint.get("problem") or f"{url} gives no token ids; use vLLM 0.14 or later")
    return None
