"""Rows of SWE-bench and data sets of its kind, as tasks."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from string import Template
from typing import Any

from polarq.errors import InvalidInput

from .known import Known

Row = Mapping[str, Any]

NEEDED = ("instance_id", "repo", "base_commit", "problem_statement", "test_patch", "FAIL_TO_PASS", "PASS_TO_PASS")
GRADED_BY = (
    "instance_id", "repo", "version", "base_commit", "test_patch", "FAIL_TO_PASS", "PASS_TO_PASS",
    "eval_script", "log_parser", "eval_type",
)  # fmt: skip
"""Columns that the evaluator gets. The solution (`patch`) and the hints go nowhere."""
TESTBED = "/testbed"
LOCAL_TESTBED = "/polar/session/testbed"


def read_rows(path: Path) -> dict[str, dict[str, Any]]:
    """By instance id, in the file's order. Raises `InvalidInput` for what are no rows of such a data set."""
    what = f"rows {path}"
    rows: dict[str, dict[str, Any]] = {}
    try:
        lines = path.read_text("utf-8").split("\n")  # texts of JSON hold what splitlines takes for an end of line
    except FileNotFoundError:
        raise InvalidInput(what, ["there is no such file; the README says how to write it"]) from None
    except (OSError, UnicodeDecodeError):
        raise InvalidInput(
            what, ["cannot be read as text; write the data set as JSON lines (see the README)"]
        ) from None
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except ValueError:
            row = None
        if not isinstance(row, dict):
            raise InvalidInput(what, [f"line {number} is no JSON object; one row of the data set a line is wanted"])
        if missing := [column for column in NEEDED if column not in row]:
            raise InvalidInput(
                what,
                [f"line {number} has no column {', '.join(missing)}: these are no rows of SWE-bench or of its kind"],
            )
        if row["instance_id"] in rows:
            raise InvalidInput(what, [f"line {number} has instance {row['instance_id']} a second time"])
        rows[row["instance_id"]] = row
    if not rows:
        raise InvalidInput(what, ["the file has no rows"])
    return rows


def image_of(row: Row, registry: str, separator: str) -> str:
    """By the rule of the data set's publisher: an image's name cannot have two underscores in a row."""
    return f"{registry}/sweb.eval.x86_64.{row['instance_id'].replace('__', separator)}:latest".lower()


def fields_of(
    row: Row, template: Mapping[str, Any], image: str, known: Callable[[Row], Known], local: Path | None = None
) -> dict[str, Any]:
    """One instance as fields of a task. `known` says how a row without `eval_script` and `test_command` is tested.

    With `local` its repository is below that folder, and its sandbox is a local one.
    """
    runtime = {**template["runtime"], "image": image}
    testbed = template["runtime"].get("workdir", TESTBED)
    if local is not None:
        testbed = LOCAL_TESTBED
        source = str((local / row["instance_id"]).resolve())
        runtime = {
            "backend": "local",
            "workdir": testbed,
            "prepare": [{"type": "upload_dir", "source": source, "target": testbed}],
        }
    config: dict[str, Any] = {
        "instance": {column: row[column] for column in GRADED_BY if row.get(column)},
        "repo_dir": testbed,
    }
    if not row.get("eval_script"):
        way = known(row)
        config |= {"test_command": row.get("test_command") or way.command}
        if not row.get("log_parser"):
            config |= {"log_parser": way.parser}
    return {
        **template,
        "instruction": Template(template["instruction"]).safe_substitute(problem_statement=row["problem_statement"]),
        "runtime": runtime,
        "evaluator": {"strategy": "swebench_harness", "config": config},
        "metadata": {**template.get("metadata", {}), "instance_id": row["instance_id"]},
    }
