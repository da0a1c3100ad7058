"""Nodes, status, metrics, readiness, and what is answered differently from Polar on purpose."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Awaitable, Callable

import pytest
from redis.asyncio import Redis

from polarq.contracts.node import NodeHealth
from polarq.errors import NotPaused
from polarq.ledger.keys import Keys
from polarq.store.pauses import Pause, PauseAck, RunAck, acknowledge, withdraw
from tests.http.rig import Rig, a_task
from tests.pauses import read_acks, read_pause, set_pause

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
    assert (await shim.http.get("/health")).json() == {"status": "ok", "nodes": 1, "ledger": True, "memory": "ok"}
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
        'polarq_node_pool{node="node0",what="idle"} 0',
        'polarq_node_sandboxes_taken_total{node="node0",from="warm"} 0',
        'polarq_run_fidelity_total{run="default",what="rollouts"} 1',
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


async def acked(shim: Rig, pause: Pause | None = None, *, node_id: str = "node0", in_flight: int = 0) -> None:
    """A node's only proxy process says that it is there, and what it does about a pause."""
    ledger = shim.client.ledger
    ack = PauseAck(node_id=node_id, pause_id=pause.pause_id if pause else "", in_flight=in_flight)
    await acknowledge(ledger.redis, ledger.calls.keys, ack)


async def paused(shim: Rig) -> Pause:
    return await set_pause(shim.client.ledger.redis, shim.client.ledger.calls.keys, lease_s=60)


async def die(shim: Rig, node_id: str = "node0") -> None:
    """The node's worker is not heard of any longer."""
    await shim.client.ledger.redis.delete(shim.client.ledger.calls.keys.node_alive(node_id))
    assert not any(node.alive for node in await shim.client.nodes() if node.node_id == node_id)


async def vanish(shim: Rig, node_id: str = "node0") -> None:
    """The node's proxy has not been heard of for so long that its presence has ended."""
    await shim.client.ledger.redis.delete(shim.client.ledger.calls.keys.proxy_present(node_id, 0))


async def drained(shim: Rig) -> bool:
    return (await shim.client.inference_state()).drained


async def test_a_proxy_that_is_there_is_waited_for_although_its_worker_is_not(shim: Rig) -> None:
    await shim.announce("node0")
    await acked(shim)
    await die(shim)
    with pytest.raises(NotPaused, match=r"in flight on node0 \(its proxy has not said\)"):
        await shim.client.pause_inference(timeout_s=0.1)
    response = await shim.http.post("/admin/inference/pause?timeout_seconds=0.1")
    assert (response.status_code, "node0" in response.json()["detail"]) == (504, True)


async def test_a_proxy_that_is_there_is_waited_for_although_its_worker_takes_it_for_dead(shim: Rig) -> None:
    await shim.announce("node0", health=NodeHealth(proxy=False))
    assert (await shim.http.post("/admin/inference/pause?timeout_seconds=5")).status_code == 200
    await acked(shim)
    with pytest.raises(NotPaused, match="node0"):
        await shim.client.pause_inference(timeout_s=0.1)


async def test_presence_that_was_never_acknowledged_blocks_too(shim: Rig) -> None:
    ledger = shim.client.ledger
    await shim.announce("node0", health=NodeHealth(proxy=False))
    await paused(shim)
    await ledger.redis.set(ledger.calls.keys.proxy_present("node0", 0), 1, px=60_000)
    assert not await drained(shim)


async def test_calls_that_a_dead_nodes_proxy_has_in_flight_are_waited_for(shim: Rig) -> None:
    await shim.announce("node0")
    await die(shim)
    pause = await paused(shim)
    await acked(shim, pause, in_flight=1)
    await vanish(shim)
    state = await shim.client.inference_state()
    assert (state.paused, state.in_flight, state.drained) == (True, 1, False)
    await acked(shim, pause)
    assert await drained(shim)


async def test_a_dead_node_whose_proxys_presence_has_ended_is_not_waited_for(shim: Rig) -> None:
    await shim.announce("node0")
    await acked(shim)
    await die(shim)
    await paused(shim)
    assert not await drained(shim)
    await vanish(shim)
    assert await drained(shim)
    assert [node.alive for node in (await shim.client.inference_state()).nodes] == [False]


async def test_a_live_node_of_whose_proxy_nothing_is_known_is_waited_for(shim: Rig) -> None:
    await shim.announce("node0")
    await paused(shim)
    assert not await drained(shim)


