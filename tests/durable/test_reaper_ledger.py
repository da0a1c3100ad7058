"""The reaper's atomic steps against a real Redis, also while others step in between."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Iterator
from typing import Any

import pytest

from polarq.contracts import Boundary, Outcome, RolloutState, RolloutSummary, Task, TaskState
from polarq.contracts.node import NodeRecord
from polarq.contracts.rollout import TERMINAL
from polarq.ledger import AsyncLedger, Calls, Claim, Keys, Ledger, Refused, TaskRecord
from polarq.ledger.reaping import (
    LOST_TOO_OFTEN,
    Due,
    give_turn_up,
    left_to_tell,
    look,
    mend_task,
    reap_lost,
    reap_nodes,
    ring_due,
    some_tasks,
    take_turn,
)

S = RolloutState
MOST = 3
ENDED = RolloutSummary(outcome=Outcome(state=S.COMPLETED, trainable=True), reward=1.0)


def a_task(task_id: str = "t", samples: int = 1, **more: Any) -> Task:
    agent = {"harness": "shell", "custom_shell": {"command": "true"}}
    return Task.load({"task_id": task_id, "instruction": "do it", "num_samples": samples, "agent": agent, **more})


@pytest.fixture
def ledger(redis_url: str, keys: Keys) -> Iterator[Ledger]:
    with Ledger(redis_url, Calls(keys)) as made:
        yield made


def record_of(ledger: Ledger, task_id: str = "t") -> TaskRecord:
    record = ledger.do(ledger.calls.task(task_id))
    assert record is not None
    return record


def claimed(ledger: Ledger, rollout_id: str = "t.0", node: str = "node0", *, over: bool = False) -> Claim:
    """A claim; `over`: its lease has run out by the server's clock."""
    claim = ledger.do(ledger.calls.claim(rollout_id, node, 0.001 if over else 600, "job"))
    assert isinstance(claim, Claim)
    if over:
        until(lambda: rollout_id in due(ledger).expired)
    return claim


def due(ledger: Ledger) -> Due:
    return ledger.do(look(ledger.calls, 0))


def until(true: Any) -> None:
    deadline = time.monotonic() + 60
    while not true():
        assert time.monotonic() < deadline


def last_rung(ledger: Ledger, rollout_id: str, ago_s: int) -> None:
    """Makes it a while ago, by the server's clock, that a waiting rollout was rung."""
    now_ms = int(ledger.redis.time()[0]) * 1000
    fields: Any = {"queued_ms": now_ms - 10_000_000, "rung_ms": now_ms - ago_s * 1000}
    ledger.redis.hset(ledger.calls.keys.rollout(rollout_id), mapping=fields)


def kinds(ledger: Ledger) -> list[tuple[str, Any]]:
    return [(e.type, e.data.get("status")) for e in ledger.do(ledger.calls.events("0"))]


def test_a_rollout_whose_lease_ran_out_waits_again_under_a_new_token_and_the_attempt_counts(ledger: Ledger) -> None:
    ledger.do(ledger.calls.submit(a_task(), "c"))
    old = claimed(ledger, over=True)
    reaped = ledger.do(reap_lost(ledger.calls, "t.0", MOST))
    assert (reaped.action, reaped.owner, reaped.cause) == ("queued", "node0", "node_gone")
    record = record_of(ledger)
    assert (record.counts.queued, record.counts.running) == (1, 0)
    rollout = record.rollouts[0]
    assert (rollout.state, rollout.attempt, rollout.owner, rollout.job_id) == (S.QUEUED, 1, None, None)
    assert rollout.token > old.token
    assert due(ledger) == Due(expired=(), waiting=("t.0",), untold=())
    assert not ledger.do(ledger.calls.commit("t.0", old.token, ENDED)).won
    assert ledger.do(ledger.calls.renew([("t.0", old.token)], 30)) == ["lost"]
    again = claimed(ledger, node="node1")
    assert again.attempt == 2
    assert ledger.do(ledger.calls.commit("t.0", again.token, ENDED)).finished
    assert ("session.reaped", "queued") in kinds(ledger)


