"""Rows in parquet and JSON lines: typed, counted, and the same when they are read back."""

from __future__ import annotations

import base64
import dataclasses
import hashlib
import json
from pathlib import Path

import pytest

from polarq.contracts import CompletionLabel, Outcome, RolloutState, VersionSpan
from polarq.errors import InvalidInput
from polarq.export.base import Format
from polarq.export.formats import read_results, read_rows
from polarq.export.jsonl import JsonLines
from polarq.export.parquet import Parquet
from polarq.export.rows import read_row, row_records
from polarq.trainers.rows import rows, written_out
from tests.export.samples import FAILED, looking, result, session, taught, written
from tests.needs import not_here
from tests.trajectory.calls import call
from tests.trajectory.pictures import PAD

try:
    import pyarrow
    import pyarrow.parquet
except ImportError:
    pyarrow = None


@pytest.fixture(params=["parquet", "jsonl"])
def form(request: pytest.FixtureRequest) -> Format:
    return a_form(request.param)


def a_form(name: str, *, everything: bool = False) -> Format:
    if name == "jsonl":
        return JsonLines(everything=everything)
    if pyarrow is None:
        not_here("pyarrow is not installed")
    return Parquet(everything=everything)


def test_rows_come_back_as_they_were_and_what_must_not_be_used_is_counted(form: Format, tmp_path: Path) -> None:
    results = [
        result(0),
        result(1, reward=0.25),
        result(2, outcome=FAILED),
        result(3, calls=[]),
        result(4, reward=None),
    ]
    target = tmp_path / f"out{form.suffix}"
    report = written(form, target, *results)
    assert (report.rollouts, report.records) == (3, 3)
    assert report.skipped == {"not trainable: runtime/sandbox_lost": 1, "nothing sampled": 1}
    expected = [row for one in results for row in rows(one)]
    assert list(read_rows(target)) == expected
    assert [row for one in read_results(target) for row in rows(one)] == expected
    assert [one.reward and one.reward.outcome for one in read_results(target)] == [1.0, 0.25, None]


def test_turns_with_their_rewards_and_pictures_come_back(form: Format, tmp_path: Path) -> None:
    target = tmp_path / f"out{form.suffix}"
    one = looking()
    report = written(form, target, one)
    assert report.records == 1
    (row,) = rows(one)
    assert list(read_rows(target)) == [row]
    assert [(t.seq, t.start, t.end, t.finish_reason, t.grammar, t.reward) for t in row.turns] == [
        (0, 0, 2, "tool_calls", None, 0.25),
        (1, 5, 6, None, "tool_choice", 1.0),
    ]
    whole = [*row.prompt_ids, *row.response_ids]
    assert [whole[image.start : image.end] for image in row.images] == [[PAD, PAD]]
    (back,) = read_results(target)
    assert rows(back) == [row]
    assert back.trajectory is not None
    assert (back.trajectory.fidelity.calls, back.trajectory.fidelity.images) == (2, 1)


def test_pictures_lie_beside_the_file_once_and_are_in_no_row(form: Format, tmp_path: Path) -> None:
    target = tmp_path / f"out{form.suffix}"
    written(form, target, looking(0), looking(1), looking(2, picture=b"q"), result(3))
    pictures = {path.name: path.read_bytes() for path in (tmp_path / f"{target.name}.images").iterdir()}
    assert pictures == {hashlib.sha256(data).hexdigest(): data for data in (b"p", b"q")}
    assert {image.sha256 for row in read_rows(target) for image in row.images} == set(pictures)
    assert base64.b64encode(b"p") not in target.read_bytes()
    plain = tmp_path / f"plain{form.suffix}"
    written(form, plain, result(3))
    assert not plain.with_name(f"{plain.name}.images").exists()


def test_a_file_of_the_first_schema_is_read(tmp_path: Path) -> None:
    target = tmp_path / "out.jsonl"
    written(a_form("jsonl"), target, result(0))
    record = json.loads(target.read_text())
    older = {key: value for key, value in record.items() if key not in {"turns", "images"}} | {
        "schema": "polarq.rows/1"
    }
    target.write_text(json.dumps(older))
    (row,) = rows(result(0))
    assert list(read_rows(target)) == [dataclasses.replace(row, turns=[])]
    (back,) = read_results(target)
    assert [one.response_ids for one in rows(back)] == [row.response_ids]


