"""The two instances of our own as rows of SWE-Gym: lists of pytest's names, and nothing that says how they are tested.

python -m examples.swe_gym.local FOLDER
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from examples.swebench_verified import local

COLUMNS = (
    "instance_id", "hints_text", "patch", "test_patch", "created_at", "problem_statement", "repo", "base_commit",
    "version",
)  # fmt: skip


def make(folder: Path) -> list[dict[str, Any]]:
    """Makes the repositories and rows.jsonl in a new folder; the rows."""
    rows = []
    for instance, row in zip(local.INSTANCES, local.make(folder), strict=True):
        module, _, of_class = instance.tests.rpartition(".")
        in_class = f"{module.replace('.', '/')}.py::{of_class}::"
        tests = {
            "FAIL_TO_PASS": [in_class + test for test in instance.fail_to_pass],
            "PASS_TO_PASS": [in_class + test for test in instance.pass_to_pass],
        }
        rows.append({**{column: row[column] for column in COLUMNS}, **tests})
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), "utf-8")
    return rows


if __name__ == "__main__":
    if len(sys.argv) != 2 or Path(sys.argv[1]).exists():
        raise SystemExit("name a new folder")
    make(Path(sys.argv[1]))
    print(Path(sys.argv[1]) / "rows.jsonl")
