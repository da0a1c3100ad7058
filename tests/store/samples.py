"""Made-up calls for the store's tests."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

from polarq.contracts.completion import Completion
from polarq.store.grants import GrantSpec

SPEC = GrantSpec(rollout_id="calc.0", task_id="calc", attempt=1, token=3, node_id="node0")


def completion(seq: int, prompt_ids: list[int], sampled_ids: list[int], **fields: Any) -> Completion:
    now = datetime(2026, 11, 29, tzinfo=UTC)
    values: dict[str, Any] = {
        "rollout_id": SPEC.rollout_id,
        "attempt": SPEC.attempt,
        "seq": seq,
        "completion_id": f"c{seq}",
        "requested_at": now,
        "answered_at": now,
        "latency_s": 0.5,
        "dialect": "openai_chat",
        "path": "/v1/chat/completions",
        "request_digest": "0" * 64,
        "prompt_ids": prompt_ids,
        "sampled_ids": sampled_ids,
        "logprobs": [-0.5] * len(sampled_ids),
        "messages": [{"role": "user", "content": f"turn {turn}"} for turn in range(seq + 1)],
    }
    return Completion(**{**values, **fields})
