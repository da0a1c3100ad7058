"""Rows: one per trace, in the one form that every trainer's own can be made from. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from polarq.contracts.completion import Image, VersionSpan
from polarq.contracts.rollout import RolloutResult
from polarq.contracts.trajectory import Trace, Trajectory, Turn
from polarq.errors import InvalidInput

MOST_DIGITS = 18


@dataclass(frozen=True, slots=True)
class Row:
    """One sequence to train on.

    `loss_mask`, `logprobs` and `teacher_logprobs` are as long as `response_ids`. Mask 1: sampled by the policy, with
    the natural logarithm of the probability it was sampled at; mask 0: nothing to train on, 0.0.
    """

    group: str
    """The task: its rollouts are compared with one another."""
    rollout: int
    """The rollout's number within the group; with it the same on each of its rows."""
    rollout_id: str
    trace: int
    prompt_ids: list[int]
    response_ids: list[int]
    loss_mask: list[int]
    logprobs: list[float]
    reward: float | None
    """This trace's own, or the rollout's; None: no verdict (never a 0 that nobody gave)."""
    weight: float
    """1 / number of the rollout's rows, so that a rollout counts once however many rows it has."""
    versions: list[VersionSpan]
    """Over `response_ids`: which policy sampled what."""
    oldest: int | None
    """The oldest policy version that sampled any of it; None: unknown, which is older than any."""
    newest: int | None
    finish_reason: str | None
    turns: list[Turn]
    """The calls, in order, with their spans of `response_ids` and the rewards of those that have one."""
    images: list[Image]
    """The pictures, in order, with their spans of `prompt_ids + response_ids`."""
    teacher_logprobs: list[float] | None = None
    """A teacher's, one for each of `logprobs`, where there was one."""


def rows(result: RolloutResult) -> list[Row]:
    """The rows that a trainer may use, none where it may use nothing of the rollout. Their weights add up to 1.

    Raises `InvalidInput` for a trajectory whose traces leave out what their parents have (`emit: tree`; see
    `written_out`), and one that is not there although it has tokens to train on.
    """
    if not result.outcome.trainable:
        return []
    if result.trajectory is None:
        raise InvalidInput(result.rollout_id, ["it was read without its trajectory; read it with trajectories=full"])
    usable = [trace for trace in result.trajectory.traces if trace.trainable_tokens]
    if any(trace.left_out for trace in usable):
        raise InvalidInput(result.rollout_id, ["its traces leave out what they share; pass it through written_out"])
    return [row_of(result, trace, 1 / len(usable)) for trace in usable]


def written_out(trajectory: Trajectory) -> Trajectory:
    """A trajectory built with `emit: tree`, each trace with all its ids."""
    whole: list[list[int]] = []
    traces = []
    for trace in trajectory.traces:
        before = whole[trace.parent][: trace.left_out] if trace.parent is not None else []
        prompt = [*before, *trace.prompt_ids]
        whole.append([*prompt, *trace.response_ids])
        traces.append(trace.model_copy(update={"prompt_ids": prompt, "left_out": 0}))
    return trajectory.model_copy(update={"traces": traces})


def version_number(version: str) -> int | None:
    """The number that a policy version, as the engine names it, ends in (`7`, `step-7`). None: in none, or in more
    digits than 64 bits have room for, which count no updates."""
    digits = version[len(version.rstrip("0123456789")) :]
    return int(digits) if 0 < len(digits) <= MOST_DIGITS else None


def row_of(result: RolloutResult, trace: Trace, weight: float) -> Row:
    """One trace as a row, whether a trainer may use it or not: that is for `rows` to say."""
    numbers = _numbers(trace.weight_versions)
    return Row(
        group=result.task_id,
        rollout=result.index,
        rollout_id=result.rollout_id,
        trace=trace.index,
        prompt_ids=trace.prompt_ids,
        response_ids=trace.response_ids,
        loss_mask=trace.loss_mask,
        logprobs=trace.logprobs,
        reward=trace.reward,
        weight=weight,
        versions=trace.weight_versions,
        oldest=None if None in numbers else min(known(numbers), default=None),
        newest=max(known(numbers), default=None),
        finish_reason=trace.finish_reason,
        turns=trace.turns,
        images=trace.images,
        teacher_logprobs=trace.teacher_logprobs,
    )


def _numbers(spans: Sequence[VersionSpan]) -> list[int | None]:
    return [version_number(span.version) for span in spans]


def known(numbers: Iterable[int | None]) -> list[int]:
    return [number for number in numbers if number is not None]
