"""What one version of polarq recorded is read by another: a fleet is updated node by node, trainers before or after."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
from pydantic import ValidationError

from polarq.contracts.rollout import Boundary, Outcome, RolloutResult, RolloutState, RolloutSummary
from polarq.contracts.task import Task
from polarq.errors import InvalidTask
from polarq.ledger import Calls, Keys, Ledger
from polarq.store.payloads import encode_result, get_payload, put_payload
from tests.durable.hand import Hand
from tests.http.rig import a_task

SUMMARY = RolloutSummary(
    outcome=Outcome(state=RolloutState.COMPLETED, boundary=Boundary.NONE, reason="completed"), reward=1.0, calls=2
)


@pytest.fixture
def ledger(redis_url: str, keys: Keys) -> Iterator[Ledger]:
    with Ledger(redis_url, Calls(keys)) as made:
        yield made


def of_a_later_version(record: dict[str, Any]) -> dict[str, Any]:
    """The record with a key that is unknown here, at every depth where keys are known at all: `fidelity` holds counts
    by names that later versions may add to."""
    deep = {key for key, value in record.items() if isinstance(value, dict) and key != "fidelity"}
    later = {key: of_a_later_version(value) if key in deep else value for key, value in record.items()}
    return {**later, "known_later": {"a": 1}}


def test_a_record_of_a_later_version_is_read_without_what_is_unknown() -> None:
    record = SUMMARY.model_dump(mode="json", exclude={"timing"})
    later = {**of_a_later_version(record), "outcome": of_a_later_version(record["outcome"])}
    assert RolloutSummary.stored(json.dumps(later)) == SUMMARY
    assert RolloutSummary.stored(later) == SUMMARY


def test_a_record_is_still_checked() -> None:
    with pytest.raises(ValidationError, match="reward"):
        RolloutSummary.stored({**SUMMARY.model_dump(mode="json"), "reward": "much"})


def test_a_request_with_an_unknown_key_is_refused() -> None:
    with pytest.raises(InvalidTask, match="unknown key 'known_later'"):
        Task.load({**a_task("t"), "known_later": 4})


def test_a_result_that_a_later_version_committed_is_read_from_ledger_and_store(ledger: Ledger) -> None:
    hand = Hand(ledger)
    hand.submit("t")
    mine = hand.end("t.0")
    record = ledger.do(ledger.calls.task("t"))
    assert record is not None
    ref = record.rollouts[0].summary.payload if record.rollouts[0].summary else None
    assert ref is not None

    class Later(RolloutResult):
        known_later: dict[str, int] = {"a": 1}

    data, raw = encode_result(Later(**dict(mine)))
    newer, writes = put_payload(ledger.calls.keys, "t.0", 1, 1, data, raw_bytes=raw, keep_s=60)
    for write in writes:
        ledger.do(write)
    keys = ledger.calls.keys
    stored = ledger.redis.hget(keys.rollout("t.0"), "summary")
    assert stored is not None
    summary = json.loads(stored)
    later = {**of_a_later_version(summary), "payload": {**newer.model_dump(mode="json"), "known_later": 1}}
    ledger.redis.hset(keys.rollout("t.0"), "summary", json.dumps(later))

    read = ledger.do(ledger.calls.task("t"))
    assert read is not None
    found = read.rollouts[0].summary
    assert found is not None
    assert found.payload == newer
    assert ledger.do(get_payload(newer)).model_copy(update={"payload": None}) == mine
