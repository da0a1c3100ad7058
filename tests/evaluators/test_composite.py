"""Several evaluators, one reward, and no reward where one of them has come to none."""

from __future__ import annotations

import json
from typing import Any, ClassVar

import pytest

from polarq.contracts.evaluators import repository_of
from polarq.contracts.rollout import Reward
from polarq.contracts.specs import EvaluatorSpec
from polarq.contracts.task import Task
from polarq.contracts.trajectory import Trajectory
from polarq.errors import EvaluatorFault, InvalidTask
from polarq.trajectory.base import rewarded
from polarq_worker.evaluators.base import EvaluationContext, EvaluationTimedOut, Evaluator
from polarq_worker.evaluators.composite import CompositeEvaluator
from tests.evaluators.conftest import FIX, QUICK, REPO, Bench
from tests.evaluators.traces import trace, trajectory


def answer(name: str, expected: str, **fields: Any) -> dict[str, Any]:
    return {"name": name, "strategy": "exact_match", "config": {"expected": expected}, **fields}


def composite(*parts: dict[str, Any], mode: str = "weighted", **config: Any) -> EvaluatorSpec:
    return EvaluatorSpec(strategy="composite", config={"mode": mode, "parts": list(parts), **config})


RIGHT, WRONG = answer("right", "42"), answer("wrong", "41")
MISSING = {"name": "missing", "strategy": "script", "config": {"command": "nosuchprogram"}}


@pytest.mark.parametrize(
    ("spec", "outcome", "told"),
    [
        (composite(RIGHT, WRONG), 0.5, {"part_right", "part_wrong"}),
        (composite({**RIGHT, "weight": 3}, WRONG), 0.75, {"part_right", "part_wrong"}),
        (composite({**RIGHT, "gate": True}, WRONG, mode="gated"), 0.0, {"part_right", "part_wrong"}),
        (composite({**RIGHT, "gate": True}, answer("too", "42"), mode="gated"), 1.0, {"part_right", "part_too"}),
        (composite({**RIGHT, "gate": True}, mode="gated"), 1.0, {"part_right"}),
        (composite({**WRONG, "gate": True}, MISSING, mode="gated", gate_reward=-1), -1.0, {"part_wrong"}),
        (composite(RIGHT, WRONG, MISSING, mode="first_failure"), 0.0, {"part_right", "part_wrong"}),
        (composite(RIGHT, answer("too", "42"), mode="first_failure"), 1.0, {"part_right", "part_too"}),
        (composite({**WRONG, "passes_at": 0}, mode="first_failure"), 0.0, {"part_wrong"}),
        (composite({**WRONG, "passes_at": 0}, RIGHT, mode="first_failure"), 0.0, {"part_right", "part_wrong"}),
    ],
)
async def test_the_parts_make_one_reward(spec: EvaluatorSpec, outcome: float, told: set[str], bench: Bench) -> None:
    await bench.start(spec)
    bench.trajectory = trajectory("42")
    reward = await bench.verdict()
    assert reward.outcome == pytest.approx(outcome)
    assert {key for key in reward.report if key.startswith("part_")} == told


@pytest.mark.parametrize("mode", ["weighted", "first_failure"])
async def test_a_part_without_a_verdict_leaves_the_whole_without_one(mode: str, bench: Bench) -> None:
    await bench.start(composite(RIGHT, MISSING, mode=mode))
    bench.trajectory = trajectory("42")
    with pytest.raises(EvaluatorFault, match="part 'missing': the script ran nothing"):
        await bench.verdict()


async def test_a_part_that_has_no_time_left_leaves_the_whole_without_a_verdict(bench: Bench) -> None:
    slow = {"name": "slow", "strategy": "script", "config": {"command": "sleep 60"}}
    await bench.start(composite(RIGHT, slow))
    bench.trajectory = trajectory("42")
    with pytest.raises(EvaluationTimedOut, match="part 'slow': the script: timed out"):
        await bench.verdict(timeout_s=0.5)


class Timed(Evaluator):
    """Keeps how much time it was given."""

    name = "timed"
    given: ClassVar[list[float]] = []

    async def evaluate(self, context: EvaluationContext) -> Reward:
        self.given.append(context.timeout_s)
        return Reward(outcome=1, evaluator="x")


async def test_a_part_has_the_time_that_those_before_it_left(bench: Bench) -> None:
    evaluator = CompositeEvaluator(composite(answer("one", "x"), answer("two", "x")))
    evaluator._parts = [(part, Timed(EvaluatorSpec(strategy="x"))) for part, _ in evaluator._parts]
    await bench.start(EvaluatorSpec(strategy="session_completed"))
    bench.evaluator = evaluator
    assert (await bench.verdict(timeout_s=30)).outcome == 1.0
    first, second = Timed.given
    assert second < first <= 30


