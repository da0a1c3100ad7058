"""A proxy that is killed costs nobody a rollout that had not begun."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from polarq.contracts.rollout import RolloutState
from polarq.testing.stack import LocalStack
from tests.durable.gates import PATIENCE_S, wait_for_log
from tests.worker.conftest import ask, shell_task, write_scenario


@pytest.fixture
def stack(tmp_path: Path) -> Iterator[LocalStack]:
    with LocalStack(tmp_path, scenario=str(write_scenario(tmp_path))) as made:
        yield made


def the_proxy_of(stack: LocalStack) -> int:
    """Its process id."""
    worker = stack.workers["node0"].pid
    assert worker is not None
    for children in Path(f"/proc/{worker}/task").glob("*/children"):
        for pid in children.read_text().split():
            if b"polarq_proxy" in Path(f"/proc/{pid}/cmdline").read_bytes():
                return int(pid)
    raise AssertionError("the worker has no proxy")


def test_a_rollout_whose_turn_comes_while_the_proxy_is_away_waits_for_it(stack: LocalStack) -> None:
    os.kill(the_proxy_of(stack), signal.SIGKILL)
    wait_for_log(stack, "the proxy ended with code -9")
    # This harness gives up at the first refused connection.
    stack.client.submit(shell_task("begins-now", ask(1)))
    (result,) = stack.client.wait("begins-now", PATIENCE_S).results
    assert result.outcome.state is RolloutState.COMPLETED, result.outcome
    assert result.trajectory is not None
    assert result.trajectory.fidelity.calls == 1
