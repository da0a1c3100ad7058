"""How much SGLang lets a request sample, and its words when that is nothing."""

from __future__ import annotations

from collections.abc import Sequence

from polarq.testing.inference.acting import ApiError
from polarq.testing.inference.engine import Engine


def room(engine: Engine, prompt_ids: Sequence[int], wanted: int | None) -> int:
    """How many tokens may be sampled. Raises `ApiError`."""
    limit, used = engine.options.max_model_len, len(prompt_ids)
    if used >= limit:
        message = f"The input ({used} tokens) is longer than the model's context length ({limit} tokens)."
        raise ApiError(400, message, "BadRequestError")
    if wanted is not None and used + wanted > limit:
        message = (
            f"Requested token count exceeds the model's maximum context length of {limit} tokens. You requested a "
            f"total of {used + wanted} tokens: {used} tokens from the input messages and {wanted} tokens for the "
            "completion. Please reduce the number of tokens in the input messages or the completion to fit within "
            "the limit."
        )
        raise ApiError(400, message, "BadRequestError")
    return wanted if wanted is not None else limit - used