def test_a_lost_rollout_stands_in_line_where_it_stood(ledger: Ledger) -> None:
    for task_id in ("first", "second", "third"):
        ledger.do(ledger.calls.submit(a_task(task_id), "c"))
    claimed(ledger, "first.0", over=True)
    claim = claimed(ledger, "second.0")
    ledger.do(ledger.calls.release("second.0", claim.token, counted=False, reason="drain"))
    assert ledger.do(reap_lost(ledger.calls, "first.0", MOST)).action == "queued"
    line: Any = ledger.redis.zrange(ledger.calls.keys.run_waiting("default"), 0, -1, withscores=True)
    since = {rollout_id.decode(): score for rollout_id, score in line}
    assert since["first.0"] <= since["second.0"] <= since["third.0"]
    created = ledger.redis.hget(ledger.calls.keys.task("first"), "created_ms")
    assert since["first.0"] == float(created or 0)


def test_a_node_that_lives_and_did_not_renew_is_said_to_be_just_that(ledger: Ledger) -> None:
    ledger.do(ledger.calls.announce(NodeRecord(node_id="node0"), 600))
    ledger.do(ledger.calls.submit(a_task(), "c"))
    claimed(ledger, over=True)
    assert ledger.do(reap_lost(ledger.calls, "t.0", MOST)).cause == "lease_expired"


def test_a_renewal_that_comes_before_the_reaper_wins(ledger: Ledger) -> None:
    ledger.do(ledger.calls.submit(a_task(), "c"))
    claim = claimed(ledger, over=True)
    assert ledger.do(ledger.calls.renew([("t.0", claim.token)], 600)) == ["ok"]
    assert ledger.do(reap_lost(ledger.calls, "t.0", MOST)).action == "held"
    assert ledger.do(ledger.calls.commit("t.0", claim.token, ENDED)).won


def test_an_index_that_contradicts_the_record_is_put_right_and_takes_no_rollout_away(ledger: Ledger) -> None:
    ledger.do(ledger.calls.submit(a_task(samples=2), "c"))
    held, done = claimed(ledger, "t.0"), claimed(ledger, "t.1")
    ledger.do(ledger.calls.commit("t.1", done.token, ENDED))
    ledger.redis.zadd(ledger.calls.keys.leases, {"t.0": 1, "t.1": 1, "gone.7": 1})
    assert set(due(ledger).expired) == {"t.0", "t.1", "gone.7"}
    actions = [ledger.do(reap_lost(ledger.calls, i, MOST)).action for i in ("t.0", "t.1", "gone.7")]
    assert actions == ["held", "index", "orphan"]
    assert due(ledger).expired == ()
    assert ledger.do(ledger.calls.commit("t.0", held.token, ENDED)).finished


def test_a_rollout_that_loses_its_node_every_time_fails_with_the_history(ledger: Ledger) -> None:
    ledger.do(ledger.calls.submit(a_task(), "c"))
    for attempt, node in enumerate(("node0", "node1", "node2"), 1):
        claim = claimed(ledger, node=node, over=True)
        assert claim.attempt == attempt
        action = ledger.do(reap_lost(ledger.calls, "t.0", MOST)).action
        assert action == ("failed" if attempt == MOST else "queued")
    record = record_of(ledger)
    assert (record.state, record.counts.failed) == (TaskState.COMPLETED, 1)
    summary = record.rollouts[0].summary
    assert summary is not None
    outcome = summary.outcome
    assert (outcome.state, outcome.boundary, outcome.reason) == (S.FAILED, Boundary.NODE, LOST_TOO_OFTEN)
    assert not outcome.trainable
    assert summary.reward is None
    for attempt, node in enumerate(("node0", "node1", "node2"), 1):
        assert f"attempt {attempt} on {node} while preparing" in outcome.message
    losses = json.loads(ledger.redis.hget(ledger.calls.keys.rollout("t.0"), "losses") or b"[]")
    assert [(x["node"], x["attempt"], x["cause"]) for x in losses] == [
        (f"node{i}", i + 1, "node_gone") for i in range(MOST)
    ]
    assert not ledger.do(ledger.calls.commit("t.0", claim.token, ENDED)).won
    assert due(ledger).expired == due(ledger).waiting == ()
    assert kinds(ledger)[-1] == ("task.completed", "completed")


