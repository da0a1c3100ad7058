"""The calculator example: a small repository with failing tests, and what its tests are called.

The scenario `calculator` of the scripted inference server plays four agents on it: two solve it, one breaks it and
one gives up. Whether they did is for the tests to say: `python3 -m tests.report` in the repository.
"""

from __future__ import annotations

from pathlib import Path

REPO = Path(__file__).parent / "repo"
"""The repository as a folder; copy it, never work in it."""

INSTRUCTION = (
    "The calculator in calculator.py is unfinished: its tests fail. Finish it so that every test in tests/ passes."
    " README.md says what it shall do. Do not change the tests. Run them with"
    " `python3 -m unittest discover -s tests`."
)

TEST_COMMAND = "python3 -m tests.report"
"""Prints a line `PASSED|FAILED|ERROR|SKIPPED <test id>` for each test; needs nothing but Python."""
