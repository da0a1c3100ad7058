"""What a trainer's stream of results costs, and that none is missing among ten thousand."""

from __future__ import annotations

import random
import threading
from collections.abc import Iterator
from typing import Any

import pytest
from redis import Redis
from redis.exceptions import RedisError

from polarq.contracts.rollout import Outcome, RolloutState, RolloutSummary
from polarq.ledger import Calls, Claim, Keys, Ledger
from polarq.testing.redis import EmbeddedRedis
from tests.durable.hand import Hand, a_client, ids
from tests.http.rig import topology_for
from tests.worker.conftest import wait_until


@pytest.fixture
def own_redis() -> Iterator[EmbeddedRedis]:
    """A server that nobody else is connected to."""
    with EmbeddedRedis() as server:
        yield server


@pytest.fixture
def lasting_redis() -> Iterator[EmbeddedRedis]:
    """A server that keeps its data when it is killed."""
    with EmbeddedRedis(appendonly=True) as server:
        yield server


def commands_so_far(redis: Redis) -> int:
    info: Any = redis.info("stats")
    return int(info["total_commands_processed"])


def test_a_run_s_results_cost_what_the_run_is_and_not_what_the_deployment_is(
    own_redis: EmbeddedRedis, keys: Keys
) -> None:
    with a_client(own_redis.url, topology_for(keys)) as client:
        hand = Hand(client.ledger)

        def cost_of_reading() -> int:
            before = commands_so_far(client.ledger.redis)
            assert sorted(ids(list(client.results(run_id="mine", timeout_s=60)))) == [
                "mine-0.0",
                "mine-1.0",
                "mine-2.0",
            ]
            return commands_so_far(client.ledger.redis) - before

        for number in range(3):
            hand.submit(f"mine-{number}", run_id="mine")
            hand.end(f"mine-{number}.0")
        alone = cost_of_reading()
        for number in range(1500):
            hand.submit(f"other-{number}", run_id=f"other-{number % 7}")
        assert cost_of_reading() <= alone + 2
        # What is acknowledged costs nothing any more, and the run is still known.
        for number in range(200):
            hand.submit(f"old-{number}", run_id="mine")
            hand.ledger.do(hand.calls.cancel(f"old-{number}"))
            assert client.acknowledge(f"old-{number}") == 1
        assert cost_of_reading() <= alone + 2
        for number in range(3):
            client.acknowledge(f"mine-{number}")
        assert list(client.results(run_id="mine", timeout_s=60)) == []


def loaded(redis: Redis) -> bool:
    """A server that reads its data back refuses everything until it has."""
    try:
        return bool(redis.ping())
    except RedisError:
        return False


def end_quickly(hand: Hand, rollout_ids: list[str]) -> None:
    """Claims and commits, without a payload, many to a round trip."""
    ledger = hand.ledger
    for rollout_id in rollout_ids:
        claim = ledger.do(hand.calls.claim(rollout_id, "node0", 600, "job"))
        assert isinstance(claim, Claim)
        summary = RolloutSummary(outcome=Outcome(state=RolloutState.COMPLETED), reward=1.0)
        assert ledger.do(hand.calls.commit(rollout_id, claim.token, summary)).won


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_none_of_ten_thousand_is_missed_or_doubled_over_cut_connections_and_restarts_of_the_server(
    lasting_redis: EmbeddedRedis, keys: Keys
) -> None:
    """100 tasks of 100. Connections are cut every 500 ends, the server is killed twice, and events are kept for a small
    part of all that happens."""
    tasks, samples = 100, 100
    topology = topology_for(keys, retention={"events": 2000})
    rollouts = [f"t{task}.{index}" for task in range(tasks) for index in range(samples)]
    random.Random(11).shuffle(rollouts)
    failures: list[BaseException] = []
    with Ledger(lasting_redis.url, Calls(keys, events_max=2000)) as ledger:
        hand = Hand(ledger)
        for task in range(tasks):
            hand.submit(f"t{task}", samples, run_id="r")

        def end_all() -> None:
            try:
                with Redis.from_url(lasting_redis.url) as admin:
                    for start in range(0, len(rollouts), 500):
                        end_quickly(hand, rollouts[start : start + 500])
                        if start in {2500, 6500}:
                            lasting_redis.kill()
                            lasting_redis.start()
                            wait_until(lambda: loaded(admin))
                        else:
                            admin.execute_command("CLIENT", "KILL", "TYPE", "normal", "SKIPME", "yes")
            except BaseException as exc:
                failures.append(exc)

        with a_client(lasting_redis.url, topology) as client:
            ending = threading.Thread(target=end_all, daemon=True)
            got: list[str] = []
            most = 0
            ending.start()
            for result in client.results(run_id="r", timeout_s=900):
                assert not failures
                got.append(result.rollout_id)
                if len(got) % 1000 == 0:
                    pool: Any = client.ledger.redis.connection_pool
                    most = max(most, len(pool._available_connections) + len(pool._in_use_connections))
            ending.join(60)
    assert failures == []
    assert len(got) == len(set(got)) == len(rollouts)
    assert set(got) == set(rollouts)
    assert most == 1, "one connection for all of them"
