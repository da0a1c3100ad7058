"""What a trainer trains on: token sequences with their mask and log-probabilities, and how faithful they are."""

from __future__ import annotations

from enum import StrEnum
from typing import Any, Self

from pydantic import Field, model_validator

from polarq.contracts.base import Contract
from polarq.contracts.completion import Image, VersionSpan


class Turn(Contract):
    """One model call within a trace: the tokens [start, end) of its response were sampled by it."""

    seq: int
    start: int = Field(ge=0)
    end: int = Field(ge=0)
    finish_reason: str | None = None
    untrainable: str | None = None
    """Why its tokens have mask 0; None: they have mask 1."""
    grammar: str | None = None
    """What constrained its sampling: a plain forward pass does not give its log-probabilities again."""
    reward: float | None = None
    """The evaluator's credit for this call alone, where it gives one."""


class BranchCause(StrEnum):
    """Why a trace is not the continuation of another one."""

    DRIFT = "drift"
    """The messages go on; the ids they were rendered to do not (see `Fidelity.breaks`)."""
    RETRY = "retry"
    """The same prompt once more, when its first answer was over."""
    PARALLEL = "parallel"
    """Asked while another call from the same place was on its way."""
    FORK = "fork"
    """The conversation was taken up again at an earlier place and went another way."""
    COMPACTION = "compaction"
    """A conversation of the same system prompt and tools, begun anew after another one."""
    SUB_AGENT = "sub_agent"
    """Another system prompt or other tools."""
    SIDE = "side"
    """Traffic beside the task."""


class Trace(Contract):
    """One token sequence to train on.

    The full sequence is `prompt_ids + response_ids`, after the first `left_out` ids of the parent's full sequence; the
    response begins at the first sampled token that this trace is the one to train on. `loss_mask` and `logprobs` are as
    long as `response_ids`: mask 1 marks a sampled, trainable token and has the log-probability it was sampled at; mask
    0 has 0.0. Every sampled token has mask 1 in one trace of its trajectory at most.
    """

    index: int = Field(ge=0)
    prompt_ids: list[int]
    response_ids: list[int]
    loss_mask: list[int]
    logprobs: list[float]
    """Natural logarithm, one per response token, always finite."""
    teacher_logprobs: list[float] | None = None
    """A teacher's natural logarithm for each response token, 0.0 under mask 0; None: no teacher was asked, or it had
    nothing to say of this trace."""
    weight_versions: list[VersionSpan] = []
    """Spans over `response_ids`."""
    images: list[Image] = []
    """The pictures in the full sequence, in order, with their places in it. A sequence has the same meaning as another
    one only if both its ids and its pictures are the same."""

    prompt_messages: list[dict[str, Any]] = []
    response_messages: list[dict[str, Any]] = []
    tools: list[dict[str, Any]] | None = None
    finish_reason: str | None = None

    reward: float | None = None
    weight: float = Field(1.0, ge=0)
    """1 / number of trainable traces of the rollout, so that a rollout with more traces does not weigh more."""
    completion_seqs: list[int] = []
    """The calls this trace was built from."""
    turns: list[Turn] = []
    """The calls, in order; what lies between them was not sampled."""
    parent: int | None = None
    """Index of the trace that this one branched off from, or followed."""
    shared: int = Field(0, ge=0)
    """Leading ids that are those of the parent's full sequence."""
    cause: BranchCause | None = None
    """Why it branched off; None: it is the first."""
    left_out: int = Field(0, ge=0)
    """Leading ids that are not in `prompt_ids`, because the parent has them (builder setting `emit: tree`)."""
    untrainable: str | None = None
    metadata: dict[str, Any] = {}

    @model_validator(mode="after")
    def _aligned(self) -> Self:
        length = len(self.response_ids)
        if len(self.loss_mask) != length or len(self.logprobs) != length:
            lengths = f"response_ids ({length}), loss_mask ({len(self.loss_mask)}), logprobs ({len(self.logprobs)})"
            raise ValueError(f"{lengths} differ in length")
        if not set(self.loss_mask) <= {0, 1}:
            raise ValueError("loss_mask holds something other than 0 and 1")
        if self.teacher_logprobs is not None and len(self.teacher_logprobs) != length:
            raise ValueError(f"teacher_logprobs ({len(self.teacher_logprobs)}) and response_ids ({length}) differ")
        return self

    @property
    def trainable_tokens(self) -> int:
        return sum(self.loss_mask)


