"""What trajectories cost a trainer, a store and a worker.

    python -m benchmarks.trajectories                 all of it
    python -m benchmarks.trajectories samples bytes   only these parts (samples, bytes, speed)

samples: rows and tokens that a trainer gets of a session, `per_request` against `prefix_merging`, on recorded sessions
of real agent programs (tests.trajectory.sessions says what they are), in both contexts.
bytes: of those sessions' merged trajectories as committed, per token of their traces: ids, masks and log-probabilities,
beside the same numbers as JSON; messages apart. The scripted model's vocabulary is small: `zipf` is a session whose ids
are spread as those of a large one, without a repetition.
speed: tokens a second that a builder reads (prompts and samples of all calls) and writes (traces), of sessions that
grow to 128,000 tokens: the least processor time of `REPEATS`, and the time per token against the session of 20 turns.
"""

from __future__ import annotations

import json
import random
import sys
import time
from datetime import UTC, datetime, timedelta
from statistics import median

import numpy as np

from polarq.contracts.completion import Completion
from polarq.contracts.trajectory import Trace, Trajectory
from polarq.store.codec import encode_trajectory
from polarq.trajectory.base import Builder
from polarq.trajectory.per_request import PerRequestBuilder
from polarq.trajectory.prefix_merging import PrefixMergingBuilder
from tests.trajectory.sessions import CONTEXTS, harnesses, session

BUILDERS: tuple[type[Builder], ...] = (PrefixMergingBuilder, PerRequestBuilder)
REPEATS = 15
GROWTH = 640
"""Ids per turn where speed is measured, half of them sampled: 200 turns are 128,000."""
ZIPF_TURNS = 24
BEGAN = datetime(2026, 1, 1, tzinfo=UTC)


def a_call(
    seq: int, prompt: list[int], sampled: list[int], messages: list[dict[str, str]], logprobs: list[float]
) -> Completion:
    at = BEGAN + timedelta(seconds=seq)
    return Completion(
        rollout_id="b.0", attempt=1, seq=seq, completion_id=f"c{seq}", requested_at=at, answered_at=at, latency_s=0,
        dialect="openai_chat", path="", request_digest="", prompt_ids=prompt, sampled_ids=sampled, logprobs=logprobs,
        messages=messages, reply={"role": "assistant", "content": f"answer {seq}"},
    )  # fmt: skip


def zipf_session() -> list[Completion]:
    """500 new ids and 300 sampled ones a turn."""
    random_ = np.random.default_rng(3)
    seen, calls = list[int](), []
    for turn in range(ZIPF_TURNS):
        new, sampled = (np.minimum(random_.zipf(1.25, size), 151_000).tolist() for size in (500, 300))
        seen += new
        values = (-random_.exponential(0.4, len(sampled))).astype(np.float32).tolist()
        calls.append(a_call(turn, list(seen), sampled, [], values))
        seen += sampled
    return calls


