"""Completions for tests of builders."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from typing import Any

from polarq.contracts import Completion, Trace
from polarq.trajectory.trainable import why_untrainable

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


def check_each_sample_is_trained_once(calls: Sequence[Completion], traces: Sequence[Trace]) -> None:
    """Every sampled id in one trace, after exactly what the engine saw before it, with its own log-probability; mask 1
    where it may be trained on, and nowhere else. For traces that hold their whole sequence."""
    by_seq = {one.seq: one for one in calls}
    turns = [(trace, turn) for trace in traces for turn in trace.turns]
    assert sorted(turn.seq for _, turn in turns) == [one.seq for one in calls if one.sampled_ids]
    for trace, turn in turns:
        one = by_seq[turn.seq]
        own = slice(turn.start, turn.end)
        assert [*trace.prompt_ids, *trace.response_ids[: turn.start]] == one.prompt_ids
        assert trace.response_ids[own] == one.sampled_ids
        trained = why_untrainable(one) is None
        assert trace.loss_mask[own] == [int(trained)] * len(one.sampled_ids)
        assert trace.logprobs[own] == (one.logprobs if trained else [0.0] * len(one.sampled_ids))
    assert sum(trace.trainable_tokens for trace in traces) == sum(
        len(one.sampled_ids) for one in calls if why_untrainable(one) is None
    )
    assert all(lp == 0.0 for t in traces for bit, lp in zip(t.loss_mask, t.logprobs, strict=True) if not bit)
