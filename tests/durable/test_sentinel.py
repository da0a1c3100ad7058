"""Redis behind Sentinels: its primary is killed and the replica takes over, under workers that hold rollouts."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from polarq.contracts import RolloutState
from polarq.contracts.rollout import RolloutResult
from polarq.errors import LedgerUnavailable, NotQueued
from polarq.ledger import AsyncLedger, Call, Calls, Ledger
from polarq.ledger.keys import Keys
from polarq.store.payloads import get_payload
from polarq.testing.stack import LocalStack
from polarq_worker.commit import Finished, commit
from polarq_worker.patience import Patience
from tests.durable.gates import PATIENCE_S, Gates, ids, wait_for_log
from tests.durable.hand import Hand
from tests.durable.sentinels import Group, wait_for_answer
from tests.http.rig import a_result
from tests.worker.conftest import ask, wait_until, write_scenario

S = RolloutState
NODE = {"max_init_workers": 8, "max_run_workers": 8, "max_postrun_workers": 8}


@pytest.fixture
def gates(tmp_path: Path) -> Gates:
    return Gates(tmp_path / "gates")


@pytest.fixture
def group() -> Iterator[Group]:
    with Group(password="secret") as made:
        yield made


def test_a_failover_costs_no_rollout_and_no_slot_and_nobody_leaves(tmp_path: Path, group: Group, gates: Gates) -> None:
    """Worker, proxy, a trainer that streams and one that submits live through it."""
    with LocalStack(
        tmp_path, scenario=str(write_scenario(tmp_path)), redis_url=group.url, nodes={"node0": NODE},
        sections={"gateway": {"lease_s": 60}},
    ) as stack:  # fmt: skip
        # As model clients do, a harness asks again while the proxy cannot record what it would answer.
        waits = f"while [ ! -e {gates.folder}/more ]; do sleep 0.05; done"
        again = f"{ask(1)}{waits}\nuntil {ask(1)}do sleep 0.1; done"
        stack.client.submit(gates.task("flight", 4))
        stack.client.submit(gates.task("talks", 2, first=again))
        gates.wait_started(*ids("flight", 4), *ids("talks", 2))
        wait_until(lambda: calls_recorded(stack) == 6, PATIENCE_S)
        group.wait_replicated()
        came: list[RolloutResult] = []
        streaming = threading.Thread(target=lambda: came.extend(stack.client.results(["flight", "talks"])), daemon=True)
        streaming.start()
        gates.open("flight.0")
        wait_until(lambda: len(came) == 1, PATIENCE_S)
        group.wait_replicated()

        group.primary.kill()
        gates.open("flight.1", "flight.2")
        wait_for_log(stack, "waiting for the ledger", times=2)
        submit_until_taken(stack, gates)
        group.wait_promoted()
        (gates.folder / "more").touch()
        gates.open("flight.3", *ids("talks", 2))
        streaming.join(PATIENCE_S)
        assert sorted(r.rollout_id for r in came) == sorted([*ids("flight", 4), *ids("talks", 2)])
        assert {r.outcome.state for r in came} == {S.COMPLETED}, [r.outcome for r in came]
        assert {r.attempt for r in came} == {1}
        found = {r.rollout_id: r.trajectory and r.trajectory.fidelity.calls for r in came}
        assert found == {**dict.fromkeys(ids("flight", 4), 1), **dict.fromkeys(ids("talks", 2), 2)}

        # Its queue moved too: what was submitted meanwhile runs, as much at once as the node may hold.
        gates.open(*ids("meanwhile", 8))
        result = stack.client.wait("meanwhile", PATIENCE_S)
        assert result.counts.completed == 8
        assert set(gates.starts().values()) == {1}
        assert stack.workers["node0"].exit_code is None
        assert "starting it again" not in stack.workers["node0"].log.read_text()


def calls_recorded(stack: LocalStack) -> int:
    return sum(stack.client.ledger.redis.llen(key) for key in stack.client.ledger.redis.scan_iter("*:completions:*"))


def submit_until_taken(stack: LocalStack, gates: Gates) -> None:
    """As a trainer does: again under the same id, for as long as it is told to."""
    told: list[str] = []

    def taken() -> bool:
        try:
            stack.client.submit(gates.task("meanwhile", 8))
        except (NotQueued, LedgerUnavailable) as exc:
            told.append(str(exc))
            return False
        return True

    wait_until(taken, PATIENCE_S)
    assert all("Sentinels at" in text or "does not answer" in text or "submit it again" in text for text in told), told


def test_a_primary_that_hangs_is_left_though_it_keeps_its_connections(
    tmp_path: Path, group: Group, gates: Gates
) -> None:
    """One of the Sentinels, the first that everybody asks, is dead too."""
    with LocalStack(
        tmp_path, scenario=str(write_scenario(tmp_path)), redis_url=group.url, nodes={"node0": NODE},
        sections={"gateway": {"lease_s": 60}},
    ) as stack:  # fmt: skip
        stack.client.submit(gates.task("hangs", 3))
        gates.wait_started(*ids("hangs", 3))
        wait_until(lambda: calls_recorded(stack) == 3, PATIENCE_S)
        group.wait_replicated()
        group.stop_sentinel(0)
        group.hang_primary()
        gates.open("hangs.0", "hangs.1")
        wait_until(lambda: wait_for_answer(lambda: stack.client.record("hangs").counts.completed) == 2, PATIENCE_S)
        group.wake_primary()
        gates.open("hangs.2")
        result = stack.client.wait("hangs", PATIENCE_S)
        assert [r.outcome.state for r in result.results] == [S.COMPLETED] * 3
        assert [r.trajectory and r.trajectory.fidelity.calls for r in result.results] == [1] * 3
        stack.client.submit(gates.task("after", 8))
        gates.wait_started(*ids("after", 8))
        gates.open(*ids("after", 8))
        assert stack.client.wait("after", PATIENCE_S).counts.completed == 8
        assert set(gates.starts().values()) == {1}
        assert stack.workers["node0"].exit_code is None


def test_what_a_failover_loses_is_run_again_and_nothing_of_it_counts(
    tmp_path: Path, group: Group, gates: Gates
) -> None:
    """The replica takes over without what was written last: a task, claims, model calls and commits that a trainer and
    a worker had been told were done."""
    with LocalStack(
        tmp_path, scenario=str(write_scenario(tmp_path)), redis_url=group.url, nodes={"node0": NODE},
        sections={"gateway": {"lease_s": 4}},
    ) as stack:  # fmt: skip
        # Held in both servers: these go on as if nothing had been.
        stack.client.submit(gates.task("held", 2))
        gates.wait_started(*ids("held", 2))
        wait_until(lambda: calls_recorded(stack) == 2, PATIENCE_S)
        # Waits in both servers, and is claimed and committed in the one that dies.
        stack.client.pause_run("late")
        stack.client.submit(gates.task("late", 3, run_id="late"))
        wait_for_log(stack, "may start nothing now")
        group.wait_replicated()

        group.cut_replica_off()
        stack.client.resume_run("late")
        gates.wait_started(*ids("late", 3))
        wait_until(lambda: calls_recorded(stack) == 5, PATIENCE_S)
        gates.open("late.0", "held.0")
        wait_until(lambda: {stack.client.record(i).counts.completed for i in ("late", "held")} == {1}, PATIENCE_S)
        assert stack.client.rollout("late.0").trajectory is not None
        stack.client.submit(gates.task("new", 1))
        gates.wait_started("new.0")
        old = {r.rollout_id: r for task in ("late", "new") for r in stack.client.record(task).rollouts}
        group.kill_primary_with_what_only_it_has()

        # The trainer is told that its task is not there, and submits it again under its id.
        assert wait_for_answer(lambda: stack.client.record("new")) is None
        again = wait_for_answer(lambda: stack.client.submit(gates.task("new", 1)))
        assert again is not None
        assert again.created
        wait_for_answer(lambda: stack.client.resume_run("late"))
        gates.open(*ids("held", 2), *ids("late", 3), "new.0")
        for task_id, samples in (("held", 2), ("late", 3), ("new", 1)):
            result = stack.client.wait(task_id, PATIENCE_S)
            assert result.counts.completed == samples, [r.outcome for r in result.results]
            assert [r.trajectory and r.trajectory.fidelity.calls for r in result.results] == [1] * samples
        new = {r.rollout_id: r for task in ("late", "new") for r in stack.client.record(task).rollouts}
        assert all(new[rollout_id].token != old[rollout_id].token for rollout_id in old)
        # What was lost was started once more, what was not was not.
        starts = gates.starts()
        assert {starts[i] for i in (*ids("late", 3), "held.0", "new.0")} == {2}
        assert starts["held.1"] == 1
        assert stack.workers["node0"].exit_code is None


def test_an_attempt_whose_record_a_failover_lost_is_run_again(tmp_path: Path, group: Group, gates: Gates) -> None:
    """The claim is there, and what its harness was let in by and what it sampled is not."""
    with LocalStack(
        tmp_path, scenario=str(write_scenario(tmp_path)), redis_url=group.url,
        nodes={"node0": {**NODE, "max_run_workers": 1}}, sections={"gateway": {"lease_s": 60}},
    ) as stack:  # fmt: skip
        stack.client.submit(gates.task("first"))
        gates.wait_started("first.0")
        stack.client.submit(gates.task("next"))
        wait_until(lambda: stack.client.record("next").rollouts[0].state == "ready", PATIENCE_S)
        group.wait_replicated()
        group.cut_replica_off()
        gates.open("first.0")
        gates.wait_started("next.0")
        wait_until(lambda: calls_recorded(stack) == 2, PATIENCE_S)
        group.kill_primary_with_what_only_it_has()
        gates.open("next.0")
        [result] = stack.client.wait("next", PATIENCE_S).results
        assert (result.outcome.state, result.attempt) == (S.COMPLETED, 2), result.outcome
        assert result.trajectory is not None
        assert result.trajectory.fidelity.calls == 1
        assert gates.starts()["next.0"] == 2
        wait_for_log(stack, "is not in Redis any more; it is run again")


def test_a_primary_that_wants_a_replica_takes_no_write_without_one_and_workers_wait(
    tmp_path: Path, gates: Gates
) -> None:
    wants = ("min-replicas-to-write 1", "min-replicas-max-lag 1")
    with (
        Group(sentinels=1, config=wants) as group,
        LocalStack(
            tmp_path, scenario=str(write_scenario(tmp_path)), redis_url=group.url, nodes={"node0": NODE},
            sections={"gateway": {"lease_s": 4}},
        ) as stack,
    ):  # fmt: skip
        stack.client.submit(gates.task("waits", 2))
        gates.wait_started(*ids("waits", 2))
        wait_until(lambda: calls_recorded(stack) == 2, PATIENCE_S)
        group.cut_replica_off()
        gates.open(*ids("waits", 2))
        wait_for_log(stack, "waiting for the ledger", times=2)
        with pytest.raises((NotQueued, LedgerUnavailable), match="NOREPLICAS"):
            stack.client.submit(gates.task("refused"))
        assert stack.client.record("waits").counts.ended == 0
        group.bring_replica_back()
        assert stack.client.wait("waits", PATIENCE_S).counts.completed == 2
        assert set(gates.starts().values()) == {1}


def test_nothing_counts_before_a_replica_has_it_when_that_is_wanted(tmp_path: Path, gates: Gates) -> None:
    with (
        Group(sentinels=1) as group,
        LocalStack(
            tmp_path, scenario=str(write_scenario(tmp_path)), redis_url=group.url, nodes={"node0": NODE},
            sections={"gateway": {"lease_s": 60}, "redis": {"wait_replicas": 1}},
        ) as stack,
    ):  # fmt: skip
        talks = f"while [ ! -e {gates.folder}/more ]; do sleep 0.05; done\nuntil {ask(1)}do sleep 0.1; done"
        stack.client.submit(gates.task("ends"))
        stack.client.submit(gates.task("talks", first=talks))
        gates.wait_started("ends.0", "talks.0")
        wait_until(lambda: calls_recorded(stack) == 1, PATIENCE_S)
        group.cut_replica_off()
        # Each is done at the primary, and nobody is told that it is.
        gates.open("ends.0", "talks.0")
        (gates.folder / "more").touch()
        wait_for_log(stack, "0 of the 1 replicas of Redis have it")
        wait_until(lambda: calls_recorded(stack) > 1, PATIENCE_S)
        with pytest.raises(NotQueued, match="0 of the 1 replicas"):
            stack.client.submit(gates.task("new"))
        assert (tmp_path / "state" / "node0" / "spool" / spooled(stack, "ends.0")).exists()
        assert stack.client.record("talks").rollouts[0].state == "running"
        group.bring_replica_back()
        assert stack.client.submit(gates.task("new")).created is False
        gates.open("new.0")
        for task_id in ("ends", "talks", "new"):
            [result] = stack.client.wait(task_id, PATIENCE_S).results
            assert (result.outcome.state, result.attempt) == (S.COMPLETED, 1), result.outcome
        wait_until(lambda: not list((tmp_path / "state" / "node0" / "spool").iterdir()), PATIENCE_S)


def spooled(stack: LocalStack, rollout_id: str) -> str:
    [rollout] = stack.client.record(rollout_id.partition(".")[0]).rollouts
    return f"{rollout_id}-{rollout.token}"


async def test_a_payload_that_went_before_its_commit_is_written_again(
    redis_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = Calls(Keys("again"))
    with Ledger(redis_url, calls) as sync:
        hand = Hand(sync)
        hand.submit("t")
        claim = hand.claim("t.0")
        result = a_result(claim, S.COMPLETED, 1.0, list(range(50)))
        async with AsyncLedger(redis_url, calls) as ledger:
            done = ledger.do
            went: list[int] = []

            async def forgetful(call: Call[Any]) -> Any:
                if call.script is not None and call.script.name == "commit" and not went:
                    went.append(sync.redis.delete(f"{calls.keys.payload('t.0', claim.attempt, claim.token)}:0"))
                return await done(call)

            monkeypatch.setattr(ledger, "do", forgetful)
            committed = await commit(Finished.encode(claim, result), ledger, Patience())
            assert (committed.won, went) == (True, [1])
        summary = sync.do(calls.task("t"))
        assert summary is not None
        ended = summary.rollouts[0].summary
        assert ended is not None
        assert ended.payload is not None
        assert sync.do(get_payload(ended.payload)).trajectory is not None
