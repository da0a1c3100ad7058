"""The Celery queues in a Redis of their own: the ledger neither needs nor writes them in its own."""

from __future__ import annotations

from pathlib import Path

import redis

from polarq.contracts.rollout import RolloutState
from polarq.testing.redis import EmbeddedRedis
from polarq.testing.stack import LocalStack
from tests.worker.conftest import ask, shell_task, write_scenario


def keys_of(server: EmbeddedRedis) -> set[str]:
    with redis.Redis.from_url(server.url, decode_responses=True) as client:
        return set(client.scan_iter())


def test_a_task_runs_with_its_queues_in_a_redis_of_their_own(tmp_path: Path) -> None:
    with EmbeddedRedis() as ledger, EmbeddedRedis(password="queues") as broker:
        sections = {"redis": {"prefix": "polarq", "broker_url": broker.url}}
        scenario = str(write_scenario(tmp_path))
        with LocalStack(tmp_path, scenario=scenario, redis=ledger, redis_url=ledger.url, sections=sections) as stack:
            stack.client.submit(shell_task("apart", ask(2), num_samples=2))
            results = list(stack.client.results(["apart"]))
            assert [r.outcome.state for r in results] == [RolloutState.COMPLETED] * 2
            assert stack.client.app.AsyncResult("apart").get(timeout=60, disable_sync_subtasks=False)
            in_ledger, in_broker = keys_of(ledger), keys_of(broker)
    assert {key for key in in_broker if not key.startswith("polarq:celery:")} == set()
    assert {key for key in in_ledger if key.startswith("polarq:celery:")} == {"polarq:celery:celery-task-meta-apart"}
    assert any("_kombu.binding" in key for key in in_broker)
