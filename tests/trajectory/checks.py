"""What holds of a trace, whatever its calls were."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from polarq.contracts import Completion, Trace
from polarq.trajectory.trainable import why_untrainable


def check_all_calls(calls: Sequence[Completion], traces: Sequence[Trace]) -> None:
    """Each call that was sampled is in one trace, as the engine had it. For traces that hold their whole sequence."""
    for trace in traces:
        check_turns(trace, {one.seq: one for one in calls})
    in_traces = sorted(seq for trace in traces for seq in trace.completion_seqs)
    assert in_traces == [one.seq for one in calls if one.sampled_ids]


def versions(spans: list[Any], length: int) -> list[str | None]:
    """Which policy sampled each of so many ids."""
    found: list[str | None] = [None] * length
    for span in spans:
        found[span.start : span.end] = [span.version] * (span.end - span.start)
    return found


def check_turns(trace: Trace, calls: dict[int, Completion]) -> None:
    """Each turn of a trace is its call as the engine had it, and nothing else of the trace is trained on."""
    own = set[int]()
    told = versions(trace.weight_versions, len(trace.response_ids))
    for turn in trace.turns:
        call, span = calls[turn.seq], slice(turn.start, turn.end)
        own |= set(range(turn.start, turn.end))
        assert [*trace.prompt_ids, *trace.response_ids[: turn.start]] == call.prompt_ids
        assert trace.response_ids[span] == call.sampled_ids
        trained = why_untrainable(call) is None
        assert trace.loss_mask[span] == [int(trained)] * len(call.sampled_ids)
        assert trace.logprobs[span] == (call.logprobs if trained else [0.0] * len(call.sampled_ids))
        assert told[span] == versions(call.weight_versions, len(call.sampled_ids))
        assert (turn.finish_reason, turn.untrainable) == (call.finish_reason, why_untrainable(call))
        seen = trace.images[: len(call.images)]
        assert [one.sha256 for one in seen] == [one.sha256 for one in call.images]
        assert all(one.start == mine.start for one, mine in zip(seen, call.images, strict=True) if mine.start)
        ahead = trace.images[len(call.images) :]
        assert all(one.start is None or one.start >= len(call.prompt_ids) for one in ahead)
    between = [at for at in range(len(trace.response_ids)) if at not in own]
    assert all(trace.loss_mask[at] == 0 and trace.logprobs[at] == 0.0 and told[at] is None for at in between)
    assert trace.completion_seqs == [turn.seq for turn in trace.turns]
    assert (trace.untrainable is None) == any(turn.untrainable is None for turn in trace.turns)
    assert trace.finish_reason == calls[trace.completion_seqs[-1]].finish_reason
