"""`per_request`: one trace per model call that sampled something."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from polarq.contracts.completion import Completion
from polarq.contracts.trajectory import Trace
from polarq.trajectory.base import Builder, trained_logprobs, turn
from polarq.trajectory.trainable import versions_of, why_untrainable


class PerRequestBuilder(Builder):
    """Each call is a trace of its own: exactly the ids the engine conditioned on and the ids it sampled."""

    name = "per_request"

    def traces(self, completions: Sequence[Completion]) -> list[Trace]:
        sampled = [c for c in completions if c.sampled_ids]
        return [_trace(index, completion) for index, completion in enumerate(sampled)]


def _trace(index: int, completion: Completion) -> Trace:
    reason = why_untrainable(completion)
    trainable = reason is None
    return Trace(
        index=index,
        prompt_ids=completion.prompt_ids,
        response_ids=completion.sampled_ids,
        loss_mask=[1 if trainable else 0] * len(completion.sampled_ids),
        logprobs=trained_logprobs(completion, reason),
        weight_versions=versions_of(completion),
        images=completion.images,
        prompt_messages=completion.messages,
        response_messages=[completion.reply] if completion.reply else [],
        tools=completion.tools,
        finish_reason=completion.finish_reason,
        completion_seqs=[completion.seq],
        turns=[turn(completion, 0, reason)],
        untrainable=reason,
        metadata=_metadata(completion),
    )


def _metadata(completion: Completion) -> dict[str, Any]:
    metadata: dict[str, Any] = {"completion_id": completion.completion_id, "label": completion.label.value}
    if completion.grammar is not None:
        # Sampled from the policy renormalised over what the grammar allows: a plain forward pass does not give these
        # log-probabilities again.
        metadata["grammar"] = completion.grammar
    return metadata
