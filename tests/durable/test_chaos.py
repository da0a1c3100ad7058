"""A short chaos run with a fixed seed; the long one is `make chaos`."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.durable.chaos.run import chaos


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_whatever_is_killed_every_rollout_ends_once(tmp_path: Path) -> None:
    report = chaos(tmp_path, seed=20, seconds=25)
    assert not report.broken, "\n".join(report.broken)
    assert sum(report.troubles.values()) > 3
    assert report.figures["rollouts"]["completed"] > 0
