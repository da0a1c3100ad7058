"""What an isolated sandbox is shown of the machine's own files."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from polarq import bubblewrap
from polarq_worker.runtimes import walls

from ..needs import not_here


def test_an_entry_of_the_root_that_is_gone_by_then_keeps_no_sandbox_from_starting(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if why := bubblewrap.why_not():
        not_here(why)
    passing = tmp_path / "passing"
    passing.mkdir()
    entries = [*Path("/").iterdir(), passing]
    monkeypatch.setattr("os.listdir", lambda folder: [str(entry)[1:] for entry in entries])
    shown = list(walls._top_level(walls.Sight(hidden=(), seen=())))
    assert str(passing) in shown
    passing.rmdir()
    argv = ["bwrap", *shown, "--dev", "/dev", "--proc", "/proc", "true"]
    ended = subprocess.run(argv, check=False, capture_output=True, text=True, timeout=60)
    assert (ended.returncode, ended.stderr) == (0, "")
