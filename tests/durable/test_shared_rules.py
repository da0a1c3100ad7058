"""What nodes let tasks ask for is in the ledger: whoever submits is judged by it, whatever file he has."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from polarq.client import Client
from polarq.contracts.node import NodeRecord
from polarq.errors import InvalidTask
from polarq.ledger import Keys, Ledger
from polarq.ledger.reaping import reap_nodes
from polarq.ledger.rules import rules_said, say_rules
from polarq.topology.rules import Rules
from tests.durable.hand import a_client
from tests.http.rig import a_task, topology_for

TWO_GPUS: dict[str, Any] = {"runtime": {"backend": "local", "gpus": 2}}


@pytest.fixture
def trainer(redis_url: str, keys: Keys) -> Iterator[Client]:
    """One that has nothing but the address of Redis."""
    with a_client(redis_url, topology_for(keys)) as made:
        yield made


def join(ledger: Ledger, node_id: str, **sections: Any) -> None:
    """As a node's start does. Without sections it is one that says nothing, as those of earlier releases."""
    if sections:
        ledger.do(say_rules(ledger.calls.keys, node_id, Rules.model_validate(sections)))
    ledger.do(ledger.calls.announce(NodeRecord(node_id=node_id), 60.0))


def refused(client: Client, **asked: Any) -> list[str]:
    with pytest.raises(InvalidTask) as told:
        client.submit(a_task("refused", **asked))
    return list(told.value.problems)


def said(ledger: Ledger) -> set[str]:
    rules = ledger.do(rules_said(ledger.calls.keys))
    return set(rules)


def test_every_kind_of_limit_holds_for_one_that_knows_only_redis(trainer: Client) -> None:
    join(trainer.ledger, "n", security={"max_gpus": 1}, budgets={"max_samples": 3, "max_timeout_s": 60})
    assert refused(trainer, samples=4, timeout_seconds=61, callback_url="http://example.org/x", **TWO_GPUS) == [
        "num_samples: 4; this deployment allows 3",
        "timeout_seconds: 61; this deployment allows 60",
        "runtime.gpus: 2; security.max_gpus of n's topology is 1",
        "callback_url: host 'example.org' is not among security.callback_hosts",
    ]
    assert trainer.submit(a_task("modest", 3, timeout_seconds=60)).created


def test_what_the_nodes_allow_needs_no_file_with_the_trainer(trainer: Client) -> None:
    custom: dict[str, Any] = {"agent": {"import_path": "mine:Agent", "model_name": "tiny"}}
    assert "security.allowed_modules of the topology" in refused(trainer, **custom)[0], "no node has said anything"
    join(trainer.ledger, "n", security={"allowed_modules": ["mine"]})
    assert trainer.submit(a_task("custom", **custom)).created


def test_of_two_files_the_stricter_holds(redis_url: str, keys: Keys) -> None:
    own = topology_for(keys, security={"max_gpus": 1}, budgets={"max_samples": 2})
    with a_client(redis_url, own) as strict:
        join(strict.ledger, "n", security={"allowed_images": ["good"]})
        assert refused(strict, **TWO_GPUS) == ["runtime.gpus: 2; security.max_gpus of the topology is 1"]
        assert refused(strict, samples=3) == ["num_samples: 3; this deployment allows 2"]
        image = {"runtime": {"backend": "docker", "image": "bad"}}
        assert refused(strict, **image) == ["runtime.image: 'bad' is not in security.allowed_images of n's topology"]
        assert strict.submit(a_task("modest", 2, runtime={"backend": "docker", "image": "good"})).created


def test_one_node_that_allows_it_is_enough_and_its_queue_alone_is_rung(
    trainer: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    rung: list[str] = []
    monkeypatch.setattr(trainer, "ring", lambda task, queues: rung.extend(queues.values()))
    join(trainer.ledger, "a", security={"max_gpus": 0})
    join(trainer.ledger, "b", security={"max_gpus": 2})
    trainer.submit(a_task("gpus", 2, **TWO_GPUS))
    assert set(rung) == {"b"}
    asked = {**TWO_GPUS, "placement": {"policy": "pinned", "node_id": "a"}}
    assert refused(trainer, **asked) == ["runtime.gpus: 2; security.max_gpus of a's topology is 0"]


def test_a_task_that_was_taken_is_the_same_task_also_under_new_rules(trainer: Client) -> None:
    join(trainer.ledger, "n", security={"max_gpus": 2})
    assert trainer.submit(a_task("early", **TWO_GPUS)).created
    join(trainer.ledger, "n", security={"max_gpus": 0})
    assert not trainer.submit(a_task("early", **TWO_GPUS)).created
    assert refused(trainer, **TWO_GPUS)


def test_what_a_later_release_says_is_read_and_what_cannot_be_is_left_to_the_node(trainer: Client, keys: Keys) -> None:
    join(trainer.ledger, "n", security={"max_gpus": 1})
    trainer.ledger.redis.hset(keys.rules, "n", '{"security": {"max_gpus": 0, "max_moons": 3}, "new": {}}')
    assert refused(trainer, **TWO_GPUS) == ["runtime.gpus: 2; security.max_gpus of n's topology is 0"]
    trainer.ledger.redis.hset(keys.rules, "n", '{"security": {"max_gpus": "none"}}')
    assert trainer.submit(a_task("left", **TWO_GPUS)).created


def test_rules_leave_with_their_node(trainer: Client) -> None:
    for node_id in ("left", "lost"):
        join(trainer.ledger, node_id, security={"max_gpus": 0})
    ledger = trainer.ledger
    assert said(ledger) == {"left", "lost"}
    ledger.do(ledger.calls.depart("left"))
    assert said(ledger) == {"lost"}
    ledger.redis.delete(ledger.calls.keys.node_alive("lost"))
    ledger.do(reap_nodes(ledger.calls, 3600))
    assert said(ledger) == {"lost"}, "it may come back"
    ledger.do(reap_nodes(ledger.calls, -1))
    assert said(ledger) == set()
