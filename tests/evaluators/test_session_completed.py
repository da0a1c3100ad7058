"""The harness's own end as reward, and what every evaluator's verdict is held to."""

from __future__ import annotations

import math
from typing import Any

import pytest

from polarq.contracts.rollout import Boundary, HarnessReport, Outcome, Reward
from polarq.contracts.specs import EvaluatorSpec
from polarq.errors import EvaluatorFault, InvalidTask
from polarq_worker.evaluators.base import MAX_REPORT_BYTES, EvaluationContext
from polarq_worker.evaluators.create import create_evaluator
from polarq_worker.outcomes import StageFailed
from polarq_worker.stages import faults
from tests.evaluators.conftest import Bench

SPEC = EvaluatorSpec(strategy="session_completed")


@pytest.mark.parametrize(("ok", "outcome"), [(True, 1.0), (False, 0.0)])
async def test_it_is_one_when_the_harness_ended_well(ok: bool, outcome: float, bench: Bench) -> None:
    await bench.begin()
    context: EvaluationContext = bench.context(HarnessReport(name="stub", ok=ok))
    reward = await create_evaluator(SPEC, []).evaluate(context)
    assert (reward.outcome, reward.evaluator) == (outcome, "session_completed")


def test_it_takes_no_config() -> None:
    with pytest.raises(InvalidTask, match="unknown key 'threshold'"):
        create_evaluator(EvaluatorSpec(strategy="session_completed", config={"threshold": 1}), [])


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_value_that_is_not_finite_is_no_reward(value: float) -> None:
    with pytest.raises(EvaluatorFault, match="no reward"):
        create_evaluator(SPEC, []).verdict(value, {})


def test_a_large_report_loses_its_largest_entries_and_says_which() -> None:
    report: dict[str, Any] = {"small": 1, "huge": "x" * 200_000, "large": ["y"] * 20_000}
    reward = create_evaluator(SPEC, []).verdict(1, report)
    assert reward.report["small"] == 1
    assert reward.report["left_out_of_report"] == ["huge", "large"]
    assert len(reward.model_dump_json()) < MAX_REPORT_BYTES


def test_a_report_holds_what_a_result_can_be_written_down_with() -> None:
    nested: list[Any] = []
    for _ in range(300):
        nested = [nested]
    report = {"reason": "good \ud83d", "reward_json": {"\ud83d": [math.nan, 2**70]}, "nested": nested}
    reward = create_evaluator(SPEC, []).verdict(1, report)
    assert reward.report["left_out_of_report"] == ["nested"]
    assert Reward.stored(reward.model_dump_json()).report == {
        "reason": "good ?",
        "reward_json": {"?": [None, 2**70]},
        "left_out_of_report": ["nested"],
    }


def test_what_an_evaluator_failed_with_can_be_written_down() -> None:
    with pytest.raises(StageFailed) as caught, faults.of_evaluate(1.0):
        raise EvaluatorFault("'score' is no number: '\ud83d'")
    outcome = caught.value.outcome
    assert (outcome.boundary, outcome.reason) == (Boundary.EVALUATOR, "evaluator_failed")
    assert outcome.message == r"'score' is no number: '\ud83d'"
    assert Outcome.stored(outcome.model_dump_json()) == outcome
