"""A group is stopped once enough of its rollouts are usable: decided in the commit that reached the number."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from polarq.contracts import Boundary, Outcome, RolloutState, RolloutSummary, TaskState
from polarq.http.polar_json import session_result
from polarq.ledger import Calls, Claim, Committed, Keys, Ledger
from polarq.testing.stack import LocalStack
from tests.http.rig import a_task, running_shim
from tests.ledger.test_ledger import a_task as task_of
from tests.ledger.test_ledger import claim
from tests.worker.conftest import ask, commands_with, shell_task, wait_until, write_scenario

S = RolloutState

POLARS = {
    "early_stop_cancelled": True,
    "fully_masked": True,
    "early_stop_reason": "minimum_usable_sessions_reached",
    "early_stop_min_usable_sessions": 2,
    "early_stop_usable_sessions": 2,
}


@pytest.fixture
def ledger(redis_url: str, keys: Keys) -> Iterator[Ledger]:
    with Ledger(redis_url, Calls(keys)) as made:
        yield made


def end(ledger: Ledger, got: Claim, tokens: int = 5, state: RolloutState = S.COMPLETED) -> Committed:
    summary = RolloutSummary(outcome=Outcome(state=state), reward=1.0, trainable_tokens=tokens)
    return ledger.do(ledger.calls.commit(got.rollout_id, got.token, summary))


def states(ledger: Ledger) -> list[RolloutState]:
    record = ledger.do(ledger.calls.task("t"))
    assert record is not None
    return [rollout.state for rollout in record.rollouts]


def test_the_usable_end_that_reaches_the_number_ends_what_waits_and_tells_what_runs(ledger: Ledger) -> None:
    ledger.do(ledger.calls.submit(task_of(samples=5, early_stop_min_usable_sessions=2), "c"))
    first, second, third = (claim(ledger, f"t.{i}", job=f"job-{i}") for i in range(3))
    assert end(ledger, first).stopping == ()
    assert states(ledger)[3:] == [S.QUEUED, S.QUEUED]
    done = end(ledger, second)
    assert [(r.rollout_id, r.owner, r.job_id) for r in done.stopping] == [("t.2", "node0", "job-2")]
    assert not done.finished
    assert states(ledger) == [S.COMPLETED, S.COMPLETED, S.PREPARING, S.CANCELLED, S.CANCELLED]
    assert ledger.do(ledger.calls.renew([("t.2", third.token)], 30)) == ["cancel"]
    assert end(ledger, third, state=S.CANCELLED).finished
    record = ledger.do(ledger.calls.task("t"))
    assert record is not None
    assert (record.state, record.counts.completed, record.counts.cancelled) == (TaskState.COMPLETED, 2, 3)
    assert ledger.redis.zcard(ledger.calls.keys.waiting) == ledger.redis.zcard(ledger.calls.keys.leases) == 0


def test_only_what_completed_with_tokens_to_train_on_counts(ledger: Ledger) -> None:
    ledger.do(ledger.calls.submit(task_of(samples=4, early_stop_min_usable_sessions=1), "c"))
    assert end(ledger, claim(ledger, "t.0"), tokens=0).stopping == ()
    assert end(ledger, claim(ledger, "t.1"), state=S.FAILED).stopping == ()
    assert states(ledger)[2:] == [S.QUEUED, S.QUEUED]
    assert end(ledger, claim(ledger, "t.2")).finished
    assert states(ledger) == [S.COMPLETED, S.FAILED, S.COMPLETED, S.CANCELLED]


def test_a_commit_that_is_repeated_counts_once(ledger: Ledger) -> None:
    ledger.do(ledger.calls.submit(task_of(samples=3, early_stop_min_usable_sessions=2), "c"))
    got = claim(ledger, "t.0")
    end(ledger, got)
    end(ledger, got)
    assert states(ledger) == [S.COMPLETED, S.QUEUED, S.QUEUED]


def test_a_real_result_of_a_rollout_that_was_told_to_stop_stays(ledger: Ledger) -> None:
    ledger.do(ledger.calls.submit(task_of(samples=3, early_stop_min_usable_sessions=1), "c"))
    first, second, third = (claim(ledger, f"t.{i}") for i in range(3))
    assert len(end(ledger, first).stopping) == 2
    assert end(ledger, second).stopping == (), "the group is stopped once"
    end(ledger, third, state=S.CANCELLED)
    assert states(ledger) == [S.COMPLETED, S.COMPLETED, S.CANCELLED]
    stops = [e.data for e in ledger.do(ledger.calls.events("0")) if e.type == "task.early_stop"]
    assert stops == [{"task_id": "t", "usable_sessions": 1}]


async def test_what_never_began_has_polars_keys_over_http(redis_url: str, keys: Keys) -> None:
    async with running_shim(redis_url, keys) as shim:
        await shim.submit(a_task("t", 4, early_stop_min_usable_sessions=2, metadata={"group_id": "g"}))
        ledger = shim.client.ledger
        for index in range(2):
            got = await shim.claim(f"t.{index}")
            summary = RolloutSummary(outcome=Outcome(state=S.COMPLETED), reward=1.0, trainable_tokens=3)
            await ledger.do(ledger.calls.commit(got.rollout_id, got.token, summary))
        status = (await shim.http.get("/rollout/task/t")).json()
        assert (status["status"], status["completed_sessions"]) == ("completed", 4)
        stopped = status["results"][2]
        assert stopped["status"] == "ERROR"
        for metadata in (stopped["metadata"], stopped["trajectory"]["metadata"]):
            assert POLARS.items() <= metadata.items()
            assert metadata["early_stop_elapsed_ms"] >= 0
        assert stopped["metadata"]["group_id"] == "g"
        assert "early_stop_cancelled" not in status["results"][0]["metadata"]


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalStack]:
    home: Path = tmp_path_factory.mktemp("early-stop")
    nodes: dict[str, dict[str, object]] = {f"node{n}": {} for n in range(2)}
    with LocalStack(home, scenario=str(write_scenario(home)), nodes=nodes) as made:
        yield made


def test_a_running_rollout_of_another_node_is_stopped_its_tokens_are_kept_and_masked(
    stack: LocalStack, tmp_path: Path
) -> None:
    slow, sampled = tmp_path / "slow", tmp_path / "sampled"
    command = f"""if mkdir {slow}; then
{ask(1)}
touch {sampled}
sleep 8765432
else
while [ ! -e {sampled} ]; do sleep 0.05; done
{ask(1)}
fi"""
    stack.client.submit(shell_task("early", command, num_samples=2, early_stop_min_usable_sessions=1))
    result = stack.client.wait("early", 60)
    assert result.state is TaskState.COMPLETED
    first, second = sorted(result.results, key=lambda r: r.outcome.state is not S.COMPLETED)
    assert first.outcome.state is S.COMPLETED
    assert first.node_id != second.node_id
    ended = second.outcome
    assert (ended.state, ended.boundary, ended.reason, ended.trainable) == (
        S.CANCELLED,
        Boundary.CONTROL,
        "early_stop",
        False,
    )
    wait_until(lambda: commands_with("sleep 8765432") == [])
    assert second.trajectory is not None
    assert second.trajectory.fidelity.sampled_tokens > 0, "what was sampled is kept"
    assert second.trajectory.fidelity.trainable_tokens == 0
    polar = session_result(second)
    keys = {**POLARS, "early_stop_min_usable_sessions": 1, "early_stop_usable_sessions": 1}
    assert keys.items() <= polar["metadata"].items()
    assert keys.items() <= polar["trajectory"]["metadata"].items()
    assert polar["trajectory"]["traces"]
    for trace in polar["trajectory"]["traces"]:
        assert not any(trace["loss_mask"])
    without = stack.client.get("early", "none").results
    assert [r.metadata.get("early_stop_cancelled") for r in sorted(without, key=lambda r: r.outcome.state)] == [
        True,
        None,
    ]
