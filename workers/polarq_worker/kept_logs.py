"""The logs of ended rollouts, where a person finds them."""

from __future__ import annotations

import shutil
from pathlib import Path

KEPT_LOGS = 500
"""Rollouts whose logs a node keeps, the newest ones."""


def keep_logs(source: Path, target: Path) -> None:
    """Copies a sandbox's logs to where a person finds them, and forgets the oldest rollouts' beyond `KEPT_LOGS`."""
    if not source.is_dir():
        return
    target.parent.mkdir(parents=True, exist_ok=True)
    shutil.copytree(source, target, symlinks=True, dirs_exist_ok=True, ignore_dangling_symlinks=True)
    for old in sorted(target.parent.parent.iterdir(), key=_written_at)[:-KEPT_LOGS]:
        shutil.rmtree(old, ignore_errors=True)


def _written_at(folder: Path) -> float:
    try:
        return folder.stat().st_mtime
    except FileNotFoundError:  # forgotten just now, for another rollout that has ended
        return 0.0