class Break(Contract):
    """A place where a prompt does not continue what was sampled before."""

    seq: int
    position: int
    """First token position that differs."""
    cause: str
    continues: int | None = None
    """seq of the call that its messages continue."""


class Fidelity(Contract):
    """How much of what was sampled can be trained on, and where it could not."""

    calls: int = 0
    traces: int = 0
    sampled_tokens: int = 0
    trainable_tokens: int = 0
    masked_tokens: int = 0
    """Sampled tokens that are not trainable (`untrainable` says why, by call)."""
    untrainable: dict[str, str] = {}
    """seq (as text) -> reason."""
    breaks: list[Break] = []
    missing_logprobs: int = 0
    replays: int = 0
    """Calls that repeated an earlier one and were answered without sampling; they leave no record."""
    forged_control_tokens: int = 0
    """Control tokens that messages' own text brought into prompts; counted where the node is in exact mode."""
    side_calls: int = 0
    side_tokens: int = 0
    """Sampled by side calls: beside the task, so that nobody misses them."""
    incomplete_calls: int = 0
    empty_calls: int = 0
    """Calls that sampled nothing: recorded, in no trace."""
    images: int = 0
    """Pictures in traces."""
    unplaced_images: int = 0
    """Those of them of which nobody can say which ids stand for them."""
    versions: list[str] = []
    """Policy versions that sampled tokens, in order of appearance."""

    @property
    def trainable_fraction(self) -> float | None:
        """Share of the sampled tokens, side calls left out, that may be trained on; None: there are none."""
        steps = self.sampled_tokens - self.side_tokens
        return self.trainable_tokens / steps if steps else None

    def counts(self) -> FidelityCounts:
        numbers = {name: getattr(self, name) for name in FidelityCounts.model_fields}
        return FidelityCounts(**{**numbers, "breaks": len(self.breaks)})


class FidelityCounts(Contract):
    """All of `Fidelity` that is a number and can be added up over rollouts."""

    calls: int = 0
    traces: int = 0
    sampled_tokens: int = 0
    trainable_tokens: int = 0
    masked_tokens: int = 0
    breaks: int = 0
    missing_logprobs: int = 0
    replays: int = 0
    forged_control_tokens: int = 0
    side_calls: int = 0
    side_tokens: int = 0
    incomplete_calls: int = 0
    empty_calls: int = 0
    images: int = 0
    unplaced_images: int = 0


class Trajectory(Contract):
    """All traces of one rollout."""

    schema_version: int = 1
    builder: str
    traces: list[Trace] = []
    fidelity: Fidelity = Fidelity()
    metadata: dict[str, Any] = {}

    @model_validator(mode="after")
    def _branched_off_earlier_ones(self) -> Self:
        """What a trace leaves out is of one before it: else nobody can write it out."""
        lengths: list[int] = []
        for position, trace in enumerate(self.traces):
            if trace.parent is not None and not 0 <= trace.parent < position:
                raise ValueError(f"traces.{position}: parent {trace.parent} is no trace before it")
            if trace.left_out > (0 if trace.parent is None else lengths[trace.parent]):
                raise ValueError(f"traces.{position}: leaves out {trace.left_out} ids, which its parent does not have")
            lengths.append(trace.left_out + len(trace.prompt_ids) + len(trace.response_ids))
        return self
