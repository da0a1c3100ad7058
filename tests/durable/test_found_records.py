"""A record that a worker cannot read is the end of that rollout at most; a fleet never stands still for it."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from polarq.client import Client
from polarq.contracts.rollout import Boundary, RolloutState
from polarq.ledger import Keys, Ledger
from polarq.ledger.records import Unreadable
from polarq.testing.stack import LocalStack
from tests.durable.gates import PATIENCE_S
from tests.durable.hand import Hand, a_client
from tests.http.rig import topology_for
from tests.worker.conftest import ask, shell_task, wait_until, write_scenario


@pytest.fixture
def stack(tmp_path: Path) -> Iterator[LocalStack]:
    # One place: what holds it up holds everything up.
    node = {"max_init_workers": 1, "max_run_workers": 1, "max_postrun_workers": 1}
    with LocalStack(
        tmp_path,
        scenario=str(write_scenario(tmp_path)),
        nodes={"node0": node},
        sections={"gateway": {"ring_again_s": 1, "reap_interval_s": 0.5}},
    ) as made:
        yield made


def before_others(stack: LocalStack, damage: Callable[[Ledger], None]) -> None:
    """A task stands in line and is damaged there; then others come, and end."""
    client = stack.client
    client.pause_node("node0")
    client.submit(shell_task("damaged", ask(1)))
    damage(client.ledger)
    client.submit(shell_task("behind", ask(1), num_samples=3))
    client.resume_node("node0")
    result = client.wait("behind", PATIENCE_S)
    assert [r.outcome.state for r in result.results] == [RolloutState.COMPLETED] * 3
    assert [r.attempt for r in result.results] == [1, 1, 1]


def test_a_task_that_a_newer_polarq_wrote_ends_with_that_at_once(stack: LocalStack) -> None:
    def damage(ledger: Ledger) -> None:
        key = ledger.calls.keys.task("damaged")
        request = ledger.redis.hget(key, "request")
        assert isinstance(request, bytes)
        ledger.redis.hset(key, "request", json.dumps({**json.loads(request), "of_next_year": 1}))

    before_others(stack, damage)
    wait_until(lambda: stack.client.record("damaged").state.terminal, PATIENCE_S)
    (rollout,) = stack.client.record("damaged").rollouts
    assert rollout.summary is not None
    outcome = rollout.summary.outcome
    assert (outcome.state, outcome.boundary, outcome.reason) == (
        RolloutState.FAILED,
        Boundary.TASK,
        "unreadable_task",
    )
    assert "of_next_year" in outcome.message
    assert rollout.attempt == 1
    with pytest.raises(Unreadable, match=r"cannot be read by this polarq.*of_next_year"):
        stack.client.get("damaged")


def wrong_type_of_task(ledger: Ledger) -> None:
    key = ledger.calls.keys.task("damaged")
    ledger.redis.delete(key)
    ledger.redis.set(key, "somebody else's")


def wrong_type_of_rollout(ledger: Ledger) -> None:
    key = ledger.calls.keys.rollout("damaged.0")
    ledger.redis.delete(key)
    ledger.redis.set(key, "somebody else's")


def labels_that_are_none(ledger: Ledger) -> None:
    ledger.redis.hset(ledger.calls.keys.task("damaged"), "labels", "{not JSON")


def no_ids_in_the_indexes(ledger: Ledger) -> None:
    keys = ledger.calls.keys
    strange: dict[str, int] = {"": 0, "no id": 1, "damaged.x": 2}
    for index in (keys.waiting, keys.leases, keys.run_waiting("default")):
        ledger.redis.zadd(index, strange)


@pytest.mark.parametrize(
    "damage", [wrong_type_of_task, wrong_type_of_rollout, labels_that_are_none, no_ids_in_the_indexes]
)
def test_a_damaged_record_holds_nobody_up(stack: LocalStack, damage: Callable[[Ledger], None]) -> None:
    before_others(stack, damage)


@pytest.fixture
def client(redis_url: str, keys: Keys) -> Iterator[Client]:
    with a_client(redis_url, topology_for(keys)) as made:
        yield made


def test_a_damaged_record_costs_its_own_lease_and_not_all_of_a_worker(client: Client) -> None:
    hand, ledger = Hand(client.ledger), client.ledger
    hand.submit("damaged")
    hand.submit("sound")
    held = [(claim.rollout_id, claim.token) for claim in (hand.claim("damaged.0"), hand.claim("sound.0"))]
    wrong_type_of_rollout(ledger)
    assert ledger.do(ledger.calls.renew(held, 60)) == ["lost", "ok"]
    assert ledger.redis.zrange(ledger.calls.keys.leases, 0, -1) == [b"sound.0"]


@pytest.mark.parametrize(
    "fields",
    [("foo", "bar"), ("type", "task.updated", "data", "{not JSON"), ("type", "x", "data", "5")],
)
def test_an_event_that_no_polarq_wrote_holds_no_reader_up(client: Client, fields: tuple[str, ...]) -> None:
    hand, ledger = Hand(client.ledger), client.ledger
    before = ledger.do(ledger.calls.last_event_id())
    strange = ("XADD", ledger.calls.keys.events, "*", *fields)
    ledger.redis.execute_command(*strange)
    hand.submit("read")
    results = client.results("read", timeout_s=PATIENCE_S)
    hand.end("read.0")
    ledger.redis.execute_command(*strange)
    assert [result.rollout_id for result in results] == ["read.0"]
    assert client.wait("read", PATIENCE_S).counts.completed == 1
    kinds = [event.type for event in client.follow("read", after=before)]
    assert kinds[0] == "task.created"
    assert kinds[-1] == "task.completed"