async def test_each_part_sees_what_it_saw_before_the_agent(bench: Bench) -> None:
    tests = {"repo_dir": REPO, "expected_output_json": {"tests/test_calc.py::test_add": "PASSED"}, **QUICK}
    parts: list[dict[str, Any]] = [
        {"name": "tests", "strategy": "test_on_output", "config": tests, "refresh_runtime": True},
        {"name": "script", "strategy": "script", "config": {"command": "test -f new", "repo_dir": REPO}},
    ]
    await bench.start(composite(*parts))
    await bench.agent(FIX)
    reward = await bench.verdict()
    assert reward.outcome == 0.5
    graded = [reward.report[f"part_{name}"]["graded_in"] for name in ("tests", "script")]
    assert graded == ["fresh", "live"]


class Crediting(Evaluator):
    """Credits the first of a trace's turns."""

    name = "crediting"

    async def evaluate(self, context: EvaluationContext) -> Reward:
        traces = context.trajectory.traces
        turns = [[1.0] + [0.0] * (len(trace.turns) - 1) for trace in traces]
        return Reward(outcome=1, evaluator="x", trace_rewards=[1.0 * t.index for t in traces], turn_rewards=turns)


async def test_credit_per_trace_and_turn_is_weighed_too(bench: Bench) -> None:
    evaluator = CompositeEvaluator(composite({**RIGHT, "weight": 3}, answer("credit", "x")))
    evaluator._parts[1] = (evaluator._parts[1][0], Crediting(EvaluatorSpec(strategy="x")))
    bench.evaluator, bench.trajectory = evaluator, trajectory("41", "42")
    bench.runtimes.append(await bench._prepared("true")) if not bench.runtimes else None
    reward = await bench.verdict()
    assert (reward.outcome, reward.trace_rewards, reward.turn_rewards) == (1.0, [0.75, 1.0], [[0.25], [0.25]])
    traces = rewarded(bench.trajectory, reward).traces
    assert [[turn.reward for turn in trace.turns] for trace in traces] == [[0.25], [0.25]]


@pytest.mark.parametrize("turns", [[[1.0, 1.0], [1.0]], [[1.0]], [[], [1.0]]])
async def test_a_part_that_credits_other_turns_than_there_are_is_named(turns: list[list[float]], bench: Bench) -> None:
    given = json.dumps({"reward": 1, "turn_rewards": turns})
    part = {"name": "credit", "strategy": "script", "config": {"command": f"echo '{given}'", "reward_from": "output"}}
    await bench.start(composite(RIGHT, part))
    bench.trajectory = trajectory("41", "42")
    with pytest.raises(EvaluatorFault, match="part 'credit': 'turn_rewards'"):
        await bench.verdict()
    evaluator = CompositeEvaluator(composite(RIGHT, answer("credit", "x")))
    evaluator._parts[1] = (evaluator._parts[1][0], Crediting(EvaluatorSpec(strategy="x")))
    bench.evaluator, bench.trajectory = evaluator, Trajectory(builder="x", traces=[trace(0), trace(1)])
    with pytest.raises(EvaluatorFault, match="part 'credit': turn_rewards"):
        await bench.verdict()


def test_turn_rewards_are_one_per_turn() -> None:
    with pytest.raises(ValueError, match="turn_rewards"):
        rewarded(trajectory("41", "42"), Reward(outcome=1, evaluator="x", turn_rewards=[[1.0], []]))


@pytest.mark.parametrize(
    ("spec", "says"),
    [
        (composite(), "parts"),
        (composite(RIGHT, RIGHT), "two parts named 'right'"),
        (composite(answer("x", " ")), "config.parts.x: config.expected"),
        (composite({**RIGHT, "strategy": "composite"}), "is a composite itself"),
        (composite({**RIGHT, "strategy": "my.module:Class"}), "import path"),
        (composite({**RIGHT, "weight": 0}), "all weights are 0"),
        (composite(RIGHT, mode="gated"), "needs a part with 'gate: true'"),
        (composite({**RIGHT, "gate": True}), "goes with mode 'gated'"),
        (composite(RIGHT, mode="sum"), "mode"),
    ],
)
def test_settings_are_refused_at_submit(spec: EvaluatorSpec, says: str) -> None:
    agent = {"harness": "shell", "custom_shell": {"command": "true"}}
    with pytest.raises(InvalidTask, match=says):
        Task.parse({"instruction": "x", "agent": agent, "evaluator": spec.model_dump()})


def test_a_repository_that_a_part_names_is_the_tasks() -> None:
    part = {"name": "tests", "strategy": "script", "config": {"command": "true", "repo_dir": "/testbed"}}
    assert repository_of(composite(RIGHT, part)) == "/testbed"
    assert repository_of(composite(RIGHT)) is None
    # Its history after the checked-out commit is taken away before the agent sees it.
    for strategy in ("test_on_output", "swebench_harness"):
        assert repository_of(EvaluatorSpec(strategy=strategy)) == "/testbed"
