"""Credit of single turns: from the evaluator to the tokens of each call."""

from __future__ import annotations

import math
from statistics import stdev

import pytest
from hypothesis import given
from hypothesis import strategies as st

from polarq.contracts import Outcome, Reward, RolloutResult, RolloutState
from polarq.errors import InvalidInput
from polarq.trainers.advantages import token_advantages, turn_advantages, turn_rewards_of
from polarq.trainers.rows import rows
from polarq.trajectory.base import rewarded
from polarq.trajectory.prefix_merging import PrefixMergingBuilder
from tests.trajectory.calls import call

CALLS = [call(0, [1], [2, 9]), call(1, [1, 2, 9, 3], [4]), call(2, [1, 2, 9, 3, 4, 5], [6, 7], incomplete=True),
         call(3, [8], [9])]  # fmt: skip
"""Three turns of one trace, the last one not to be trained on, and another trace."""


def result(turns: list[list[float]] | None, index: int = 0, *, trainable: bool = True) -> RolloutResult:
    verdict = Reward(outcome=1.0, turn_rewards=turns, evaluator="e")
    return RolloutResult(
        rollout_id=f"t.{index}",
        task_id="t",
        run_id="run",
        index=index,
        outcome=Outcome(state=RolloutState.COMPLETED, trainable=trainable),
        reward=verdict,
        trajectory=rewarded(PrefixMergingBuilder({}).build(CALLS), verdict),
    )


def test_rewards_of_turns_are_in_their_rows_beside_the_traces() -> None:
    first, second = rows(result([[0.0, 0.5, 1.0], [0.25]]))
    assert [(turn.seq, turn.start, turn.end, turn.reward) for turn in first.turns] == [
        (0, 0, 2, 0.0),
        (1, 3, 4, 0.5),
        (2, 5, 7, 1.0),
    ]
    assert [turn.reward for turn in second.turns] == [0.25]
    assert [row.reward for row in (first, second)] == [1.0, 1.0]
    assert [turn.reward for row in rows(result(None)) for turn in row.turns] == [None] * 4


def test_a_reward_that_takes_the_place_of_another_takes_that_of_its_turns_too() -> None:
    """A task's rule for an end (`endings`): what the evaluator gave single turns would be trained on beside it."""
    before = result([[0.0, 0.5, 1.0], [0.25]])
    assert before.trajectory is not None
    after = rewarded(before.trajectory, Reward(outcome=-1.0, evaluator="endings"))
    assert [(trace.reward, [turn.reward for turn in trace.turns]) for trace in after.traces] == [
        (-1.0, [None] * 3),
        (-1.0, [None]),
    ]
    assert turn_rewards_of([before.model_copy(update={"trajectory": after})]) == {}


def test_rewards_are_those_of_rollouts_that_may_be_used_and_a_reward_of_zero_is_one() -> None:
    given = [result([[0.0, 0.5, 1.0], [0.25]]), result([[1.0] * 3, [1.0]], 1, trainable=False), result(None, 2)]
    assert turn_rewards_of(given) == {"t.0": {0: 0.0, 1: 0.5, 2: 1.0, 3: 0.25}}


def test_an_advantage_is_what_came_of_a_call_compared_with_the_group() -> None:
    """By hand: the mean of 0, 1, 1, 0, 0 is 0.4; each call has its own and all that came after."""
    rewards = {"a": {0: 0.0, 2: 1.0, 5: 1.0}, "b": {0: 0.0, 1: 0.0}}
    plain = turn_advantages(rewards, scaled=False)
    assert plain["a"] == pytest.approx({0: 0.8, 2: 1.2, 5: 0.6})
    assert plain["b"] == pytest.approx({0: -0.8, 1: -0.4})
    scale = stdev([0, 1, 1, 0, 0])
    scaled = turn_advantages({"b": {1: 0.0, 0: 0.0}, "a": {5: 1.0, 0: 0.0, 2: 1.0}})
    assert scaled["a"] == pytest.approx({seq: value / scale for seq, value in plain["a"].items()}, rel=1e-5)
    assert scaled["b"] == pytest.approx({seq: value / scale for seq, value in plain["b"].items()}, rel=1e-5)


def test_turns_that_are_all_alike_have_no_advantage() -> None:
    assert turn_advantages({"a": {0: 0.1, 1: 0.1}, "b": {3: 0.1}}) == {"a": {0: 0.0, 1: 0.0}, "b": {3: 0.0}}
    assert turn_advantages({"a": {4: 1.0}}) == {"a": {4: 0.0}}
    assert turn_advantages({}) == {}


def test_a_reward_that_is_no_number_is_refused_by_its_call() -> None:
    with pytest.raises(InvalidInput, match="a, call 7: nan is not a finite number"):
        turn_advantages({"a": {0: 1.0, 7: math.nan}})


def test_tokens_have_the_advantage_of_their_rollout_and_of_their_turn() -> None:
    first, second = rows(result([[0.0, 0.5, 1.0], [0.25]]))
    assert first.loss_mask == [1, 1, 0, 1, 0, 0, 0]
    assert token_advantages(first, 0.5) == [0.5, 0.5, 0, 0.5, 0, 0, 0]
    assert token_advantages(first, 0.5, {0: 1.0, 1: -2.0, 2: 9.0}) == [1.5, 1.5, 0, -1.5, 0, 0, 0]
    assert token_advantages(second, 0.5, {3: 0.25}) == [0.75]


@given(
    st.dictionaries(
        st.text(min_size=1, max_size=2),
        st.dictionaries(st.integers(0, 20), st.floats(-10, 10), max_size=6),
        max_size=4,
    )
)
def test_the_first_call_has_all_that_its_rollout_was_given_above_the_mean(rewards: dict[str, dict[int, float]]) -> None:
    found = turn_advantages(rewards, scaled=False)
    values = [value for turns in rewards.values() for value in turns.values()]
    mean = math.fsum(values) / len(values) if values else 0.0
    assert {name: set(turns) for name, turns in found.items()} == {name: set(turns) for name, turns in rewards.items()}
    for name, turns in rewards.items():
        if turns:
            assert found[name][min(turns)] == pytest.approx(sum(turns.values()) - mean * len(turns), abs=1e-6)
            assert found[name][max(turns)] == pytest.approx(turns[max(turns)] - mean, abs=1e-6)
