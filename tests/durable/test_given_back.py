"""A rollout that was told to stop and whose worker leaves meanwhile has ended: it is not run once more to say so."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from polarq.contracts import Boundary, Outcome, RolloutState, RolloutSummary, Task, TaskState
from polarq.ledger import Calls, Claim, Keys, Ledger, Released, TaskRecord
from polarq.testing.redis import EmbeddedRedis
from tests.durable.evaluated import stack_of
from tests.durable.gates import PATIENCE_S, Gates
from tests.http.rig import a_task
from tests.worker.conftest import wait_until

S = RolloutState
GOOD = RolloutSummary(outcome=Outcome(state=S.COMPLETED, trainable=True), reward=1.0, trainable_tokens=5)


@pytest.fixture
def ledger(redis_url: str, keys: Keys) -> Iterator[Ledger]:
    with Ledger(redis_url, Calls(keys)) as made:
        yield made


def claim(ledger: Ledger, rollout_id: str) -> Claim:
    claimed = ledger.do(ledger.calls.claim(rollout_id, "node0", 600, "job"))
    assert isinstance(claimed, Claim)
    return claimed


def give_back(ledger: Ledger, claimed: Claim) -> Released | None:
    return ledger.do(ledger.calls.release(claimed.rollout_id, claimed.token, counted=False, reason="drain"))


def record_of(ledger: Ledger) -> TaskRecord:
    record = ledger.do(ledger.calls.task("t"))
    assert record is not None
    return record


def test_a_cancelled_rollout_that_is_given_back_has_ended_and_so_has_its_task(ledger: Ledger) -> None:
    ledger.do(ledger.calls.submit(Task.load(a_task("t", 1)), "t"))
    held = claim(ledger, "t.0")
    ledger.do(ledger.calls.cancel("t"))
    assert give_back(ledger, held) is Released.CANCELLED
    record = record_of(ledger)
    assert (record.state, record.counts.cancelled, record.counts.queued) == (TaskState.CANCELLED, 1, 0)
    rollout = record.rollouts[0]
    assert (rollout.state, rollout.attempt) == (S.CANCELLED, 1)
    assert rollout.summary is not None
    assert (rollout.summary.outcome.boundary, rollout.summary.outcome.reason) == (Boundary.CONTROL, "cancelled")
    assert give_back(ledger, held) is None
    assert not ledger.do(ledger.calls.commit("t.0", held.token, GOOD)).won
    keys = ledger.calls.keys
    assert not ledger.redis.exists(keys.waiting, keys.leases)


def test_one_that_its_group_no_longer_needs_ends_as_such(ledger: Ledger) -> None:
    ledger.do(ledger.calls.submit(Task.load(a_task("t", 2, early_stop_min_usable_sessions=1)), "t"))
    spare, good = claim(ledger, "t.0"), claim(ledger, "t.1")
    assert ledger.do(ledger.calls.commit("t.1", good.token, GOOD)).won
    assert give_back(ledger, spare) is Released.CANCELLED
    record = record_of(ledger)
    assert record.state is TaskState.COMPLETED
    summary = record.rollouts[0].summary
    assert summary is not None
    assert (summary.outcome.reason, summary.early_stop is not None) == ("early_stop", True)


def test_a_worker_that_leaves_ends_what_was_cancelled_meanwhile_and_tells_of_it(tmp_path: Path) -> None:
    gates = Gates(tmp_path / "gates")
    never = {"drain_grace_s": 0.0, "lease_s": 3600.0, "heartbeat_interval_seconds": 3600.0, "reap_interval_s": 3600.0}
    with EmbeddedRedis() as server, stack_of(tmp_path, server, **never) as stack:
        stack.client.submit(gates.task("t"))
        gates.wait_started("t.0")
        ledger = stack.client.ledger
        # In the ledger only: no broadcast tells the worker, and no renewal comes.
        ledger.do(ledger.calls.cancel("t"))
        stack.workers["node0"].signal(signal.SIGTERM)
        assert stack.workers["node0"].wait(PATIENCE_S) == 0
        assert stack.client.record("t").rollouts[0].state is S.CANCELLED
        assert stack.client.head("t").state is TaskState.CANCELLED
        wait_until(lambda: ledger.redis.hget(ledger.calls.keys.task("t"), "told") == b"1", PATIENCE_S)
