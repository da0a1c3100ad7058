"""Builders: pure functions from completions to a trajectory, so that a stored rollout can be rebuilt offline."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, ClassVar, cast

from polarq.contracts.completion import Completion, CompletionLabel
from polarq.contracts.rollout import Reward
from polarq.contracts.trajectory import Fidelity, Trace, Trajectory, Turn
from polarq.trajectory.breaks import find_breaks
from polarq.trajectory.trainable import versions_of, why_untrainable


class Builder(ABC):
    """Turns the captured completions of one attempt into a trajectory."""

    name: ClassVar[str]

    def __init__(self, config: dict[str, Any]) -> None:
        if config:
            raise ValueError(f"builder '{self.name}' takes no settings (got {', '.join(sorted(config))})")

    @abstractmethod
    def traces(self, completions: Sequence[Completion]) -> list[Trace]:
        """The traces, in order. Each trainable sampled token has mask 1 in exactly one of them."""

    def build(self, completions: Sequence[Completion], metadata: dict[str, Any] | None = None) -> Trajectory:
        """The trajectory of `completions` (in request order)."""
        ordered = sorted(completions, key=lambda c: c.seq)
        traces = weighted(self.traces(ordered))
        return Trajectory(
            builder=self.name,
            traces=traces,
            fidelity=fidelity(ordered, traces),
            metadata={"record_count": len(ordered), "trace_count": len(traces), **(metadata or {})},
        )


def turn(completion: Completion, start: int, untrainable: str | None) -> Turn:
    """The call as a turn whose sample begins at `start` of a trace's response."""
    return Turn(
        seq=completion.seq,
        start=start,
        end=start + len(completion.sampled_ids),
        finish_reason=completion.finish_reason,
        untrainable=untrainable,
        grammar=completion.grammar,
    )


def trained_logprobs(completion: Completion, untrainable: str | None) -> list[float]:
    """One per sampled id. Under mask 0 the value is 0.0 by contract; under mask 1 `why_untrainable` has seen that every
    one is there."""
    if untrainable is not None:
        return [0.0] * len(completion.sampled_ids)
    return cast("list[float]", completion.logprobs)


def weighted(traces: list[Trace]) -> list[Trace]:
    """Gives each trainable trace the weight 1 / their number, and the others 0."""
    trainable = [1 in trace.loss_mask for trace in traces]
    share = 1 / max(sum(trainable), 1)
    return [
        trace.model_copy(update={"weight": share if trained else 0.0})
        for trace, trained in zip(traces, trainable, strict=True)
    ]


def rewarded(trajectory: Trajectory, reward: Reward) -> Trajectory:
    """The trajectory with this reward and no other: each trace's (its own where the evaluator gave one, else the
    outcome), and each turn's where there are any. A teacher's log-probabilities stay, unless there are others.

    Raises ValueError when there are not as many trace rewards as traces, turn rewards as turns, or log-probabilities as
    tokens.
    """
    own = reward.trace_rewards
    if own is not None and len(own) != len(trajectory.traces):
        raise ValueError(f"{len(own)} trace rewards for {len(trajectory.traces)} traces")
    values = own if own is not None else [reward.outcome] * len(trajectory.traces)
    traces = [t.model_copy(update={"reward": v}) for t, v in zip(trajectory.traces, values, strict=True)]
    if reward.turn_rewards is not None:
        if [len(turns) for turns in reward.turn_rewards] != [len(trace.turns) for trace in traces]:
            raise ValueError("turn_rewards: not one list per trace with one reward per turn")
        traces = [_turned(trace, turns) for trace, turns in zip(traces, reward.turn_rewards, strict=True)]
    elif any(turn.reward is not None for trace in traces for turn in trace.turns):
        traces = [_turned(trace, [None] * len(trace.turns)) for trace in traces]
    if reward.teacher_logprobs is not None:
        traces = _taught(traces, reward.teacher_logprobs)
    return trajectory.model_copy(update={"traces": traces})


def turn_rewards(trajectory: Trajectory) -> dict[int, float]:
    """seq of a call -> its reward, of those that have one."""
    turns = (turn for trace in trajectory.traces for turn in trace.turns)
    return {turn.seq: turn.reward for turn in turns if turn.reward is not None}


def _turned(trace: Trace, rewards: Sequence[float | None]) -> Trace:
    turns = [turn.model_copy(update={"reward": value}) for turn, value in zip(trace.turns, rewards, strict=True)]
    return trace.model_copy(update={"turns": turns})


def _taught(traces: Sequence[Trace], logprobs: Sequence[Sequence[float] | None]) -> list[Trace]:
    if len(logprobs) != len(traces):
        raise ValueError(f"teacher_logprobs: {len(logprobs)} lists for {len(traces)} traces")
    found = []
    for trace, values in zip(traces, logprobs, strict=True):
        if values is not None and len(values) != len(trace.loss_mask):
            raise ValueError(
                f"teacher_logprobs: {len(values)} for {len(trace.loss_mask)} tokens of trace {trace.index}"
            )
        own = None if values is None else [v if bit else 0.0 for v, bit in zip(values, trace.loss_mask, strict=True)]
        found.append(trace.model_copy(update={"teacher_logprobs": own}))
    return found


def fidelity(completions: Sequence[Completion], traces: Sequence[Trace]) -> Fidelity:
    """What was kept of what was sampled, and where and why not."""
    trained = {turn.seq for trace in traces for turn in trace.turns if turn.untrainable is None}
    rest = [completion for completion in completions if completion.seq not in trained]
    reasons = {str(one.seq): why_untrainable(one) or "in no trace" for one in rest if one.sampled_ids}
    sampled = sum(len(c.sampled_ids) for c in completions)
    trainable = sum(trace.trainable_tokens for trace in traces)
    images = [image for trace in traces for image in trace.images]
    return Fidelity(
        calls=len(completions),
        traces=len(traces),
        sampled_tokens=sampled,
        trainable_tokens=trainable,
        masked_tokens=sampled - trainable,
        untrainable=reasons,
        breaks=find_breaks(completions),
        missing_logprobs=sum(c.logprobs.count(None) for c in rest),
        forged_control_tokens=sum(c.forged for c in completions),
        side_calls=sum(1 for c in completions if c.label is CompletionLabel.SIDE),
        side_tokens=sum(len(c.sampled_ids) for c in completions if c.label is CompletionLabel.SIDE),
        incomplete_calls=sum(1 for c in completions if c.incomplete),
        empty_calls=sum(1 for c in completions if not c.sampled_ids),
        images=len(images),
        unplaced_images=sum(1 for image in images if image.start is None),
        versions=list(dict.fromkeys(span.version for c in completions for span in versions_of(c))),
    )
