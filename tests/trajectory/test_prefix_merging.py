"""`prefix_merging`: one trace per way through the token tree, each a sequence that the engine saw."""

from __future__ import annotations

import random
from datetime import timedelta
from itertools import count
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from polarq.contracts import BranchCause, Completion, CompletionLabel, Trace, Trajectory, VersionSpan
from polarq.errors import InvalidTask
from polarq.trajectory.per_request import PerRequestBuilder
from polarq.trajectory.prefix_merging import PrefixMergingBuilder
from tests.trajectory.calls import NOW, call, check_each_sample_is_trained_once


def build(*calls: Completion, **config: Any) -> Trajectory:
    return PrefixMergingBuilder(config).build(calls)


def whole(trace: Trace, traces: list[Trace]) -> list[int]:
    """The full sequence, with what the trace leaves to its parent."""
    left_out = whole(traces[trace.parent], traces)[: trace.left_out] if trace.parent is not None else []
    return [*left_out, *trace.prompt_ids, *trace.response_ids]


def branches(trajectory: Trajectory) -> list[tuple[int | None, int, BranchCause | None]]:
    return [(trace.parent, trace.shared, trace.cause) for trace in trajectory.traces]


def said(*words: str) -> list[dict[str, Any]]:
    roles = ("user", "assistant")
    return [{"role": roles[i % 2], "content": word} for i, word in enumerate(words)]


def test_a_session_whose_prompts_go_on_is_one_trace() -> None:
    spans = [VersionSpan(version="v2", start=0, end=1)]
    trajectory = build(
        call(0, [1, 2], [3, 9], messages=said("a"), reply={"role": "assistant", "content": "b"}),
        call(1, [1, 2, 3, 9, 4, 5], [6, 9], messages=said("a", "b", "c"), weight_versions=spans, finish_reason="stop"),
    )
    (trace,) = trajectory.traces
    assert trace.prompt_ids == [1, 2]
    assert trace.response_ids == [3, 9, 4, 5, 6, 9]
    assert trace.loss_mask == [1, 1, 0, 0, 1, 1]
    assert trace.logprobs == [-0.5, -0.5, 0.0, 0.0, -0.5, -0.5]
    assert trace.weight_versions == [VersionSpan(version="v2", start=4, end=5)]
    assert [(turn.seq, turn.start, turn.end) for turn in trace.turns] == [(0, 0, 2), (1, 4, 6)]
    assert [m["content"] for m in [*trace.prompt_messages, *trace.response_messages]] == ["a", "b", "c"]
    assert (trace.finish_reason, trace.weight, trace.completion_seqs) == ("stop", 1.0, [0, 1])
    assert branches(trajectory) == [(None, 0, None)]


def test_end_of_turn_ids_in_a_prompt_cut_nothing() -> None:
    forged = [9, 9, 7, 9]
    trajectory = build(
        call(0, [1], [2, 9]), call(1, [1, 2, 9, *forged], [3, 9]), call(2, [1, 2, 9, *forged, 3, 9], [4])
    )
    assert [trace.loss_mask for trace in trajectory.traces] == [[1, 1, 0, 0, 0, 0, 1, 1, 1]]


def test_a_break_begins_a_trace_and_loses_nothing() -> None:
    trajectory = build(call(0, [1, 2], [3, 9]), call(1, [1, 2, 4, 9], [5]), call(2, [1, 2, 4, 9, 5, 6], [7]))
    assert [(t.prompt_ids, t.response_ids) for t in trajectory.traces] == [([1, 2], [3, 9]), ([1, 2, 4, 9], [5, 6, 7])]
    assert branches(trajectory)[1] == (0, 2, BranchCause.DRIFT)
    assert [(b.seq, b.position, b.continues) for b in trajectory.fidelity.breaks] == [(1, 2, 0)]
    assert (trajectory.fidelity.trainable_tokens, trajectory.fidelity.sampled_tokens) == (4, 4)


