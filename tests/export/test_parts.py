"""An export that is killed goes on, and its file is whole or not there."""

from __future__ import annotations

import json
import os
import resource
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from polarq.contracts import RolloutResult
from polarq.errors import InvalidInput, PayloadCorrupt, PayloadMissing, TaskNotFound
from polarq.export import run
from polarq.export.atif import Atif
from polarq.export.base import Format, Group, Rollout
from polarq.export.jsonl import JsonLines
from polarq.export.parts import Parts
from polarq.export.polar import Polar
from polarq.export.run import Report, export
from tests.export.samples import FAILED, looking, result, source, written


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


@pytest.mark.parametrize("journal", [b"[1]\n", b"not\n", b"\0\0\n"])
def test_a_damaged_journal_is_one_line_that_says_what_to_do(tmp_path: Path, journal: bytes) -> None:
    folder = tmp_path / ".rows.jsonl.polarq-export"
    folder.mkdir()
    (folder / "journal.jsonl").write_bytes(journal)
    with pytest.raises(InvalidInput, match="is damaged; remove it"):
        written(JsonLines(), tmp_path / "rows.jsonl", result())


@pytest.mark.parametrize("line", [{}, {"rollouts": ["t.0"], "skipped": {}, "records": 1, "files": ["x"], "memory": 0}])
def test_a_journal_that_tells_of_what_is_not_there_is_damaged(tmp_path: Path, line: dict[str, Any]) -> None:
    folder = tmp_path / ".rows.jsonl.polarq-export"
    folder.mkdir()
    head = {"format": "jsonl", "settings": dict(JsonLines().settings), "targets": "t"}
    (folder / "journal.jsonl").write_text(f"{json.dumps(head)}\n{json.dumps(line)}\n")
    with pytest.raises(InvalidInput, match="is damaged; remove it"):
        written(JsonLines(), tmp_path / "rows.jsonl", result())


def test_a_disk_without_room_for_the_journal_is_one_line_and_later_it_goes_on(tmp_path: Path) -> None:
    before, handler = resource.getrlimit(resource.RLIMIT_FSIZE), signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    target = tmp_path / "rows.jsonl"
    resource.setrlimit(resource.RLIMIT_FSIZE, (10, before[1]))
    try:
        with pytest.raises(InvalidInput, match="cannot be written: File too large"):
            written(JsonLines(), target, result())
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, handler)
    assert written(JsonLines(), target, result()).records == 1


def test_an_export_that_came_to_nothing_leaves_nothing_and_is_in_nobodys_way(tmp_path: Path) -> None:
    def mistyped() -> Group:
        raise TaskNotFound("no task 'tt'")

    target = tmp_path / "rows.jsonl"
    with pytest.raises(TaskNotFound), Parts(target, JsonLines(), {"targets": ["tt"]}) as parts:
        export([mistyped], JsonLines(), parts, lambda _: None)
    assert list(tmp_path.iterdir()) == []
    # One that was killed before its first part had no time to clear up.
    folder = tmp_path / ".rows.jsonl.polarq-export"
    folder.mkdir()
    (folder / "journal.jsonl").write_text('{"format": "jsonl", "targets": ["tt"]}\n')
    (folder / ".part-000000.jsonl.x.part").write_bytes(b"half")
    assert written(JsonLines(), target, result()).records == 1
    assert list(tmp_path.iterdir()) == [target]


def test_killed_while_it_clears_up_it_is_in_nobodys_way(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def killed(*_: object, **__: object) -> None:
        raise Killed

    target = tmp_path / "rows.jsonl"
    with monkeypatch.context() as context, pytest.raises(Killed):
        context.setattr("polarq.export.parts.shutil.rmtree", killed)
        written(JsonLines(), target, result(0))
    assert target.exists()
    with Parts(target, JsonLines(), {"targets": "others"}, overwrite=True) as parts:
        assert export([source([result(1)])], JsonLines(), parts, lambda _: None).records == 1
    assert [json.loads(line)["rollout_id"] for line in target.read_text().splitlines()] == ["t.1"]
    assert list(tmp_path.iterdir()) == [target]


def test_a_file_where_the_pictures_should_lie_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl.images").write_text("mine")
    with pytest.raises(InvalidInput, match=r"rows[.]jsonl[.]images: cannot be written: File exists"):
        written(JsonLines(), tmp_path / "rows.jsonl", looking(0))


def test_a_name_that_no_file_can_have_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(InvalidInput, match="cannot be written: File name too long"):
        written(JsonLines(), tmp_path / ("a" * 300), result())


def test_overwriting_deletes_no_folder_that_holds_more_than_an_export(tmp_path: Path) -> None:
    target = tmp_path / "project"
    target.mkdir()
    (target / "notes.txt").write_text("mine")
    with pytest.raises(InvalidInput, match=r"holds notes\.txt, which no export wrote"):
        Parts(target, Atif(), {}, overwrite=True)
    with pytest.raises(InvalidInput, match="is a folder; format jsonl makes a file"):
        Parts(target, JsonLines(), {}, overwrite=True)
    assert [path.name for path in tmp_path.iterdir()] == ["project"]
    (target / "notes.txt").rename(target / "t.0.json")
    with Parts(target, Atif(), {}, overwrite=True) as parts:
        export([source([result(1)])], Atif(), parts, lambda _: None)
    assert [path.name for path in target.iterdir()] == ["t.1.json"]


def test_a_task_that_is_forgotten_meanwhile_is_counted_and_the_rest_is_there(tmp_path: Path) -> None:
    def forgotten() -> Any:
        raise TaskNotFound("no task 't'")

    target, results = tmp_path / "rows.jsonl", [result(index) for index in range(4)]
    with Parts(target, JsonLines(), {}) as parts, pytest.raises(Killed):
        export([killed_at(results, 3, [])], JsonLines(), parts, lambda _: None)
    half = Rollout("u.0", source([result(task_id="u")])().rollouts[0].verdict, forgotten)
    groups = [forgotten, lambda: Group("u", [half]), source([result(task_id="v")])]
    with Parts(target, JsonLines(), {}) as parts:
        report = export(groups, JsonLines(), parts, lambda _: None)
    assert [json.loads(line)["rollout_id"] for line in target.read_text().splitlines()] == ["t.0", "t.1", "v.0"]
    assert dict(report.skipped) == {"no trajectory in the store": 1, run.GONE: 1}
    with Parts(tmp_path / "other.jsonl", JsonLines(), {}) as parts, pytest.raises(TaskNotFound):
        export([forgotten], JsonLines(), parts, lambda _: None)
