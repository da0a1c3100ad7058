"""What holds of every rollout: each sampled id is trained on once, in its true context, and nothing is lost unsaid."""

from __future__ import annotations

from itertools import count, pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from polarq.contracts import BranchCause, Completion, Outcome, RolloutResult, RolloutState, Trajectory
from polarq.trainers.rows import rows, written_out
from polarq.trajectory.per_request import PerRequestBuilder
from polarq.trajectory.prefix_merging import PrefixMergingBuilder
from polarq.trajectory.trainable import why_untrainable
from tests.trajectory.checks import check_all_calls, check_turns
from tests.trajectory.random_rollouts import rollout

SEEDS = st.integers(min_value=0)
ALL = ("paths", "tree", "per_request")
"""Ways to build that leave out nothing."""


def build(how: str, calls: list[Completion]) -> Trajectory:
    """Each trace with all its ids."""
    builder = PerRequestBuilder({}) if how == "per_request" else PrefixMergingBuilder({"emit": how})
    return written_out(builder.build(calls))


def goes_on(earlier: Completion, later: Completion) -> bool:
    """Whether a prompt begins with all that an earlier call saw, pictures included, and sampled."""
    seen = [*earlier.prompt_ids, *earlier.sampled_ids]
    mine, theirs = [one.sha256 for one in earlier.images], [one.sha256 for one in later.images]
    new = later.images[len(mine) :]
    return (
        later.prompt_ids[: len(seen)] == seen
        and theirs[: len(mine)] == mine
        and all(one.start is None or one.start >= len(seen) for one in new)
    )


@pytest.mark.parametrize("how", ALL)
@given(SEEDS)
def test_each_sampled_id_is_in_one_trace_as_the_engine_had_it(how: str, seed: int) -> None:
    calls = rollout(seed)
    trajectory = build(how, calls)
    check_all_calls(calls, trajectory.traces)
    assert trajectory.fidelity.trainable_tokens == sum(
        len(one.sampled_ids) for one in calls if why_untrainable(one) is None
    )


@given(SEEDS)
def test_of_one_path_all_is_as_the_engine_had_it_and_what_is_left_out_is_counted(seed: int) -> None:
    calls = rollout(seed)
    trajectory = build("last_path", calls)
    trained = [one for one in calls if one.sampled_ids and why_untrainable(one) is None]
    assert len(trajectory.traces) == bool(trained)
    kept = {seq for trace in trajectory.traces for seq in trace.completion_seqs}
    for trace in trajectory.traces:
        check_turns(trace, {one.seq: one for one in calls})
        assert trace.completion_seqs[-1] == trained[-1].seq
    found = trajectory.fidelity
    reasons = {one.seq: why_untrainable(one) or (None if one.seq in kept else "in no trace") for one in calls}
    assert found.untrainable == {
        str(one.seq): reasons[one.seq] for one in calls if one.sampled_ids and reasons[one.seq] is not None
    }
    assert found.sampled_tokens == sum(len(one.sampled_ids) for one in calls)
    assert found.trainable_tokens == sum(len(one.sampled_ids) for one in trained if one.seq in kept)
    assert found.masked_tokens == found.sampled_tokens - found.trainable_tokens


@given(SEEDS)
def test_a_call_goes_on_from_the_longest_that_it_can_and_a_trace_begins_only_where_it_must(seed: int) -> None:
    calls = [one for one in rollout(seed) if one.sampled_ids]
    traces = build("paths", calls).traces
    by_seq = {one.seq: one for one in calls}
    before = {after: seq for trace in traces for seq, after in pairwise(trace.completion_seqs)}

    def longest(seq: int) -> int:
        """Ids of the longest earlier call that this one goes on from."""
        ends = [e for e in calls if e.seq < seq and goes_on(e, by_seq[seq])]
        return max((len(e.prompt_ids) + len(e.sampled_ids) for e in ends), default=0)

    for trace in traces:
        first, *others = trace.completion_seqs
        for seq in others:
            parent = by_seq[before[seq]]
            assert goes_on(parent, by_seq[seq])
            assert len(parent.prompt_ids) + len(parent.sampled_ids) == longest(seq)
        if length := longest(first):
            # The trace of what it goes on from goes on with another call.
            rivals = [seq for seq in before if longest(seq) == length and seq != first]
            assert any(goes_on(by_seq[before[seq]], by_seq[first]) for seq in rivals)


@given(SEEDS)
def test_a_trace_says_what_it_shares_with_the_one_it_left(seed: int) -> None:
    calls = rollout(seed)
    tree = PrefixMergingBuilder({"emit": "tree"}).build(calls).traces
    paths = build("paths", calls).traces
    for index, (path, one) in enumerate(zip(paths, tree, strict=True)):
        assert path.index == one.index == index
        assert (path.cause is None) == (path.parent is None) == (index == 0)
        assert one.left_out == one.shared == path.shared
        if path.parent is not None:
            other = paths[path.parent]
            assert path.parent < index
            assert [*other.prompt_ids, *other.response_ids][: path.shared] == path.prompt_ids[: path.shared]
            assert path.prompt_ids == [*path.prompt_ids[: path.shared], *one.prompt_ids]
    out = written_out(Trajectory(builder="b", traces=tree)).traces
    assert [trace.model_dump(exclude={"left_out"}) for trace in out] == [
        trace.model_dump(exclude={"left_out"}) for trace in paths
    ]


@given(SEEDS)
def test_both_builders_train_on_the_same_ids(seed: int) -> None:
    calls = rollout(seed)
    of_traces = {"traces": 0, "images": 0, "unplaced_images": 0}
    merged, single = build("paths", calls), build("per_request", calls)
    assert merged.fidelity.model_copy(update=of_traces) == single.fidelity.model_copy(update=of_traces)
    assert len(merged.traces) <= len(single.traces)


@pytest.mark.parametrize("how", ALL)
@given(SEEDS)
def test_rows_are_the_traces_that_may_be_trained_on_and_weigh_one(how: str, seed: int) -> None:
    trajectory = build(how, rollout(seed))
    outcome = Outcome(state=RolloutState.COMPLETED, trainable=True)
    result = RolloutResult(rollout_id="t.0", task_id="t", run_id="r", index=0, outcome=outcome, trajectory=trajectory)
    made = rows(result)
    usable = [trace for trace in trajectory.traces if trace.trainable_tokens]
    assert [row.trace for row in made] == [trace.index for trace in usable]
    for row, trace in zip(made, usable, strict=True):
        assert (row.prompt_ids, row.response_ids, row.loss_mask) == (
            trace.prompt_ids,
            trace.response_ids,
            trace.loss_mask,
        )
        assert (row.logprobs, row.turns, row.images) == (trace.logprobs, trace.turns, trace.images)
    assert sum(row.weight for row in made) == pytest.approx(1.0 if made else 0.0)
    assert sum(sum(row.loss_mask) for row in made) == trajectory.fidelity.trainable_tokens


def test_the_random_rollouts_hold_everything() -> None:
    """Every cause of a branch, every cause of a break, and pictures with and without a place."""
    causes, breaks, placed = set[BranchCause | None](), set[str](), set[bool]()
    for seed in count():
        trajectory = build("paths", rollout(seed))
        causes |= {trace.cause for trace in trajectory.traces}
        breaks |= {one.cause for one in trajectory.fidelity.breaks}
        placed |= {image.start is None for trace in trajectory.traces for image in trace.images}
        if len(causes) == len(BranchCause) + 1 and len(breaks) == 3 and len(placed) == 2:
            return
        assert seed < 2000, f"only {causes}, {breaks}, {placed}"
