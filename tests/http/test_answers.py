"""What a bad request gets: one JSON shape, one clear line, nothing of the inside."""

from __future__ import annotations

import logging
import socket
import zlib
from typing import Any

import pytest
from aiohttp import web

from polarq.contracts.task import MAX_TASK_BYTES
from polarq.errors import PolarqError, QueueFull
from polarq.http.answers import errors, of_error
from polarq.ledger import Keys
from polarq.testing.redis import EmbeddedRedis
from tests.http.rig import Rig, a_task, running_shim


async def submitted(shim: Rig, **more: Any) -> tuple[int, Any]:
    response = await shim.http.post("/rollout/task/submit", json=a_task(**more))
    return response.status_code, response.json()["detail"]


async def test_an_unknown_key_is_refused_with_its_path_and_the_nearest_known_one(shim: Rig) -> None:
    status, detail = await submitted(shim, agent={"harnes": "mini_swe_agent"})
    assert status == 422
    line = "unknown key 'harnes', did you mean 'harness'?"
    assert {"loc": ["body", "agent"], "msg": line, "type": "value_error"} in detail


async def test_every_mistake_of_a_task_is_named(shim: Rig) -> None:
    status, detail = await submitted(shim, samples=0, timeout_seconds=-1, instruction="")
    assert status == 422
    assert {tuple(problem["loc"]) for problem in detail} == {
        ("body", "num_samples"),
        ("body", "timeout_seconds"),
        ("body", "instruction"),
    }


async def test_an_expectation_that_tests_nothing_is_refused_with_its_key(shim: Rig) -> None:
    # Field case E03.
    tests = {"strategy": "test_on_output", "config": {"test_command": "pytest", "expected_output_json": {}}}
    status, detail = await submitted(shim, evaluator=tests)
    assert (status, detail[0]["loc"]) == (422, ["body", "evaluator"])
    assert detail[0]["msg"].startswith("config.expected_output_json: is empty")
    instance = {"instance_id": "x-1", "FAIL_TO_PASS": "[]", "PASS_TO_PASS": []}
    swe = {"strategy": "swebench_harness", "config": {"instance": instance, "test_command": "pytest"}}
    status, detail = await submitted(shim, evaluator=swe)
    assert (status, detail[0]["loc"]) == (422, ["body", "evaluator"])
    assert detail[0]["msg"].startswith("config.instance: FAIL_TO_PASS and PASS_TO_PASS are both empty")


async def test_a_limit_of_the_deployment_is_a_422_too(shim: Rig) -> None:
    status, detail = await submitted(shim, timeout_seconds=1e6)
    assert (status, detail[0]["loc"]) == (422, ["body", "timeout_seconds"])
    status, detail = await submitted(shim, placement={"policy": "pinned", "node_id": "nowhere"})
    assert (status, detail[0]["loc"]) == (422, ["body", "placement", "node_id"])


@pytest.mark.parametrize(
    ("body", "status", "words"),
    [
        (b"", 400, "not JSON"),
        (b"{", 400, "not JSON"),
        (b'{"a": NaN}', 400, "not JSON"),
        (b'{"instruction": "caf\xe9"}', 400, "not UTF-8 text (byte 20)"),
        (b'{"instruction": "\\ud800"}', 400, "not JSON"),
        (b'{"metadata": ' + b"[" * 100_000 + b"]" * 100_000 + b"}", 400, "nested"),
        (b'{"metadata": ' + b"[" * 300 + b"]" * 300 + b"}", 400, "nested more than 200"),
    ],
)
async def test_a_body_that_is_no_json_is_a_400(shim: Rig, body: bytes, status: int, words: str) -> None:
    response = await shim.http.post("/rollout/task/submit", content=body)
    assert response.status_code == status
    assert words in response.json()["detail"]


async def test_json_that_is_no_object_is_a_422(shim: Rig) -> None:
    response = await shim.http.post("/rollout/task/submit", json=[1])
    assert response.status_code == 422
    assert "JSON object" in response.json()["detail"][0]["msg"]


async def test_a_byte_order_mark_does_no_harm(shim: Rig) -> None:
    response = await shim.http.post("/rollout/task/submit", content=b"\xef\xbb\xbf" + web.json_response(a_task()).body)  # type: ignore[operator]
    assert response.status_code == 200


async def test_a_body_beyond_the_limit_is_a_413_also_when_it_was_packed(shim: Rig) -> None:
    large = b'{"instruction": "' + b"x" * MAX_TASK_BYTES + b'"}'
    for content, headers in ((large, {}), (zlib.compress(large), {"Content-Encoding": "deflate"})):
        response = await shim.http.post("/rollout/task/submit", content=content, headers=headers)
        assert (response.status_code, response.json()) == (413, {"detail": "the body is larger than 32 MiB"})