def test_what_a_teacher_said_comes_back_and_files_of_before_have_none(form: Format, tmp_path: Path) -> None:
    target = tmp_path / f"out{form.suffix}"
    written(form, target, taught(result(0)), result(1))
    found = list(read_rows(target))
    assert found == [*rows(taught(result(0))), *rows(result(1))]
    assert [row.teacher_logprobs is None for row in found] == [False, True]
    assert [row for back in read_results(target) for row in rows(back)] == found
    (record,) = row_records(result(1), everything=False)
    del record["teacher_logprobs"]
    assert read_row(record).teacher_logprobs is None
    with pytest.raises(InvalidInput, match="teacher_logprobs differ in length"):
        read_row({**record, "teacher_logprobs": [0.0]})


def test_all_keeps_the_rest_under_a_mask_of_0_and_says_why(tmp_path: Path) -> None:
    form = a_form("jsonl", everything=True)
    target = tmp_path / "out.jsonl"
    report = written(form, target, result(0), result(1, outcome=FAILED), result(2, calls=[]))
    assert report.skipped == {"nothing sampled": 1}
    records = [json.loads(line) for line in target.read_text().splitlines()]
    assert [(r["rollout_id"], r["trace"], r["unused"]) for r in records] == [
        ("t.0", 0, None),
        ("t.0", 1, "log-probability 0 is missing"),
        ("t.1", 0, "not trainable: runtime/sandbox_lost"),
        ("t.1", 1, "log-probability 0 is missing"),
    ]
    assert [sum(r["loss_mask"]) for r in records] == [4, 0, 0, 0]
    assert [r["weight"] for r in records] == [1.0, 0, 0, 0]
    assert all(v == 0.0 for r in records[1:] for v in r["logprobs"])
    # Read back, it is still not used.
    assert [len(rows(one)) for one in read_results(target)] == [1, 0]


def test_a_call_that_an_abort_left_without_tokens_is_in_no_sample_and_counted(tmp_path: Path) -> None:
    """Case A03: aborted for a weight update before the first token, after five, and nothing else in a rollout."""
    aborted = {"label": CompletionLabel.ABORTED, "finish_reason": "abort", "untrainable": "aborted"}
    alone = result(0, [call(0, [1, 2], [], **aborted)])
    cut = result(
        1, [call(0, [1, 2], [], **aborted), call(1, [1, 2], [3, 4, 5, 6, 7], finish_reason="length", continued=1)]
    )
    assert alone.trajectory is not None
    assert (alone.trajectory.traces, alone.trajectory.fidelity.empty_calls) == ([], 1)
    target = tmp_path / "out.jsonl"
    for everything in (False, True):
        report = written(a_form("jsonl", everything=everything), target, alone, cut)
        assert (report.records, report.skipped) == (1, {"nothing sampled": 1})
        (row,) = read_rows(target)
        assert (row.rollout_id, row.response_ids, row.finish_reason) == ("t.1", [3, 4, 5, 6, 7], "length")
        target.unlink()


def test_a_tree_is_written_out(tmp_path: Path) -> None:
    tree = result(0, config={"emit": "tree"}, calls=[*session()[:2], call(3, [1, 2, 3, 9, 5], [6])])
    assert tree.trajectory is not None
    assert any(trace.left_out for trace in tree.trajectory.traces)
    written(a_form("jsonl"), tmp_path / "out.jsonl", tree)
    whole = tree.model_copy(update={"trajectory": written_out(tree.trajectory)})
    assert list(read_rows(tmp_path / "out.jsonl")) == rows(whole)


def test_columns_are_typed_and_the_file_names_its_schema(tmp_path: Path) -> None:
    written(a_form("parquet"), tmp_path / "out.parquet", result(0))
    schema = pyarrow.parquet.read_schema(tmp_path / "out.parquet")
    assert schema.metadata[b"polarq.schema"] == b"polarq.rows/2"
    kinds = {name: schema.field(name).type.value_type for name in ("prompt_ids", "loss_mask", "logprobs")}
    assert kinds == {"prompt_ids": pyarrow.int32(), "loss_mask": pyarrow.uint8(), "logprobs": pyarrow.float32()}
    assert not schema.field("prompt_ids").nullable


