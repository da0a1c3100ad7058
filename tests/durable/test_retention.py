"""Nothing in Redis grows without a bound: what stays after a task has a time to live, or a limit of its own."""

from __future__ import annotations

from pathlib import Path

from redis import Redis

from polarq.client import Client
from polarq.ledger import Keys
from polarq.testing.stack import LocalStack
from tests.durable.hand import Hand, a_client
from tests.durable.key_layout import strangers
from tests.http.rig import topology_for
from tests.worker.conftest import ask, shell_task, write_scenario

BOUNDED = (
    "events",  # capped: retention.events
    "nodes",  # records of nodes: lost ones go after retention.lost_nodes_s
    "tasks",  # trimmed to retention.result_s at each submit
    "reaped",  # one counter per kind of repair
    "limits",  # one record: what the deployment goes by
    "celery:_kombu.",  # the broker's table of queues
)
"""What may stay for ever, by the beginning of its name."""


def lasting(redis: Redis, prefix: str) -> list[str]:
    """Keys without a time to live that are not in `BOUNDED`."""
    found = []
    for key in redis.scan_iter("*", count=1000):
        name = key.decode()
        if redis.ttl(key) == -1 and not name.removeprefix(f"{prefix}:").startswith(BOUNDED):
            found.append(name)
    return sorted(found)


def test_after_real_rollouts_every_key_has_an_end_or_a_bound(tmp_path: Path) -> None:
    with LocalStack(tmp_path, scenario=str(write_scenario(tmp_path))) as stack:
        client = stack.client
        client.submit(shell_task("kept", ask(2), num_samples=2))
        client.submit(shell_task("gone", ask(2), num_samples=2))
        client.submit(shell_task("failed", "exit 3"))
        client.submit(shell_task("cancelled", "sleep 60"))
        client.cancel("cancelled")
        for task_id in ("kept", "gone", "failed", "cancelled"):
            client.wait(task_id, 120, "none")
        assert client.acknowledge("gone") == 2
        stack.workers["node0"].stop()
        with Redis.from_url(stack.redis.url) as redis:
            assert lasting(redis, "polarq") == []
            keys = [key.decode() for key in redis.scan_iter("polarq:*")]
            assert not [key for key in keys if "{gone}:payload" in key or "{gone}:completions" in key]
            assert [key for key in keys if "{kept}:payload" in key]
            assert [key for key in keys if "{kept}:completions" in key]
            assert strangers((key.encode() for key in keys), Keys()) == []


def test_a_thousand_tasks_leave_no_more_events_than_are_kept(redis_url: str, keys: Keys) -> None:
    with a_client(redis_url, topology_for(keys, retention={"events": 200})) as client:
        hand = Hand(client.ledger)
        for number in range(300):
            hand.submit(f"t{number}", 2)
            hand.ledger.do(hand.calls.cancel(f"t{number}"))
        # Redis trims whole nodes of its list: at most one of them, 100 events, is more than asked for.
        assert client.ledger.redis.xlen(keys.events) <= 300


def test_the_index_of_tasks_holds_those_that_are_kept(redis_url: str, keys: Keys) -> None:
    with a_client(redis_url, topology_for(keys, retention={"result_s": 1.0})) as client:
        hand = Hand(client.ledger)
        for number in range(20):
            hand.submit(f"t{number}")
            hand.end(f"t{number}.0")
        wait_for_expiry(client, "t19")
        hand.submit("new")
        assert client.ledger.redis.zrange(keys.tasks, 0, -1) == [b"new"]
        left = {key for key in hand.all_keys() if ":{t" in key}
        assert not [key for key in left if client.ledger.redis.ttl(key) == -1]


def wait_for_expiry(client: Client, task_id: str) -> None:
    ledger = client.ledger
    while ledger.do(ledger.calls.head(task_id)) is not None:
        ledger.wait_events("$", 0.1)
