"""Leases: who holds them, who loses them, and that a worker which lost one changes nothing any more."""

from __future__ import annotations

import asyncio
import signal
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from polarq.contracts import RolloutState
from polarq.contracts.rollout import Outcome, RolloutResult
from polarq.ledger import Claim
from polarq.store.payloads import encode_result, put_payload
from polarq.testing.redis import EmbeddedRedis
from polarq.testing.stack import LocalStack
from polarq_worker.commit import summary_of
from polarq_worker.lease import Lease, steady_s
from polarq_worker.lease_watch import LoopWatch
from tests.durable.evaluated import evaluated_by, stack_of
from tests.durable.gates import PATIENCE_S, Gates, wait_for_log
from tests.worker.conftest import commands_with, wait_until

S = RolloutState


@pytest.fixture
def server() -> Iterator[EmbeddedRedis]:
    with EmbeddedRedis(appendonly=True) as made:
        yield made


@pytest.fixture
def gates(tmp_path: Path) -> Gates:
    return Gates(tmp_path / "gates")


def taken_over(stack: LocalStack, rollout_id: str, *, at_once: bool = False) -> Claim:
    """Claims a rollout as another node, as soon as its lease lets go of it, or as if it had."""
    ledger = stack.client.ledger
    claims: list[Claim] = []

    def taken() -> bool:
        if at_once:
            ledger.redis.hset(ledger.calls.keys.rollout(rollout_id), "lease_ms", "0")
        answer = ledger.do(ledger.calls.claim(rollout_id, "another", 3600, "hand"))
        if isinstance(answer, Claim):
            claims.append(answer)
        return bool(claims)

    wait_until(taken, PATIENCE_S)
    return claims[0]


def commit_by_hand(stack: LocalStack, claim: Claim) -> None:
    """Ends the other node's attempt as failed, which no worker of these tests does by itself."""
    result = RolloutResult(
        rollout_id=claim.rollout_id,
        task_id=claim.task.task_id,
        run_id=claim.task.run_id,
        index=0,
        attempt=claim.attempt,
        outcome=Outcome(state=S.FAILED, message="by hand"),
    )
    ledger = stack.client.ledger
    data, raw = encode_result(result)
    ref, writes = put_payload(
        ledger.calls.keys, claim.rollout_id, claim.attempt, claim.token, data, raw_bytes=raw, keep_s=3600
    )
    for write in writes:
        ledger.do(write)
    summary = summary_of(result).model_copy(update={"payload": ref})
    assert ledger.do(ledger.calls.commit(claim.rollout_id, claim.token, summary)).won


def let_go(stack: LocalStack, rollout_id: str) -> None:
    """Returns when the node holds nothing any more."""
    log = stack.workers["node0"].log
    words = [
        f"rollout {rollout_id}: its lease went to another worker",
        f"rollout {rollout_id}: a late commit was refused",
    ]
    wait_until(lambda: any(word in log.read_text(errors="replace") for word in words), PATIENCE_S)


def only_the_hand_is_visible(stack: LocalStack, claim: Claim) -> None:
    result = stack.client.wait(claim.task.task_id, PATIENCE_S).results[0]
    assert (result.outcome.state, result.outcome.message, result.attempt) == (S.FAILED, "by hand", claim.attempt)
    payloads = list(stack.client.ledger.redis.scan_iter("*payload*"))
    assert len(payloads) == 1, "what was refused is not kept"


# --- a lease as its worker knows it


async def test_a_lease_is_certain_from_when_it_was_asked_for_and_no_longer() -> None:
    assert Lease(60, steady_s()).certain
    assert not Lease(60, steady_s() - 61).certain
    late_answer = Lease(60, steady_s() - 200)
    late_answer.renewed(steady_s() - 61)
    assert not late_answer.certain, "the answer is new, the request was old"


async def test_whoever_needs_a_certain_lease_waits_for_the_next_renewal() -> None:
    lease = Lease(60, steady_s() - 61)
    waiting = asyncio.create_task(lease.certainty())
    lease.renewed(steady_s() - 61)
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert not waiting.done(), "a renewal whose answer took longer than the lease says nothing"
    lease.renewed(steady_s())
    await waiting
    await lease.certainty()


# --- the loop, watched from outside


class WatchedLoop:
    """A loop in a thread of its own, and its watch."""

    def __init__(self, bound_s: float) -> None:
        self.loop = asyncio.new_event_loop()
        self.thread = threading.Thread(target=self.loop.run_forever, daemon=True)
        self.thread.start()
        self.returns: list[tuple[float, bool]] = []
        self.returned = threading.Event()
        self.watch = LoopWatch(bound_s, self._on_return)
        self.loop.call_soon_threadsafe(self.watch.start)

    def _on_return(self, stood_s: float, whole_process: bool) -> None:
        self.returns.append((stood_s, whole_process))
        self.returned.set()

    def stop(self) -> None:
        self.loop.call_soon_threadsafe(self.watch.stop)
        self.loop.call_soon_threadsafe(self.loop.stop)
        self.thread.join(PATIENCE_S)


