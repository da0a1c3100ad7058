"""Rows and advantages: what every trainer's own form is made from."""

from __future__ import annotations

import math
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from polarq.contracts import Completion, Outcome, Reward, RolloutResult, RolloutState, VersionSpan
from polarq.errors import InvalidInput
from polarq.trainers.advantages import Baseline, advantages, rewards_of, turn_advantages
from polarq.trainers.rows import rows, version_number, written_out
from polarq.trajectory.base import rewarded
from polarq.trajectory.prefix_merging import PrefixMergingBuilder
from tests.export.samples import looking_calls
from tests.trajectory.calls import call
from tests.trajectory.pictures import PAD


def result(*calls: Completion, reward: float | None = 1.0, trainable: bool = True, **more: Any) -> RolloutResult:
    config = more.pop("config", {})
    trajectory = PrefixMergingBuilder(config).build(calls)
    verdict = None if reward is None else Reward(outcome=reward, evaluator="e")
    fields = {
        "rollout_id": "t.1",
        "task_id": "t",
        "run_id": "run",
        "index": 1,
        "outcome": Outcome(state=RolloutState.COMPLETED, trainable=trainable),
        "reward": verdict,
        "trajectory": trajectory if verdict is None else rewarded(trajectory, verdict),
    }
    return RolloutResult(**{**fields, **more})


def test_a_rollout_weighs_one_however_many_rows_it_has() -> None:
    lone = call(2, [7], [8], incomplete=True)
    made = rows(result(call(0, [1], [2]), call(1, [5], [6]), lone, reward=0.5))
    assert [(row.group, row.rollout, row.rollout_id, row.trace) for row in made] == [
        ("t", 1, "t.1", 0),
        ("t", 1, "t.1", 1),
    ]
    assert [row.weight for row in made] == [0.5, 0.5]
    assert [row.reward for row in made] == [0.5, 0.5]
    assert [(row.prompt_ids, row.response_ids, row.loss_mask, row.logprobs) for row in made] == [
        ([1], [2], [1], [-0.5]),
        ([5], [6], [1], [-0.5]),
    ]


def test_a_row_has_what_a_teacher_said_of_each_token() -> None:
    one = result(call(0, [1], [2, 3]))
    assert one.trajectory is not None
    verdict = Reward(outcome=1, evaluator="e", teacher_logprobs=[[-2.0, -3.0]])
    (row,) = rows(one.model_copy(update={"trajectory": rewarded(one.trajectory, verdict)}))
    assert row.teacher_logprobs == [-2.0, -3.0]
    assert rows(one)[0].teacher_logprobs is None


def test_what_a_teacher_said_of_tokens_that_are_not_trained_on_is_nothing() -> None:
    one = result(call(0, [1], [2, 3]), call(1, [1, 2, 3, 4], [5]))
    assert one.trajectory is not None
    verdict = Reward(outcome=1, evaluator="e", teacher_logprobs=[[-2.0, -3.0, -4.0, -5.0]])
    (row,) = rows(one.model_copy(update={"trajectory": rewarded(one.trajectory, verdict)}))
    assert (row.loss_mask, row.teacher_logprobs) == ([1, 1, 0, 1], [-2.0, -3.0, 0.0, -5.0])


def test_a_row_is_its_traces_and_its_rollouts() -> None:
    first, last = looking_calls()
    shown = result(first, last.model_copy(update={"finish_reason": "length"}), index=4, rollout_id="t.4")
    assert shown.trajectory is not None
    (trace,) = shown.trajectory.traces
    (row,) = rows(shown)
    of_trace = (row.trace, row.prompt_ids, row.response_ids, row.loss_mask, row.logprobs, row.images, row.turns)
    assert of_trace == (0, [1], [2, 9, PAD, PAD, 3, 4], [1, 1, 0, 0, 0, 1], trace.logprobs, trace.images, trace.turns)
    assert (len(row.images), len(row.turns), row.finish_reason) == (1, 2, "length")
    assert (row.group, row.rollout, row.rollout_id) == ("t", 4, "t.4")


def test_a_row_has_the_reward_of_its_own_trace() -> None:
    one = result(call(0, [1], [2]), call(1, [5], [6]))
    assert one.trajectory is not None
    verdict = Reward(outcome=1.0, trace_rewards=[0.25, 0.0], evaluator="e")
    made = rows(one.model_copy(update={"trajectory": rewarded(one.trajectory, verdict), "reward": verdict}))
    assert [row.reward for row in made] == [0.25, 0.0]


def test_what_a_trainer_may_not_use_makes_no_row() -> None:
    assert rows(result(call(0, [1], [2]), trainable=False)) == []


def test_no_verdict_is_no_reward_of_zero() -> None:
    (row,) = rows(result(call(0, [1], [2]), reward=None))
    assert row.reward is None


def test_a_row_says_between_which_policies_it_was_sampled() -> None:
    spans = [VersionSpan(version="step-9", start=0, end=1), VersionSpan(version="10", start=1, end=2)]
    (row,) = rows(result(call(0, [1], [2, 3], weight_versions=spans)))
    assert (row.oldest, row.newest, row.versions) == (9, 10, spans)
    unknown = [VersionSpan(version="default", start=0, end=1), spans[1]]
    (row,) = rows(result(call(0, [1], [2, 3], weight_versions=unknown)))
    assert (row.oldest, row.newest) == (None, 10)
    (row,) = rows(result(call(0, [1], [2, 3])))
    assert (row.oldest, row.newest) == (None, None)


