"""The ledger's promises, each against a real Redis."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator

import pytest

from polarq.contracts import Boundary, Outcome, RolloutState, RolloutSummary, Task, TaskState
from polarq.errors import LedgerUnavailable, StepRefused, TaskConflict
from polarq.ledger import AsyncLedger, Calls, Claim, Keys, Ledger, Refused
from polarq.testing.redis import EmbeddedRedis

S = RolloutState


def a_task(task_id: str = "t", samples: int = 2, **more: object) -> Task:
    return Task.load(
        {
            "task_id": task_id,
            "instruction": "do it",
            "num_samples": samples,
            "agent": {"harness": "mini_swe_agent"},
            "runtime": {"backend": "local"},
            **more,
        }
    )


def ended(state: RolloutState = S.COMPLETED, reward: float | None = 1.0) -> RolloutSummary:
    return RolloutSummary(outcome=Outcome(state=state, trainable=state is S.COMPLETED), reward=reward)


@pytest.fixture
def ledger(redis_url: str, keys: Keys) -> Iterator[Ledger]:
    with Ledger(redis_url, Calls(keys)) as made:
        yield made


def claim(ledger: Ledger, rollout_id: str, node: str = "node0", lease_s: float = 30, job: str = "job") -> Claim:
    got = ledger.do(ledger.calls.claim(rollout_id, node, lease_s, job))
    assert isinstance(got, Claim)
    return got


def test_the_same_request_under_the_same_id_is_the_same_task(ledger: Ledger) -> None:
    first = ledger.do(ledger.calls.submit(a_task(), "celery-1"))
    again = ledger.do(ledger.calls.submit(a_task(), "celery-2"))
    assert (first.created, again.created) == (True, False)
    record = ledger.do(ledger.calls.task("t"))
    assert record is not None
    assert record.celery_ids == ("celery-1", "celery-2")
    assert record.counts.queued == record.counts.total == 2


def test_a_different_request_under_the_same_id_is_refused_and_changes_nothing(ledger: Ledger) -> None:
    ledger.do(ledger.calls.submit(a_task(), "c"))
    with pytest.raises(TaskConflict, match="taken by a different request"):
        ledger.do(ledger.calls.submit(a_task(samples=3), "c"))
    record = ledger.do(ledger.calls.task("t", with_request=True))
    assert record is not None
    assert record.request == a_task()
    assert record.counts.total == 2


def test_a_rollout_is_granted_to_one_claimant_only(ledger: Ledger) -> None:
    ledger.do(ledger.calls.submit(a_task(), "c"))
    granted = claim(ledger, "t.0")
    assert (granted.attempt, granted.task) == (1, a_task())
    refused = ledger.do(ledger.calls.claim("t.0", "node1", 30, "job"))
    assert refused == Refused("busy", "node0")
    assert ledger.do(ledger.calls.claim("t.7", "node1", 30, "job")) == Refused("unknown")


def test_carrying_out_one_claim_twice_grants_it_once(ledger: Ledger) -> None:
    """The client library repeats a call whose answer got lost."""
    ledger.do(ledger.calls.submit(a_task(), "c"))
    call = ledger.calls.claim("t.0", "node0", 30, "job")
    first, again = ledger.do(call), ledger.do(call)
    assert isinstance(first, Claim)
    assert isinstance(again, Claim)
    assert (first.token, first.attempt) == (again.token, again.attempt)
    assert first.attempt == 1


def test_many_claimants_at_once_get_one_grant(redis_url: str, keys: Keys) -> None:
    async def race() -> list[object]:
        async with AsyncLedger(redis_url, Calls(keys)) as ledger:
            await ledger.do(ledger.calls.submit(a_task(), "c"))
            calls = [ledger.calls.claim("t.0", f"node{i}", 30, "job") for i in range(40)]
            return list(await asyncio.gather(*(ledger.do(call) for call in calls)))

    answers = asyncio.run(race())
    assert sum(isinstance(a, Claim) for a in answers) == 1


def test_a_lease_that_ran_out_can_be_claimed_and_the_old_owner_cannot_commit(ledger: Ledger) -> None:
    ledger.do(ledger.calls.submit(a_task(samples=1), "c"))
    old = claim(ledger, "t.0", lease_s=0.001)
    deadline = time.monotonic() + 5
    new: Claim | Refused = Refused("busy")
    while isinstance(new, Refused) and time.monotonic() < deadline:
        new = ledger.do(ledger.calls.claim("t.0", "node1", 30, "job2"))
    assert isinstance(new, Claim)
    assert new.token > old.token
    assert ledger.do(ledger.calls.advance("t.0", old.token, S.READY)) == "lost"
    assert ledger.do(ledger.calls.renew([("t.0", old.token)], 30)) == ["lost"]
    assert not ledger.do(ledger.calls.commit("t.0", old.token, ended(reward=0.0))).won
    assert ledger.do(ledger.calls.commit("t.0", new.token, ended())).won
    record = ledger.do(ledger.calls.task("t"))
    assert record is not None
    assert record.rollouts[0].summary == ended()
    assert record.counts.completed == 1


def test_only_steps_of_the_transition_table_are_taken(ledger: Ledger) -> None:
    ledger.do(ledger.calls.submit(a_task(), "c"))
    token = claim(ledger, "t.0").token
    with pytest.raises(StepRefused, match="no step from preparing to evaluating"):
        ledger.do(ledger.calls.advance("t.0", token, S.EVALUATING))
    for state in (S.READY, S.RUNNING, S.BUILDING, S.EVALUATING):
        assert ledger.do(ledger.calls.advance("t.0", token, state)) == "ok"
    with pytest.raises(StepRefused, match="no step from evaluating to ready"):
        ledger.do(ledger.calls.advance("t.0", token, S.READY))


def test_a_commit_repeated_with_its_token_succeeds_and_counts_once(ledger: Ledger) -> None:
    ledger.do(ledger.calls.submit(a_task(), "c"))
    token = claim(ledger, "t.0").token
    for _ in range(3):
        assert ledger.do(ledger.calls.commit("t.0", token, ended())).won
    record = ledger.do(ledger.calls.task("t"))
    assert record is not None
    assert (record.counts.completed, record.counts.queued, record.state) == (1, 1, TaskState.RUNNING)


def test_the_last_commit_ends_the_task_and_expires_it(ledger: Ledger) -> None:
    ledger.do(ledger.calls.submit(a_task(), "c"))
    first, second = claim(ledger, "t.0"), claim(ledger, "t.1")
    assert not ledger.do(ledger.calls.commit("t.0", first.token, ended())).finished
    assert ledger.do(ledger.calls.commit("t.1", second.token, ended(S.FAILED, None))).finished
    record = ledger.do(ledger.calls.task("t"))
    assert record is not None
    assert (record.state, record.counts.completed, record.counts.failed) == (TaskState.COMPLETED, 1, 1)
    for key in (ledger.calls.keys.task("t"), ledger.calls.keys.rollout("t.0")):
        assert 0 < ledger.redis.ttl(key) <= ledger.calls.keep_s


def test_a_released_rollout_is_queued_again_under_a_new_token_and_not_counted(ledger: Ledger) -> None:
    ledger.do(ledger.calls.submit(a_task(samples=1), "c"))
    old = claim(ledger, "t.0")
    assert ledger.do(ledger.calls.release("t.0", old.token, counted=False, reason="drain"))
    assert not ledger.do(ledger.calls.release("t.0", old.token, counted=False, reason="drain"))
    assert not ledger.do(ledger.calls.commit("t.0", old.token, ended())).won
    new = claim(ledger, "t.0")
    assert new.attempt == old.attempt == 1
    assert ledger.do(ledger.calls.commit("t.0", new.token, ended())).finished


def test_cancel_ends_what_waits_and_tells_what_runs(ledger: Ledger) -> None:
    ledger.do(ledger.calls.submit(a_task(samples=3), "c"))
    running = claim(ledger, "t.1", job="job-1")
    done = ledger.do(ledger.calls.cancel("t"))
    assert [(a.rollout_id, a.owner, a.job_id) for a in done.active] == [("t.1", "node0", "job-1")]
    assert ledger.do(ledger.calls.renew([("t.1", running.token)], 30)) == ["cancel"]
    assert ledger.do(ledger.calls.advance("t.1", running.token, S.READY)) == "cancel"
    record = ledger.do(ledger.calls.task("t"))
    assert record is not None
    assert (record.state, record.counts.cancelled, record.counts.running) == (TaskState.CANCELLING, 2, 1)
    assert record.rollouts[0].summary is not None
    assert record.rollouts[0].summary.outcome.boundary is Boundary.CONTROL
    assert ledger.do(ledger.calls.commit("t.1", running.token, ended(S.CANCELLED, None))).finished
    record = ledger.do(ledger.calls.task("t"))
    assert record is not None
    assert record.state is TaskState.CANCELLED
    assert ledger.do(ledger.calls.cancel("t")).already_over


def test_one_rollout_is_cancelled_and_the_others_go_on(ledger: Ledger) -> None:
    ledger.do(ledger.calls.submit(a_task(), "c"))
    ledger.do(ledger.calls.cancel("t", 0))
    other = claim(ledger, "t.1")
    assert ledger.do(ledger.calls.commit("t.1", other.token, ended())).finished
    record = ledger.do(ledger.calls.task("t"))
    assert record is not None
    assert (record.state, record.counts.cancelled, record.counts.completed) == (TaskState.COMPLETED, 1, 1)


def test_a_cancel_that_arrives_first_refuses_the_task_that_comes_later(ledger: Ledger) -> None:
    assert ledger.do(ledger.calls.cancel("t", tombstone_s=60)).registered
    with pytest.raises(TaskConflict, match="cancelled before it arrived"):
        ledger.do(ledger.calls.submit(a_task(), "c"))
    assert not ledger.do(ledger.calls.cancel("other")).known


def test_events_tell_the_whole_story_and_can_be_resumed(ledger: Ledger) -> None:
    before = ledger.do(ledger.calls.last_event_id())
    ledger.do(ledger.calls.submit(a_task(samples=1), "c"))
    token = claim(ledger, "t.0").token
    ledger.do(ledger.calls.advance("t.0", token, S.READY))
    ledger.do(ledger.calls.commit("t.0", token, ended()))
    events = ledger.do(ledger.calls.events(before))
    assert [(e.type, e.data.get("status")) for e in events] == [
        ("task.created", "running"),
        ("session.state_changed", "preparing"),
        ("session.state_changed", "ready"),
        ("session.state_changed", "completed"),
        ("task.completed", "completed"),
    ]
    assert ledger.wait_events(events[1].event_id, 1) == events[2:]
    assert ledger.wait_events(events[-1].event_id, 0.01) == []


def test_a_flushed_script_cache_is_not_noticed(ledger: Ledger) -> None:
    ledger.do(ledger.calls.submit(a_task(samples=20), "c"))
    for index in range(20):
        ledger.redis.script_flush()
        token = claim(ledger, f"t.{index}").token
        ledger.redis.script_flush()
        assert ledger.do(ledger.calls.commit(f"t.{index}", token, ended())).won
    record = ledger.do(ledger.calls.task("t"))
    assert record is not None
    assert record.counts.completed == 20


def test_times_are_the_servers_and_carry_their_zone(ledger: Ledger) -> None:
    ledger.do(ledger.calls.submit(a_task(samples=1), "c"))
    granted = claim(ledger, "t.0")
    record = ledger.do(ledger.calls.task("t"))
    assert record is not None
    assert record.created_at.utcoffset() is not None
    assert record.rollouts[0].claimed_at == granted.claimed_at
    assert granted.waited_s >= 0


@pytest.mark.parametrize(
    ("url", "says"),
    [
        ("redis://127.0.0.1:1/0", "does not answer; start it, or set POLARQ_REDIS_URL"),
        ("http://127.0.0.1:1/0", "is not a Redis address"),
    ],
)
def test_a_redis_that_is_not_there_is_one_clear_line(url: str, says: str) -> None:
    with pytest.raises(LedgerUnavailable) as caught, Ledger(url, Calls(Keys())) as ledger:
        ledger.do(ledger.calls.last_event_id())
    assert says in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_wrong_password_is_named_and_not_shown() -> None:
    with EmbeddedRedis(password="right") as server:
        url = f"redis://:wrong-secret@127.0.0.1:{server.port}/0"
        with Ledger(url, Calls(Keys())) as ledger, pytest.raises(LedgerUnavailable) as caught:
            ledger.do(ledger.calls.last_event_id())
    assert "refuses the user or password" in str(caught.value)
    assert "wrong-secret" not in str(caught.value)
