"""Recorded sessions of real agent programs: how many traces each becomes, and what a trainer is spared by that."""

from __future__ import annotations

from itertools import pairwise

import pytest

from polarq.contracts.completion import Completion
from polarq.contracts.trajectory import Trajectory
from polarq.store.codec import encode_trajectory
from polarq.trajectory.per_request import PerRequestBuilder
from polarq.trajectory.prefix_merging import PrefixMergingBuilder
from tests.trajectory.checks import check_all_calls
from tests.trajectory.sessions import CONTEXTS, DRIFT, harnesses, session

SAMPLES_RATIO = 5.4
"""How many times fewer samples a trainer gets of merged traces: the gain that Polar's paper tells of."""
BYTES_A_TOKEN = 6.0

both = pytest.mark.parametrize("context", CONTEXTS)
every = pytest.mark.parametrize(("harness", "context"), [(one, kind) for kind in CONTEXTS for one in harnesses(kind)])


def merged(calls: tuple[Completion, ...]) -> Trajectory:
    return PrefixMergingBuilder({}).build(calls)


@every
def test_a_history_that_goes_on_is_one_trace(harness: str, context: str) -> None:
    calls = session(harness, context)
    trajectory = merged(calls)
    kept = trajectory.fidelity
    print(f"{harness} ({context}): {kept.calls} calls, {kept.traces} traces, {len(kept.breaks)} breaks")
    assert kept.traces == 1
    check_all_calls(calls, trajectory.traces)
    assert kept.trainable_tokens == sum(len(call.sampled_ids) for call in calls if call.trainable)


@pytest.mark.parametrize("harness", harnesses(DRIFT))
def test_a_history_whose_answers_are_encoded_otherwise_breaks_in_each_of_them_and_loses_nothing(harness: str) -> None:
    calls = session(harness, DRIFT)
    trajectory = merged(calls)
    kept = trajectory.fidelity
    print(f"{harness} ({DRIFT}): {kept.calls} calls, {kept.traces} traces, {len(kept.breaks)} breaks")
    check_all_calls(calls, trajectory.traces)
    assert kept.traces == len(calls)
    assert [(found.seq, found.continues) for found in kept.breaks] == [(b.seq, a.seq) for a, b in pairwise(calls)]
    assert {found.cause for found in kept.breaks} == {"sampled tokens re-encoded"}
    for found, (before, after) in zip(kept.breaks, pairwise(calls), strict=True):
        seen = [*before.prompt_ids, *before.sampled_ids]
        assert len(before.prompt_ids) <= found.position < len(seen)
        assert seen[: found.position] == after.prompt_ids[: found.position]
        assert seen[found.position] != after.prompt_ids[found.position]
    assert kept.trainable_tokens == sum(len(call.sampled_ids) for call in calls)


@both
def test_there_are_sessions_of_twenty_turns_of_four_programs(context: str) -> None:
    assert len(harnesses(context)) >= 4
    for harness in harnesses(context):
        steps = [call for call in session(harness, context) if call.trainable]
        assert len(steps) >= 20
        assert {call.exact for call in steps[1:]} == {context == "exact"}


@both
def test_a_trainer_gets_five_times_fewer_samples_and_every_sampled_token(context: str) -> None:
    sessions = [session(harness, context) for harness in harnesses(context)]
    apart = [PerRequestBuilder({}).build(calls).fidelity for calls in sessions]
    whole = [merged(calls).fidelity for calls in sessions]
    ratio = sum(one.traces for one in apart) / sum(one.traces for one in whole)
    print(f"{context}: {ratio:.1f} times fewer samples")
    assert ratio >= SAMPLES_RATIO
    assert [one.trainable_tokens for one in whole] == [one.trainable_tokens for one in apart]


@every
def test_a_token_is_stored_in_few_bytes(harness: str, context: str) -> None:
    trajectory = merged(session(harness, context))
    bare = [
        trace.model_copy(update={"prompt_messages": [], "response_messages": [], "tools": None})
        for trace in trajectory.traces
    ]
    tokens = sum(len(trace.prompt_ids) + len(trace.response_ids) for trace in bare)
    assert len(encode_trajectory(trajectory.model_copy(update={"traces": bare}))) <= BYTES_A_TOKEN * tokens
