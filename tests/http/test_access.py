"""Who may use the shim."""

from __future__ import annotations

import pytest

from polarq.http.access import Access, is_loopback
from polarq.ledger import Keys
from tests.http.rig import Rig, a_task, running_shim

TOKEN = Access("right-token")


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({}, 401),
        ({"Authorization": "Bearer right-token"}, 200),
        ({"authorization": "bearer right-token"}, 200),
        ({"X-Polar-Control-Token": "right-token"}, 200),
        ({"Authorization": "Bearer wrong-token"}, 401),
        ({"Authorization": "Basic right-token"}, 401),
        ({"Authorization": "Bearer"}, 401),
        ({"X-Polar-Control-Token": ""}, 401),
        ({"Authorization": "Bearer r\u00fcght"}, 401),
    ],
)
async def test_only_the_token_opens_a_guarded_shim(
    redis_url: str, keys: Keys, headers: dict[str, str], status: int
) -> None:
    async with running_shim(redis_url, keys, rule=TOKEN) as shim:
        encoded = {key.encode(): value.encode() for key, value in headers.items()}
        response = await shim.http.get("/tasks", headers=encoded)
        assert response.status_code == status
        if status == 401:
            assert "token" in response.json()["detail"]
            assert response.headers["WWW-Authenticate"].startswith("Bearer")


async def test_every_route_but_health_is_guarded(redis_url: str, keys: Keys) -> None:
    async with running_shim(redis_url, keys, rule=TOKEN) as shim:
        assert (await shim.http.get("/health")).status_code == 200
        assert (await shim.http.head("/health")).status_code == 200
        paths = (await shim.http.get("/openapi.json", headers={"X-Polar-Control-Token": "right-token"})).json()["paths"]
        for path, operations in paths.items():
            for method in operations:
                if path == "/health":
                    continue
                response = await shim.http.request(method, path.replace("{", "").replace("}", ""))
                assert response.status_code == 401, path
        for path in ("/openapi.json", "/nothing"):
            assert (await shim.http.get(path)).status_code == 401
        assert (await shim.http.post("/rollout/task/submit", json=a_task())).status_code == 401
        assert await shim.client.ledger.do(shim.client.ledger.calls.task("t")) is None


async def test_a_rebound_name_does_not_reach_an_open_shim(shim: Rig) -> None:
    for host in ("attacker.test", "attacker.test:80", "127.0.0.1.attacker.test", "10.0.0.1", "[2001:db8::1]:80"):
        response = await shim.http.get("/tasks", headers={"Host": host})
        assert response.status_code == 403, host
    for host in ("localhost", "LOCALHOST:8080", "127.0.0.1", "127.3.2.1:1", "[::1]:8080"):
        assert (await shim.http.get("/tasks", headers={"Host": host})).status_code == 200, host


async def test_another_sites_page_cannot_post_to_an_open_shim(shim: Rig) -> None:
    for origin in ("https://attacker.test", "null", "http://[broken"):
        response = await shim.http.post("/rollout/task/submit", json=a_task(), headers={"Origin": origin})
        assert response.status_code == 403, origin
    assert (await shim.http.get("/tasks")).json() == {"tasks": []}
    local = {"Origin": "http://localhost:8090"}
    assert (await shim.http.post("/rollout/task/submit", json=a_task(), headers=local)).status_code == 200


def test_a_bind_beyond_loopback_makes_a_token_up_and_loopback_needs_none() -> None:
    made = Access.for_bind("0.0.0.0", None)
    assert made.made_up
    assert made.token is not None
    assert len(made.token) >= 32
    assert made.token != Access.for_bind("0.0.0.0", None).token
    assert Access.for_bind("0.0.0.0", "mine") == Access("mine")
    assert Access.for_bind("127.0.0.1", None) == Access(None)
    assert Access.for_bind("localhost", "mine") == Access("mine")


def test_loopback_is_this_machine_and_nothing_that_looks_like_it() -> None:
    assert all(is_loopback(host) for host in ("localhost", "127.0.0.1", "127.9.9.9", "::1", "[::1]", "LocalHost."))
    assert not any(is_loopback(host) for host in ("", "0.0.0.0", "::", "localhost.attacker.test", "10.0.0.1"))
