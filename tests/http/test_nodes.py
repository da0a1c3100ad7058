"""Nodes, status, metrics, readiness, and what is answered differently from Polar on purpose."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Awaitable, Callable

from redis.asyncio import Redis

from polarq.ledger.keys import Keys
from polarq.store.pauses import PauseAck, acknowledge, read_pause
from tests.http.rig import Rig, a_task

POLAR_NODE_KEYS = {
    "node_id",
    "gateway_url",
    "max_init_workers",
    "max_run_workers",
    "max_postrun_workers",
    "metrics",
    "dispatch_reservations",
    "healthy",
    "draining",
    "heartbeat_interval_seconds",
    "last_heartbeat",
}


async def eventually(condition: Callable[[], Awaitable[object]]) -> None:
    """Waits until what another process or Redis itself brings about is there."""
    async with asyncio.timeout(10):
        while not await condition():  # noqa: ASYNC110 - Redis tells nobody of an expiry
            await asyncio.sleep(0.01)


async def over(redis: Redis, keys: Keys) -> bool:
    return await read_pause(redis, keys) is None


async def test_nodes_are_listed_by_id_with_polars_keys(shim: Rig) -> None:
    await shim.announce("node1")
    await shim.announce("node0", labels={"zone": "a"})
    nodes = (await shim.http.get("/nodes")).json()
    assert [node["node_id"] for node in nodes] == ["node0", "node1"]
    node = nodes[0]
    assert set(node) >= POLAR_NODE_KEYS
    assert node["healthy"] is True
    assert node["draining"] is False
    assert node["metrics"]["run_inflight"] == 2
    assert (node["max_init_workers"], node["max_run_workers"], node["max_postrun_workers"]) == (2, 3, 4)
    assert node["node"]["labels"] == {"zone": "a"}
    assert (await shim.http.get("/nodes/node0")).json() == node


async def test_deleting_a_node_drains_it_and_undrain_takes_it_back(shim: Rig) -> None:
    await shim.announce("node0")
    assert (await shim.http.delete("/nodes/node0")).json()["draining"] is True
    assert (await shim.http.get("/nodes/node0")).json()["draining"] is True
    assert (await shim.http.post("/nodes/node0/undrain")).json()["draining"] is False
    assert (await shim.http.get("/nodes/node0")).json()["draining"] is False


async def test_an_unknown_node_is_404(shim: Rig) -> None:
    for method, path in (("GET", "/nodes/x"), ("DELETE", "/nodes/x"), ("POST", "/nodes/x/undrain")):
        response = await shim.http.request(method, path)
        assert (response.status_code, response.json()) == (404, {"detail": "Node not found"})


async def test_health_counts_nodes_and_status_shows_everything_at_once(shim: Rig) -> None:
    await shim.announce("node0")
    await shim.submit(a_task("a", samples=3))
    await shim.submit(a_task("b"))
    await shim.end("b.0")
    assert (await shim.http.get("/health")).json() == {"status": "ok", "nodes": 1, "ledger": True}
    status = (await shim.http.get("/rollout/status")).json()
    assert status["tasks"] == {"a": "running", "b": "completed"}
    assert status["pipeline"] == {"pending_sessions": 3}
    assert [node["node_id"] for node in status["nodes"]["nodes"]] == ["node0"]


async def test_a_redis_that_forgot_its_tasks_is_not_remembered_for_it(shim: Rig) -> None:
    await shim.submit(a_task("a"))
    assert (await shim.http.get("/rollout/status")).json()["tasks"] == {"a": "running"}
    ledger = shim.client.ledger
    await ledger.redis.delete(ledger.calls.keys.tasks, ledger.calls.keys.task("a"))
    assert (await shim.http.get("/rollout/status")).json()["tasks"] == {}
    assert (await shim.http.get("/tasks")).json() == {"tasks": []}
    await shim.submit(a_task("b"))
    assert (await shim.http.get("/rollout/status")).json()["tasks"] == {"b": "running"}


async def test_metrics_are_prometheus_text_about_tasks_rollouts_and_nodes(shim: Rig) -> None:
    await shim.announce("node0")
    await shim.submit(a_task("a", samples=3))
    await shim.end("a.0")
    await shim.claim("a.1")
    await shim.http.get("/nothing/of/that/name")
    response = await shim.http.get("/metrics")
    assert response.headers["content-type"] == "text/plain; version=0.0.4; charset=utf-8"
    lines = response.text.splitlines()
    for line in (
        'polarq_tasks{state="running"} 1',
        'polarq_tasks{state="completed"} 0',
        'polarq_rollouts{outcome="completed"} 1',
        'polarq_rollouts{outcome="queued"} 1',
        'polarq_rollouts{outcome="running"} 1',
        "polarq_waiting_rollouts 1",
        "polarq_leased_rollouts 1",
        "polarq_nodes_alive 1",
        'polarq_node_up{node="node0"} 1',
        'polarq_node_queue_depth{node="node0"} 3',
        'polarq_node_stage{node="node0",stage="run_inflight"} 2',
        'polarq_node_capacity{node="node0",stage="run"} 3',
        "polarq_ledger_up 1",
        'polarq_http_requests_total{method="POST",route="/rollout/task/submit",status="200"} 1',
        'polarq_http_requests_total{method="GET",route="other",status="404"} 1',
    ):
        assert line in lines, line
    assert any(re.fullmatch(r"polarq_events_total [1-9]\d*", line) for line in lines)
    sample = re.compile(r'[a-z_]+(\{([a-z_]+="[^"\\]*",?)*\})? -?[0-9.e+]+')
    assert all(line.startswith("# ") or sample.fullmatch(line) for line in lines)


async def test_a_finished_task_is_counted_by_its_new_state(shim: Rig) -> None:
    await shim.submit(a_task("a"))
    assert 'polarq_tasks{state="running"} 1' in (await shim.http.get("/metrics")).text
    await shim.end("a.0")
    text = (await shim.http.get("/metrics")).text
    assert 'polarq_tasks{state="running"} 0' in text
    assert 'polarq_tasks{state="completed"} 1' in text


async def test_inference_is_paused_when_every_live_node_says_that_nothing_is_in_flight(shim: Rig) -> None:
    redis, keys = shim.client.ledger.redis, shim.client.ledger.calls.keys
    assert (await shim.http.get("/admin/inference/status")).json() == {"paused": False, "inflight": None, "nodes": []}
    await shim.announce("node0")
    pausing = asyncio.create_task(shim.http.post("/admin/inference/pause?timeout_seconds=60"))
    await eventually(lambda: read_pause(redis, keys))
    pause = await read_pause(redis, keys)
    assert pause is not None
    ack = PauseAck(node_id="node0", process=0, processes=2, pause_id=pause.pause_id, in_flight=1)
    await acknowledge(redis, keys, ack)  # one of two processes, with one call in flight
    status = (await shim.http.get("/admin/inference/status")).json()
    assert (status["paused"], status["inflight"]) == (False, None)
    await acknowledge(redis, keys, ack.model_copy(update={"process": 1, "in_flight": 0}))
    status = (await shim.http.get("/admin/inference/status")).json()
    assert (status["paused"], status["inflight"]) == (True, 1)
    assert not pausing.done()
    await acknowledge(redis, keys, ack.model_copy(update={"in_flight": 0}))
    paused = (await pausing).json()
    share = {"paused": True, "inflight": 0}
    node = {"node_id": "node0", "alive": True, "inference": None, "waiting": 0}
    assert paused == {**share, "nodes": [{**node, **share}]}
    resumed = (await shim.http.post("/admin/inference/resume")).json()
    assert resumed["paused"] is False
    assert await read_pause(redis, keys) is None


async def test_a_pause_that_does_not_drain_is_a_504_and_holds_until_its_lease_ends(shim: Rig) -> None:
    redis, keys = shim.client.ledger.redis, shim.client.ledger.calls.keys
    await shim.announce("node0")
    response = await shim.http.post("/admin/inference/pause?timeout_seconds=0.2&lease_seconds=1&mode=abort")
    assert response.status_code == 504
    assert "still model calls in flight on node0" in response.json()["detail"]
    await eventually(lambda: over(redis, keys))


async def test_polars_gateway_routes_say_where_nodes_meet(shim: Rig) -> None:
    for path in ("/nodes/register", "/nodes/node0/heartbeat", "/callbacks/session_result"):
        response = await shim.http.post(path, json={})
        assert response.status_code == 501
        assert "celery -A polarq worker" in response.json()["detail"]
