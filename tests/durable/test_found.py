"""What lies in a queue, and what Redis answers to whoever reads it, never ends a worker or what it runs."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import redis

from polarq.contracts import RolloutState
from polarq.testing.redis import EmbeddedRedis
from polarq.testing.stack import LocalStack
from tests.durable.gates import PATIENCE_S, Gates, wait_for_log
from tests.worker.conftest import wait_until, write_scenario

REFUSALS = 3
"""How often a worker is refused before Redis is right again."""

CANNOT_READ = "the queues cannot be read"
DROPPED = "a message in the queue cannot be read and is dropped"


@pytest.fixture
def gates(tmp_path: Path) -> Gates:
    return Gates(tmp_path / "gates")


@pytest.fixture
def stack(tmp_path: Path) -> Iterator[LocalStack]:
    node = {"max_init_workers": 2, "max_run_workers": 2, "max_postrun_workers": 2}
    # Leases outlast whatever is done to Redis here.
    sections = {"gateway": {"lease_s": 300}}
    with (
        EmbeddedRedis() as server,
        LocalStack(
            tmp_path, scenario=str(write_scenario(tmp_path)), redis=server, nodes={"node0": node}, sections=sections
        ) as made,
    ):
        yield made


@pytest.fixture
def queue(stack: LocalStack) -> str:
    return stack.client.ledger.calls.keys.queue_lists("node0")[0]


def a_message(task: str, args: list[Any], **changed: Any) -> bytes:
    """A message as Celery writes it, with parts of its envelope changed."""
    envelope = {
        "body": base64.b64encode(json.dumps([args, {}, {}]).encode()).decode(),
        "content-encoding": "utf-8",
        "content-type": "application/json",
        "headers": {"task": task, "id": "hand-made", "lang": "py", "retries": 0, "eta": None, "expires": None},
        "properties": {
            "correlation_id": "hand-made",
            "delivery_info": {"exchange": "", "routing_key": "node0"},
            "priority": 0,
            "body_encoding": "base64",
            "delivery_tag": "hand-made",
        },
    }
    return json.dumps({**envelope, **changed}).encode()


NO_MESSAGES = [
    b"",
    b"garbage",
    bytes(range(256)),
    b"5",
    b"[]",
    b"{}",
    a_message("polarq.run_rollout", ["first.0", 0], properties=None),
    a_message("polarq.run_rollout", ["first.0", 0], headers=None),
    a_message("polarq.run_rollout", ["first.0", 0], body="!!!"),
    a_message("polarq.run_rollout", ["first.0", 0], body=5),
]
OTHER_MESSAGES = [
    a_message("somebody.elses", [1]),
    a_message("polarq.run_rollout", []),
    a_message("polarq.run_rollout", [None]),
    a_message("polarq.run_rollout", ["no-rollout-id"]),
    a_message("polarq.finish_task", [{}]),
]


def the_first_ends_and_the_next_is_taken(stack: LocalStack, gates: Gates) -> None:
    """What ran all the while ends in its first attempt, and the same worker takes new work."""
    stack.client.submit(gates.task("next"))
    gates.open("first.0", "next.0")
    for task_id in ("first", "next"):
        (result,) = stack.client.wait(task_id, PATIENCE_S).results
        assert result.outcome.state is RolloutState.COMPLETED
        assert result.attempt == 1
    assert gates.starts() == {"first.0": 1, "next.0": 1}
    stack.check_worker("node0")


def test_what_is_no_message_costs_a_worker_nothing(stack: LocalStack, gates: Gates, queue: str) -> None:
    stack.client.submit(gates.task("first"))
    gates.wait_started("first.0")
    ledger = stack.client.ledger
    ledger.redis.lpush(queue, *NO_MESSAGES, *OTHER_MESSAGES)
    wait_until(lambda: ledger.redis.llen(queue) == 0, PATIENCE_S)
    wait_for_log(stack, DROPPED, times=5)
    the_first_ends_and_the_next_is_taken(stack, gates)


@pytest.mark.parametrize("trouble", ["full", "replica", "wrong type"])
def test_a_redis_that_refuses_to_serve_the_queues_for_a_while_costs_a_worker_nothing(
    stack: LocalStack, gates: Gates, queue: str, trouble: str
) -> None:
    stack.client.submit(gates.task("first"))
    gates.wait_started("first.0")
    with redis.Redis.from_url(stack.redis.url) as server:
        with server.pipeline(transaction=True) as at_once:
            if trouble == "full":
                # It is full when the doorbell is taken from the queue.
                at_once.lpush(queue, a_message("polarq.run_rollout", ["first.0", 0]))
                at_once.config_set("maxmemory", 1)
            elif trouble == "replica":
                at_once.execute_command("REPLICAOF", "127.0.0.1", "1")
            else:
                at_once.set(queue, "not a list")
            at_once.execute()
        wait_for_log(stack, CANNOT_READ, times=REFUSALS)
        server.config_set("maxmemory", 0)
        server.execute_command("REPLICAOF", "NO", "ONE")
        if trouble == "wrong type":
            server.delete(queue)
    the_first_ends_and_the_next_is_taken(stack, gates)
