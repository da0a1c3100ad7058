"""The calculator example as package data: a small repository with failing tests, and the task to finish it.

The scenario `calculator` of the scripted inference server plays four agents on it: two solve it, one breaks it and
one gives up. Whether they did is for the repository's tests to say.
"""

from __future__ import annotations

from pathlib import Path

REPO = Path(__file__).parent / "repo"
"""The repository. Copy it, never work in it."""

TASK_FILE = Path(__file__).parent / "task.yaml"
"""The task: four samples with mini-swe-agent in a local runtime, scored by `test_on_output`."""
