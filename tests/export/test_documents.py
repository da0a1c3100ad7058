"""Polar's results and ATIF documents: valid for others, and the same rows when they come back."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from polarq.contracts import BranchCause, RolloutResult, VersionSpan
from polarq.errors import InvalidInput
from polarq.export.atif import Atif
from polarq.export.base import MissingPackage
from polarq.export.formats import read_results
from polarq.export.jsonl import JsonLines
from polarq.export.polar import Polar
from polarq.trainers.rows import rows, written_out
from tests.export.samples import FAILED, answer, looking, result, said, session, taught, written
from tests.needs import not_here
from tests.trajectory.calls import call

TOOL = {"id": "c1", "type": "function", "function": {"name": "ls", "arguments": '{"path": "/"}'}}
CALLING = {"role": "assistant", "content": None, "tool_calls": [TOOL], "reasoning_content": "look"}
SYSTEM = {"role": "system", "content": "s"}


@pytest.fixture
def atif() -> Any:
    try:
        import atif
    except ImportError:
        not_here("the package atif is not installed")
    return atif


def with_tools(index: int = 0, **more: Any) -> RolloutResult:
    """A session with a tool call and a sub-agent."""
    asked = [SYSTEM, *said("a")]
    told = [*asked, CALLING, {"role": "tool", "tool_call_id": "c1", "content": "bin"}]
    calls = [
        call(0, [1, 2], [3, 9], messages=asked, reply=CALLING, tools=[{"type": "function"}]),
        call(1, [7, 7], [8], messages=said("sub"), reply=answer("done")),
        call(2, [1, 2, 3, 9, 4], [5], messages=told, reply=answer("b"), tools=[{"type": "function"}]),
    ]
    return result(index, calls, **more)


def test_polar_results_come_back_whole(tmp_path: Path) -> None:
    results = [
        taught(result(0)),
        with_tools(1, reward=0.5),
        result(2, outcome=FAILED, reward=None),
        result(3, calls=[]),
        looking(5),
    ]
    tree = result(4, config={"emit": "tree"}, calls=[*session()[:2], call(3, [1, 2, 3, 9, 5], [6])])
    bare = result(6)
    assert bare.trajectory is not None
    bare = bare.model_copy(update={"trajectory": bare.trajectory.model_copy(update={"metadata": {}})})
    target = tmp_path / "polar.jsonl"
    report = written(Polar(), target, *results, tree, bare)
    assert (report.rollouts, report.skipped) == (7, {})
    assert list(read_results(target)) == [*results, tree, bare]


def test_a_result_of_polar_itself_is_read_for_what_it_holds(tmp_path: Path) -> None:
    trace = {"prompt_ids": [1], "response_ids": [2, 3], "loss_mask": [1, 0], "response_logprobs": [-0.5, -0.25]}
    session_ = {
        "session_id": "6f2c", "task_id": "t", "status": "COMPLETED", "node_id": None, "error": None, "metadata": {},
        "trajectory": {
            "status": "COMPLETED", "error": None, "traces": [trace, {**trace, "response_logprobs": None}],
            "metadata": {"evaluation": {"strategy": "e", "outcome_reward": 0.5, "trace_rewards": None}},
        },
    }  # fmt: skip
    failed: dict[str, Any] = {
        **session_,
        "session_id": "77aa",
        "status": "ERROR",
        "error": "boom",
        "trajectory": {"traces": []},
    }
    target = tmp_path / "p.jsonl"
    target.write_text(json.dumps(session_) + "\n" + json.dumps(failed) + "\n")
    first, second = read_results(target)
    (row,) = rows(first)
    assert (row.rollout_id, row.response_ids, row.loss_mask, row.logprobs) == ("t.0", [2, 3], [1, 0], [-0.5, 0.0])
    assert (row.reward, row.weight) == (0.5, 1.0)
    assert first.metadata["polar_session_id"] == "6f2c"
    assert first.trajectory is not None
    assert first.trajectory.traces[1].untrainable == "no log-probabilities"
    assert (second.rollout_id, second.outcome.state.value, second.outcome.message) == ("t.1", "failed", "boom")
    assert rows(second) == []
    whole = tmp_path / "task.json"
    whole.write_text(json.dumps({"task_id": "t", "status": "completed", "results": [session_, failed]}))
    assert list(read_results(whole)) == [first, second]
    target.write_text(json.dumps({**session_, "status": "LOST"}) + "\n")
    with pytest.raises(InvalidInput, match="session 1 is no SessionResult"):
        list(read_results(target))


def test_an_atif_document_says_what_was_done_and_sampled(atif: Any, tmp_path: Path) -> None:
    written(Atif(), tmp_path / "docs", with_tools())
    (path,) = (tmp_path / "docs").iterdir()
    assert path.name == "t.0.json"
    document = atif.Trajectory.model_validate_json(path.read_text())
    assert [(step.source, step.message) for step in document.steps] == [
        ("system", "s"), ("user", "a"), ("agent", ""), ("agent", "b"),
    ]  # fmt: skip
    calling, last = document.steps[2:]
    assert (calling.tool_calls[0].function_name, calling.tool_calls[0].arguments) == ("ls", {"path": "/"})
    assert calling.reasoning_content == "look"
    assert [(r.source_call_id, r.content) for r in calling.observation.results] == [("c1", "bin")]
    metrics = calling.metrics
    assert (metrics.prompt_token_ids, metrics.completion_token_ids, metrics.logprobs) == ([1, 2], [3, 9], [-0.5, -0.5])
    assert (last.metrics.prompt_tokens, last.metrics.extra["new_prompt_token_ids"]) == (5, [4])
    (sub,) = document.subagent_trajectories
    assert (sub.trajectory_id, sub.extra["polarq"]["trace"]["cause"]) == ("t.0:1", BranchCause.SUB_AGENT.value)
    # What a branch took over is not to be learned twice.
    assert [step.is_copied_context for step in sub.steps] == [True, None]


def test_atif_documents_come_back_as_the_same_rows(atif: Any, tmp_path: Path) -> None:
    failed = result(4, outcome=FAILED)
    results = [
        taught(result(0)),
        with_tools(1, reward=0.5),
        result(2, reward=None),
        result(3, calls=[]),
        failed,
        looking(5),
    ]
    report = written(Atif(), tmp_path / "docs", *results)
    assert (report.rollouts, report.skipped) == (5, {"nothing sampled": 1})
    back = {one.rollout_id: one for one in read_results(tmp_path / "docs")}
    assert set(back) == {"t.0", "t.1", "t.2", "t.4", "t.5"}
    for one in results:
        if one.rollout_id in back:
            mine, before = back[one.rollout_id], one.trajectory
            assert rows(mine) == rows(one)
            assert (mine.outcome, mine.reward, mine.metadata) == (one.outcome, one.reward, one.metadata)
            assert mine.trajectory is not None
            assert before is not None
            assert mine.trajectory.fidelity == before.fidelity
            for made, trace in zip(mine.trajectory.traces, written_out(before).traces, strict=True):
                same = {
                    "turns",
                    "images",
                    "weight_versions",
                    "cause",
                    "parent",
                    "untrainable",
                    "prompt_ids",
                    "loss_mask",
                }
                assert made.model_dump(include=same) == trace.model_dump(include=same)


def test_a_document_of_another_program_is_built_from_its_calls(atif: Any, tmp_path: Path) -> None:
    def step(number: int, prompt: list[int], sampled: list[int], logprobs: list[float] | None) -> dict[str, Any]:
        metrics = {"prompt_token_ids": prompt, "completion_token_ids": sampled, "logprobs": logprobs}
        return {"step_id": number, "source": "agent", "message": "", "metrics": metrics}

    document = {
        "schema_version": "ATIF-v1.8",
        "agent": {"name": "a", "version": "1"},
        "steps": [
            {"step_id": 1, "source": "user", "message": "q"},
            step(2, [1], [2, 3], [-0.5, -0.25]),
            step(3, [1, 2, 3, 4], [5], [-0.125]),
            step(4, [9], [8], None),
        ],
    }
    path = tmp_path / "their run.json"
    path.write_text(json.dumps(document))
    (back,) = read_results(path)
    (row,) = rows(back)
    assert (row.rollout_id, row.prompt_ids, row.response_ids) == ("their-run.0", [1], [2, 3, 4, 5])
    assert (row.loss_mask, row.logprobs) == ([1, 1, 0, 1], [-0.5, -0.25, 0.0, -0.125])
    document["steps"] = [{"step_id": 1, "source": "user", "message": "q"}]
    path.write_text(json.dumps(document))
    with pytest.raises(InvalidInput, match="holds no token ids"):
        list(read_results(path))


def test_contents_that_atif_has_no_word_for_stay_valid(atif: Any, tmp_path: Path) -> None:
    odd = {"id": "c9", "function": {"name": "f", "arguments": "not json"}}
    picture = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}
    messages = [
        {"role": "developer", "content": "d"},
        {"role": "tool", "tool_call_id": "nobody", "content": "early"},
        {"role": "assistant", "content": "", "tool_calls": [TOOL]},
        {"role": "tool", "tool_call_id": "nobody", "content": "whose?"},
        {"role": "user", "content": [{"type": "text", "text": "see"}, picture, {"type": "audio", "x": 1}]},
    ]
    reply = {"role": "assistant", "content": [{"type": "text", "text": "t"}], "tool_calls": [odd]}
    written(Atif(), tmp_path / "docs", result(0, [call(0, [1], [2], messages=messages, reply=reply)]))
    document = atif.Trajectory.model_validate_json((tmp_path / "docs" / "t.0.json").read_text())
    assert [(r.source_call_id, r.content) for r in document.steps[2].observation.results] == [(None, "whose?")]
    assert [part.type for part in document.steps[3].message] == ["text", "image", "text"]
    assert document.steps[4].tool_calls[0].extra == {"arguments_text": "not json"}


def test_a_trace_whose_answers_cannot_be_told_keeps_its_ids(atif: Any, tmp_path: Path) -> None:
    """One that broke off, and one of a harness that put in an answer of its own: no step could have their ids."""
    calls = [
        call(0, [1], [2, 3], messages=said("a"), reply={}, logprobs=[-0.5, -1.0]),
        call(1, [1, 2, 3, 4], [5], messages=said("a", "own"), reply=answer("b"), logprobs=[None], untrainable="x"),
        call(2, [9], [8], messages=said("n"), reply={}, weight_versions=[VersionSpan(version="3", start=0, end=1)]),
    ]
    one = result(0, calls)
    report = written(Atif(), tmp_path / "docs", one, result(1))
    assert report.rollouts == 2
    back = list(read_results(tmp_path / "docs"))
    assert [row for made in back for row in rows(made)] == [*rows(one), *rows(result(1))]
    messages = {"traces": {"__all__": {"prompt_messages", "response_messages"}}}
    assert back[0].trajectory is not None
    assert one.trajectory is not None
    assert back[0].trajectory.model_dump(exclude=messages) == one.trajectory.model_dump(exclude=messages)


def test_a_mask_is_not_lifted_on_the_way_through_a_document(atif: Any, tmp_path: Path) -> None:
    """Rows that were kept under a mask of 0 have no messages: what must not be trained on stays so."""
    written(JsonLines(everything=True), tmp_path / "rows.jsonl", result(0, outcome=FAILED))
    (masked,) = read_results(tmp_path / "rows.jsonl")
    written(Atif(), tmp_path / "docs", masked)
    (back,) = read_results(tmp_path / "docs")
    assert back.trajectory is not None
    assert back.trajectory == masked.trajectory
    assert {bit for trace in back.trajectory.traces for bit in trace.loss_mask} == {0}


ODD_ARGUMENTS = (
    r'{"half": "\ud83d"}',
    '{"a": NaN}',
    "[1]",
    '{"a": ' + "[" * 100_000 + "]" * 100_000 + "}",
    '{"a": ' + "[" * 200 + "]" * 200 + "}",
)
ODD_MESSAGES: tuple[dict[str, Any], ...] = (
    {"role": "assistant", "content": "x", "tool_calls": "all"},
    {"role": "assistant", "content": "x", "tool_calls": [None, "f", {"function": "f"}, {"id": 1, "function": {}}]},
    {"role": "assistant", "content": {"a": 1}, "reasoning_content": {"why": 1}},
    {"role": "tool", "tool_call_id": ["c"], "content": 5},
    {"role": {"a": 1}, "content": [None, 5, {"type": "image_url", "image_url": None}]},
    {},
)


@pytest.mark.parametrize("arguments", ODD_ARGUMENTS, ids=range(len(ODD_ARGUMENTS)))
def test_arguments_that_are_no_object_of_a_document_stay_text(atif: Any, tmp_path: Path, arguments: str) -> None:
    """They are the model's own, and half of a character or a NaN in them must not end an export."""
    reply = {"role": "assistant", "content": "", "tool_calls": [{"id": "c", "function": {"arguments": arguments}}]}
    written(Atif(), tmp_path / "docs", result(0, [call(0, [1], [2], messages=said("a"), reply=reply)]))
    document = atif.Trajectory.model_validate_json((tmp_path / "docs" / "t.0.json").read_text())
    (called,) = document.steps[1].tool_calls
    assert (called.arguments, called.extra) == ({}, {"arguments_text": arguments})


@pytest.mark.parametrize("message", ODD_MESSAGES, ids=range(len(ODD_MESSAGES)))
def test_whatever_an_agent_sends_as_a_message_its_rollout_is_exported(
    atif: Any, tmp_path: Path, message: dict[str, Any]
) -> None:
    odd = result(0, [call(0, [1], [2], messages=[message, *said("a")], reply=answer("b"))])
    assert written(Atif(), tmp_path / "docs", odd).rollouts == 1
    assert [row for one in read_results(tmp_path / "docs") for row in rows(one)] == rows(odd)


def test_a_missing_package_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    import sys

    monkeypatch.setitem(sys.modules, "atif", None)
    with pytest.raises(MissingPackage, match=r"needs the package atif, which is not installed: pip install 'polarq"):
        Atif()