def test_nothing_to_write_makes_a_whole_empty_file(form: Format, tmp_path: Path) -> None:
    target = tmp_path / f"out{form.suffix}"
    assert written(form, target, result(0, outcome=FAILED)).records == 0
    assert list(read_rows(target)) == []


def test_rows_that_are_apart_or_of_another_schema_are_refused(tmp_path: Path) -> None:
    target = tmp_path / "out.jsonl"
    form = a_form("jsonl", everything=True)
    written(form, target, result(0), result(1))
    lines = target.read_text().splitlines(keepends=True)
    target.write_text("".join([lines[0], lines[2], lines[1]]))
    with pytest.raises(InvalidInput, match=r"'t\.0' are not together"):
        list(read_results(target))
    target.write_text(lines[0].replace("polarq.rows/2", "polarq.rows/9"))
    with pytest.raises(InvalidInput, match="no format that can be read back"):
        list(read_results(target))
    with pytest.raises(InvalidInput, match=r"its schema is 'polarq\.rows/9'"):
        list(read_rows(target))
    target.write_text(lines[0] + "{")
    with pytest.raises(InvalidInput, match="line 2 is no JSON object"):
        list(read_results(target))


def test_a_version_that_counts_no_updates_ends_no_export(form: Format, tmp_path: Path) -> None:
    spans = [VersionSpan(version="built-" + "9" * 40, start=0, end=1)]
    one = result(0, [call(0, [1], [2], weight_versions=spans)])
    target = tmp_path / f"out{form.suffix}"
    written(form, target, one)
    (row,) = read_rows(target)
    assert (row.oldest, row.newest, row.versions) == (None, None, spans)


def test_what_rows_tell_of_their_rollout_comes_back(form: Format, tmp_path: Path) -> None:
    target = tmp_path / f"out{form.suffix}"
    written(form, target, result(0))
    (back,) = read_results(target)
    assert back.versions == ["step-7", "step-8"]
    assert back.trajectory is not None
    assert back.trajectory.fidelity.versions == ["step-7", "step-8"]
    masked = [call(0, [1], [2]), call(1, [1, 2, 3], [4], untrainable="why")]
    written(form, target.with_suffix(f".2{form.suffix}"), result(0, masked))
    (back,) = read_results(target.with_suffix(f".2{form.suffix}"))
    assert back.trajectory is not None
    assert back.trajectory.fidelity.untrainable == {"1": "why"}


def test_a_number_that_no_column_holds_is_one_line_that_names_its_rollouts(tmp_path: Path) -> None:
    if pyarrow is None:
        not_here("pyarrow is not installed")
    with pytest.raises(InvalidInput, match=r"rollouts 't[.]0' to 't[.]1': have what no column holds .*export as jsonl"):
        written(Parquet(), tmp_path / "x.parquet", result(0), result(1, [call(1, [2**31], [2])]))


def test_rows_that_are_there_twice_are_refused(tmp_path: Path) -> None:
    """Two files of one rollout in one: read as they are, its tokens would be trained on twice."""
    calls = [call(0, [1], [2]), call(1, [3], [4])]
    written(JsonLines(), tmp_path / "one.jsonl", result(0, calls))
    lines = (tmp_path / "one.jsonl").read_text().splitlines(keepends=True)
    for some in ([*lines, *lines], lines[::-1], [lines[0], lines[0]]):
        (tmp_path / "two.jsonl").write_text("".join(some))
        with pytest.raises(InvalidInput, match=r"rows of rollout 't[.]0' are not in the order of their traces, each"):
            list(read_results(tmp_path / "two.jsonl"))


def test_an_ended_state_comes_back(tmp_path: Path) -> None:
    late = Outcome(state=RolloutState.TIMED_OUT, boundary="harness", reason="agent_timeout", trainable=True)
    written(a_form("jsonl"), tmp_path / "out.jsonl", result(0, outcome=late))
    (back,) = read_results(tmp_path / "out.jsonl")
    assert back.outcome == late
