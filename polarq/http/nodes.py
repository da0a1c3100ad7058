"""Nodes, the server's own status, metrics, and what polarq answers differently from Polar on purpose."""

from __future__ import annotations

import asyncio
from itertools import islice

from aiohttp import web

from polarq.client.pausing import InferenceState
from polarq.contracts.node import NodeRecord
from polarq.errors import LedgerUnavailable, NodeNotFound, NotPaused
from polarq.http.answers import Refused, answer, retry_after
from polarq.http.metrics import CONTENT_TYPE, metrics_page
from polarq.http.polar_json import node_info
from polarq.http.polar_shapes import (
    GatewayNodeInfo,
    Health,
    InferenceStatus,
    Ready,
    ServerStatus,
)
from polarq.http.queries import (
    CapacityQuery,
    DrainQuery,
    InferenceQuery,
    NoQuery,
    PauseQuery,
    no_body,
    node_id_of,
    query,
)
from polarq.http.shim import Shim
from polarq.ledger import AsyncLedger, without_password
from polarq.ledger.calls import Call
from polarq.ledger.memory import memory_use
from polarq.ledger.server import server_facts

_HEALTH_S = 1.0
_READY_S = 3.0
_STATUS_TASKS = 1000


async def health(shim: Shim, request: web.Request) -> web.StreamResponse:
    """The process lives: 200 always. `ledger` says whether Redis answered within a second."""
    query(request, NoQuery)
    try:
        async with asyncio.timeout(_HEALTH_S):
            ledger = shim.client.ledger
            nodes = await ledger.do(ledger.calls.node_records())
            memory = await ledger.do(memory_use(ledger.calls))
        made: Health = {"status": "ok", "nodes": len(nodes), "ledger": True, "memory": memory.level.value}
    except (LedgerUnavailable, TimeoutError):
        made = {"status": "ok", "nodes": 0, "ledger": False, "memory": None}
    return answer(made)


async def ready(shim: Shim, request: web.Request) -> web.StreamResponse:
    """Redis can be written, and does not throw away what it is given."""
    query(request, NoQuery)
    try:
        async with asyncio.timeout(_READY_S):
            problem = await _problem(shim.client.ledger)
    except LedgerUnavailable as exc:
        problem = str(exc)
    except TimeoutError:
        problem = f"Redis did not answer within {_READY_S:g} s"
    if problem is not None:
        raise Refused(503, problem, retry_after(2.0))
    made: Ready = {"status": "ready"}
    return answer(made)


async def _problem(ledger: AsyncLedger) -> str | None:
    """What is wrong with Redis as a ledger; None: nothing. A replica or a full one refuses the write."""
    await ledger.do(Call(lambda _: None, commands=(("SET", f"{ledger.calls.keys.prefix}:ready", "1", "EX", 10),)))
    problem = (await ledger.do(server_facts())).problem
    return f"Redis at {without_password(ledger.url)}: {problem}" if problem else None


async def metrics(shim: Shim, request: web.Request) -> web.StreamResponse:
    query(request, NoQuery)
    return web.Response(body=(await metrics_page(shim)).encode(), headers={"Content-Type": CONTENT_TYPE})


async def server_status(shim: Shim, request: web.Request) -> web.StreamResponse:
    query(request, NoQuery)
    await shim.index.refresh()
    ledger = shim.client.ledger
    waiting = await ledger.do(Call(lambda r: int(r[0]), commands=(("ZCARD", ledger.calls.keys.waiting),)))
    newest = islice(shim.index.newest_first(), _STATUS_TASKS)
    made: ServerStatus = {
        "tasks": {task.task_id: task.state.value for task in newest},
        "pipeline": {"pending_sessions": waiting},
        "nodes": {"nodes": await _infos(shim)},
    }
    return answer(made)


async def list_nodes(shim: Shim, request: web.Request) -> web.StreamResponse:
    query(request, NoQuery)
    return answer(await _infos(shim))


async def get_node(shim: Shim, request: web.Request) -> web.StreamResponse:
    query(request, NoQuery)
    node_id = node_id_of(request)
    for info in await _infos(shim):
        if info["node_id"] == node_id:
            return answer(info)
    raise NodeNotFound(f"no node '{node_id}' has announced itself")


async def drain_node(shim: Shim, request: web.Request) -> web.StreamResponse:
    """Polar's DELETE: the node takes nothing new and finishes what it has."""
    asked = query(request, DrainQuery)
    return _node(shim, await shim.client.drain(node_id_of(request), deadline_s=asked.deadline_seconds))


async def undrain_node(shim: Shim, request: web.Request) -> web.StreamResponse:
    query(request, NoQuery)
    return _node(shim, await shim.client.drain(node_id_of(request), on=False))


async def pause_node(shim: Shim, request: web.Request) -> web.StreamResponse:
    query(request, NoQuery)
    return _node(shim, await shim.client.pause_node(node_id_of(request)))


async def resume_node(shim: Shim, request: web.Request) -> web.StreamResponse:
    query(request, NoQuery)
    return _node(shim, await shim.client.resume_node(node_id_of(request)))


async def set_capacity(shim: Shim, request: web.Request) -> web.StreamResponse:
    """How many harnesses the node runs at once; without a number, what its topology says."""
    asked = query(request, CapacityQuery)
    return _node(shim, await shim.client.set_capacity(node_id_of(request), asked.run_workers))


def _node(shim: Shim, record: NodeRecord) -> web.Response:
    return answer(node_info(record, shim.topology.gateway.heartbeat_interval_seconds))


async def _infos(shim: Shim) -> list[GatewayNodeInfo]:
    heartbeat_s = shim.topology.gateway.heartbeat_interval_seconds
    return sorted(
        (node_info(record, heartbeat_s) for record in await shim.client.nodes()), key=lambda info: info["node_id"]
    )


async def inference_status(shim: Shim, request: web.Request) -> web.StreamResponse:
    """Whether model calls are held back; `inflight` is null while some node that counts has not said."""
    asked = query(request, InferenceQuery)
    return answer(_inference(await shim.client.inference_state(asked.run_id)))


async def pause_inference(shim: Shim, request: web.Request) -> web.StreamResponse:
    """Answers when nothing is in flight on any node; 504 when that takes too long (the pause then still holds)."""
    await no_body(request)
    wanted = query(request, PauseQuery)
    try:
        state = await shim.client.pause_inference(
            mode=wanted.mode,
            timeout_s=wanted.timeout_seconds,
            lease_s=wanted.lease_seconds,
            run_id=wanted.run_id,
        )
    except NotPaused as exc:
        raise Refused(504, str(exc)) from None
    return answer(_inference(state))


async def resume_inference(shim: Shim, request: web.Request) -> web.StreamResponse:
    await no_body(request)
    asked = query(request, InferenceQuery)
    await shim.client.resume_inference(asked.run_id)
    return answer(_inference(await shim.client.inference_state(asked.run_id)))


def _inference(state: InferenceState) -> InferenceStatus:
    return {
        "paused": state.paused,
        "inflight": state.in_flight,
        "nodes": [
            {
                "node_id": node.node_id,
                "paused": node.paused,
                "alive": node.alive,
                "inference": node.usable,
                "inflight": node.in_flight,
                "waiting": node.waiting,
            }
            for node in state.nodes
        ],
    }


async def not_over_http(shim: Shim, request: web.Request) -> web.StreamResponse:
    raise Refused(
        501, "polarq's nodes meet in Redis, not over HTTP: start one with `celery -A polarq worker -Q <node>`"
    )
