"""Which calls may be trained on. The recorder marks what it doubts; a call out of a file may be of anybody."""

from __future__ import annotations

from polarq.contracts.completion import Completion, CompletionLabel, VersionSpan

UNKNOWN_LOGPROB = -9999.0
"""vLLM's sign for a log-probability that it does not know; none is as low."""
ROUNDED_LOGPROB = 1e-3
"""No log-probability is above 0, but for rounding."""


def why_untrainable(completion: Completion) -> str | None:
    """Why a call's tokens must not be trained on; None when they may."""
    logprobs = completion.logprobs
    if completion.untrainable is not None:
        return completion.untrainable
    if completion.label is not CompletionLabel.TRAIN:
        return f"label {completion.label.value}"
    if completion.incomplete:
        return "incomplete answer"
    known = [value for value in logprobs if value is not None]
    if len(logprobs) != len(completion.sampled_ids) or len(known) != len(logprobs):
        return "log-probabilities are missing"
    if known and (min(known) <= UNKNOWN_LOGPROB or max(known) > ROUNDED_LOGPROB):
        return "log-probabilities that cannot be any"
    if completion.weight_versions and not versions_of(completion):
        return "the policy version spans do not cover the sampled ids"
    return None


def versions_of(completion: Completion) -> list[VersionSpan]:
    """Spans over the sampled ids; none where those told are not of these ids."""
    position = 0
    for span in completion.weight_versions:
        if span.start != position or span.end < span.start:
            return []
        position = span.end
    return completion.weight_versions if position == len(completion.sampled_ids) else []
