"""An answer out of the record, for a harness that asks for it again."""

from __future__ import annotations

from collections.abc import Sequence

from polarq.contracts.completion import Completion
from polarq_proxy.call import Answer, Choice


def answer_of(completions: Sequence[Completion]) -> Answer:
    """The answer whose choices were recorded as these. The texts of single tokens are not recorded, so that
    log-probability entries name their token by its id."""
    first = completions[0]
    choices = [
        Choice(
            index=index,
            message=completion.reply,
            ids=list(completion.sampled_ids),
            logprobs=[
                {"token": f"token_id:{token_id}", "logprob": logprob, "bytes": None, "top_logprobs": []}
                for token_id, logprob in zip(completion.sampled_ids, completion.logprobs, strict=False)
            ],
            finish_reason=completion.finish_reason,
            stop_reason=completion.stop_reason,
        )
        for index, completion in enumerate(completions)
    ]
    counts = [completion.usage.completion_tokens for completion in completions]
    known = [count for count in counts if count is not None]
    usage = first.usage.model_copy(update={"completion_tokens": sum(known) if len(known) == len(counts) else None})
    return Answer(choices, list(first.prompt_ids), usage, first.model_served)
