"""What a node keeps of its rollouts' logs."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from polarq_worker import kept_logs


def test_logs_are_kept_and_the_oldest_forgotten(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kept_logs, "KEPT_LOGS", 2)
    source = tmp_path / "sandbox"
    (source / "agent").mkdir(parents=True)
    (source / "agent" / "step.00.stdout").write_text("said")
    for age, name in enumerate(["c", "b", "a"]):
        kept_logs.keep_logs(source, tmp_path / "logs" / name / "agent-sandbox")
        stamp = 1_000_000_000 + age
        os.utime(tmp_path / "logs" / name, (stamp, stamp))
    kept_logs.keep_logs(source, tmp_path / "logs" / "d" / "agent-sandbox")
    kept = sorted(folder.name for folder in (tmp_path / "logs").iterdir())
    assert kept == ["a", "d"]
    assert (tmp_path / "logs" / "d" / "agent-sandbox" / "agent" / "step.00.stdout").read_text() == "said"


def test_a_sandbox_without_logs_is_no_error(tmp_path: Path) -> None:
    kept_logs.keep_logs(tmp_path / "none", tmp_path / "logs" / "x" / "y")
    assert not (tmp_path / "logs").exists()


def test_what_is_forgotten_meanwhile_is_no_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Many rollouts end at once and forget the same old ones: one that is listed may be there no longer."""
    monkeypatch.setattr(kept_logs, "KEPT_LOGS", 1)
    source = tmp_path / "sandbox"
    source.mkdir()
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs" / "gone").symlink_to(tmp_path / "nowhere")
    for name in ("a", "b"):
        kept_logs.keep_logs(source, tmp_path / "logs" / name / "agent-sandbox")
    assert [folder.name for folder in (tmp_path / "logs").iterdir() if folder.exists()] == ["b"]
