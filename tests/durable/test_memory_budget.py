"""A Redis that fills up says so in time, takes no new tasks, and still takes the results of those under way."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from polarq.cli.checks.base import Deployment, Verdict
from polarq.cli.checks.ledger import check_redis
from polarq.client import AsyncClient, Client
from polarq.errors import InvalidTopology, QueueFull
from polarq.ledger import Keys
from polarq.ledger.memory import MemoryLevel, memory_use
from polarq.testing.redis import EmbeddedRedis
from polarq.topology import Topology
from polarq_worker.upkeep import Upkeep
from tests.durable.hand import Hand, a_client
from tests.http.rig import a_task, running_shim, settings_for, topology_for

MIB = 2**20


@pytest.fixture(scope="module")
def server() -> Iterator[EmbeddedRedis]:
    """A server whose memory nobody else uses."""
    with EmbeddedRedis() as made:
        yield made


@pytest.fixture(autouse=True)
def emptied(server: EmbeddedRedis, keys: Keys) -> Iterator[None]:
    yield
    with a_client(server.url, topology_for(keys)) as client:
        client.ledger.redis.config_set("maxmemory", 0)
        client.ledger.redis.flushall()


def used(client: Client) -> int:
    return int(client.ledger.redis.info("memory")["used_memory"])


def fill_to(client: Client, total: int) -> None:
    """Makes Redis use `total` bytes, about."""
    redis = client.ledger.redis
    for key in redis.scan_iter("ballast:*", count=10_000):
        redis.delete(key)
    number = 0
    while used(client) < total:
        # Made by the server itself: what a client sends takes room in its buffers too.
        redis.setrange(f"ballast:{number}", 100_000, b"x")
        number += 1


def budgeted(server: EmbeddedRedis, keys: Keys, budget: float | None) -> Client:
    return a_client(server.url, topology_for(keys, redis={"prefix": keys.prefix, "memory_budget": budget}))


def kinds(client: Client) -> list[tuple[str, str]]:
    events = client.ledger.do(client.ledger.calls.events("0"))
    return [(event.type, event.data["level"]) for event in events if event.type == "redis.memory"]


def test_at_80_percent_it_is_told_at_95_refused_and_results_are_still_taken(server: EmbeddedRedis, keys: Keys) -> None:
    with budgeted(server, keys, 40 * MIB) as client:
        hand, calls = Hand(client.ledger), client.ledger.calls
        hand.submit("before")
        claim = hand.claim("before.0")
        assert client.ledger.do(memory_use(calls)).level is MemoryLevel.OK
        fill_to(client, 33 * MIB)
        seen = client.ledger.do(memory_use(calls))
        assert (seen.level, seen.changed, seen.budget_bytes) == (MemoryLevel.HIGH, True, 40 * MIB)
        assert not client.ledger.do(memory_use(calls)).changed
        hand.submit("still-taken")
        fill_to(client, 39 * MIB)
        assert client.ledger.do(memory_use(calls)).level is MemoryLevel.FULL
        before = hand.all_keys()
        with pytest.raises(QueueFull, match=r"Redis uses \d+ of the 40 MiB.*acknowledge results") as refused:
            hand.submit("too-much")
        assert refused.value.retry_after_s >= 30
        assert hand.all_keys() == before
        # The same request again is no new task, and what runs may end.
        hand.submit("still-taken")
        hand.end("before.0", claim=claim, size=100_000)
        assert client.acknowledge("before") == 1
        fill_to(client, 37 * MIB)
        assert client.ledger.do(memory_use(calls)).level is MemoryLevel.FULL
        hand.submit("fits-again")
        fill_to(client, 20 * MIB)
        assert client.ledger.do(memory_use(calls)).level is MemoryLevel.OK
        assert kinds(client) == [("redis.memory", "high"), ("redis.memory", "full"), ("redis.memory", "ok")]


@pytest.mark.parametrize(("budget", "limit"), [(None, 60), (0.5, 30), (1.0, 60), (20 * MIB, 20), (90 * MIB, 60)])
def test_a_budget_is_bytes_or_a_share_of_maxmemory_and_never_more_than_that(
    server: EmbeddedRedis, keys: Keys, budget: float | None, limit: int
) -> None:
    with budgeted(server, keys, budget) as client:
        client.ledger.redis.config_set("maxmemory", 60 * MIB)
        assert client.ledger.do(memory_use(client.ledger.calls)).budget_bytes == limit * MIB
        hand = Hand(client.ledger)
        fill_to(client, int(limit * 0.93 * MIB))
        hand.submit("t")
        fill_to(client, int(limit * 0.97 * MIB))
        with pytest.raises(QueueFull, match=f"of the {limit} MiB"):
            hand.submit("u")


def test_without_maxmemory_and_budget_nothing_is_refused(server: EmbeddedRedis, keys: Keys) -> None:
    with budgeted(server, keys, None) as client:
        fill_to(client, 50 * MIB)
        Hand(client.ledger).submit("t")
        seen = client.ledger.do(memory_use(client.ledger.calls))
        assert (seen.level, seen.budget_bytes, seen.share) == (MemoryLevel.OK, 0, 0.0)


def test_a_user_who_may_not_ask_is_not_refused(server: EmbeddedRedis, keys: Keys) -> None:
    with budgeted(server, keys, 1 * MIB) as client:
        client.ledger.redis.execute_command("ACL", "SETUSER", "asker", "on", ">secret", "~*", "&*", "+@all", "-info")
        url = server.url.replace("redis://", "redis://asker:secret@")
        with a_client(url, client.topology) as asker:
            Hand(asker.ledger).submit("t")


def test_a_budget_of_nothing_is_refused() -> None:
    with pytest.raises(InvalidTopology, match="memory_budget"):
        Topology.parse({"redis": {"memory_budget": 0}}, what="topology", error=InvalidTopology)


async def test_over_http_it_is_429_with_the_time_to_wait_and_health_and_metrics_say_it(
    server: EmbeddedRedis, keys: Keys
) -> None:
    more = {"redis": {"prefix": keys.prefix, "memory_budget": 40 * MIB}}
    async with running_shim(server.url, keys, topology=more) as rig:
        with budgeted(server, keys, 40 * MIB) as client:
            fill_to(client, 39 * MIB)
        refused = await rig.http.post("/rollout/task/submit", json=a_task())
        assert refused.status_code == 429
        assert int(refused.headers["Retry-After"]) >= 30
        health = (await rig.http.get("/health")).json()
        assert health["status"] == "ok"
        assert health["memory"] == "full"
        page = (await rig.http.get("/metrics")).text
        assert f"polarq_redis_memory_budget_bytes {40 * MIB}" in page
        assert 'polarq_redis_memory_level{level="full"} 1' in page


async def test_a_workers_log_says_it_once_and_again_when_it_is_over(
    server: EmbeddedRedis, keys: Keys, caplog: pytest.LogCaptureFixture
) -> None:
    topology = topology_for(keys, redis={"prefix": keys.prefix, "memory_budget": 40 * MIB})
    caplog.set_level("INFO")
    with a_client(server.url, topology) as client:
        async with AsyncClient(topology, settings_for(server.url)) as other:
            upkeep = Upkeep(other.ledger, topology)
            for share in (0.5, 0.85, 0.85, 0.97, 0.97, 0.5):
                fill_to(client, int(share * 40 * MIB))
                await upkeep.memory_step()
        said = [(r.levelname, r.getMessage()) for r in caplog.records if r.name == "polarq.worker.upkeep"]
        assert [level for level, _ in said] == ["WARNING", "ERROR", "INFO"]
        assert "new tasks are refused, results are still taken; acknowledge" in said[1][1]


@pytest.mark.parametrize(("share", "verdict"), [(0.5, Verdict.OK), (0.85, Verdict.WARN), (0.97, Verdict.FAIL)])
def test_doctor_says_how_full_it_is(server: EmbeddedRedis, keys: Keys, share: float, verdict: Verdict) -> None:
    with budgeted(server, keys, 40 * MIB) as client:
        fill_to(client, int(share * 40 * MIB))
        findings = list(check_redis(Deployment(client.topology, client.settings)))
    (found,) = [finding for finding in findings if "of the 40 MiB" in finding.fact]
    assert found.verdict is verdict
    assert ("acknowledge results" in found.advice) is (verdict is not Verdict.OK)