async def test_what_is_no_route_or_method_is_answered_in_json(shim: Rig) -> None:
    response = await shim.http.get("/nothing/here")
    assert (response.status_code, response.json()) == (404, {"detail": "Not Found"})
    response = await shim.http.put("/tasks")
    assert (response.status_code, response.json()) == (405, {"detail": "Method Not Allowed"})
    assert response.headers["Allow"] == "GET"


@pytest.mark.parametrize(
    ("path", "parameter"),
    [
        ("/rollout/task/t?wait=61", "wait"),
        ("/rollout/task/t?trajectories=some", "trajectories"),
        ("/rollout/task/t?offset=-1", "offset"),
        ("/tasks?limit=1001", "limit"),
        ("/tasks?status=lost", "status"),
        ("/tasks?since=yesterday", "since"),
        ("/events?after=yesterday", "after"),
    ],
)
async def test_a_parameter_that_cannot_be_used_is_named(shim: Rig, path: str, parameter: str) -> None:
    response = await shim.http.get(path)
    assert response.status_code == 422
    assert response.json()["detail"][0]["loc"] == ["query", parameter]


async def test_a_misspelt_parameter_is_refused_with_the_nearest_one(shim: Rig) -> None:
    response = await shim.http.get("/rollout/task/t?trajectory=none")
    assert response.status_code == 422
    assert response.json()["detail"][0]["msg"] == "unknown key 'trajectory', did you mean 'trajectories'?"


async def test_without_redis_requests_get_503_with_the_line_that_says_what_to_do(keys: Keys) -> None:
    with EmbeddedRedis() as server:
        async with running_shim(server.url, keys) as shim:
            assert (await shim.http.get("/ready")).json() == {"status": "ready"}
            server.stop()
            response = await shim.http.post("/rollout/task/submit", json=a_task())
            assert response.status_code == 503
            assert response.headers["Retry-After"] == "2"
            assert "does not answer; start it" in response.json()["detail"]
            assert (await shim.http.get("/rollout/task/t")).status_code == 503
            assert (await shim.http.get("/ready")).status_code == 503
            health = {"status": "ok", "nodes": 0, "ledger": False, "memory": None}
            assert (await shim.http.get("/health")).json() == health
            assert "polarq_ledger_up 0" in (await shim.http.get("/metrics")).text
            assert "polarq_ledger_up 0" in (await shim.http.get("/metrics")).text
            server.start()
            await shim.submit(a_task())
            assert (await shim.http.get("/ready")).status_code == 200


async def test_a_redis_that_evicts_is_not_ready(keys: Keys) -> None:
    with EmbeddedRedis() as server:
        async with running_shim(server.url, keys) as shim:
            await shim.client.ledger.redis.config_set("maxmemory", "100mb")
            await shim.client.ledger.redis.config_set("maxmemory-policy", "allkeys-lru")
            response = await shim.http.get("/ready")
            assert response.status_code == 503
            assert "maxmemory-policy noeviction" in response.json()["detail"]


async def test_a_broker_that_is_away_is_a_503_and_the_task_is_kept(redis_url: str, keys: Keys) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        nowhere = f"redis://127.0.0.1:{listener.getsockname()[1]}/0"
    redis_section = {"prefix": keys.prefix, "broker_url": nowhere}
    async with running_shim(redis_url, keys, topology={"redis": redis_section}) as shim:
        await shim.announce("node0")
        response = await shim.http.post("/rollout/task/submit", json=a_task())
        assert response.status_code == 503
        assert "submit it again, under task_id 't' it is the same task" in response.json()["detail"]
        assert (await shim.client.record("t")).counts.queued == 1
        claim = await shim.claim("t.0")
        # Its worker cannot be told at once, and learns it with its next heartbeat.
        assert (await shim.http.delete("/rollout/task/t?wait=0")).json()["status"] == "cancelling"
        ledger = shim.client.ledger
        assert await ledger.do(ledger.calls.renew([("t.0", claim.token)], 30)) == ["cancel"]


async def test_back_pressure_is_a_429_that_says_when_to_come_back() -> None:
    response = of_error(QueueFull("10000 rollouts wait", 2.3))
    assert (response.status, response.headers["Retry-After"]) == (429, "3")


async def test_an_unexpected_error_is_logged_and_its_answer_has_only_its_id(
    shim: Rig, caplog: pytest.LogCaptureFixture
) -> None:
    # The ledger's own key is broken from outside: nothing that polarq foresees.
    await shim.submit(a_task())
    await shim.client.ledger.redis.hset(shim.client.ledger.calls.keys.task("t"), "state", "sideways")
    with caplog.at_level(logging.ERROR, logger=errors.__module__):
        response = await shim.http.get("/rollout/task/t")
    assert response.status_code == 500
    error_id = response.json()["detail"].rpartition(" ")[2]
    assert error_id in caplog.text
    assert "sideways" in caplog.text
    assert "sideways" not in response.text


def test_an_error_of_polarqs_own_keeps_its_line() -> None:
    assert of_error(PolarqError("one line")).status == 500
