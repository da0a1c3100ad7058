"""A rollout's captured calls built anew, offline: with another builder, other settings, or a later polarq."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from polarq.contracts.completion import Completion
from polarq.contracts.rollout import RolloutResult
from polarq.contracts.trajectory import Trajectory
from polarq.errors import InvalidInput
from polarq.registry import plugin
from polarq.trajectory.base import Builder, rewarded, turn_rewards


def make_builder(strategy: str, config: Mapping[str, Any]) -> Builder:
    """Raises `UnknownPlugin`, and `InvalidInput` for settings that it does not take."""
    try:
        builder: Builder = plugin("builders", strategy)(dict(config))
    except ValueError as exc:
        raise InvalidInput("settings of the builder", [str(exc)]) from None
    return builder


def rebuilt(
    builder: Builder,
    result: RolloutResult,
    calls: Sequence[Completion],
    turns: Mapping[int, float] | None = None,
) -> RolloutResult:
    """The result with the trajectory that `builder` makes of its calls. `turns`: seq of a call -> its reward; those of
    the result's trajectory, where it has one.

    Each trace has the rollout's reward: rewards of single traces, and what a teacher said of their tokens, belonged to
    the traces before. Rewards of turns go with their calls, where all are known. It is trainable if it was, and has
    something to train on.
    """
    trajectory = builder.build(calls, {"task_metadata": result.metadata})
    before = result.trajectory
    if before is not None:
        kept = trajectory.fidelity.model_copy(update={"replays": before.fidelity.replays})
        trajectory = trajectory.model_copy(update={"fidelity": kept})
    reward = None
    if result.reward is not None:
        known = turns or {} if before is None else turn_rewards(before)
        own = {"trace_rewards": None, "turn_rewards": _of_turns(trajectory, known)}
        reward = result.reward.model_copy(update=own)
        trajectory = rewarded(trajectory, reward)
    trainable = result.outcome.trainable and trajectory.fidelity.trainable_tokens > 0
    return result.model_copy(
        update={
            "trajectory": trajectory,
            "reward": reward,
            "outcome": result.outcome.model_copy(update={"trainable": trainable}),
        }
    )


def _of_turns(after: Trajectory, known: Mapping[int, float]) -> list[list[float]] | None:
    found = [[known.get(turn.seq) for turn in trace.turns] for trace in after.traces]
    told = [[reward for reward in turns if reward is not None] for turns in found]
    return told if list(map(len, told)) == list(map(len, found)) and any(told) else None
