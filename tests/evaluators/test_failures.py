"""An evaluator that fails is an outcome of its own, never a reward of 0: each of them, in each way that it can."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from polarq.contracts.evaluators import BUILT_IN
from polarq.contracts.rollout import Boundary, RolloutState
from polarq.contracts.specs import EvaluatorSpec
from polarq.testing.ports import free_port
from polarq_worker.outcomes import StageFailed
from polarq_worker.stages import faults
from tests.evaluators.conftest import FIX, REPO, Bench
from tests.evaluators.judging import scripted_judge
from tests.evaluators.test_swebench_harness import INSTANCE
from tests.evaluators.traces import trajectory

FAILED, TIMED_OUT = RolloutState.FAILED, RolloutState.TIMED_OUT
TESTS = {"repo_dir": REPO, "expected_output_json": {"tests/test_calc.py::test_add": "PASSED"}}
SWE = {"instance": INSTANCE, "repo_dir": REPO}
VERIFIER = {"tests_target": "/polar/session/v-tests", "verifier_dir": "/polar/session/v-logs"}
AWAY = "http://127.0.0.1:{port}"
"""Where nobody listens."""
ASKS = {"judge_base_url": AWAY, "judge_model": "m", "judge_max_retries": 0}
PART = {"name": "one", "strategy": "exact_match", "config": {"expected": "42"}}
NAN = "echo nan > $VERIFIER_DIR/reward.txt"

Case = tuple[str, dict[str, Any], float, RolloutState]
"""(strategy, config, budget in seconds, how the rollout ends). `test.sh` is a verifier's own script."""


def case(strategy: str, config: dict[str, Any], *, budget_s: float = 120.0, state: RolloutState = FAILED) -> Case:
    return strategy, config, budget_s, state


CASES: dict[str, Case] = {
    "tests: no such program": case("test_on_output", {**TESTS, "test_command": "nosuchprogram"}),
    "tests: crash": case("test_on_output", {**TESTS, "test_command": "kill -9 $$"}),
    "tests: nothing told": case("test_on_output", {**TESTS, "test_command": "true"}),
    "tests: no time": case("test_on_output", {**TESTS, "test_command": "sleep 60"}, budget_s=0.05, state=TIMED_OUT),
    "script: no such program": case("script", {"command": "nosuchprogram | cat"}),
    "script: crash": case("script", {"command": "kill -9 $$"}),
    "script: NaN": case("script", {"command": "echo nan", "reward_from": "output"}),
    "script: no time": case("script", {"command": "sleep 60"}, budget_s=0.5, state=TIMED_OUT),
    "swebench: crash": case("swebench_harness", {**SWE, "test_command": "kill -9 $$"}),
    "swebench: no time": case("swebench_harness", {**SWE, "test_command": "sleep 60"}, budget_s=0.05, state=TIMED_OUT),
    "harbor: no such program": case("harbor", {"test.sh": "nosuchprogram > $VERIFIER_DIR/reward.txt"}),
    "harbor: crash": case("harbor", {"test.sh": "kill -9 $PPID"}),
    "harbor: NaN": case("harbor", {"test.sh": NAN}),
    "harbor: no time": case("harbor", {"test.sh": "sleep 60"}, budget_s=0.5, state=TIMED_OUT),
    "rubric: NaN of the verifier": case("harbor_rubric", {"test.sh": NAN, **ASKS}),
    "rubric: judge away": case("harbor_rubric", {"test.sh": "echo 1 > $VERIFIER_DIR/reward.txt", **ASKS}),
    "judge: away": case("llm_judge", {**ASKS, "rubric": "r"}),
    "judge: no time": case("llm_judge", {**ASKS, "judge_max_retries": 9, "rubric": "r"}, budget_s=0.5, state=TIMED_OUT),
    "json_schema: crash": case("json_schema", {"schema": {"$ref": "http://127.0.0.1:1/x.json"}}),
    "json_schema: no time": case("json_schema", {"schema": {"type": "object"}}, budget_s=0.01, state=TIMED_OUT),
    "math_verify: what is expected is unreadable": case("math_verify", {"expected": "hello world"}),
    "math_verify: no time": case("math_verify", {"expected": "42"}, budget_s=0.01, state=TIMED_OUT),
    "composite: a part fails": case(
        "composite", {"parts": [PART, {"name": "two", "strategy": "script", "config": {"command": "kill -9 $$"}}]}
    ),
    "self_distillation: what it goes by fails": case(
        "self_distillation", {"evaluator": {"strategy": "script", "config": {"command": "kill -9 $$"}}, "hint": "x"}
    ),
    "self_distillation: teacher away": case(
        "self_distillation",
        {"evaluator": {"strategy": "session_completed"}, "teacher_base_url": AWAY, "teacher_max_retries": 0},
    ),
}  # fmt: skip


