"""What an operator does to a worker through Celery's own doors, remote control and signals, does what it says or is
refused with what to do instead."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from polarq.contracts import RolloutState
from polarq.testing.stack import LocalStack
from tests.durable.gates import PATIENCE_S, Gates, wait_for_log
from tests.worker.conftest import wait_until, write_scenario


@pytest.fixture
def gates(tmp_path: Path) -> Gates:
    return Gates(tmp_path / "gates")


@pytest.fixture
def stack(tmp_path: Path) -> Iterator[LocalStack]:
    with LocalStack(
        tmp_path, scenario=str(write_scenario(tmp_path)), sections={"gateway": {"drain_grace_s": 600}}
    ) as made:
        yield made


COMMANDS: dict[str, tuple[dict[str, Any], str]] = {
    "pool_grow": ({"n": 2}, "polarq capacity node0 N"),
    "pool_shrink": ({"n": 2}, "polarq capacity node0 N"),
    "autoscale": ({"max": 9, "min": 1}, "polarq capacity node0 N"),
    "pool_restart": ({}, "polarq capacity node0 N"),
    "cancel_consumer": ({"queue": "node0"}, "polarq pause node0"),
    "add_consumer": ({"queue": "node7"}, "polarq pause node0"),
    "rate_limit": ({"task_name": "polarq.run_rollout", "rate_limit": "1/h"}, "polarq capacity node0 N"),
    "time_limit": ({"task_name": "polarq.run_rollout", "hard": 1, "soft": 1}, "timeout_seconds"),
}


def test_celerys_commands_that_the_ledger_knows_nothing_of_are_refused_and_change_nothing(
    stack: LocalStack, gates: Gates
) -> None:
    control = stack.client.app.control
    # A node is up a moment before its remote control listens.
    wait_until(lambda: bool(control.ping(timeout=1.0)), PATIENCE_S)
    for command, (arguments, instead) in COMMANDS.items():
        answers = control.broadcast(command, arguments=arguments, reply=True, timeout=PATIENCE_S, limit=1) or []
        (said,) = (by_node["error"] for answer in answers for by_node in answer.values())
        assert instead in said, command
    stack.client.submit(gates.task("after", samples=4))
    gates.open(*[f"after.{n}" for n in range(4)])
    assert stack.client.wait("after", PATIENCE_S).counts.completed == 4


def test_two_sigterms_at_once_give_everything_back_at_once(stack: LocalStack, gates: Gates) -> None:
    stack.client.submit(gates.task("held"))
    gates.wait_started("held.0")
    worker = stack.workers["node0"]
    worker.signal(signal.SIGTERM)
    wait_for_log(stack, "Warm shutdown")
    worker.signal(signal.SIGTERM)
    # Far sooner than the grace that one SIGTERM gives.
    assert worker.wait(PATIENCE_S) == 0
    (rollout,) = stack.client.record("held").rollouts
    assert (rollout.state, rollout.attempt) == (RolloutState.QUEUED, 0)


@pytest.mark.parametrize("numbers", [(signal.SIGHUP, signal.SIGTERM), (signal.SIGTERM, signal.SIGHUP)])
def test_a_worker_told_to_start_anew_and_to_stop_stops(
    stack: LocalStack, gates: Gates, numbers: tuple[signal.Signals, ...]
) -> None:
    stack.client.submit(gates.task("last"))
    gates.wait_started("last.0")
    worker = stack.workers["node0"]
    said = {signal.SIGHUP: "Restarting celery worker", signal.SIGTERM: "Warm shutdown"}
    worker.signal(numbers[0])
    wait_for_log(stack, said[numbers[0]])
    wait_for_log(stack, "stopping: 1 rollouts in flight")
    worker.signal(numbers[1])
    if numbers[1] is signal.SIGHUP:
        wait_for_log(stack, said[signal.SIGHUP])
        gates.open("last.0")
    assert worker.wait(PATIENCE_S) == 0
    assert stack.client.nodes() == []


def test_a_worker_told_to_start_anew_does_so_when_what_it_has_has_ended(stack: LocalStack, gates: Gates) -> None:
    stack.client.submit(gates.task("before"))
    gates.wait_started("before.0")
    stack.workers["node0"].signal(signal.SIGHUP)
    wait_for_log(stack, "stopping: 1 rollouts in flight")
    gates.open("before.0")
    wait_for_log(stack, "node node0 is up", times=2)
    stack.client.submit(gates.task("next"))
    gates.open("next.0")
    for task_id in ("before", "next"):
        (result,) = stack.client.wait(task_id, PATIENCE_S).results
        assert (result.outcome.state, result.attempt) == (RolloutState.COMPLETED, 1)
    stack.check_worker("node0")
