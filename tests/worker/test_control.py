"""Cancel, revoke, drain, stop: against a real worker."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import pytest

from polarq.celery import make_app
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


def test_a_task_cancelled_while_it_waits_still_answers_the_celery_client_that_sent_it(stack: LocalStack) -> None:
    app = make_app(stack.topology, stack.settings)
    task = shell_task("control-waits", ask(1), placement={"policy": "pinned", "node_id": "node0"})
    pending = app.send_task("polarq.submit_rollout", [{**task, "num_samples": 30}], queue="polarq")
    wait_until(lambda: stack.client.ledger.do(stack.client.ledger.calls.head("control-waits")) is not None)
    stack.client.cancel("control-waits")
    value = pending.get(timeout=60)
    assert (value["state"], value["counts"]["total"]) == ("cancelled", 30)


def test_cancelling_what_nobody_has_started_tells_of_the_end_too(stack: LocalStack) -> None:
    stack.client.drain("node0")
    wait_until(lambda: stack.client.nodes()[0].draining)
    last = stack.client.ledger.do(stack.client.ledger.calls.last_event_id())
    task = shell_task("control-idle", ask(1), placement={"policy": "pinned", "node_id": "node0"})
    stack.client.submit(task, celery_id="celery-idle")
    stack.client.cancel("control-idle")
    stack.client.drain("node0", on=False)
    app = make_app(stack.topology, stack.settings)
    assert app.AsyncResult("celery-idle").get(timeout=60)["state"] == "cancelled"
    assert stack.client.ledger.do(stack.client.ledger.calls.last_event_id()) != last


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