def made(strategy: str, config: dict[str, Any], folder: Path) -> EvaluatorSpec:
    port = free_port()
    config = {key: value.format(port=port) if value == AWAY else value for key, value in config.items()}
    if "test.sh" in config:
        (folder / "tests").mkdir()
        (folder / "tests" / "test.sh").write_text(config.pop("test.sh"))
        (folder / "tests" / "rubric.md").write_text("Small steps.")
        config = {"tests_dir": str(folder / "tests"), **VERIFIER, **config}
    return EvaluatorSpec(strategy=strategy, config=config)


async def ended(bench: Bench, budget_s: float) -> StageFailed:
    with pytest.raises(StageFailed) as caught, faults.of_evaluate(budget_s):
        reward = await bench.verdict(budget_s)
        pytest.fail(f"it came to a reward: {reward}")
    return caught.value


@pytest.mark.parametrize("name", CASES)
async def test_a_failure_of_the_evaluator_is_an_outcome(name: str, bench: Bench, tmp_path: Path) -> None:
    strategy, config, budget_s, state = CASES[name]
    await bench.start(made(strategy, config, tmp_path))
    await bench.agent(FIX)
    bench.trajectory = trajectory("42")
    outcome = (await ended(bench, budget_s)).outcome
    assert (outcome.state, outcome.boundary, outcome.trainable) == (state, Boundary.EVALUATOR, False), outcome


def test_every_evaluator_that_can_fail_is_in_the_table() -> None:
    assert {strategy for strategy, *_ in CASES.values()} | set(LOOKS) == BUILT_IN - {"session_completed"}


LOOKS: dict[str, dict[str, Any]] = {
    "test_on_output": {**TESTS, "test_command": "true"},
    "script": {"command": "true", "repo_dir": REPO},
    "harbor": {"test.sh": "true"},
    "exact_match": {"expected": "42", "answer_file": "x"},
    "swebench_harness": {**SWE, "test_command": "true"},
}
"""Those that look into the sandbox."""


@pytest.mark.parametrize("strategy", LOOKS)
async def test_a_sandbox_that_is_gone_is_the_runtimes_failure(strategy: str, bench: Bench, tmp_path: Path) -> None:
    await bench.start(made(strategy, LOOKS[strategy], tmp_path))
    await bench.runtime.stop()
    outcome = (await ended(bench, 60.0)).outcome
    assert (outcome.state, outcome.boundary, outcome.reason) == (FAILED, Boundary.RUNTIME, "sandbox_lost"), outcome


async def test_a_judge_that_scores_nothing_but_nan_is_no_zero(bench: Bench) -> None:
    async with scripted_judge(*['{"score": NaN}'] * 3) as server:
        config = {"judge_base_url": server.url, "judge_model": "m", "rubric": "r", "judge_max_asks": 3}
        await bench.start(EvaluatorSpec(strategy="llm_judge", config=config))
        bench.trajectory = trajectory("42")
        assert (await ended(bench, 60.0)).outcome.boundary is Boundary.EVALUATOR
