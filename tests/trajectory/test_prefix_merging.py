"""`prefix_merging`: one trace per way through the token tree, each a sequence that the engine saw."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

import pytest

from polarq.contracts import BranchCause, Completion, CompletionLabel, Trajectory, VersionSpan
from polarq.errors import InvalidTask
from polarq.trajectory.prefix_merging import PrefixMergingBuilder
from tests.trajectory.calls import NOW, call
from tests.trajectory.pictures import image


def build(*calls: Completion, **config: Any) -> Trajectory:
    return PrefixMergingBuilder(config).build(calls)


def branches(trajectory: Trajectory) -> list[tuple[int | None, int, BranchCause | None]]:
    return [(trace.parent, trace.shared, trace.cause) for trace in trajectory.traces]


def said(*words: str) -> list[dict[str, Any]]:
    roles = ("user", "assistant")
    return [{"role": roles[i % 2], "content": word} for i, word in enumerate(words)]


@pytest.mark.parametrize("logprobs", [[None, -0.25], [-0.25], [-0.5, -0.25, -0.125], []])
def test_a_call_that_lacks_a_log_probability_is_masked_whoever_recorded_it(logprobs: list[float | None]) -> None:
    trajectory = build(call(0, [1], [2, 3], logprobs=logprobs), call(1, [1, 2, 3, 4], [5, 6], logprobs=[-1.0, -2.0]))
    (trace,) = trajectory.traces
    assert (trace.loss_mask, trace.logprobs) == ([0, 0, 0, 1, 1], [0.0, 0.0, 0.0, -1.0, -2.0])
    assert trajectory.fidelity.untrainable == {"0": "log-probabilities are missing"}
    assert (trajectory.fidelity.trainable_tokens, trajectory.fidelity.masked_tokens) == (2, 2)


def test_a_session_whose_prompts_go_on_is_one_trace() -> None:
    spans = [VersionSpan(version="v2", start=0, end=2)]
    trajectory = build(
        call(0, [1, 2], [3, 9], messages=said("a"), reply={"role": "assistant", "content": "b"}),
        call(
            1,
            [1, 2, 3, 9, 4, 5],
            [6, 9],
            messages=said("a", "b", "c"),
            weight_versions=spans,
            finish_reason="stop",
            tools=[{"type": "function"}],
        ),
    )
    (trace,) = trajectory.traces
    assert trace.prompt_ids == [1, 2]
    assert trace.response_ids == [3, 9, 4, 5, 6, 9]
    assert trace.loss_mask == [1, 1, 0, 0, 1, 1]
    assert trace.logprobs == [-0.5, -0.5, 0.0, 0.0, -0.5, -0.5]
    assert trace.weight_versions == [VersionSpan(version="v2", start=4, end=6)]
    assert [(turn.seq, turn.start, turn.end) for turn in trace.turns] == [(0, 0, 2), (1, 4, 6)]
    assert [m["content"] for m in [*trace.prompt_messages, *trace.response_messages]] == ["a", "b", "c"]
    assert (trace.finish_reason, trace.weight, trace.completion_seqs) == ("stop", 1.0, [0, 1])
    assert trace.tools == [{"type": "function"}], "the newest that the model was offered"
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


def test_what_must_not_be_trained_on_makes_no_way_the_better_one() -> None:
    trajectory = build(
        call(0, [1], [2]),
        call(1, [1, 2, 3], [4, 4, 4], untrainable="why"),
        call(2, [1, 2, 5], [6]),
    )
    assert [trace.completion_seqs for trace in trajectory.traces] == [[0, 2], [1]]
    assert [trace.untrainable for trace in trajectory.traces] == [None, "why"]


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


def on_and_on(count: int) -> list[Completion]:
    """One conversation: every call ends at a length of its own."""
    return [call(seq, [1, *[2] * (2 * seq)], [2], messages=said("q")) for seq in range(count)]


def drifting(count: int) -> list[Completion]:
    """One conversation by its messages, whose last ids are never those that were sampled."""
    return [call(seq, [1, *[2] * seq], [3], messages=said("q", "a", "r")) for seq in range(count)]


def anew(count: int) -> list[Completion]:
    """Each with a question of its own."""
    return [call(seq, [seq, 1], [2], messages=said(f"q{seq}")) for seq in range(count)]


def other_agents(count: int) -> list[Completion]:
    """The same question to one agent after another."""
    systems = ([{"role": "system", "content": f"s{seq}"}] for seq in range(count))
    return [call(seq, [seq, 1], [2], messages=[*system, *said("q")]) for seq, system in enumerate(systems)]


def again(count: int) -> list[Completion]:
    """The same question once more and once more, and then each goes on."""
    first = [call(seq, [1], [9, seq], messages=said("q"), reply=answer(f"a{seq}")) for seq in range(count)]
    return first + [call(count + seq, [1, 9, seq, 1], [2], messages=said("q", f"a{seq}", "r")) for seq in range(count)]


def aside(count: int) -> list[Completion]:
    """Each goes on from the first, and then from there."""
    first = call(0, [1], [2], messages=said("q"))
    second = [call(seq, [1, 2, seq], [3], messages=said("q", "1", f"{seq}")) for seq in range(1, count)]
    third = [
        call(count + seq, [1, 2, seq, 3, 4], [5], messages=said("q", "1", f"{seq}", "3", "r"))
        for seq in range(1, count)
    ]
    return [first, *second, *third]


def back(count: int) -> list[Completion]:
    """As far as one goes, each is taken up again at its first turn."""
    whole = [call(seq, [1, *[2] * (2 * seq)], [2], messages=said("q")) for seq in range(count)]
    return [*whole, *(call(count + seq, [1, 2, 3, seq], [4], messages=said("q")) for seq in range(count))]


def shrinking(count: int) -> list[Completion]:
    """Each ends within what those before saw."""
    return [call(seq, [1, *[2] * (count - seq)], [2], messages=said("q")) for seq in range(count)]


def looking(count: int) -> list[Completion]:
    """The same ids for ever other pictures, and then each goes on."""
    shown = [[image(b"%d" % seq, 1, 2)] for seq in range(count)]
    first = [call(seq, [1, 7], [2], messages=said(f"q{seq}"), images=shown[seq]) for seq in range(count)]
    return first + [
        call(count + seq, [1, 7, 2, 3], [4], messages=said(f"q{seq}", "a", "r"), images=shown[seq])
        for seq in range(count)
    ]


def answer(content: str) -> dict[str, str]:
    return {"role": "assistant", "content": content}


def steps(calls: list[Completion]) -> int:
    """Lines that are run for a trajectory of the calls, each turn of a loop anew, and calls of functions in C."""
    taken = 0

    def count(_frame: FrameType, event: str, _arg: object) -> Callable[..., Any]:
        nonlocal taken
        taken += event in {"line", "c_call"}
        return count

    sys.settrace(count)
    sys.setprofile(count)
    try:
        build(*calls)
    finally:
        sys.setprofile(None)
        sys.settrace(None)
    return taken


SESSIONS = (on_and_on, drifting, anew, other_agents, again, aside, back, shrinking, looking)


@pytest.mark.parametrize("session", SESSIONS)
def test_twice_the_calls_are_twice_the_work(session: Callable[[int], list[Completion]]) -> None:
    assert steps(session(160)) < 2.2 * steps(session(80))
