"""Which calls may be trained on."""

from __future__ import annotations

from polarq.contracts.completion import Completion, CompletionLabel


def why_untrainable(completion: Completion) -> str | None:
    """Why a call's tokens must not be trained on; None when they may."""
    if completion.untrainable is not None:
        return completion.untrainable
    if completion.label is not CompletionLabel.TRAIN:
        return f"label {completion.label.value}"
    if completion.incomplete:
        return "incomplete answer"
    if len(completion.logprobs) != len(completion.sampled_ids) or None in completion.logprobs:
        # The recorder says so itself; a call out of a file may not.
        return "log-probabilities are missing"
    return None
