"""Evaluators where rollouts really are: in a worker, on what its own model and harness left."""

from __future__ import annotations

from pathlib import Path

from polarq.contracts.rollout import Boundary, RolloutState
from polarq.testing.ports import free_port
from polarq.testing.stack import LocalStack
from tests.worker.conftest import ask, shell_task
from tests.worker.test_faults import run


def test_an_answer_a_script_and_a_verifier_make_one_reward(stack: LocalStack, tmp_path: Path) -> None:
    tests = tmp_path / "tests"
    tests.mkdir()
    (tests / "test.sh").write_text('grep -q 7 "$SESSION_DIR/made.txt" && echo 0.5 > "$VERIFIER_DIR/reward.txt"\n')
    inside = {"tests_target": "/polar/session/tests", "verifier_dir": "/polar/session/verifier"}
    parts = [
        {"name": "answer", "strategy": "exact_match", "config": {"expected": "Second answer."}},
        {"name": "file", "strategy": "json_schema", "config": {"schema": {"const": 7}, "answer_file": "made.txt"}},
        {"name": "script", "strategy": "script", "config": {"command": "exit 1"}},
        {"name": "verifier", "strategy": "harbor", "config": {"tests_dir": str(tests), **inside}},
    ]
    evaluator = {"strategy": "composite", "config": {"parts": parts}}
    result = run(stack, shell_task("evaluators-composite", f"{ask(2)}\necho 7 > made.txt", evaluator=evaluator))
    assert (result.outcome.state, result.outcome.trainable) == (RolloutState.COMPLETED, True), result.outcome
    assert result.reward is not None
    outcomes = {part["name"]: result.reward.report[f"part_{part['name']}"]["outcome"] for part in parts}
    assert outcomes == {"answer": 1.0, "file": 1.0, "script": 0.0, "verifier": 0.5}
    assert result.reward.outcome == 0.625
    assert result.trajectory is not None
    assert {trace.reward for trace in result.trajectory.traces} == {0.625}


def test_a_teacher_on_the_nodes_own_inference_scores_what_was_sampled(stack: LocalStack) -> None:
    config = {"evaluator": {"strategy": "session_completed"}, "hint": "Answer at once."}
    evaluator = {"strategy": "self_distillation", "config": config}
    result = run(stack, shell_task("evaluators-teacher", ask(2), evaluator=evaluator))
    assert (result.outcome.state, result.outcome.trainable) == (RolloutState.COMPLETED, True), result.outcome
    assert result.reward is not None
    assert (result.reward.outcome, result.reward.teacher_logprobs) == (1.0, None)
    assert result.trajectory is not None
    for trace in result.trajectory.traces:
        assert trace.teacher_logprobs is not None
        trained = [value for value, bit in zip(trace.teacher_logprobs, trace.loss_mask, strict=True) if bit]
        assert all(value < 0 for value in trained)
        assert trace.teacher_logprobs != trace.logprobs


def test_a_judge_that_is_away_leaves_no_reward(stack: LocalStack) -> None:
    config = {"judge_base_url": f"http://127.0.0.1:{free_port()}", "judge_model": "m", "rubric": "r"}
    evaluator = {"strategy": "llm_judge", "config": {**config, "judge_max_retries": 0}}
    result = run(stack, shell_task("evaluators-judge", ask(1), evaluator=evaluator))
    assert (result.outcome.state, result.outcome.boundary) == (RolloutState.FAILED, Boundary.EVALUATOR)
    assert (result.reward, result.outcome.trainable) == (None, False)
    assert "ConnectError" in result.outcome.message
