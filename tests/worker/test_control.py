"""Cancel, revoke, drain, stop: against a real worker."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import pytest

from polarq.contracts import Boundary, RolloutState, TaskState
from polarq.testing.stack import LocalStack
from tests.worker.conftest import ask, commands_with, shell_task, wait_until

S = RolloutState

SLEEP = "echo started; sleep 300"


def wait_for_state(stack: LocalStack, rollout_id: str, state: RolloutState) -> None:
    """Returns when the rollout is in `state`, told by the event stream."""
    client = stack.client
    task_id = rollout_id.rpartition(".")[0]
    for event in client.follow(task_id, after="0", wait_s=30):
        if event.data.get("session_id") == rollout_id and event.data.get("status") == state.value:
            return
    pytest.fail(f"{rollout_id} never was {state.value}")


def wait_for_event(stack: LocalStack, kind: str) -> None:
    for event in stack.client.follow(after="0", wait_s=30):
        if event.type == kind:
            return


def test_cancelling_a_running_task_ends_it_and_leaves_nothing_running(stack: LocalStack) -> None:
    stack.client.submit(shell_task("control-cancel", f"{ask(1)}\nsleep 7654321"))
    wait_until(lambda: bool(commands_with("sleep 7654321")))
    stack.client.cancel("control-cancel")
    result = stack.client.wait("control-cancel", 60)
    assert (result.state, result.counts.cancelled) == (TaskState.CANCELLED, 1)
    rollout = result.results[0]
    assert (rollout.outcome.state, rollout.outcome.boundary) == (S.CANCELLED, Boundary.CONTROL)
    assert rollout.reward is None
    assert not rollout.outcome.trainable
    assert rollout.trajectory is not None, "what was sampled until then is kept"
    assert rollout.trajectory.fidelity.calls == 1
    assert commands_with("sleep 7654321") == []


def test_celerys_revoke_with_terminate_cancels_the_rollout(stack: LocalStack) -> None:
    stack.client.submit(shell_task("control-revoke", SLEEP))
    wait_for_state(stack, "control-revoke.0", S.RUNNING)
    job_id = stack.client.record("control-revoke").rollouts[0].job_id
    assert job_id
    stack.client.app.control.revoke(job_id, terminate=True)
    result = stack.client.wait("control-revoke", 60)
    assert result.results[0].outcome.state is S.CANCELLED


def test_a_draining_node_takes_nothing_new_and_goes_on_afterwards(stack: LocalStack) -> None:
    stack.client.drain("node0")
    wait_for_event(stack, "node.paused")
    stack.client.submit(shell_task("control-drain", ask(1), placement={"policy": "pinned", "node_id": "node0"}))
    assert stack.client.record("control-drain").counts.queued == 1
    stack.client.drain("node0", on=False)
    result = stack.client.wait("control-drain", 60)
    assert result.counts.completed == 1, result.results[0].outcome


@pytest.fixture
def own_stack(tmp_path: Path, scenario: Path) -> Any:
    with LocalStack(tmp_path, scenario=str(scenario)) as made:
        yield made


def test_sigterm_lets_what_runs_end_and_then_leaves(own_stack: LocalStack, tmp_path: Path) -> None:
    gate = tmp_path / "gate"
    own_stack.client.submit(shell_task("drain", f"{ask(1)}\nwhile [ ! -e {gate} ]; do sleep 0.05; done"))
    wait_for_state(own_stack, "drain.0", S.RUNNING)
    worker = own_stack.workers["node0"]
    worker.signal(signal.SIGTERM)
    gate.touch()
    assert worker.wait(60) == 0
    result = own_stack.client.get("drain")
    assert (result.state, result.counts.completed) == (TaskState.COMPLETED, 1)
    assert [n.node_id for n in own_stack.client.nodes()] == []


def test_a_second_sigterm_gives_everything_back_and_the_next_worker_takes_it(
    own_stack: LocalStack, tmp_path: Path
) -> None:
    gate = tmp_path / "gate"
    own_stack.client.submit(shell_task("back", f"{ask(1)}\nwhile [ ! -e {gate} ]; do sleep 0.05; done"))
    wait_for_state(own_stack, "back.0", S.RUNNING)
    worker = own_stack.workers["node0"]
    worker.signal(signal.SIGTERM)
    wait_for_event(own_stack, "node.draining")
    worker.signal(signal.SIGTERM)
    assert worker.wait(60) == 0
    record = own_stack.client.record("back")
    assert (record.rollouts[0].state, record.rollouts[0].attempt) == (S.QUEUED, 0)
    gate.touch()
    own_stack.start_worker()
    result = own_stack.client.wait("back", 60)
    assert (result.counts.completed, result.results[0].attempt) == (1, 1)
