"""Redis goes away, or lets go of everybody, while real workers hold rollouts: nothing is lost and nothing hangs."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import redis

from polarq.contracts import RolloutState
from polarq.testing.redis import EmbeddedRedis
from polarq.testing.stack import LocalStack
from tests.durable.gates import PATIENCE_S, Gates, ids, wait_for_log
from tests.worker.conftest import wait_until, write_scenario

S = RolloutState

CAPACITY = 6

OUTAGE_S = 10.0
"""How long Redis is away: longer than any retry of a client library."""


@pytest.fixture
def server() -> Iterator[EmbeddedRedis]:
    """Keeps what it was told over a SIGKILL."""
    with EmbeddedRedis(appendonly=True) as made:
        yield made


@pytest.fixture
def gates(tmp_path: Path) -> Gates:
    return Gates(tmp_path / "gates")


def stack_of(home: Path, server: EmbeddedRedis, lease_s: float, *nodes: str, at_once: int = CAPACITY) -> LocalStack:
    node = {"max_init_workers": CAPACITY, "max_run_workers": at_once, "max_postrun_workers": CAPACITY}
    return LocalStack(
        home,
        scenario=str(write_scenario(home)),
        redis=server,
        nodes=dict.fromkeys(nodes or ("node0",), node),
        sections={"gateway": {"lease_s": lease_s}},
    )


def outage() -> None:
    threading.Event().wait(OUTAGE_S)


def completed_once(stack: LocalStack, task_id: str, gates: Gates) -> None:
    """Every rollout of the task has one visible result and was started once."""
    result = stack.client.wait(task_id, PATIENCE_S)
    assert [r.outcome.state for r in result.results] == [S.COMPLETED] * result.counts.total
    assert [r.trajectory and r.trajectory.fidelity.calls for r in result.results] == [1] * result.counts.total
    assert {gates.starts()[r.rollout_id] for r in result.results} == {1}


def every_slot_is_free(stack: LocalStack, gates: Gates) -> None:
    """The node runs as many rollouts at once as it may."""
    task = gates.task("slots", CAPACITY)
    stack.client.submit(task)
    gates.wait_started(*ids("slots", CAPACITY))
    gates.open(*ids("slots", CAPACITY))
    completed_once(stack, "slots", gates)


def test_a_redis_that_is_killed_and_comes_back_costs_no_rollout_and_no_slot(
    tmp_path: Path, server: EmbeddedRedis, gates: Gates
) -> None:
    with stack_of(tmp_path, server, 60) as stack:
        before, inside, after = ids("outage", 6)[:2], ids("outage", 6)[2:4], ids("outage", 6)[4:]
        stack.client.submit(gates.task("outage", 6))
        gates.wait_started(*before, *inside, *after)
        gates.open(*before)
        wait_until(lambda: stack.client.record("outage").counts.completed == 2, PATIENCE_S)
        server.kill()
        gates.open(*inside)
        # Each of the two asks whether it may enter its next stage, and gets no answer.
        wait_for_log(stack, "waiting for the ledger", times=2)
        outage()
        server.start()
        wait_until(lambda: stack.client.record("outage").counts.completed == 4, PATIENCE_S)
        gates.open(*after)
        completed_once(stack, "outage", gates)
        assert {r.attempt for r in stack.client.record("outage").rollouts} == {1}
        assert stack.workers["node0"].exit_code is None
        every_slot_is_free(stack, gates)


def test_an_outage_longer_than_the_leases_costs_no_work_when_nobody_took_them(
    tmp_path: Path, server: EmbeddedRedis, gates: Gates
) -> None:
    with stack_of(tmp_path, server, 2) as stack:
        stack.client.submit(gates.task("long", 4))
        gates.wait_started(*ids("long", 4))
        server.kill()
        gates.open(*ids("long", 2))
        wait_for_log(stack, "waiting for the ledger", times=2)
        outage()
        server.start()
        wait_until(lambda: stack.client.record("long").counts.completed >= 2, PATIENCE_S)
        gates.open(*ids("long", 4))
        result = stack.client.wait("long", PATIENCE_S)
        assert result.counts.completed == 4
        assert stack.workers["node0"].exit_code is None
        every_slot_is_free(stack, gates)


def test_a_redis_that_hangs_longer_than_the_leases_costs_no_rollout(
    tmp_path: Path, server: EmbeddedRedis, gates: Gates
) -> None:
    with stack_of(tmp_path, server, 2) as stack:
        stack.client.submit(gates.task("hangs", 4))
        gates.wait_started(*ids("hangs", 4))
        assert server.pid is not None
        os.kill(server.pid, signal.SIGSTOP)
        try:
            gates.open(*ids("hangs", 2))
            # It is asked again and again, each time over a connection that does not hang yet.
            wait_for_log(stack, "leases were not renewed: no answer", times=5)
        finally:
            os.kill(server.pid, signal.SIGCONT)
        gates.open(*ids("hangs", 4))
        assert stack.client.wait("hangs", PATIENCE_S).counts.completed == 4
        assert stack.workers["node0"].exit_code is None
        every_slot_is_free(stack, gates)


def test_when_all_connections_are_cut_nothing_runs_twice_and_all_commit(
    tmp_path: Path, server: EmbeddedRedis, gates: Gates
) -> None:
    # Each node could run all of it: whoever takes how many, all of them run when the cuts come.
    nodes = stack_of(tmp_path, server, 60, "node0", "node1", at_once=2 * CAPACITY)
    with nodes as stack, redis.Redis.from_url(server.url) as operator:
        stack.client.submit(gates.task("cut", 2 * CAPACITY))
        gates.wait_started(*ids("cut", 2 * CAPACITY))
        for n in range(5):
            operator.execute_command("CLIENT", "KILL", "TYPE", "normal", "SKIPME", "yes")
            operator.execute_command("CLIENT", "KILL", "TYPE", "pubsub", "SKIPME", "yes")
            gates.open(*ids("cut", 2 * CAPACITY)[2 * n : 2 * n + 2])
            wait_until(lambda n=n: stack.client.record("cut").counts.completed >= 2 * n + 2, PATIENCE_S)  # type: ignore[misc]
        gates.open(*ids("cut", 2 * CAPACITY))
        completed_once(stack, "cut", gates)
        assert {r.attempt for r in stack.client.record("cut").rollouts} == {1}
        # Doorbells that came twice have been heard by now; still nobody started again.
        stack.client.submit(gates.task("next", 2))
        gates.open(*ids("next", 2))
        completed_once(stack, "next", gates)
        completed_once(stack, "cut", gates)


def test_a_worker_told_to_stop_while_redis_is_away_leaves_and_its_rollouts_go_on_later(
    tmp_path: Path, server: EmbeddedRedis, gates: Gates
) -> None:
    with stack_of(tmp_path, server, 2) as stack:
        stack.client.submit(gates.task("leave", 2))
        gates.wait_started(*ids("leave", 2))
        server.kill()
        worker = stack.workers["node0"]
        worker.signal(signal.SIGTERM)
        wait_for_log(stack, "stopping: 2 rollouts in flight")
        worker.signal(signal.SIGTERM)
        worker.wait(PATIENCE_S)
        server.start()
        gates.open(*ids("leave", 2))
        stack.start_worker()
        # It could not give them back: their leases ended, and the reaper of any worker queues them again.
        assert stack.client.wait("leave", PATIENCE_S).counts.completed == 2
