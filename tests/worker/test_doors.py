"""The ways in, through a real worker started by its documented command."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest
from celery import Celery

from polarq.celery import make_app
from polarq.contracts import RolloutState, TaskResult
from polarq.errors import InvalidTask
from polarq.testing.stack import LocalStack
from tests.worker.conftest import ask, shell_task

TRAINER = """
import json, sys
from polarq import submit_rollout
batch = submit_rollout.delay(json.loads(sys.argv[1]))
before = batch.state
result = batch.get(timeout=60)
loaded = sorted(name for name in sys.modules if name.split(".")[0] in ("polarq_worker", "polarq_proxy", "aiohttp"))
print(json.dumps({"before": before, "after": batch.state, "ready": batch.ready(), "loaded": loaded,
                  "progress": batch.progress(), "result": result.model_dump(mode="json")}))
"""


def as_a_trainer(stack: LocalStack, task: dict[str, Any]) -> dict[str, Any]:
    done = subprocess.run(
        [sys.executable, "-c", TRAINER, json.dumps(task)],
        env=stack.env,
        capture_output=True,
        text=True,
        timeout=90,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    answer: dict[str, Any] = json.loads(done.stdout)
    return answer


def test_delay_and_get_give_the_complete_result_in_a_process_that_knows_only_polarq(stack: LocalStack) -> None:
    answer = as_a_trainer(stack, shell_task("door-delay", ask(3), num_samples=2))
    result = TaskResult.model_validate(answer["result"])
    assert answer["loaded"] == []
    assert answer["before"] in {"PENDING", "STARTED", "PROGRESS"}
    assert (answer["after"], answer["ready"]) == ("SUCCESS", True)
    assert answer["progress"]["completed"] == 2
    assert [r.index for r in result.results] == [0, 1]
    for rollout in result.results:
        assert rollout.outcome.state is RolloutState.COMPLETED
        assert rollout.outcome.trainable
        assert rollout.reward is not None
        assert rollout.reward.outcome == 1.0
        assert rollout.trajectory is not None
        assert rollout.trajectory.fidelity.calls == len(rollout.trajectory.traces) == 3
        assert rollout.trajectory.fidelity.trainable_tokens == rollout.trajectory.fidelity.sampled_tokens > 0
        assert all(value < 0 for trace in rollout.trajectory.traces for value in trace.logprobs)
        assert rollout.timing.agent_s is not None


def test_a_foreign_celery_client_that_knows_only_the_name_gets_json(stack: LocalStack) -> None:
    foreign = Celery("foreign", set_as_current=False)
    ours = make_app(stack.topology, stack.settings).conf
    for key in ("broker_url", "result_backend", "broker_transport_options", "result_backend_transport_options"):
        foreign.conf[key] = ours[key]
    task = shell_task("unused", ask(1))
    del task["task_id"]
    pending = foreign.send_task("polarq.submit_rollout", [task], queue="polarq")
    value = pending.get(timeout=60)
    assert pending.state == "SUCCESS"
    assert (value["state"], value["rewards"], value["trajectories"]) == ("completed", [1.0], "full")
    assert value["task_id"] == pending.id
    assert value["results"][0]["trajectory"]["traces"][0]["response_ids"]
    json.dumps(value, allow_nan=False)


def test_a_foreign_clients_bad_task_fails_its_result_with_the_line(stack: LocalStack) -> None:
    app = make_app(stack.topology, stack.settings)
    pending = app.send_task("polarq.submit_rollout", [{"instructions": "x"}], queue="polarq")
    with pytest.raises(Exception, match="did you mean 'instruction'"):
        pending.get(timeout=60)
    assert pending.state == "FAILURE"


def test_a_bad_task_raises_in_the_caller_before_anything_is_enqueued(stack: LocalStack) -> None:
    before = stack.client.ledger.do(stack.client.ledger.calls.last_event_id())
    with pytest.raises(InvalidTask, match="did you mean 'num_samples'"):
        stack.client.submit({**shell_task("door-bad", "true"), "num_smaples": 2})
    assert stack.client.ledger.do(stack.client.ledger.calls.last_event_id()) == before


def test_submitting_the_same_task_again_runs_nothing_again(stack: LocalStack) -> None:
    task = shell_task("door-twice", ask(1))
    first = stack.client.submit(task)
    assert stack.client.wait("door-twice", 60).counts.completed == 1
    again = stack.client.submit(task)
    assert (first.created, again.created) == (True, False)
    assert stack.client.wait("door-twice", 60).results[0].attempt == 1