async def test_a_proxy_without_a_worker_is_waited_for_and_listed_as_not_alive(shim: Rig) -> None:
    await acked(shim, node_id="outside")
    with pytest.raises(NotPaused, match="outside"):
        await shim.client.pause_inference(timeout_s=0.1)
    share = {"node_id": "outside", "alive": False, "inference": None, "waiting": 0}
    status = (await shim.http.get("/admin/inference/status")).json()
    assert status == {"paused": False, "inflight": None, "nodes": [{**share, "paused": False, "inflight": None}]}
    await acked(shim, await paused(shim), node_id="outside")
    status = (await shim.http.get("/admin/inference/status")).json()
    assert status == {"paused": True, "inflight": 0, "nodes": [{**share, "paused": True, "inflight": 0}]}


async def test_every_process_that_a_present_proxy_tells_of_is_waited_for(shim: Rig) -> None:
    ledger = shim.client.ledger
    pause = await paused(shim)
    ack = PauseAck(node_id="outside", process=1, processes=2, pause_id=pause.pause_id)
    await acknowledge(ledger.redis, ledger.calls.keys, ack)
    assert not await drained(shim)
    await acknowledge(ledger.redis, ledger.calls.keys, ack.model_copy(update={"process": 0}))
    assert await drained(shim)


async def test_a_proxy_that_withdraws_is_not_waited_for(shim: Rig) -> None:
    ledger = shim.client.ledger
    await acked(shim, node_id="outside")
    await paused(shim)
    assert not await drained(shim)
    await withdraw(ledger.redis, ledger.calls.keys, "outside", 0)
    assert await drained(shim)


async def test_a_new_pause_forgets_the_proxies_that_are_gone_and_no_others(shim: Rig) -> None:
    redis, keys = shim.client.ledger.redis, shim.client.ledger.calls.keys
    await acked(shim, node_id="gone")
    await acked(shim, node_id="there")
    await vanish(shim, "gone")
    await paused(shim)
    assert [ack.node_id for ack in await read_acks(redis, keys)] == ["there"]


async def test_a_run_is_paused_by_itself(shim: Rig) -> None:
    redis, keys = shim.client.ledger.redis, shim.client.ledger.calls.keys
    await shim.announce("node0")
    pausing = asyncio.create_task(shim.http.post("/admin/inference/pause?run_id=r&timeout_seconds=60"))
    await eventually(lambda: read_pause(redis, keys, "r"))
    pause = await read_pause(redis, keys, "r")
    assert pause is not None
    said = RunAck(run_id="r", pause_id=pause.pause_id, in_flight=1, waiting=2)
    await acknowledge(redis, keys, PauseAck(node_id="node0", runs=(said,)))
    status = (await shim.http.get("/admin/inference/status?run_id=r")).json()
    assert (status["paused"], status["inflight"], status["nodes"][0]["waiting"]) == (True, 1, 2)
    assert (await shim.http.get("/admin/inference/status")).json()["paused"] is False
    assert not pausing.done()
    done = said.model_copy(update={"in_flight": 0})
    await acknowledge(redis, keys, PauseAck(node_id="node0", runs=(done,)))
    answered = (await pausing).json()
    assert (answered["paused"], answered["inflight"]) == (True, 0)
    await shim.http.post("/admin/inference/resume")
    assert await read_pause(redis, keys, "r") == pause
    assert (await shim.http.post("/admin/inference/resume?run_id=r")).json()["paused"] is False
    assert await read_pause(redis, keys, "r") is None
    assert (await shim.http.post("/admin/inference/pause?run_id=a%20b")).status_code == 422


@pytest.mark.parametrize("verb", ["pause", "resume"])
async def test_parameters_of_a_pause_in_the_body_are_refused(shim: Rig, verb: str) -> None:
    redis, keys = shim.client.ledger.redis, shim.client.ledger.calls.keys
    pause = await paused(shim)
    for body in (b'{"mode": "abort"}', b"[]", b"null", b"mode=abort", b"{"):
        response = await shim.http.post(f"/admin/inference/{verb}", content=body)
        assert response.status_code == 422, body
        assert "?mode=abort&timeout_seconds=...&lease_seconds=..." in response.json()["detail"][0]["msg"]
    assert await read_pause(redis, keys) == pause
    for body in (b"", b"{}", b" { }\n"):
        assert (await shim.http.post(f"/admin/inference/{verb}", content=body)).status_code == 200


async def test_polars_gateway_routes_say_where_nodes_meet(shim: Rig) -> None:
    for path in ("/nodes/register", "/nodes/node0/heartbeat", "/callbacks/session_result"):
        response = await shim.http.post(path, json={})
        assert response.status_code == 501
        assert "celery -A polarq worker" in response.json()["detail"]
