"""Files that others wrote, or that were damaged on their way: one line says so, and nothing leaves the archive."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from polarq.errors import InvalidInput
from polarq.export.formats import read_results, read_rows
from polarq.export.jsonl import JsonLines
from polarq.export.parquet import Parquet
from polarq.export.polar import Polar
from polarq.store.archive import Archive
from tests.export.samples import result, written


def changed(tmp_path: Path, **values: Any) -> Path:
    """A file of one row with other values."""
    written(JsonLines(), tmp_path / "rows.jsonl", result())
    row = json.loads((tmp_path / "rows.jsonl").read_text().splitlines()[0])
    target = tmp_path / "changed.jsonl"
    target.write_text(json.dumps({**row, **values}) + "\n")
    return target


@pytest.mark.parametrize(
    ("values", "told"),
    [
        ({"group": "../../x", "rollout_id": "../../x.0"}, "task_id: '../../x' is no id"),
        ({"run": "../x"}, "run_id: '../x' is no id"),
        ({"rollout_id": "other.7"}, "is not what rollout 0 of task 't' is called"),
        ({"state": "queued"}, "has not ended"),
        ({"rollout_id": [1]}, "cannot be read"),
        ({"schema": [1]}, "cannot be read"),
    ],
)
def test_a_row_that_names_no_rollout_of_an_archive_is_refused(
    tmp_path: Path, values: dict[str, Any], told: str
) -> None:
    with pytest.raises(InvalidInput, match=told.replace(".", "[.]")):
        list(read_results(changed(tmp_path, **values)))


def test_an_archive_takes_no_result_whose_task_lies_outside_it(tmp_path: Path) -> None:
    astray = result().model_copy(update={"task_id": "../outside"})
    with pytest.raises(InvalidInput, match="is no id"):
        Archive(str(tmp_path / "archive")).put(astray)
    assert not (tmp_path / "outside").exists()


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("logprobs", [None] * 5),
        ("logprobs", ["-1"] * 5),
        ("loss_mask", [0.5] * 5),
        ("loss_mask", [True] * 5),
        ("reward", "1"),
        ("reward", True),
        ("weight", None),
        ("prompt_ids", None),
        ("group", ["t"]),
        ("rollout", "0"),
        ("rollout", True),
        ("trace", -1),
        ("oldest", 1.5),
        ("finish_reason", 5),
        ("version", [{"version": "1", "start": 0, "end": 6}]),
        ("turn", [{"seq": 0, "start": 0, "end": 6}]),
        ("turn", [{"seq": 0, "start": 3, "end": 1}]),
    ],
)
def test_a_trainer_gets_no_row_with_odd_values(tmp_path: Path, name: str, values: Any) -> None:
    key = f"{name}s" if name in {"turn", "version"} else name
    with pytest.raises(InvalidInput, match=name):
        list(read_rows(changed(tmp_path, **{key: values})))


@pytest.mark.parametrize("ids", [[2**31], [-(2**31) - 1]])
def test_a_session_of_ids_that_are_none_is_refused(tmp_path: Path, ids: list[int]) -> None:
    """In the archive it would be in the way of each export to come."""
    written(Polar(), tmp_path / "polar.jsonl", result())
    session = json.loads((tmp_path / "polar.jsonl").read_text())
    session["trajectory"]["traces"][0]["prompt_ids"] = ids
    (tmp_path / "changed.jsonl").write_text(json.dumps(session) + "\n")
    with pytest.raises(InvalidInput, match="prompt_ids of trace 0 holds something other than 32-bit whole numbers"):
        list(read_results(tmp_path / "changed.jsonl"))


def test_an_archive_takes_no_rollout_that_it_would_not_list(tmp_path: Path) -> None:
    archive = Archive(str(tmp_path / "archive"))
    with pytest.raises(InvalidInput, match="rollouts 0 to 999999"):
        archive.put(result(1_000_000))
    archive.put(result(999_999))
    assert archive.indices("t") == [999_999]


@pytest.mark.parametrize("suffix", [".json", ".jsonl"])
def test_json_nested_beyond_all_measure_is_said_in_one_line(tmp_path: Path, suffix: str) -> None:
    target = tmp_path / f"deep{suffix}"
    target.write_bytes(b'{"a":' + b"[" * 100_000 + b"]" * 100_000 + b"}\n")
    with pytest.raises(InvalidInput, match="is no JSON object"):
        list(read_results(target))


def test_sessions_of_odd_shapes_are_said_in_one_line(tmp_path: Path) -> None:
    target = tmp_path / "odd.json"
    target.write_text('{"session_id": "s", "task_id": "t", "status": "COMPLETED", "trajectory": []}')
    with pytest.raises(InvalidInput, match="cannot be read"):
        list(read_results(target))


def test_a_folder_in_the_place_of_a_document_is_said_in_one_line(tmp_path: Path) -> None:
    (tmp_path / "folder" / "one.json").mkdir(parents=True)
    with pytest.raises(InvalidInput, match="cannot be read: Is a directory"):
        list(read_results(tmp_path / "folder"))


def test_a_parquet_file_damaged_anywhere_is_said_in_one_line_or_read(tmp_path: Path) -> None:
    written(Parquet(), tmp_path / "rows.parquet", result())
    good, target = (tmp_path / "rows.parquet").read_bytes(), tmp_path / "damaged.parquet"
    refused = 0
    for at in range(0, len(good), len(good) // 60):
        target.write_bytes(good[:at] + bytes([good[at] ^ 0x41]) + good[at + 1 :])
        try:
            list(read_results(target))
        except InvalidInput:
            refused += 1
    assert refused > 20


@pytest.mark.parametrize(
    ("values", "told"),
    [
        ({"images": [{"sha256": "x", "size": 1, "end": "y"}]}, "end: Input should be a valid integer"),
        ({"turns": [{"seq": 0, "end": 1}]}, "'start' is missing"),
        ({"versions": [{"start": 0, "end": 1}]}, "version: Field required"),
    ],
)
def test_what_a_row_lacks_is_said_in_one_line_by_its_key(tmp_path: Path, values: dict[str, Any], told: str) -> None:
    with pytest.raises(InvalidInput) as caught:
        list(read_rows(changed(tmp_path, **values)))
    assert str(caught.value).startswith(f"import: this is no row of polarq.rows/2: {told}")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("own", "told"),
    [
        ({"parent": 7}, "traces.1: parent 7 is no trace before it"),
        ({"parent": -1}, "traces.1: parent -1 is no trace before it"),
        ({"parent": 1}, "traces.1: parent 1 is no trace before it"),
        ({"left_out": 100}, "traces.1: leaves out 100 ids, which its parent does not have"),
        ({"parent": None, "left_out": 1}, "traces.1: leaves out 1 ids, which its parent does not have"),
    ],
)
def test_a_trace_that_leaves_out_what_no_other_has_is_refused(tmp_path: Path, own: dict[str, Any], told: str) -> None:
    """Read all the same, it would be trained on in a context that nobody saw."""
    written(Polar(), tmp_path / "polar.jsonl", result(config={"emit": "tree"}))
    session = json.loads((tmp_path / "polar.jsonl").read_text())
    session["trajectory"]["traces"][1]["metadata"]["polarq"] |= own
    (tmp_path / "changed.jsonl").write_text(json.dumps(session) + "\n")
    with pytest.raises(InvalidInput, match=f"session 1 is no SessionResult: .*{told.replace('.', '[.]')}"):
        list(read_results(tmp_path / "changed.jsonl"))