def test_a_loss_that_a_claim_found_before_the_reaper_is_in_the_history_too(ledger: Ledger) -> None:
    ledger.do(ledger.calls.submit(a_task(), "c"))
    claimed(ledger, node="node0", over=True)
    claimed(ledger, node="node1", over=True)
    assert ledger.do(reap_lost(ledger.calls, "t.0", 2)).action == "failed"
    summary = record_of(ledger).rollouts[0].summary
    assert summary is not None
    assert "attempt 1 on node0" in summary.outcome.message
    assert "attempt 2 on node1" in summary.outcome.message


def test_what_a_drain_gave_back_is_no_loss(ledger: Ledger) -> None:
    ledger.do(ledger.calls.submit(a_task(), "c"))
    for _ in range(5):
        claim = claimed(ledger)
        assert ledger.do(ledger.calls.release("t.0", claim.token, counted=False, reason="drain"))
    claimed(ledger, over=True)
    assert ledger.do(reap_lost(ledger.calls, "t.0", 2)).action == "queued"


def test_a_cancelled_rollout_whose_node_is_gone_ends_as_cancelled(ledger: Ledger) -> None:
    ledger.do(ledger.calls.submit(a_task(samples=2), "c"))
    claimed(ledger, over=True)
    ledger.do(ledger.calls.cancel("t"))
    assert ledger.do(reap_lost(ledger.calls, "t.0", MOST)).action == "cancelled"
    record = record_of(ledger)
    assert (record.state, record.counts.cancelled) == (TaskState.CANCELLED, 2)


def test_a_rollout_that_its_group_no_longer_needs_is_not_run_again(ledger: Ledger) -> None:
    ledger.do(ledger.calls.submit(a_task(samples=2, early_stop_min_usable_sessions=1), "c"))
    claimed(ledger, "t.0", over=True)
    good = ENDED.model_copy(update={"trainable_tokens": 5})
    assert ledger.do(ledger.calls.commit("t.1", claimed(ledger, "t.1").token, good)).won
    assert ledger.do(reap_lost(ledger.calls, "t.0", MOST)).action == "cancelled"
    record = record_of(ledger)
    assert (record.state, record.counts.cancelled) == (TaskState.COMPLETED, 1)
    summary = record.rollouts[0].summary
    assert summary is not None
    assert (summary.outcome.reason, summary.early_stop is not None) == ("early_stop", True)


@pytest.mark.parametrize("other", ["renew", "commit", "claim", "reap"])
async def test_of_all_that_come_at_once_one_wins(redis_url: str, keys: Keys, other: str) -> None:
    """Many at once over many connections, on many rollouts: whatever the order, each rollout has one owner or end."""
    count = 40
    async with AsyncLedger(redis_url, Calls(keys)) as ledger:
        calls = ledger.calls
        await ledger.do(calls.submit(a_task(samples=count), "c"))
        ids = [f"t.{i}" for i in range(count)]
        claims = [await ledger.do(calls.claim(i, "node0", 0.001, "job")) for i in ids]
        while len((await ledger.do(look(calls, 0))).expired) < count:
            pass

        async def one(rollout_id: str, claim: Claim | Refused) -> tuple[list[str], Any]:
            assert isinstance(claim, Claim)
            steps: dict[str, Any] = {
                "renew": calls.renew([(rollout_id, claim.token)], 600),
                "commit": calls.commit(rollout_id, claim.token, ENDED),
                "claim": calls.claim(rollout_id, "node1", 600, "job1"),
                "reap": reap_lost(calls, rollout_id, MOST),
            }
            reap = reap_lost(calls, rollout_id, MOST)
            first, met, second = await asyncio.gather(ledger.do(reap), ledger.do(steps[other]), ledger.do(reap))
            return [first.action, second.action], met

        outcomes = await asyncio.gather(*(one(i, c) for i, c in zip(ids, claims, strict=True)))
        record = await ledger.do(calls.task("t"))
        assert record is not None
        for (actions, met), rollout in zip(outcomes, record.rollouts, strict=True):
            reaped = actions.count("queued") + (getattr(met, "action", "") == "queued")
            assert reaped <= 1
            match other:
                case "renew":
                    assert met == (["lost"] if reaped else ["ok"])
                    assert (rollout.state is S.QUEUED) == bool(reaped)
                case "commit":
                    assert met.won == (not reaped)
                    assert (rollout.state is S.COMPLETED) == (not reaped)
                case "claim":
                    assert isinstance(met, Claim)
                    assert (rollout.state, rollout.owner, rollout.attempt) == (S.PREPARING, "node1", 2)
                case _:
                    assert (reaped, rollout.state) == (1, S.QUEUED)
        redis: Any = ledger.redis
        lost = [int(await redis.hget(keys.rollout(i), "lost") or 0) for i in ids]
        assert max(lost) <= 1, "a loss was counted twice"
        waits = {i.decode() for i in await redis.zrange(keys.waiting, 0, -1)}
        held = {i.decode() for i in await redis.zrange(keys.leases, 0, -1)}
        assert waits == {r.rollout_id for r in record.rollouts if r.state is S.QUEUED}
        assert held == {r.rollout_id for r in record.rollouts if r.state not in {S.QUEUED, *TERMINAL}}
        assert record.counts.queued == len(waits)


