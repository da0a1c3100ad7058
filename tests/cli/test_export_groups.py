"""`polarq export`: a task's rollouts are one group, however they were named."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from polarq.client import Client
from polarq.store.archive import Archive
from tests.cli.conftest import Cli
from tests.cli.driving import finish, record, task

REWARDS = {"a": (0.2, 0.25, 1.0, 0.5, 0.5), "b": (0.25, 0.0), "a.1": (0.75,)}


@pytest.fixture(params=["redis", "archive"])
def source(request: pytest.FixtureRequest, client: Client, tmp_path: Path) -> list[str]:
    """Where the tasks are, as arguments: `a`, `b`, and `a.1`, whose id looks like a rollout's."""
    archive = Archive(str(tmp_path / "kept"))
    for task_id, rewards in REWARDS.items():
        wanted = task(task_id, len(rewards), run_id="run")
        record(client, wanted)
        for index, reward in enumerate(rewards):
            archive.keep(wanted, finish(client, f"{task_id}.{index}", reward=reward))
    return ["--archive", archive.root] if request.param == "archive" else []


@pytest.mark.parametrize(
    ("targets", "wanted"),
    [
        (["a"], ["a.2"]),
        (["a.0", "a.3", "a.4"], ["a.3"]),  # among those named, the first of equals
        (["a.4", "a.3"], ["a.3"]),
        (["a.0", "b", "a.3"], ["a.3", "b.0"]),
        (["a.0", "a"], ["a.2"]),
        (["a", "a.0"], ["a.2"]),
        (["a.1", "a.0", "a.1.0"], ["a.1.0", "a.0"]),  # `a.1` is a task
    ],
)
def test_the_best_of_a_group_are_the_best_of_those_named_of_its_task(
    cli: Cli, source: list[str], tmp_path: Path, targets: list[str], wanted: list[str]
) -> None:
    file = tmp_path / "best.jsonl"
    options = ["--format", "sft", "--best-of-group", "1", "--no-dedup", "--to", str(file)]
    ran = cli("export", *targets, *source, *options)
    assert (ran.code, ran.err) == (0, "")
    assert [json.loads(line)["rollout_id"] for line in file.read_text().splitlines()] == wanted


def test_a_rollout_that_is_not_there_is_named(cli: Cli, source: list[str], tmp_path: Path) -> None:
    ran = cli("export", "b.0", "b.7", *source, "--to", str(tmp_path / "x.jsonl"))
    told = "b.7: is no task and no rollout of the archive" if source else "task 'b' has 2 rollouts; there is no 'b.7'"
    assert (ran.code, told in ran.err, ran.err.count("\n")) == (2, True, 1)
    assert not (tmp_path / "x.jsonl").exists()