@pytest.mark.parametrize(
    ("version", "number"), [("7", 7), ("step-12", 12), ("v1.0-3", 3), ("default", None), ("", None), ("7b", None),
     ("8" * 18, int("8" * 18)), ("sha-" + "9" * 19, None), ("7" * 5000, None)]
)  # fmt: skip
def test_a_version_is_the_number_it_ends_in(version: str, number: int | None) -> None:
    assert version_number(version) == number


def test_a_tree_is_written_out_before_rows_are_made_of_it() -> None:
    calls = [call(0, [1], [2]), call(1, [1, 2, 3], [4, 5]), call(2, [1, 2, 6], [7])]
    tree = result(*calls, config={"emit": "tree"})
    with pytest.raises(InvalidInput, match="written_out"):
        rows(tree)
    assert tree.trajectory is not None
    out = tree.model_copy(update={"trajectory": written_out(tree.trajectory)})
    assert rows(out) == rows(result(*calls))
    assert [row.prompt_ids for row in rows(out)] == [[1], [1, 2, 6]]


def test_a_branch_of_a_branch_is_written_out_whole() -> None:
    calls = [
        call(0, [1], [2]),
        call(1, [1, 2, 3], [4, 5, 5]),
        call(2, [1, 2, 6], [7]),
        call(3, [1, 2, 6, 7, 8], [9, 9]),
        call(4, [1, 2, 6, 7, 10], [11]),
    ]
    tree = result(*calls, config={"emit": "tree"}).trajectory
    assert tree is not None
    assert [(trace.parent, trace.left_out, trace.prompt_ids) for trace in tree.traces] == [
        (None, 0, [1]),
        (0, 2, [6]),
        (1, 4, [10]),
    ]
    assert [trace.prompt_ids for trace in written_out(tree).traces] == [[1], [1, 2, 6], [1, 2, 6, 7, 10]]


def test_a_result_that_was_read_without_its_tokens_says_so() -> None:
    with pytest.raises(InvalidInput, match="read without its trajectory"):
        rows(result(call(0, [1], [2])).model_copy(update={"trajectory": None}))


def test_the_baseline_is_over_rollouts_that_count_and_their_rows_do_not() -> None:
    many = [call(n, [n], [n]) for n in range(5)]
    group = [
        result(*many, reward=1.0, rollout_id="t.0"),
        result(call(0, [1], [2]), reward=0.0, rollout_id="t.1"),
        result(call(0, [1], [2]), reward=0.0, rollout_id="t.2", trainable=False),
        result(call(0, [1], [2]), reward=None, rollout_id="t.3"),
    ]
    assert rewards_of(group) == {"t.0": 1.0, "t.1": 0.0}
    assert advantages(rewards_of(group), scaled=False) == {"t.0": 0.5, "t.1": -0.5}


def test_advantages_of_known_groups() -> None:
    rewards = {"a": 1.0, "b": 0.0, "c": 0.0, "d": 1.0}
    spread = math.sqrt(1 / 3)
    assert advantages(rewards) == pytest.approx({k: (v - 0.5) / spread for k, v in rewards.items()}, rel=1e-5)
    one_out = advantages(rewards, baseline=Baseline.LEAVE_ONE_OUT, scaled=False)
    assert one_out == pytest.approx({"a": 2 / 3, "b": -2 / 3, "c": -2 / 3, "d": 2 / 3})
    assert advantages(rewards, baseline=Baseline.NONE, scaled=False) == rewards
    assert advantages({"a": 0.1, "b": 0.1, "c": 0.1}) == {"a": 0.0, "b": 0.0, "c": 0.0}
    assert advantages({"a": 3.0}) == {"a": 0.0}
    assert advantages({"a": 3.0}, baseline=Baseline.LEAVE_ONE_OUT) == {"a": 0.0}
    assert advantages({"a": 3.0}, baseline=Baseline.NONE) == {"a": 3.0}
    assert advantages({}) == {}
    assert advantages({"a": 0.0, "b": 2e-6}) == pytest.approx({"a": -1 / (1 + 2**0.5), "b": 1 / (1 + 2**0.5)})


@pytest.mark.parametrize("wrong", [float("nan"), float("inf"), None, "one", pytest.param(10**400, id="huge")])
def test_a_reward_that_is_no_number_is_refused_by_its_rollout(wrong: Any) -> None:
    with pytest.raises(InvalidInput, match=r"t\.1: (nan|inf|None|one|10+) is not a finite number"):
        advantages({"t.0": 1.0, "t.1": wrong})
    with pytest.raises(InvalidInput, match=r"t\.1, call 0: (nan|inf|None|one|10+) is not a finite number"):
        turn_advantages({"t.0": {0: 1.0}, "t.1": {0: wrong}})


@given(st.dictionaries(st.text(min_size=1, max_size=3), st.floats(-10, 10), min_size=2, max_size=8))
def test_advantages_of_a_group_add_up_to_nothing(rewards: dict[str, float]) -> None:
    for baseline in (Baseline.MEAN, Baseline.LEAVE_ONE_OUT):
        found = advantages(rewards, baseline=baseline)
        assert math.fsum(found.values()) == pytest.approx(0, abs=1e-3)
        assert all(math.isfinite(value) for value in found.values())
        order = sorted(rewards, key=rewards.__getitem__)
        assert all(found[a] <= found[b] + 1e-9 for a, b in pairwise(order))
