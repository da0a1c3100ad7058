"""Conversations for supervised training, filtered."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from polarq.contracts import Outcome, RolloutResult, RolloutState
from polarq.export import run
from polarq.export.base import Group, Rollout
from polarq.export.parts import Parts
from polarq.export.sft import Sft, SftFilters
from tests.export.samples import FAILED, answer, result, said, session, source, written
from tests.trajectory.calls import call


def exported(tmp_path: Path, *results: RolloutResult, **filters: Any) -> tuple[list[dict[str, Any]], dict[str, int]]:
    target = tmp_path / "sft.jsonl"
    target.unlink(missing_ok=True)
    report = written(Sft(SftFilters(**filters)), target, *results)
    return [json.loads(line) for line in target.read_text().splitlines()], dict(report.skipped)


def one(index: int, reward: float | None = 1.0, word: str = "", **more: Any) -> RolloutResult:
    """A rollout of a single call; its own words unless told."""
    words = word or f"answer {index}"
    return result(index, [call(0, [1, 2], [3], messages=said("q"), reply=answer(words))], reward=reward, **more)


def test_a_conversation_is_chat_messages_with_what_the_policy_sampled_to_learn(tmp_path: Path) -> None:
    (record,), skipped = exported(tmp_path, result(0))
    assert record == {
        "messages": [*said("a"), answer("b"), {"role": "user", "content": "c"}, answer("d")],
        "reward": 1.0,
        "group": "t",
        "rollout_id": "t.0",
        "trace": 0,
        "schema": "polarq.sft/1",
    }
    assert skipped == {}


def test_an_answer_that_is_not_the_policys_here_has_weight_0(tmp_path: Path) -> None:
    """A history that the harness brought along, and a call that must not be trained on, between two that may."""
    calls = [
        call(0, [1], [2], messages=said("a", "before", "b"), reply=answer("c")),
        call(1, [1, 2, 3], [4], messages=said("a", "before", "b", "c", "d"), reply=answer("e"), untrainable="why"),
        call(2, [1, 2, 3, 4, 5], [6], messages=said("a", "before", "b", "c", "d", "e", "f"), reply=answer("g")),
    ]
    (record,), _ = exported(tmp_path, result(0, calls))
    learned = {m["content"]: m.get("weight", 1) for m in record["messages"] if m["role"] == "assistant"}
    assert learned == {"before": 0, "c": 1, "e": 0, "g": 1}


def test_a_conversation_whose_answers_cannot_be_told_apart_is_left_out(tmp_path: Path) -> None:
    injected = [
        call(0, [1], [2], messages=said("a"), reply=answer("b")),
        call(1, [1, 2, 3], [4], messages=[*said("a", "b", "c"), answer("mine"), *said("d")], reply=answer("e")),
    ]
    assert exported(tmp_path, result(0, injected)) == ([], {"answers of the policy cannot be told from others": 1})


def test_only_completed_rollouts_that_are_good_enough(tmp_path: Path) -> None:
    late = Outcome(state=RolloutState.TIMED_OUT, boundary="harness", reason="agent_timeout", trainable=True)
    results = [one(0, 0.2), one(1, 0.5), one(2, 1.0, outcome=FAILED), one(3, None), one(4, 1.0, outcome=late)]
    records, skipped = exported(tmp_path, *results, min_reward=0.5)
    assert [r["rollout_id"] for r in records] == ["t.1"]
    assert skipped == {
        "reward below the least wanted": 1,
        "not trainable: runtime/sandbox_lost": 1,
        "no reward": 1,
        "not trainable: harness/agent_timeout": 1,
    }


def test_the_best_of_each_group_and_the_first_of_equals(tmp_path: Path) -> None:
    results = [one(0, 0.5), one(1, 0.9), one(2, 0.9), one(3, 0.1), one(4, 5.0, outcome=FAILED), one(5, None)]
    records, skipped = exported(tmp_path, *results, best_of_group=2)
    assert [r["rollout_id"] for r in records] == ["t.1", "t.2"]
    assert skipped == {"not the best of its group": 2, "not trainable: runtime/sandbox_lost": 1, "no reward": 1}
    assert [r["rollout_id"] for r in exported(tmp_path, *results, best_of_group=1)[0]] == ["t.1"]


def test_what_is_not_among_the_best_is_not_even_read(tmp_path: Path) -> None:
    group = source([one(0, 0.1), one(1, 1.0)])()

    def never() -> RolloutResult:
        raise AssertionError("was read")

    poor = Rollout(group.rollouts[0].rollout_id, group.rollouts[0].verdict, never)
    form = Sft(SftFilters(best_of_group=1))
    with Parts(tmp_path / "o.jsonl", form, {}) as parts:
        report = run.export([lambda: Group("t", [poor, group.rollouts[1]])], form, parts, lambda _: None)
    assert report.records == 1


def test_the_same_conversation_once_also_over_a_restart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    results = [one(0, word="x"), one(1, word="x"), one(2, word="y"), one(3, word="x")]
    records, skipped = exported(tmp_path, *results)
    assert [r["rollout_id"] for r in records] == ["t.0", "t.2"]
    assert skipped == {"the same conversation as another": 2}
    assert len(exported(tmp_path, *results, dedup=False)[0]) == 4
    monkeypatch.setattr(run, "PART_ROLLOUTS", 1)
    target = tmp_path / "again.jsonl"
    with Parts(target, first := Sft(SftFilters()), {}) as parts:
        parts.add({"t.0": first.records(results[0])}, {})
    with Parts(target, again := Sft(SftFilters()), {}) as parts:
        report = run.export([source(results)], again, parts, lambda _: None)
    assert (report.records, report.skipped) == (2, {"the same conversation as another": 2})


def test_too_long_is_left_out(tmp_path: Path) -> None:
    assert len(exported(tmp_path, result(0), max_tokens=7)[0]) == 1
    assert exported(tmp_path, result(0), max_tokens=6) == ([], {"too many tokens": 1})


def test_a_trace_that_is_left_out_of_a_rollout_is_counted_also_over_a_restart(tmp_path: Path) -> None:
    forked = [
        call(0, [1, 2], [3], messages=said("q"), reply=answer("b")),
        call(1, [1, 5, 6, 7, 8], [9], messages=said("other"), reply=answer("c")),
    ]
    results = [result(0, forked), one(1)]
    filters = SftFilters(max_tokens=5)
    target = tmp_path / "sft.jsonl"
    with Parts(target, first := Sft(filters), {}) as parts:
        parts.add({"t.0": first.records(results[0])}, {})
    with Parts(target, again := Sft(filters), {}) as parts:
        report = run.export([source(results)], again, parts, lambda _: None)
    assert (report.records, report.rollouts, report.skipped) == (2, 2, {})
    assert report.traces_left_out == {"too many tokens": 1}


def test_the_ids_are_those_that_the_engine_saw(tmp_path: Path) -> None:
    """Case T06: the start token (1) is written by the template and by the tokenizer; what the engine saw has one. No
    id is made of text here, so the export has as many as the engine's prompt."""
    begin, calls = 1, session()[:2]
    (record,), _ = exported(tmp_path, result(0, calls), ids=True)
    whole = [*record["prompt_ids"], *record["response_ids"]]
    assert whole == [*calls[1].prompt_ids, *calls[1].sampled_ids]
    assert whole.count(begin) == calls[1].prompt_ids.count(begin) == 1
    assert record["loss_mask"] == [1, 1, 0, 1, 1]
    (plain,), _ = exported(tmp_path, result(0, calls))
    assert "prompt_ids" not in plain


def test_a_rollout_that_is_named_beside_its_task_is_there_once(tmp_path: Path) -> None:
    form, target = Sft(SftFilters()), tmp_path / "sft.jsonl"
    with Parts(target, form, {}) as parts:
        report = run.export([source([one(0), one(1)]), source([one(1)])], form, parts, lambda _: None)
    assert [json.loads(line)["rollout_id"] for line in target.read_text().splitlines()] == ["t.0", "t.1"]
    assert (report.rollouts, report.records, dict(report.skipped)) == (2, 2, {})
