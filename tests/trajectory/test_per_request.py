"""Builders: what is kept of what was sampled."""

from __future__ import annotations

from typing import Any

import pytest

from polarq.contracts import Completion, CompletionLabel, Reward, Trace, VersionSpan
from polarq.trajectory.base import Builder, rewarded
from polarq.trajectory.per_request import PerRequestBuilder
from polarq.trajectory.prefix_merging import PrefixMergingBuilder
from tests.trajectory.calls import call


def build(*calls: Completion) -> Any:
    return PerRequestBuilder({}).build(calls)


def test_each_call_is_a_trace_of_exactly_what_the_engine_saw() -> None:
    trajectory = build(call(1, [1, 2, 3, 9, 4], [5, 9]), call(0, [1, 2], [3, 9]))
    assert [(t.prompt_ids, t.response_ids) for t in trajectory.traces] == [([1, 2], [3, 9]), ([1, 2, 3, 9, 4], [5, 9])]
    assert [t.loss_mask for t in trajectory.traces] == [[1, 1], [1, 1]]
    assert [t.weight for t in trajectory.traces] == [0.5, 0.5]
    f = trajectory.fidelity
    assert (f.calls, f.traces, f.sampled_tokens, f.trainable_tokens, f.breaks) == (2, 2, 4, 4, [])


def test_untrainable_calls_are_kept_masked_and_named() -> None:
    trajectory = build(
        call(0, [1], [2, 3]),
        call(1, [1, 2, 3], [4], untrainable="logprob missing at 0", logprobs=[None]),
        call(2, [1, 2, 3], [5], incomplete=True),
        call(3, [1, 2, 3], [6], label=CompletionLabel.SIDE),
    )
    assert [t.trainable_tokens for t in trajectory.traces] == [2, 0, 0, 0]
    assert [t.logprobs for t in trajectory.traces[1:]] == [[0.0]] * 3
    assert [t.weight for t in trajectory.traces] == [1.0, 0.0, 0.0, 0.0]
    f = trajectory.fidelity
    assert (f.sampled_tokens, f.trainable_tokens, f.masked_tokens) == (5, 2, 3)
    assert f.untrainable == {"1": "logprob missing at 0", "2": "incomplete answer", "3": "label side"}
    assert (f.missing_logprobs, f.incomplete_calls, f.side_calls) == (1, 1, 1)


@pytest.mark.parametrize("logprobs", [[-0.5, 0.1], [0.0, -9999.0], [1e9, -0.5], [-1e9, -0.5]])
@pytest.mark.parametrize("builder", [PerRequestBuilder, PrefixMergingBuilder])
def test_a_number_that_is_no_log_probability_is_not_trained_on(builder: type[Builder], logprobs: list[float]) -> None:
    trajectory = builder({}).build(
        [call(0, [1], [2, 3], logprobs=logprobs), call(1, [5], [6, 7], logprobs=[0.0, 1e-6])]
    )
    assert [trace.loss_mask for trace in trajectory.traces] == [[0, 0], [1, 1]]
    assert [trace.logprobs for trace in trajectory.traces] == [[0.0, 0.0], [0.0, 1e-6]]
    assert trajectory.fidelity.untrainable == {"0": "log-probabilities that cannot be any"}


@pytest.mark.parametrize("spans", [[(0, 3)], [(0, 1)], [(1, 2)], [(0, 1), (0, 2)], [(0, 2), (2, 1)]])
@pytest.mark.parametrize("builder", [PerRequestBuilder, PrefixMergingBuilder])
def test_versions_that_are_not_those_of_the_sample_are_not_told(
    builder: type[Builder], spans: list[tuple[int, int]]
) -> None:
    told = [VersionSpan(version="v", start=start, end=end) for start, end in spans]
    (trace,) = (trajectory := builder({}).build([call(0, [1], [2, 3], weight_versions=told)])).traces
    assert (trace.loss_mask, trace.weight_versions, trajectory.fidelity.versions) == ([0, 0], [], [])
    assert trajectory.fidelity.untrainable == {"0": "the policy version spans do not cover the sampled ids"}


def test_a_trace_sampled_under_a_grammar_says_so() -> None:
    trajectory = build(call(0, [1], [2], grammar="tool_choice"), call(1, [1], [2]))
    assert [t.metadata.get("grammar") for t in trajectory.traces] == ["tool_choice", None]


