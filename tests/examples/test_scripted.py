"""`python -m examples.scripted`: what it started ends with it."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.leftovers import running

from .rig import EXAMPLES

pytestmark = pytest.mark.timeout(240)


def scripted(folder: Path, scenario: Path, *command: str) -> subprocess.Popen[str]:
    words = [sys.executable, "-m", "examples.scripted", str(scenario), "--state", str(folder / "state"), "--", *command]
    return subprocess.Popen(
        words, cwd=EXAMPLES.parent, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, bufsize=1
    )


def test_a_signal_ends_all_that_was_started(tmp_path: Path) -> None:
    command = ("sh", "-c", "echo begun; exec sleep 9182736")
    with scripted(tmp_path, EXAMPLES / "offline_sft/scenario.yaml", *command) as program:
        assert program.stdout is not None
        assert program.stdout.readline() == "begun\n"
        program.send_signal(signal.SIGTERM)
        assert program.wait(120) == 128 + signal.SIGTERM
    assert running(tmp_path) == {}


def test_a_part_that_does_not_start_is_told_with_its_last_words(tmp_path: Path) -> None:
    scenario = tmp_path / "scenario.yaml"
    scenario.write_text("scripts: [{nam: x}]\n", "utf-8")
    said = scripted(tmp_path, scenario, "true").communicate(timeout=120)[1]
    assert "the inference ended with code" in said
    assert "unknown key 'nam'" in said
    assert running(tmp_path) == {}
