"""How a rollout's end is judged."""

from __future__ import annotations

import pytest

from polarq.contracts import (
    Boundary,
    ExecKind,
    Fidelity,
    HarnessReport,
    Outcome,
    Reward,
    RolloutState,
    StepReport,
    Trajectory,
)
from polarq.contracts.require import Require
from polarq.store.grants import GrantUse
from polarq_worker.outcomes import StageFailed, failed, faithful, final_outcome, harness_outcome, worth_scoring

S = RolloutState
B = Boundary


def trajectory(sampled: int = 5, trainable: int | None = None) -> Trajectory:
    kept = sampled if trainable is None else trainable
    return Trajectory(
        builder="per_request",
        fidelity=Fidelity(calls=1 if sampled else 0, sampled_tokens=sampled, trainable_tokens=kept),
    )


def report(kind: ExecKind, code: int | None = None) -> HarnessReport:
    ok = kind is ExecKind.EXITED and code == 0
    return HarnessReport(name="shell", ok=ok, steps=[StepReport(kind=kind, exit_code=code, message="why")])


@pytest.mark.parametrize(
    ("kind", "code", "use", "sampled", "state", "boundary", "scored"),
    [
        (ExecKind.EXITED, 0, GrantUse(1), 5, S.COMPLETED, B.NONE, True),
        (ExecKind.EXITED, 0, GrantUse(), 0, S.COMPLETED, B.NONE, True),
        # A bad exit is not a verdict: the work tree is judged when the model was sampled.
        (ExecKind.EXITED, 1, GrantUse(1), 5, S.FAILED, B.HARNESS, True),
        (ExecKind.SIGNALLED, None, GrantUse(1), 5, S.FAILED, B.HARNESS, True),
        (ExecKind.TIMED_OUT, None, GrantUse(1), 5, S.TIMED_OUT, B.HARNESS, True),
        # Nothing was sampled: there is nothing of the policy's to judge, and no zero to be had.
        (ExecKind.EXITED, 1, GrantUse(), 0, S.FAILED, B.HARNESS, False),
        (ExecKind.COULD_NOT_START, None, GrantUse(), 0, S.FAILED, B.HARNESS, False),
        (ExecKind.TIMED_OUT, None, GrantUse(), 0, S.TIMED_OUT, B.HARNESS, False),
        # The model's answers failed: not the policy's doing.
        (ExecKind.EXITED, 1, GrantUse(2, 1, "503"), 5, S.FAILED, B.MODEL, False),
        (ExecKind.TIMED_OUT, None, GrantUse(0, 9, "down"), 0, S.FAILED, B.MODEL, False),
        (ExecKind.SANDBOX_LOST, None, GrantUse(1), 5, S.FAILED, B.RUNTIME, False),
    ],
)
def test_a_harness_end_is_judged_by_whose_doing_it_was(
    kind: ExecKind, code: int | None, use: GrantUse, sampled: int, state: RolloutState, boundary: Boundary, scored: bool
) -> None:
    outcome = harness_outcome(report(kind, code), use, trajectory(sampled))
    assert (outcome.state, outcome.boundary) == (state, boundary)
    assert worth_scoring(outcome, trajectory(sampled)) is scored


@pytest.mark.parametrize(
    ("outcome", "tokens", "reward", "scored", "trainable"),
    [
        (Outcome(state=S.COMPLETED), 5, 1.0, True, True),
        (Outcome(state=S.COMPLETED), 5, None, False, True),
        (Outcome(state=S.COMPLETED), 5, None, True, False),
        (Outcome(state=S.COMPLETED), 0, 1.0, True, False),
        (Outcome(state=S.FAILED, boundary=B.HARNESS), 5, 0.0, True, True),
        (Outcome(state=S.FAILED, boundary=B.MODEL), 5, None, True, False),
        (Outcome(state=S.FAILED, boundary=B.RUNTIME), 5, None, False, False),
    ],
)
def test_only_the_policys_own_doing_with_tokens_and_a_due_reward_is_trainable(
    outcome: Outcome, tokens: int, reward: float | None, scored: bool, trainable: bool
) -> None:
    verdict = None if reward is None else Reward(outcome=reward, evaluator="e")
    assert final_outcome(outcome, trajectory(tokens), verdict, scored=scored).trainable is trainable


def test_a_rollout_without_model_calls_says_so() -> None:
    outcome = final_outcome(Outcome(state=S.COMPLETED), trajectory(0), Reward(outcome=0, evaluator="e"), scored=True)
    assert (outcome.reason, outcome.trainable) == ("no_model_calls", False)


def test_a_trajectory_that_misses_what_its_task_requires_ends_the_rollout() -> None:
    whole, half, require = trajectory(4), trajectory(4, 2), Require(trainable_fraction=1)
    completed = Outcome(state=S.COMPLETED)
    faithful(require, completed, whole)
    with pytest.raises(StageFailed) as missed:
        faithful(require, completed, half)
    outcome = missed.value.outcome
    assert (outcome.state, outcome.boundary, outcome.reason) == (S.FAILED, B.BUILDER, "fidelity")
    assert "trainable_fraction is 0.5, at least 1 is required" in outcome.message
    assert not outcome.trainable
    # A failure that is not the policy's doing says more.
    faithful(require, failed(B.MODEL, "model_failed", "why").outcome, half)
