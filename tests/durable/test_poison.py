"""What of a lost worker is held against a rollout: poison ends as failed with its history, bystanders do not."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from polarq.contracts import Boundary, RolloutState, Task
from polarq.contracts.rollout import Loss
from polarq.ledger import Calls, Claim, Keys, Ledger
from polarq.ledger.blame import LOSSES_PER_ATTEMPT, LostTogether, Share
from polarq.ledger.incarnations import Holding
from polarq.ledger.reaping import LOST_TOO_OFTEN, Reaped, look, reap_lost
from polarq.testing.redis import EmbeddedRedis
from tests.durable.evaluated import stack_of
from tests.durable.gates import PATIENCE_S, Gates
from tests.durable.test_doorbells import LEASE_S, LIFE, Fleet
from tests.http.rig import a_task
from tests.worker.conftest import wait_until

S = RolloutState
MOST = 3


@pytest.fixture
def ledger(redis_url: str, keys: Keys) -> Iterator[Ledger]:
    with Ledger(redis_url, Calls(keys)) as made:
        yield made


@pytest.fixture
async def fleet(redis_url: str, keys: Keys) -> AsyncIterator[Fleet]:
    made = Fleet(redis_url, keys)
    yield made
    await made.aclose()


def lose(ledger: Ledger, *, at: RolloutState = S.PREPARING, share: Share | None = None, how: str = "") -> Reaped:
    """Claims `t.0`, brings it to a stage, and takes it back from its worker, which is known to be dead."""
    claim = ledger.do(ledger.calls.claim("t.0", "node0", 600, "job", incarnation="one"))
    assert isinstance(claim, Claim)
    for stage in (S.READY, S.RUNNING, S.BUILDING):
        if at is S.PREPARING:
            break
        ledger.do(ledger.calls.advance("t.0", claim.token, stage))
        if stage is at:
            break
    return ledger.do(reap_lost(ledger.calls, "t.0", MOST, share or Share(), dead="one", how=how))


def losses(ledger: Ledger) -> tuple[Loss, ...]:
    record = ledger.do(ledger.calls.task("t"))
    assert record is not None
    return record.rollouts[0].losses


def message(ledger: Ledger) -> str:
    record = ledger.do(ledger.calls.task("t"))
    assert record is not None
    summary = record.rollouts[0].summary
    assert summary is not None
    assert (summary.outcome.state, summary.outcome.boundary) == (S.FAILED, Boundary.NODE)
    assert summary.outcome.reason == LOST_TOO_OFTEN
    return summary.outcome.message


def test_the_same_crash_each_time_fails_a_rollout_with_that_history(ledger: Ledger) -> None:
    ledger.do(ledger.calls.submit(Task.load(a_task("t", 1)), "t"))
    assert [lose(ledger, at=S.RUNNING).action for _ in range(MOST)] == ["queued", "queued", "failed"]
    told = message(ledger)
    assert told.startswith(
        "lost with its worker 3 times, the same crash each time (the worker died while running): "
        "attempt 1 on node0 while running, at "
    )
    assert told.count("(its worker was gone)") == 3
    assert [(loss.attempt, loss.stage, loss.cause, loss.share) for loss in losses(ledger)] == [
        (attempt, S.RUNNING, "worker_gone", 1.0) for attempt in (1, 2, 3)
    ]


def test_crashes_at_other_stages_or_of_another_kind_do_not_add_up(ledger: Ledger) -> None:
    ledger.do(ledger.calls.submit(Task.load(a_task("t", 1)), "t"))
    fault = "Segmentation fault"
    for at, how in ((S.PREPARING, ""), (S.RUNNING, fault), (S.PREPARING, ""), (S.RUNNING, "out of memory")):
        assert lose(ledger, at=at, how=how).action == "queued"
    assert lose(ledger, at=S.RUNNING, how=fault).action == "queued"
    # What is not known of a loss is not held to be different.
    assert lose(ledger, at=S.RUNNING).action == "failed"
    assert "(the worker died while running)" in message(ledger)
    assert "(its worker was gone: Segmentation fault)" in message(ledger)


def test_a_rollout_that_was_never_the_only_suspect_fails_in_the_end(ledger: Ledger) -> None:
    ledger.do(ledger.calls.submit(Task.load(a_task("t", 1)), "t"))
    most = LOSSES_PER_ATTEMPT * MOST
    actions = [lose(ledger, share=Share(beside=99, share=0.01)).action for _ in range(most)]
    assert actions == ["queued"] * (most - 1) + ["failed"]
    assert message(ledger).startswith("lost with its worker 12 times, which is the most that are tried: attempt 1 on ")
    assert "(its worker was gone, with 99 others)" in message(ledger)


def test_a_loss_is_held_against_those_that_had_been_lost_most_often() -> None:
    together = LostTogether()
    for number, lost in enumerate([0, 2, 1, 2]):
        together.add(Holding(f"t.{number}", "node0", "one", lost))
    shares = [together.share(f"t.{number}") for number in range(4)]
    assert shares == [Share(3, 0.0), Share(3, 0.5), Share(3, 0.0), Share(3, 0.5)]
    together.add(Holding("t.1", "node0", "one", 9))
    assert together.share("t.1") == Share(3, 0.5), "what it has been lost since is not counted again"
    assert together.share("other.0") == Share(0, 1.0)


async def test_what_a_node_takes_along_is_shared_and_what_comes_back_to_die_is_not(fleet: Fleet) -> None:
    """The real reaper. Eight rollouts die with a node; one of them takes two more nodes along."""
    fleet.submit("t", 8)
    ledger, calls = fleet.sync, fleet.calls
    fleet.announce("node0", "node1", "node2")
    fleet.reaper.server = None

    async def lost_on(node: str, *indices: int) -> None:
        for index in indices:
            claim = ledger.do(calls.claim(f"t.{index}", node, 0.001, "job", incarnation=node))
            assert isinstance(claim, Claim)
        fleet.lose(node)
        wait_until(lambda: len(ledger.do(look(calls, 0)).expired) == len(indices))
        wait_until(lambda: ledger.do(LIFE).up_s > LEASE_S)
        await fleet.turn()

    await lost_on("node0", *range(8))
    await lost_on("node1", 7)
    await lost_on("node2", 7, 0)
    record = ledger.do(calls.task("t"))
    assert record is not None
    shares = [[(loss.beside, loss.share) for loss in rollout.losses] for rollout in record.rollouts]
    assert shares[7] == [(7, 0.125), (0, 1.0), (1, 1.0)]
    assert shares[0] == [(7, 0.125), (1, 0.0)]
    assert shares[1] == [(7, 0.125)]


def test_a_worker_that_faults_tells_how_and_its_rollout_shows_it_to_the_end(tmp_path: Path) -> None:
    gates = Gates(tmp_path / "gates")
    with EmbeddedRedis() as server, stack_of(tmp_path, server, lease_s=3600) as stack:
        stack.client.submit(gates.task("faulty"))
        gates.wait_started("faulty.0")
        os.kill(stack.workers["node0"].pid, signal.SIGSEGV)
        stack.workers["node0"].wait(PATIENCE_S)
        stack.start_worker()
        gates.open("faulty.0")
        result = stack.client.wait("faulty", PATIENCE_S).results[0]
        assert result.outcome.state is S.COMPLETED
        command = [sys.executable, "-m", "polarq.cli", "show", "faulty.0"]
        shown = subprocess.run(command, env=stack.env, capture_output=True, text=True, check=True).stdout
        assert f"lost: {result.losses[0].line}" in shown
        assert [(loss.how, loss.stage) for loss in result.losses] == [("Segmentation fault", S.RUNNING)]
        assert result.losses[0].line == ("attempt 1 on node0 while running: its worker was gone: Segmentation fault")
