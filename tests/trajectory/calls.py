"""Completions for tests of builders."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

from polarq.contracts import Completion

NOW = datetime(2026, 1, 1, tzinfo=UTC)


def call(seq: int, prompt: list[int], sampled: list[int], **more: Any) -> Completion:
    """A call that began `seq` seconds on and took less than one; its messages alternate from a user's first."""
    at = NOW + timedelta(seconds=seq)
    roles = ("user", "assistant")
    return Completion(
        rollout_id="t.0",
        attempt=1,
        seq=seq,
        completion_id=f"c{seq}",
        latency_s=0,
        dialect="openai_chat",
        path="/v1/chat/completions",
        request_digest="",
        prompt_ids=prompt,
        sampled_ids=sampled,
        **{
            "requested_at": at,
            "answered_at": at + timedelta(seconds=0.9),
            "logprobs": [-0.5] * len(sampled),
            "messages": [{"role": roles[i % 2], "content": str(i)} for i in range(2 * seq + 1)],
            **more,
        },
    )