def test_a_break_after_a_shared_turn_is_one_too() -> None:
    trajectory = build(call(0, [1], [2]), call(1, [1, 2, 3], [4, 5]), call(2, [1, 2, 3, 8, 5, 6], [7]))
    assert branches(trajectory) == [(None, 0, None), (0, 3, BranchCause.DRIFT)]
    assert [b.seq for b in trajectory.fidelity.breaks] == [2]


def test_the_same_prompt_again_is_a_retry_and_beside_it_a_parallel_call() -> None:
    again = {"messages": said("a")}
    trajectory = build(call(0, [1], [2], **again), call(1, [1], [3], **again))
    assert branches(trajectory)[1] == (0, 1, BranchCause.RETRY)
    together = build(call(0, [1], [2], **again), call(1, [1], [3], requested_at=NOW, **again))
    assert branches(together)[1] == (0, 1, BranchCause.PARALLEL)


def test_a_trace_goes_on_where_most_is_to_be_trained() -> None:
    first, other = (
        [call(0, [1], [2]), call(1, [1, 2, 3], [4])],
        [call(2, [1, 2, 5], [6]), call(3, [1, 2, 5, 6, 7], [8])],
    )
    trajectory = build(*first, *other)
    assert [trace.completion_seqs for trace in trajectory.traces] == [[0, 2, 3], [1]]
    assert trajectory.traces[1].prompt_ids == [1, 2, 3]
    assert trajectory.traces[1].loss_mask == [1]
    assert branches(trajectory)[1] == (0, 2, BranchCause.FORK)


def test_a_new_conversation_is_a_sub_agents_or_a_compacted_one() -> None:
    main = [{"role": "system", "content": "main"}]
    sub = [{"role": "system", "content": "sub"}]
    trajectory = build(
        call(0, [1, 2], [3], messages=[*main, *said("a")]),
        call(1, [5], [6], messages=[*sub, *said("b")]),
        call(2, [1, 7], [8], messages=[*main, *said("summary")]),
        call(3, [5, 8], [9], messages=[*sub, *said("c")]),
        call(4, [4], [9], messages=[*main, *said("title?")], label=CompletionLabel.SIDE),
    )
    causes = [None, BranchCause.SUB_AGENT, BranchCause.COMPACTION, BranchCause.SUB_AGENT, BranchCause.SIDE]
    assert [trace.cause for trace in trajectory.traces] == causes
    assert [trace.parent for trace in trajectory.traces] == [None, 0, 0, 1, 2]
    assert trajectory.traces[2].shared == 1


def test_what_is_on_no_way_to_the_last_call_is_said() -> None:
    trajectory = build(call(0, [1], [2]), call(1, [1, 2, 3], [4, 5]), call(2, [1, 2, 6], [7]), emit="last_path")
    assert [(t.prompt_ids, t.response_ids, t.loss_mask) for t in trajectory.traces] == [([1], [2, 6, 7], [1, 0, 1])]
    assert trajectory.fidelity.untrainable == {"1": "in no trace"}
    assert trajectory.fidelity.masked_tokens == 2


def test_a_setting_that_is_not_there_is_refused() -> None:
    with pytest.raises(InvalidTask, match=r"unknown key 'emitt', did you mean 'emit'\?"):
        PrefixMergingBuilder({"emitt": "tree"})


# --- all of it, over random rollouts


