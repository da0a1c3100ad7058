"""Why a trace begins where it does: by what was asked when, of whom, and after what."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

from polarq.contracts import Completion, CompletionLabel
from polarq.contracts.trajectory import BranchCause
from polarq.trajectory.prefix_merging import PrefixMergingBuilder
from tests.export.samples import said
from tests.trajectory.calls import NOW, call


def causes(*calls: Completion) -> dict[int, tuple[int | None, BranchCause | None]]:
    """seq of each trace's first call -> (the trace it branched off from, why)."""
    traces = PrefixMergingBuilder({}).build(calls).traces
    return {trace.completion_seqs[0]: (trace.parent, trace.cause) for trace in traces}


def during(begin_s: float, end_s: float) -> dict[str, Any]:
    return {"requested_at": NOW + timedelta(seconds=begin_s), "answered_at": NOW + timedelta(seconds=end_s)}


def of(system: str, question: str) -> dict[str, Any]:
    return {"messages": [{"role": "system", "content": system}, *said(question)]}


def test_calls_that_go_on_from_one_are_parallel_while_another_of_them_is_on_its_way() -> None:
    asked = [said("q", "a", f"{seq}") for seq in range(6)]
    found = causes(
        call(0, [1], [2], messages=said("q")),
        call(1, [1, 2, 3], [7], messages=asked[1], **during(1, 5)),
        call(2, [1, 2, 4], [7], messages=asked[2], **during(2, 3)),
        call(3, [1, 2, 5], [7], messages=asked[3], **during(4, 4.5)),
        call(4, [1, 2, 6], [7], messages=asked[4], **during(6, 7)),
        call(5, [1, 2, 8], [7, 7], messages=asked[5], **during(7, 8)),  # goes on with the first: most is trained there
    )
    parallel, fork = (0, BranchCause.PARALLEL), (0, BranchCause.FORK)
    assert found == {0: (None, None), 1: parallel, 2: parallel, 3: parallel, 4: fork}


def test_a_sub_agent_began_after_the_call_before_it() -> None:
    found = causes(
        call(0, [1], [2], **of("main", "q")), call(1, [9], [8], **of("main", "p")), call(2, [5], [6], **of("sub", "q"))
    )
    assert found == {0: (None, None), 1: (0, BranchCause.COMPACTION), 2: (1, BranchCause.SUB_AGENT)}


def test_new_conversations_of_one_agent_at_the_same_time_are_parallel() -> None:
    found = causes(call(0, [1], [2], **of("main", "q")), call(1, [9], [8], **of("main", "p"), **during(0.5, 1)))
    assert found[1] == (0, BranchCause.PARALLEL)


def test_who_is_asked_aside_is_not_the_agent_that_the_task_was_given_to() -> None:
    found = causes(
        call(0, [3], [4], **of("titles", "title?"), label=CompletionLabel.SIDE),
        call(1, [1], [2], **of("main", "q")),
        call(2, [9], [8], **of("main", "p")),
    )
    assert [cause for _, cause in found.values()] == [None, BranchCause.SUB_AGENT, BranchCause.COMPACTION]


def test_an_agent_with_other_tools_is_another_agent() -> None:
    tools = [{"type": "function", "function": {"name": "look"}}]
    found = causes(call(0, [1], [2], **of("main", "q")), call(1, [9], [8], **of("main", "p"), tools=tools))
    assert found[1] == (0, BranchCause.SUB_AGENT)
