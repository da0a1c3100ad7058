"""A proxy that is killed costs nobody a rollout that had not begun."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from polarq.contracts.rollout import RolloutState
from polarq.testing.stack import LocalStack
from tests.durable.chaos.fleet import children_of, command_of
from tests.durable.gates import PATIENCE_S, wait_for_log
from tests.worker.conftest import ask, shell_task, wait_until, write_scenario


@pytest.fixture
def stack(tmp_path: Path) -> Iterator[LocalStack]:
    with LocalStack(tmp_path, scenario=str(write_scenario(tmp_path))) as made:
        yield made


def proxies_of(stack: LocalStack) -> list[int]:
    """Process ids of what the worker has started as its proxy."""
    children = children_of(stack.workers["node0"].pid)
    return [pid for pid in children if b"polarq_proxy" in command_of(pid)]


def test_a_rollout_whose_turn_comes_while_the_proxy_is_away_waits_for_it(stack: LocalStack) -> None:
    (proxy,) = proxies_of(stack)
    os.kill(proxy, signal.SIGKILL)
    wait_for_log(stack, "the proxy ended with code -9")
    # This harness gives up at the first refused connection.
    stack.client.submit(shell_task("begins-now", ask(1)))
    (result,) = stack.client.wait("begins-now", PATIENCE_S).results
    assert result.outcome.state is RolloutState.COMPLETED, result.outcome
    assert result.trajectory is not None
    assert result.trajectory.fidelity.calls == 1


def test_a_proxy_that_is_killed_before_it_listens_is_started_again(stack: LocalStack) -> None:
    worker = stack.workers["node0"]
    worker.stop()
    stack.start_worker("node0", wait=False)
    wait_until(lambda: bool(proxies_of(stack)), PATIENCE_S)
    (proxy,) = proxies_of(stack)
    os.kill(proxy, signal.SIGKILL)
    wait_for_log(stack, "the proxy was killed by signal 9 before it listened; starting it again")
    stack.wait_for_node("node0")
    stack.client.submit(shell_task("after", ask(1)))
    (result,) = stack.client.wait("after", PATIENCE_S).results
    assert result.outcome.state is RolloutState.COMPLETED, result.outcome