def rollout(seed: int) -> list[Completion]:
    """Calls that go on, fork, are asked again, drift, begin anew, overlap, fail and break off, over few ids."""
    chance = random.Random(seed)
    calls: list[Completion] = []

    def ids(most: int) -> list[int]:
        return [chance.randrange(4) for _ in range(chance.randint(0, most))]

    for seq in range(chance.randint(1, 14)):
        prompt = [chance.randrange(4), *ids(3)]
        messages = said(str(chance.randrange(3)))
        if calls:
            before = calls[-1] if chance.random() < 0.6 else chance.choice(calls)
            seen = [*before.prompt_ids, *before.sampled_ids]
            way = chance.random()
            if way < 0.5:
                prompt = [*seen, *ids(3)]
                messages = [*before.messages, {"role": "assistant", "content": "y"}, *said(str(seq))]
            elif way < 0.6:
                prompt, messages = before.prompt_ids, before.messages
            elif way < 0.8:
                position = chance.randrange(len(seen))
                prompt = [*seen[:position], (seen[position] + 1) % 4, *seen[position + 1 :], *ids(2)]
                messages = [*before.messages, {"role": "assistant", "content": "y"}, *said(str(seq))]
        sampled = ids(4)
        more: dict[str, Any] = {"messages": messages, "logprobs": [-chance.random() for _ in sampled]}
        if chance.random() < 0.2:
            more["requested_at"] = NOW + timedelta(seconds=max(0, seq - 1))
        trouble = chance.random()
        if trouble < 0.06 and sampled:
            more |= {"untrainable": "a log-probability is missing", "logprobs": [None] * len(sampled)}
        elif trouble < 0.12:
            more["incomplete"] = True
        elif trouble < 0.18:
            more["label"] = CompletionLabel.SIDE
        calls.append(call(seq, prompt, sampled, **more))
    return calls


@given(st.integers(min_value=0))
def test_each_sampled_id_is_trained_once_in_the_context_it_was_sampled_in(seed: int) -> None:
    calls = rollout(seed)
    trajectory = build(*calls)
    check_each_sample_is_trained_once(calls, trajectory.traces)


@given(st.integers(min_value=0))
def test_no_trace_could_have_been_the_continuation_of_another(seed: int) -> None:
    calls = [one for one in rollout(seed) if one.sampled_ids]
    traces = build(*calls).traces
    for place, one in enumerate(calls):
        ends = [[*e.prompt_ids, *e.sampled_ids] for e in calls[:place]]
        fits = [end for end in ends if one.prompt_ids[: len(end)] == end]
        (trace,) = (t for t in traces if one.seq in t.completion_seqs)
        begins = trace.completion_seqs[0] == one.seq
        # One that goes on from nothing begins a trace; else it is in its parent's, or one beside it is.
        assert begins or fits
        if fits and begins:
            longest = max(fits, key=len)
            beside = [c for c in calls if c.seq != one.seq and c.prompt_ids[: len(longest)] == longest]
            assert beside


@given(st.integers(min_value=0))
def test_a_tree_is_the_same_traces_with_what_they_share_written_once(seed: int) -> None:
    calls = rollout(seed)
    paths, tree = build(*calls).traces, build(*calls, emit="tree").traces
    assert [whole(trace, tree) for trace in tree] == [whole(trace, paths) for trace in paths]
    for trace in tree:
        assert trace.left_out == trace.shared
        assert trace.parent is None or trace.parent < trace.index
    for path, trace in zip(paths, tree, strict=True):
        assert (path.response_ids, path.loss_mask, path.logprobs) == (
            trace.response_ids,
            trace.loss_mask,
            trace.logprobs,
        )


@given(st.integers(min_value=0))
def test_both_builders_train_on_the_same_ids(seed: int) -> None:
    calls = rollout(seed)
    merged, single = build(*calls), PerRequestBuilder({}).build(calls)
    assert merged.fidelity.model_copy(update={"traces": 0}) == single.fidelity.model_copy(update={"traces": 0})
    assert len(merged.traces) <= len(single.traces)


def test_the_random_rollouts_hold_every_cause() -> None:
    found: set[BranchCause | None] = set()
    for seed in count():
        found |= {trace.cause for trace in build(*rollout(seed)).traces}
        if found >= {None, *BranchCause} - {BranchCause.SUB_AGENT}:
            return
        assert seed < 2000, f"only {found}"