def test_one_worker_at_a_time_is_the_reaper(ledger: Ledger) -> None:
    calls = ledger.calls
    assert ledger.do(take_turn(calls, "a", 600))
    assert ledger.do(take_turn(calls, "a", 600)), "it may go on"
    assert not ledger.do(take_turn(calls, "b", 600))
    ledger.do(give_turn_up(calls, "b"))
    assert not ledger.do(take_turn(calls, "b", 600)), "only the one it belongs to can give it up"
    ledger.do(give_turn_up(calls, "a"))
    assert ledger.do(take_turn(calls, "b", 0.001))
    until(lambda: ledger.do(take_turn(calls, "c", 600)))


def test_a_waiting_rollout_is_rung_less_and_less_often_and_anew_when_it_was_given_back(ledger: Ledger) -> None:
    calls = ledger.calls
    ledger.do(calls.submit(a_task(), "c"))
    assert ledger.do(ring_due(calls, "t.0", 600, 600)) == "early"
    assert ledger.do(ring_due(calls, "t.0", 0, 600)) == "ring"
    assert ledger.do(ring_due(calls, "t.0", 300, 600)) == "early"
    last_rung(ledger, "t.0", 700)
    assert ledger.do(ring_due(calls, "t.0", 300, 9999)) == "ring", "after twice the time"
    last_rung(ledger, "t.0", 700)
    assert ledger.do(ring_due(calls, "t.0", 300, 9999)) == "early", "four times the time is not over"
    assert ledger.do(ring_due(calls, "t.0", 300, 600)) == "ring", "but there is a longest time"
    assert ledger.do(ring_due(calls, "t.0", 600, 600, given_back=True)) == "ring"
    last_rung(ledger, "t.0", 400)
    assert ledger.do(ring_due(calls, "t.0", 300, 9999)) == "ring"


def test_what_waits_only_in_the_index_is_taken_out_of_it(ledger: Ledger) -> None:
    calls, keys = ledger.calls, ledger.calls.keys
    ledger.do(calls.submit(a_task(samples=3), "c"))
    claim = claimed(ledger, "t.0")
    done = claimed(ledger, "t.1")
    ledger.do(calls.commit("t.1", done.token, ENDED))
    ledger.redis.zadd(keys.waiting, {"t.0": 1, "t.1": 1, "gone.7": 1})
    ledger.redis.zadd(keys.run_waiting("default"), {"gone.7": 1})
    assert [ledger.do(ring_due(calls, i, 0, 600)) for i in ("t.0", "t.1", "gone.7")] == ["index", "index", "orphan"]
    assert due(ledger).waiting == ("t.2",)
    assert ledger.redis.zscore(keys.leases, "t.0") is not None
    assert ledger.do(calls.commit("t.0", claim.token, ENDED)).won