def grown_session(turns: int, *, drift: bool) -> list[Completion]:
    """Ids at random. With `drift` each prompt differs from what was sampled before: every call breaks."""
    pick = random.Random(1)
    seen = [pick.randrange(150_000) for _ in range(GROWTH)]
    messages = [{"role": "user", "content": "x"}]
    calls = []
    for turn in range(turns):
        sampled = [pick.randrange(150_000) for _ in range(GROWTH // 2)]
        calls.append(a_call(turn, list(seen), sampled, list(messages), [-0.5] * len(sampled)))
        seen += sampled
        if drift:
            seen[-3] += 1
        seen += [pick.randrange(150_000) for _ in range(GROWTH // 2)]
        messages += [{"role": "assistant", "content": f"a{turn}"}, {"role": "user", "content": f"b{turn}"}]
    return calls


def trained(trajectory: Trajectory) -> tuple[int, int]:
    """(samples, tokens) that a trainer computes: of traces with something to train on."""
    traces = [trace for trace in trajectory.traces if trace.untrainable is None]
    return len(traces), sum(len(trace.prompt_ids) + len(trace.response_ids) for trace in traces)


def samples() -> None:
    print("samples and tokens of a rollout, per_request against prefix_merging")
    for context in CONTEXTS:
        all_apart, all_merged = (0, 0), (0, 0)
        for harness in harnesses(context):
            calls = session(harness, context)
            apart, merged = PerRequestBuilder({}).build(calls), PrefixMergingBuilder({}).build(calls)
            _compare(f"{harness} ({context})", apart, merged)
            all_apart, all_merged = _added(all_apart, trained(apart)), _added(all_merged, trained(merged))
        by_samples, by_tokens = (one / other for one, other in zip(all_apart, all_merged, strict=True))
        print(f"  {context}, all of them: {by_samples:.1f} times fewer samples, {by_tokens:.1f} times fewer tokens")


def _compare(name: str, apart: Trajectory, merged: Trajectory) -> None:
    (n, tokens), (n_merged, tokens_merged) = trained(apart), trained(merged)
    kept = merged.fidelity.trainable_tokens / apart.fidelity.trainable_tokens
    print(
        f"  {name:24} samples {n} / {n_merged} = {n / n_merged:.1f}, tokens {tokens:,} / {tokens_merged:,} = "
        f"{tokens / tokens_merged:.1f}, sampled tokens kept {kept:.0%}, breaks {len(merged.fidelity.breaks)}"
    )


def _added(one: tuple[int, int], other: tuple[int, int]) -> tuple[int, int]:
    return one[0] + other[0], one[1] + other[1]


def sizes() -> None:
    print("bytes per token of the committed trajectory (prefix_merging)")
    rows = []
    sessions = {harness: session(harness, "exact") for harness in harnesses("exact")}
    for name, calls in {**sessions, "zipf": zipf_session()}.items():
        merged = PrefixMergingBuilder({}).build(calls)
        tokens = trained(merged)[1]
        bare = [_numbers(trace) for trace in merged.traces]
        numbers = Trajectory(builder=merged.builder, traces=bare)
        text = json.dumps(
            [[t.prompt_ids, t.response_ids, t.loss_mask, t.logprobs] for t in bare], separators=(",", ":")
        )
        stored, whole = len(encode_trajectory(numbers)), len(encode_trajectory(merged))
        rows.append((stored / tokens, whole / tokens, len(text) / tokens))
        print(f"  {name:16} {rows[-1][0]:5.2f} (with messages {rows[-1][1]:5.2f}), as JSON {rows[-1][2]:5.2f}")
    stored_, whole_, as_json = (median(column) for column in zip(*rows, strict=True))
    print(f"  median: {stored_:.2f} (with messages {whole_:.2f}), as JSON {as_json:.2f}")


def _numbers(trace: Trace) -> Trace:
    return Trace(
        index=trace.index,
        prompt_ids=trace.prompt_ids,
        response_ids=trace.response_ids,
        loss_mask=trace.loss_mask,
        logprobs=trace.logprobs,
    )


def speed() -> None:
    print(f"tokens a second that a builder reads and writes, best of {REPEATS}; {GROWTH} tokens a turn")
    for drift in (False, True):
        print(f"  {'every call breaks' if drift else 'every call goes on'}")
        for kind in BUILDERS:
            shortest: float | None = None
            for turns in (20, 50, 100, 200):
                calls = grown_session(turns, drift=drift)
                tokens = sum(len(call.prompt_ids) + len(call.sampled_ids) for call in calls)
                tokens += trained(kind({}).build(calls))[1]
                took = min(_seconds(kind({}), calls) for _ in range(REPEATS)) / tokens
                shortest = shortest or took
                print(
                    f"    {kind.name:15} {turns:3} turns, {tokens:10,} tokens: {1 / took / 1e6:5.1f} M/s, "
                    f"{took * 1e9:4.0f} ns a token ({took / shortest - 1:+.0%})"
                )


def _seconds(builder: Builder, calls: list[Completion]) -> float:
    began = time.process_time()
    builder.build(calls)
    return time.process_time() - began


PARTS = {"samples": samples, "bytes": sizes, "speed": speed}

if __name__ == "__main__":
    for part in sys.argv[1:] or PARTS:
        PARTS[part]()
