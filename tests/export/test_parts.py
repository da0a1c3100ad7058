"""An export that is killed goes on, and its file is whole or not there."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from polarq.contracts import RolloutResult
from polarq.errors import InvalidInput, PayloadCorrupt, PayloadMissing
from polarq.export import run
from polarq.export.base import Format, Group, Rollout
from polarq.export.jsonl import JsonLines
from polarq.export.parts import Parts
from polarq.export.polar import Polar
from polarq.export.run import Report, export
from tests.export.samples import FAILED, result, source, written


class Killed(BaseException):
    """What a signal does."""


@pytest.fixture(autouse=True)
def _small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run, "PART_ROLLOUTS", 2)


def go(form: Format, target: Path, group: Callable[[], Group], **more: bool) -> Report:
    with Parts(target, form, {}, **more) as parts:
        return export([group], form, parts, lambda _: None)


def killed_at(results: list[RolloutResult], at: int, loaded: list[str]) -> Callable[[], Group]:
    """The results; whoever reads number `at` is killed."""
    whole = source(results)()

    def load(rollout: Rollout, number: int) -> RolloutResult:
        if number == at:
            raise Killed
        loaded.append(rollout.rollout_id)
        return rollout.load()

    watched = [
        Rollout(one.rollout_id, one.verdict, lambda one=one, n=n: load(one, n))  # type: ignore[misc]
        for n, one in enumerate(whole.rollouts)
    ]
    return lambda: Group(whole.task_id, watched)


@pytest.mark.parametrize("at", range(7))
def test_killed_anywhere_it_goes_on_and_ends_as_if_it_had_not_been(tmp_path: Path, at: int) -> None:
    results = [result(i, outcome=FAILED if i % 3 == 1 else None) for i in range(7)]
    plain, target = tmp_path / "plain.jsonl", tmp_path / "out.jsonl"
    expected = written(JsonLines(), plain, *results)
    loaded: list[str] = []
    with pytest.raises(Killed):
        go(JsonLines(), target, killed_at(results, at, loaded))
    assert not target.exists()
    before = list(loaded)
    report = go(JsonLines(), target, killed_at(results, -1, loaded))
    assert target.read_bytes() == plain.read_bytes()
    assert (report.records, report.rollouts, report.skipped) == (expected.records, expected.rollouts, expected.skipped)
    # What was in a part is not read again.
    assert len(loaded) - len(before) == 7 - 2 * (at // 2)
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".")] == []


@pytest.mark.parametrize("cut", [1, 20])
def test_a_line_of_the_journal_that_was_not_whole_does_not_count(tmp_path: Path, cut: int) -> None:
    results = [result(i) for i in range(4)]
    target = tmp_path / "out.jsonl"
    with pytest.raises(Killed):
        go(JsonLines(), target, killed_at(results, 2, []))
    folder = tmp_path / ".out.jsonl.polarq-export"
    journal = folder / "journal.jsonl"
    os.truncate(journal, journal.stat().st_size - cut)
    (folder / ".part-000009.jsonl.x.part").write_bytes(b"half")
    assert go(JsonLines(), target, source(results)).rollouts == 4
    assert [json.loads(line)["rollout_id"] for line in target.read_text().splitlines()] == ["t.0", "t.1", "t.2", "t.3"]


def test_another_export_into_the_same_file_is_refused(tmp_path: Path) -> None:
    target = tmp_path / "out.jsonl"
    with pytest.raises(Killed):
        go(JsonLines(), target, killed_at([result(i) for i in range(4)], 3, []))
    with pytest.raises(InvalidInput, match=r"was begun by another export \(settings differ\); remove .*polarq-export"):
        go(JsonLines(everything=True), target, source([result(0)]))
    with (
        Parts(target, JsonLines(), {}),
        pytest.raises(InvalidInput, match="is being written by another export"),
    ):
        Parts(target, JsonLines(), {})


def test_a_file_that_is_there_is_kept_unless_it_is_to_be_overwritten(tmp_path: Path) -> None:
    target = tmp_path / "out.jsonl"
    target.write_text("mine")
    with pytest.raises(InvalidInput, match="is there already"):
        go(JsonLines(), target, source([result(0)]))
    assert target.read_text() == "mine"
    go(JsonLines(), target, source([result(0)]), overwrite=True)
    assert "t.0" in target.read_text()


def test_a_place_that_cannot_be_written_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(InvalidInput, match="cannot be written"):
        Parts(tmp_path / "file" / "out.jsonl", JsonLines(), {})


def test_what_is_gone_or_damaged_or_has_not_ended_is_counted(tmp_path: Path) -> None:
    def gone() -> RolloutResult:
        raise PayloadMissing("x")

    def damaged() -> RolloutResult:
        raise PayloadCorrupt("x")

    fine = source([result(0)])()
    bad = [Rollout(name, fine.rollouts[0].verdict, load) for name, load in (("t.1", gone), ("t.2", damaged))]
    report = go(JsonLines(), tmp_path / "out.jsonl", lambda: Group("t", [*fine.rollouts, *bad], waiting=3))
    assert report.skipped == {"no trajectory in the store": 1, "damaged in the store": 1, "not ended": 3}
    assert (report.rollouts, report.damaged) == (1, 1)


def test_parts_are_made_by_tokens_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run, "PART_ROLLOUTS", 1000)
    monkeypatch.setattr(run, "PART_TOKENS", 10)
    loaded: list[str] = []
    with pytest.raises(Killed):
        go(Polar(), tmp_path / "o.jsonl", killed_at([result(i) for i in range(4)], 3, loaded))
    go(Polar(), tmp_path / "o.jsonl", killed_at([result(i) for i in range(4)], -1, loaded))
    # Ten tokens each: the first two were a part.
    assert loaded == ["t.0", "t.1", "t.2", "t.2", "t.3"]