def test_a_node_that_went_without_a_word_is_noticed_once_and_forgotten_in_the_end(ledger: Ledger) -> None:
    calls = ledger.calls
    ledger.do(calls.announce(NodeRecord(node_id="lives"), 600))
    ledger.do(calls.announce(NodeRecord(node_id="gone"), 600))
    ledger.redis.delete(calls.keys.node_alive("gone"))
    assert ledger.do(reap_nodes(calls, 600)) == ["gone"]
    ledger.redis.zadd(calls.keys.nodes_lost, {"gone": 1})
    assert ledger.do(reap_nodes(calls, 10**10)) == []
    assert ledger.redis.zscore(calls.keys.nodes_lost, "gone") == 1, "it is gone since it was noticed"
    assert [node_id for node_id, _ in ledger.do(calls.node_records())] == ["gone", "lives"]
    assert kinds(ledger) == [("node.lost", None)]
    ledger.do(calls.announce(NodeRecord(node_id="gone"), 600))
    assert ledger.do(reap_nodes(calls, 0)) == [], "it came back"
    ledger.redis.delete(calls.keys.node_alive("gone"))
    assert ledger.do(reap_nodes(calls, 0)) == ["gone"]
    ledger.do(reap_nodes(calls, 0))
    assert [node_id for node_id, _ in ledger.do(calls.node_records())] == ["lives"]
    assert not ledger.redis.exists(calls.keys.nodes_lost)


def test_a_task_whose_records_do_not_fit_together_is_mended(ledger: Ledger) -> None:
    calls, keys = ledger.calls, ledger.calls.keys
    ledger.do(calls.submit(a_task(samples=2), "c"))
    claim = claimed(ledger, "t.0")
    assert ledger.do(mend_task(calls, "t")) == "right"
    ledger.redis.delete(keys.leases, keys.waiting)
    ledger.redis.hset(keys.task("t"), "queued", 7)
    assert ledger.do(mend_task(calls, "t")) == "mended"
    assert (due(ledger).waiting, ledger.redis.zcard(keys.leases)) == (("t.1",), 1)
    assert record_of(ledger).counts.queued == 1
    for index, token in ((0, claim.token), (1, claimed(ledger, "t.1").token)):
        ledger.do(calls.commit(f"t.{index}", token, ENDED))
    # A finish that got lost on its way.
    ledger.redis.hset(keys.task("t"), mapping={"state": "running", "completed": 1})
    assert ledger.do(mend_task(calls, "t")) == "finished"
    record = record_of(ledger)
    assert (record.state, record.counts.completed) == (TaskState.COMPLETED, 2)
    assert ledger.do(some_tasks(calls, 0, 10)) == (0, ["t"])


def test_an_ended_task_is_in_the_outbox_until_all_is_told(ledger: Ledger) -> None:
    calls, keys = ledger.calls, ledger.calls.keys
    for task_id, url in (("plain", None), ("called", "http://127.0.0.1:9/x")):
        ledger.do(calls.submit(a_task(task_id, callback_url=url), "c"))
        ledger.do(calls.commit(f"{task_id}.0", claimed(ledger, f"{task_id}.0").token, ENDED))
    assert due(ledger).untold == (), "whoever ended it gets some time"
    ledger.redis.zadd(keys.untold, {"plain": 1, "called": 1, "gone": 1})
    assert set(due(ledger).untold) == {"plain", "called", "gone"}
    assert [ledger.do(left_to_tell(calls, i)) for i in ("plain", "called", "gone")] == ["tell", "tell", "nothing"]
    assert due(ledger).untold == (), "not again at once"
    assert ledger.do(left_to_tell(calls, "plain", told=True)) == "nothing"
    assert ledger.do(left_to_tell(calls, "called", told=True)) == "wait"
    assert ledger.do(left_to_tell(calls, "called")) == "call", "nobody delivers its callback"
    ledger.redis.set(keys.callback_claim("called"), "somebody")
    assert ledger.do(left_to_tell(calls, "called")) == "wait"
    ledger.redis.set(keys.callback_claim("called"), "done")
    assert ledger.do(left_to_tell(calls, "called")) == "nothing"
    assert not ledger.redis.exists(keys.untold)
