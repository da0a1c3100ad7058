"""Advantages within a group: one per rollout, whatever number of rows it has, and beside it one per turn. Pure.

A rollout without a verdict, and one that a trainer may not use, is in no baseline and has no advantage: it is left out,
never counted as a reward of 0.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from enum import StrEnum
from itertools import accumulate
from statistics import fmean, stdev

from polarq.contracts.rollout import RolloutResult
from polarq.errors import InvalidInput
from polarq.trainers.rows import Row
from polarq.trajectory.base import turn_rewards

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
    _check(rewards.items())
    values = list(rewards.values())
    if baseline is not Baseline.NONE and not _spread(values):
        return dict.fromkeys(rewards, 0.0)
    scale = _scale(values, scaled=scaled)
    return {rollout_id: (reward - _base(reward, values, baseline)) / scale for rollout_id, reward in rewards.items()}


def turn_rewards_of(results: Iterable[RolloutResult]) -> dict[str, dict[int, float]]:
    """rollout id -> seq of a call -> its reward, of the rollouts that a trainer may use; only calls that have one."""
    found = {}
    for result in results:
        trajectory = result.trajectory if result.outcome.trainable else None
        if trajectory is not None and (given := turn_rewards(trajectory)):
            found[result.rollout_id] = given
    return found


def turn_advantages(rewards: Mapping[str, Mapping[int, float]], *, scaled: bool = True) -> dict[str, dict[int, float]]:
    """rollout id -> seq of a call -> its advantage, of one group's rollouts.

    With R all turn rewards of the group, the advantage of a rollout's call k is the sum over its calls j >= k, in the
    order of their requests, of (r_j - mean(R)) / std(R): what came of it, compared with the group. GRPO's process
    supervision (DeepSeekMath, arXiv 2402.03300, section 4.1.3), with the sample standard deviation, as `advantages`
    has it; not `scaled`: without the division. Where all of R is equal, all are 0.

    Raises `InvalidInput` for a reward that is not a finite number.
    """
    _check((f"{name}, call {seq}", reward) for name, turns in rewards.items() for seq, reward in turns.items())
    values = [reward for turns in rewards.values() for reward in turns.values()]
    if not _spread(values):
        return {rollout_id: dict.fromkeys(sorted(turns), 0.0) for rollout_id, turns in rewards.items()}
    mean, scale = fmean(values), _scale(values, scaled=scaled)
    found = {}
    for rollout_id, turns in rewards.items():
        seqs = sorted(turns)
        to_go = accumulate((turns[seq] - mean) / scale for seq in reversed(seqs))
        found[rollout_id] = dict(zip(seqs, reversed(list(to_go)), strict=True))
    return found


def token_advantages(row: Row, rollout: float, turns: Mapping[int, float] | None = None) -> list[float]:
    """One per id of the row's response: the advantage of its rollout, and of its turn where `turns` (seq of a call ->
    advantage) has it; 0.0 where the mask is 0. Their sum is MT-GRPO's (arXiv 2505.11821); scale either one before."""
    spread = [rollout * bit for bit in row.loss_mask]
    for turn in row.turns:
        more = (turns or {}).get(turn.seq, 0.0)
        for at in range(turn.start, turn.end):
            spread[at] += more * row.loss_mask[at]
    return spread


def _check(rewards: Iterable[tuple[str, float]]) -> None:
    wrong = [f"{name}: {str(reward)[:40]} is not a finite number" for name, reward in rewards if not _is_finite(reward)]
    if wrong:
        raise InvalidInput("rewards", wrong)


def _is_finite(reward: float) -> bool:
    try:
        return math.isfinite(reward)
    except (OverflowError, TypeError, ValueError):
        return False


def _spread(values: Sequence[float]) -> bool:
    """Two values at least, and not all equal: rounding of a mean must not become a difference that is scaled up."""
    return len(set(values)) > 1


def _scale(values: Sequence[float], *, scaled: bool) -> float:
    return stdev(values) + EPSILON if scaled and _spread(values) else 1.0


def _base(reward: float, values: list[float], baseline: Baseline) -> float:
    if baseline is Baseline.NONE:
        return 0.0
    if baseline is Baseline.MEAN:
        return fmean(values)
    return (math.fsum(values) - reward) / (len(values) - 1)
