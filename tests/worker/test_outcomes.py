"""How a rollout's end is judged."""

from __future__ import annotations

from typing import Any

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
from polarq.contracts.endings import Ending, EndingRule
from polarq.contracts.require import Require
from polarq.store.grants import GrantUse
from polarq_worker.harnesses.verdicts import CallsSeen, verdict_of
from polarq_worker.outcomes import StageFailed, failed, faithful, final_outcome, harness_outcome, worth_scoring
from tests.trajectory.calls import call

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
        (ExecKind.COULD_NOT_START, None, GrantUse(), 0, S.FAILED, B.RUNTIME, False),
        # A later command of the harness, in the tree as the policy left it.
        (ExecKind.COULD_NOT_START, None, GrantUse(1), 5, S.FAILED, B.HARNESS, True),
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
    ("use", "last_seq", "boundary"),
    [
        # One that failed, and was asked again: the time was the agent's own.
        (GrantUse(2, 1, "engine_down: no", last_problem="engine_down: no", last_problem_seq=1), 1, B.HARNESS),
        (GrantUse(2, 9, "engine_down: no", last_problem="engine_down: no", last_problem_seq=2), 1, B.MODEL),
        # What the newest call was told is the policy's own doing.
        (GrantUse(2, 1, "engine_down: no", last_problem="context_overflow: no", last_problem_seq=2), 1, B.HARNESS),
    ],
)
def test_an_agent_whose_time_ran_out_while_the_model_was_away_is_not_judged(
    use: GrantUse, last_seq: int, boundary: Boundary
) -> None:
    seen = CallsSeen.of([call(last_seq, [1], [2])], use)
    outcome = harness_outcome(report(ExecKind.TIMED_OUT), use, trajectory(), failing=seen.failing)
    assert (outcome.boundary, worth_scoring(outcome, trajectory())) == (boundary, boundary is B.HARNESS)


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
    assert final_outcome(outcome, trajectory(tokens), verdict, {}, scored=scored)[0].trainable is trainable


def test_a_rollout_without_model_calls_says_so() -> None:
    verdict = Reward(outcome=0, evaluator="e")
    outcome, _ = final_outcome(Outcome(state=S.COMPLETED), trajectory(0), verdict, {}, scored=True)
    assert (outcome.reason, outcome.trainable) == ("no_model_calls", False)


@pytest.mark.parametrize(
    ("outcome", "ending"),
    [
        (Outcome(state=S.COMPLETED), Ending.COMPLETED),
        (Outcome(state=S.COMPLETED, reason="no_trainable_tokens"), Ending.COMPLETED),
        (Outcome(state=S.FAILED, boundary=B.HARNESS, reason="harness_exited"), Ending.AGENT_FAILED),
        (Outcome(state=S.TIMED_OUT, boundary=B.HARNESS, reason="agent_timeout"), Ending.AGENT_TIMED_OUT),
        (Outcome(state=S.FAILED, boundary=B.HARNESS, reason="answer_cut"), Ending.TRUNCATED),
        (Outcome(state=S.FAILED, boundary=B.HARNESS, reason="context_overflow"), Ending.OVERFLOW),
        (Outcome(state=S.FAILED, boundary=B.HARNESS, reason="invalid_tool_call"), Ending.PARSER_INVALID_CALL),
        (Outcome(state=S.FAILED, boundary=B.MODEL, reason="model_failed"), Ending.MODEL_ERROR),
        (Outcome(state=S.TIMED_OUT, boundary=B.PREPARE, reason="prepare_timeout"), Ending.RUNTIME),
        (Outcome(state=S.FAILED, boundary=B.EVALUATOR, reason="evaluator_failed"), Ending.EVALUATOR),
        (Outcome(state=S.FAILED, boundary=B.STORE, reason="result_not_storable"), Ending.NODE),
        (Outcome(state=S.FAILED, boundary=B.BUILDER, reason="fidelity"), Ending.FIDELITY),
        (Outcome(state=S.FAILED, boundary=B.TASK, reason="unusable_task"), Ending.TASK),
        (Outcome(state=S.CANCELLED, boundary=B.CONTROL, reason="cancelled"), Ending.CANCELLED),
        (Outcome(state=S.CANCELLED, boundary=B.CONTROL, reason="early_stop"), Ending.EARLY_STOPPED),
    ],
)
def test_an_outcome_is_one_kind_of_end(outcome: Outcome, ending: Ending) -> None:
    assert outcome.ending is ending


def test_a_rules_reward_counts_in_place_of_the_verdict_which_stays_in_its_report() -> None:
    outcome = Outcome(state=S.TIMED_OUT, boundary=B.HARNESS, reason="agent_timeout")
    rules = {Ending.AGENT_TIMED_OUT: EndingRule(use="train", reward=-1.0)}
    ended, reward = final_outcome(outcome, trajectory(), Reward(outcome=1.0, evaluator="e"), rules, scored=True)
    assert ended.trainable
    assert reward is not None
    assert (reward.outcome, reward.report["ending"], reward.report["verdict"]["outcome"]) == (
        -1.0,
        "agent_timed_out",
        1.0,
    )
    ended, reward = final_outcome(outcome, trajectory(0), None, rules, scored=True)
    assert (ended.trainable, reward) == (False, None), "nothing was sampled, so there is nothing to train on"


def test_a_masked_end_keeps_its_verdict_and_is_not_trained_on() -> None:
    outcome, verdict = Outcome(state=S.FAILED, boundary=B.HARNESS), Reward(outcome=1.0, evaluator="e")
    rules = {Ending.AGENT_FAILED: EndingRule(use="mask")}
    assert final_outcome(outcome, trajectory(), verdict, rules, scored=True) == (outcome, verdict)


@pytest.mark.parametrize(
    ("fields", "invalid"),
    [
        ({"reply": {"content": "<tool_call>\n{..."}, "finish_reason": "stop"}, True),
        ({"reply": {"content": "so:\n  <function=look>"}, "finish_reason": "stop"}, True),
        ({"reply": {"content": "I call it"}, "finish_reason": "tool_calls"}, True),
        ({"reply": {"content": "one writes\n```\n<tool_call>\n```\nso"}, "finish_reason": "stop"}, False),
        ({"reply": {"content": "with <tool_call> in it"}, "finish_reason": "stop"}, False),
        ({"reply": {"content": "<tool_call>", "tool_calls": [{"id": "a"}]}, "finish_reason": "tool_calls"}, False),
    ],
)
def test_a_last_answer_that_was_to_be_a_call_and_is_none_is_told(fields: dict[str, Any], invalid: bool) -> None:
    seen = CallsSeen(sampled=1, last=call(0, [1], [2], **fields))
    verdict = verdict_of(report(ExecKind.EXITED, 0), seen)
    assert (verdict is not None and verdict.reason == "invalid_tool_call") is invalid


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
