"""Advantages within a group: one per rollout, whatever number of rows it has. Pure.

A rollout without a verdict, and one that a trainer may not use, is in no baseline and has no advantage: it is left out,
never counted as a reward of 0.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from enum import StrEnum
from statistics import fmean, stdev

from polarq.contracts.rollout import RolloutResult
from polarq.errors import InvalidInput

EPSILON = 1e-6
"""Added to a standard deviation before dividing by it."""


class Baseline(StrEnum):
    """What a rollout's reward is compared with."""

    MEAN = "mean"
    """The group's mean."""
    LEAVE_ONE_OUT = "leave_one_out"
    """The mean of the others."""
    NONE = "none"
    """Nothing: the reward itself."""


def rewards_of(results: Iterable[RolloutResult]) -> dict[str, float]:
    """rollout id -> reward, of the rollouts that a trainer may use."""
    return {
        result.rollout_id: result.reward.outcome
        for result in results
        if result.outcome.trainable and result.reward is not None
    }


def advantages(
    rewards: Mapping[str, float], *, baseline: Baseline = Baseline.MEAN, scaled: bool = True
) -> dict[str, float]:
    """rollout id -> advantage, of one group's rollouts.

    `scaled` divides by the sample standard deviation of the group's rewards (GRPO; without it Dr. GRPO's form). A group
    whose rewards are all equal has advantages of 0, and so has a group of one, unless it is compared with nothing.

    Raises `InvalidInput` for a reward that is not a finite number.
    """
    wrong = [
        f"{name}: {reward} is not a finite number" for name, reward in rewards.items() if not math.isfinite(reward)
    ]
    if wrong:
        raise InvalidInput("rewards", wrong)
    values = list(rewards.values())
    # Two values at least, and not all equal: rounding of a mean must not become a difference that is scaled up.
    spread = len(set(values)) > 1
    if baseline is not Baseline.NONE and not spread:
        return dict.fromkeys(rewards, 0.0)
    scale = stdev(values) + EPSILON if scaled and spread else 1.0
    return {rollout_id: (reward - _base(reward, values, baseline)) / scale for rollout_id, reward in rewards.items()}


def _base(reward: float, values: list[float], baseline: Baseline) -> float:
    if baseline is Baseline.NONE:
        return 0.0
    if baseline is Baseline.MEAN:
        return fmean(values)
    return (math.fsum(values) - reward) / (len(values) - 1)
