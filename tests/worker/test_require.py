"""A rollout whose trajectory misses what its task requires is an outcome of its own, never a reward."""

from __future__ import annotations

from typing import Any

import pytest

from polarq.contracts import Boundary, RolloutState
from polarq.ledger.fidelity import run_fidelity
from polarq.testing.stack import LocalStack
from polarq.trainers.rows import rows
from tests.worker.conftest import ask, shell_task


@pytest.mark.parametrize(
    ("name", "script", "require", "message"),
    [
        ("nan", "nan_logprob", {"max_missing_logprobs": 0}, "missing_logprobs is 1, at most 0 allowed"),
        ("traces", "plain", {"max_traces": 1}, "traces is 2, at most 1 allowed"),
    ],
)
def test_it_fails_at_the_builder_keeps_its_record_and_has_no_reward(
    stack: LocalStack, name: str, script: str, require: dict[str, Any], message: str
) -> None:
    task = shell_task(
        f"require-{name}", ask(2 if script == "plain" else 1), instruction=f"[script: {script}] Say something.",
        run_id=f"run-{name}", require=require,
    )  # fmt: skip
    stack.client.submit(task)
    (result,) = stack.client.wait(task["task_id"], timeout_s=120).results
    outcome = result.outcome
    assert (outcome.state, outcome.boundary, outcome.reason) == (RolloutState.FAILED, Boundary.BUILDER, "fidelity")
    assert message in outcome.message
    assert (outcome.trainable, result.reward, rows(result)) == (False, None, [])
    assert result.trajectory is not None
    assert result.trajectory.fidelity.sampled_tokens > 0
    ledger = stack.client.ledger
    (counts,) = ledger.do(run_fidelity(ledger.calls.keys, [f"run-{name}"]))
    assert (counts["rollouts"], counts["rollouts_refused"]) == (1, 1)
    assert counts["sampled_tokens"] == result.trajectory.fidelity.sampled_tokens


def test_what_meets_it_is_scored(stack: LocalStack) -> None:
    require = {"trainable_fraction": 1.0, "max_breaks": 0, "max_missing_logprobs": 0, "max_traces": 1}
    stack.client.submit(shell_task("require-met", ask(1), require=require))
    (result,) = stack.client.wait("require-met", timeout_s=120).results
    assert (result.outcome.state, result.outcome.trainable) == (RolloutState.COMPLETED, True)
    assert result.reward is not None