def test_a_blocked_loop_is_reported_while_it_lasts_with_what_blocks_it(caplog: pytest.LogCaptureFixture) -> None:
    watched = WatchedLoop(bound_s=0.5)
    gate = threading.Event()

    def computes_for_long() -> None:
        gate.wait(PATIENCE_S)

    try:
        watched.loop.call_soon_threadsafe(computes_for_long)
        wait_until(lambda: "has been blocked" in caplog.text, PATIENCE_S)
        assert watched.watch.blocked
        assert "computes_for_long" in caplog.text
        assert not watched.returned.is_set()
        gate.set()
        assert watched.returned.wait(PATIENCE_S)
        stood_s, whole_process = watched.returns[0]
        assert (stood_s > 0.5, whole_process, watched.watch.blocked) == (True, False, False)
        assert watched.watch.lag_s > 0
    finally:
        watched.stop()


def test_a_worker_whose_loop_is_blocked_says_so_and_loses_its_leases_by_itself(
    tmp_path: Path, server: EmbeddedRedis, gates: Gates
) -> None:
    gate = tmp_path / "gate"
    with stack_of(tmp_path, server, lease_s=2) as stack:
        stack.client.submit(gates.task("blocked", **evaluated_by("BlocksTheLoop", gate)))
        gates.open("blocked.0")
        wait_for_log(stack, "the engine's loop has been blocked")
        assert "in evaluate" in stack.workers["node0"].log.read_text(), "the stack names the plug-in"
        claim = taken_over(stack, "blocked.0")
        gate.touch()
        let_go(stack, "blocked.0")
        commit_by_hand(stack, claim)
        only_the_hand_is_visible(stack, claim)
        blocked = [e for e in stack.client.ledger.wait_events("0", 1) if e.type == "node.blocked"]
        assert [(e.data["node_id"], e.data["whole_process"]) for e in blocked][:1] == [("node0", False)]
        stack.client.submit(gates.task("after"))
        gates.open("after.0")
        assert stack.client.wait("after", PATIENCE_S).counts.completed == 1
        wait_until(lambda: (stack.client.nodes()[0].loop_lag_s or 0) > 0, PATIENCE_S)


# --- a worker that stood still


def test_a_worker_that_was_stopped_past_its_lease_commits_nothing(
    tmp_path: Path, server: EmbeddedRedis, gates: Gates
) -> None:
    with stack_of(tmp_path, server, lease_s=2) as stack:
        stack.client.submit(gates.task("stopped"))
        gates.wait_started("stopped.0")
        assert commands_with("/rollouts/stopped.0-")
        worker = stack.workers["node0"]
        worker.signal(signal.SIGSTOP)
        try:
            claim = taken_over(stack, "stopped.0")
        finally:
            worker.signal(signal.SIGCONT)
        # Its harness still waits: it is the renewal that learns of it, and stops what runs.
        let_go(stack, "stopped.0")
        wait_until(lambda: commands_with("/rollouts/stopped.0-") == [], PATIENCE_S)
        gates.open("stopped.0")
        wait_for_log(stack, "the whole process stood still")
        commit_by_hand(stack, claim)
        only_the_hand_is_visible(stack, claim)
        assert gates.starts()["stopped.0"] == 1
        stack.client.submit(gates.task("after"))
        gates.open("after.0")
        assert stack.client.wait("after", PATIENCE_S).counts.completed == 1


def test_a_result_that_was_finished_after_the_lease_was_lost_is_refused(
    tmp_path: Path, server: EmbeddedRedis, gates: Gates
) -> None:
    gate = tmp_path / "gate"
    # A minute's lease is renewed every 15 s: the commit comes first.
    with stack_of(tmp_path, server, lease_s=60) as stack:
        stack.client.submit(gates.task("late", **evaluated_by("Waits", gate)))
        gates.open("late.0")
        wait_until(Path(f"{gate}.reached").exists, PATIENCE_S)
        claim = taken_over(stack, "late.0", at_once=True)
        gate.touch()
        let_go(stack, "late.0")
        commit_by_hand(stack, claim)
        only_the_hand_is_visible(stack, claim)
        spool = tmp_path / "state" / "node0" / "spool"
        wait_until(lambda: not list(spool.iterdir()), PATIENCE_S)


# --- what must not begin while the ledger is away


def test_no_stage_begins_before_the_ledger_has_said_that_the_lease_is_ours(
    tmp_path: Path, server: EmbeddedRedis, gates: Gates
) -> None:
    gate = tmp_path / "gate"
    waits = f"touch {gate}.reached; while [ ! -e {gate} ]; do sleep 0.05; done"
    runtime = {"backend": "local", "prepare": [{"type": "exec", "command": waits}]}
    with stack_of(tmp_path, server, lease_s=2) as stack:
        stack.client.submit(gates.task("begin", runtime=runtime))
        gates.open("begin.0")
        wait_until(Path(f"{gate}.reached").exists, PATIENCE_S)
        server.kill()
        gate.touch()
        wait_for_log(stack, "waiting for the ledger", times=3)
        assert not gates.starts()
        server.start()
        assert stack.client.wait("begin", PATIENCE_S).counts.completed == 1