def test_a_call_that_sampled_nothing_makes_no_trace() -> None:
    trajectory = build(call(0, [1], []), call(1, [1], [2]), call(2, [1], []))
    assert [t.completion_seqs for t in trajectory.traces] == [[1]]
    assert (trajectory.fidelity.empty_calls, trajectory.fidelity.untrainable) == (2, {})


def test_what_was_forged_and_sampled_aside_is_counted_in_tokens() -> None:
    aside = [call(seq, [1], [2, 3, seq], label=CompletionLabel.SIDE) for seq in (1, 2)]
    f = build(call(0, [1], [2], forged=2), *aside, call(3, [1], [9], forged=3)).fidelity
    assert (f.forged_control_tokens, f.side_calls, f.side_tokens) == (5, 2, 6)


def test_a_broken_prefix_is_located_and_its_cause_told() -> None:
    trajectory = build(call(0, [1, 2], [3, 4, 9]), call(1, [1, 2, 3, 5, 9, 7], [8]), call(2, [1, 6, 3], [8]))
    assert [(b.seq, b.position, b.cause) for b in trajectory.fidelity.breaks] == [
        (1, 3, "sampled tokens re-encoded"),
        (2, 1, "prompt re-rendered"),
    ]


def test_a_sample_that_differs_at_its_first_id_was_re_encoded() -> None:
    trajectory = build(call(0, [1, 2], [3, 4]), call(1, [1, 2, 5, 4, 7], [8]))
    assert [(b.position, b.cause) for b in trajectory.fidelity.breaks] == [(2, "sampled tokens re-encoded")]


def test_a_call_whose_last_message_is_the_answer_goes_on_too() -> None:
    begun = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    trajectory = build(call(0, [1], [2], messages=begun[:1]), call(1, [1, 3], [4], messages=begun))
    assert [(b.seq, b.position, b.continues) for b in trajectory.fidelity.breaks] == [(1, 1, 0)]


def test_versions_are_listed_in_order_of_appearance() -> None:
    spans = [VersionSpan(version="v1", start=0, end=1), VersionSpan(version="v2", start=1, end=2)]
    again = [VersionSpan(version="v1", start=0, end=1)]
    trajectory = build(call(0, [1], [2, 3], weight_versions=spans), call(1, [1], [2], weight_versions=again))
    assert trajectory.fidelity.versions == ["v1", "v2"]
    assert trajectory.traces[0].weight_versions == spans


def test_an_outcome_reward_reaches_every_trace_and_own_rewards_win() -> None:
    trajectory = build(call(0, [1], [2]), call(1, [1, 2], [3]))
    assert [t.reward for t in rewarded(trajectory, Reward(outcome=0.5, evaluator="e")).traces] == [0.5, 0.5]
    own = Reward(outcome=0.5, trace_rewards=[0.0, 1.0], evaluator="e")
    assert [t.reward for t in rewarded(trajectory, own).traces] == [0.0, 1.0]
    with pytest.raises(ValueError, match="1 trace rewards for 2 traces"):
        rewarded(trajectory, Reward(outcome=0.5, trace_rewards=[0.0], evaluator="e"))


def test_no_calls_make_an_empty_trajectory() -> None:
    trajectory = build()
    assert (trajectory.traces, trajectory.fidelity.calls) == ([], 0)


def test_settings_the_builder_does_not_have_are_refused() -> None:
    with pytest.raises(ValueError, match=r"takes no settings \(got tokenizer\)"):
        PerRequestBuilder({"tokenizer": "x"})


@pytest.mark.parametrize(
    "wrong",
    [{"loss_mask": [1]}, {"logprobs": [0.0]}, {"loss_mask": [1, 2]}, {"logprobs": [0.0, float("nan")]}],
)
def test_a_trace_that_is_not_aligned_cannot_be_made(wrong: dict[str, Any]) -> None:
    fields: dict[str, Any] = {
        "index": 0,
        "prompt_ids": [1],
        "response_ids": [2, 3],
        "loss_mask": [1, 1],
        "logprobs": [-1.0, -2.0],
    }
    with pytest.raises(ValueError, match=r"differ in length|other than 0 and 1|finite"):
        Trace(**{**fields, **wrong})
