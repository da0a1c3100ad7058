"""What trajectories cost a trainer, a store and a worker.

    python -m benchmarks.trajectories                 all of it
    python -m benchmarks.trajectories samples bytes   only these parts (samples, bytes, speed)

samples: rows and tokens that a trainer gets of a session, `per_request` against `prefix_merging`, on recorded sessions
of real agent programs (tests.trajectory.sessions says what they are): in both contexts, and of a model whose ids are
others than its texts encode to, in observe mode, where nothing can be merged.
bytes: of those sessions' merged trajectories as committed, per token of their traces: ids, masks and log-probabilities,
beside the same numbers as JSON; messages apart. The scripted model's vocabulary is small: `zipf` is a session whose ids
are spread as those of a large one, without a repetition.
speed: tokens a second that a builder reads (prompts and samples of all calls) and writes (traces), and the time per
token against the session of 20 turns. Sessions of 20 to 200 turns: of 640 new tokens each, so that the last grows to
128,000, and of 128,000 tokens in all. Of each, the median processor time of `ROUNDS`, in which all sizes take turns.
Small sessions are built several times a round, and the garbage collector waits (as in timeit): it would look through
all of the benchmark's sessions. Below them, what these times are made of (least squares): a share for each token that
is read, one for each that is new in a turn (it is written with its mask and log-probability), one for each call. The
fewer turns, the more of the tokens are new: where cost is linear in all three, time per token falls.
"""

from __future__ import annotations

import gc
import hashlib
import json
import random
import sys
import time
from collections.abc import Callable, Sequence
from datetime import UTC, datetime, timedelta
from statistics import median

import numpy as np

from polarq.contracts.completion import Completion, Image
from polarq.contracts.trajectory import Trace, Trajectory
from polarq.store.codec import encode_trajectory
from polarq.trajectory.base import Builder
from polarq.trajectory.per_request import PerRequestBuilder
from polarq.trajectory.prefix_merging import PrefixMergingBuilder
from tests.trajectory.sessions import CONTEXTS, DRIFT, harnesses, session

BUILDERS: dict[str, Builder] = {
    "prefix_merging": PrefixMergingBuilder({}),
    "tree": PrefixMergingBuilder({"emit": "tree"}),
    "per_request": PerRequestBuilder({}),
}
TURNS = (20, 50, 100, 200)
LENGTH = 128_000
"""Tokens of the longest session where speed is measured; half of what is new in a turn is sampled."""
SHAPES: dict[str, Callable[[int], int]] = {
    "640 tokens a turn": lambda turns: LENGTH // TURNS[-1],
    "128,000 tokens": lambda turns: LENGTH // turns,
}
"""New tokens a turn, by the number of turns."""
SESSIONS = ("every call goes on", "every call breaks", "every call shows a new picture")
ROUNDS = 5
READ_A_ROUND = 3_000_000
"""Tokens, at least: sessions that have fewer are built several times."""
IMAGE_PAD, IMAGE_IDS = 151_655, 64
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


def grown_session(turns: int, growth: int, kind: str) -> list[Completion]:
    """Ids at random, so many new ones a turn. Where calls break, each prompt differs from what was sampled before, near
    its end."""
    pick = random.Random(1)
    seen = [pick.randrange(150_000) for _ in range(growth)]
    messages = [{"role": "user", "content": "x"}]
    images = list[Image]()
    calls = []
    for turn in range(turns):
        sampled = [pick.randrange(150_000) for _ in range(growth // 2)]
        call = a_call(turn, list(seen), sampled, list(messages), [-0.5] * len(sampled))
        calls.append(call.model_copy(update={"images": list(images)}))
        seen += sampled
        new = [pick.randrange(150_000) for _ in range(growth // 2)]
        if kind == "every call breaks":
            seen[-3] += 1
        elif kind == "every call shows a new picture":
            new[1 : IMAGE_IDS + 1] = [IMAGE_PAD] * IMAGE_IDS
            start, sha256 = len(seen) + 1, hashlib.sha256(b"%d" % turn).hexdigest()
            images.append(Image(sha256=sha256, size=1, start=start, end=start + IMAGE_IDS))
        seen += new
        messages += [{"role": "assistant", "content": f"a{turn}"}, {"role": "user", "content": f"b{turn}"}]
    return calls


def trained(trajectory: Trajectory) -> tuple[int, int]:
    """(samples, tokens) that a trainer computes: of traces with something to train on."""
    traces = [trace for trace in trajectory.traces if trace.untrainable is None]
    return len(traces), sum(len(trace.prompt_ids) + len(trace.response_ids) for trace in traces)


def samples() -> None:
    print("samples and tokens of a rollout, per_request against prefix_merging")
    for context in (*CONTEXTS, DRIFT):
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
    print(f"tokens a second that a builder reads and writes, and the time per token; medians of {ROUNDS} rounds")
    for kind in SESSIONS:
        sessions = [(turns, growth(turns)) for growth in SHAPES.values() for turns in TURNS]
        grown = [grown_session(turns, growth, kind) for turns, growth in sessions]
        for name, builder in BUILDERS.items():
            print(f"  {name}, {kind}")
            _compare_sizes(builder, sessions, grown)


def _compare_sizes(
    builder: Builder, sessions: Sequence[tuple[int, int]], grown: Sequence[Sequence[Completion]]
) -> None:
    """Of sessions of so many turns and new tokens a turn."""
    read = [sum(len(call.prompt_ids) + len(call.sampled_ids) for call in calls) for calls in grown]
    times = [-(-READ_A_ROUND // one) for one in read]
    gc.disable()
    rounds = [[_seconds(builder, *one) for one in zip(grown, times, strict=True)] for _ in range(ROUNDS)]
    gc.enable()
    took = [median(column) for column in zip(*rounds, strict=True)]
    first = 0.0
    for (turns, growth), calls, one, seconds in zip(sessions, grown, read, took, strict=True):
        tokens = one + trained(builder.build(calls))[1]
        first = seconds / tokens if turns == TURNS[0] else first
        print(
            f"    {turns:3} turns of {growth:5,}, {tokens:10,} tokens: {tokens / seconds / 1e6:5.1f} M/s, "
            f"{seconds / tokens * 1e9:4.1f} ns a token ({seconds / tokens / first - 1:+.0%})",
        )
    parts = np.array([[one, turns * growth, turns] for one, (turns, growth) in zip(read, sessions, strict=True)])
    # Relative to the time: every session counts alike.
    shares = np.linalg.lstsq(parts / np.array(took)[:, None], np.ones(len(took)))[0]
    off = max(abs(parts @ shares / took - 1))
    print(
        f"    {shares[0] * 1e9:.0f} ns a token read, {shares[1] * 1e9:.0f} ns a new one, {shares[2] * 1e6:.0f} us "
        f"a call (no session is further off than {off:.0%})",
        flush=True,
    )


def _seconds(builder: Builder, calls: Sequence[Completion], times: int) -> float:
    """Of one of so many builds."""
    began = time.process_time()
    for _ in range(times):
        builder.build(calls)
    return (time.process_time() - began) / times


PARTS = {"samples": samples, "bytes": sizes, "speed": speed}

if __name__ == "__main__":
    for part in sys.argv[1:] or PARTS:
        PARTS[part]()
