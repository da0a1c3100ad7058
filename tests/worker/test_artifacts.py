"""What comes back from a sandbox with a rollout's result."""

from __future__ import annotations

import hashlib
import tarfile
from pathlib import Path
from typing import Any

import pytest

from polarq.contracts import RolloutState
from polarq.contracts.artifacts import Artifact
from polarq.contracts.rollout import RolloutResult
from polarq.testing.stack import LocalStack
from tests.worker.conftest import ask, shell_task, wait_until

S = RolloutState


def run(stack: LocalStack, task: dict[str, Any]) -> RolloutResult:
    stack.client.submit(task)
    return stack.client.wait(task["task_id"], timeout_s=300).results[0]


def named(result: RolloutResult) -> dict[str, Artifact]:
    return {artifact.name: artifact for artifact in result.artifacts}


MADE = """
mkdir -p out/deep; echo report > out/report.txt; echo a > out/deep/a.log; ln -s ../report.txt out/deep/back
ln -s /etc/passwd out/passwd; mkfifo out/pipe; chmod 4755 out/report.txt; truncate -s 1T out/sparse
"""
DECLARED = [{"path": "out"}, {"path": "out/**/*.log"}, {"path": "none"}, {"path": "must", "required": True}]


def test_declared_files_and_logs_come_back_and_a_bad_entry_costs_no_other(stack: LocalStack) -> None:
    result = run(stack, shell_task("artifacts-all", f"{ask(1)}{MADE}", artifacts=DECLARED))
    assert result.outcome.state is S.COMPLETED
    found = named(result)
    assert set(found) == {"out.tar", "out/deep/a.log", "must", "logs/agent/step.00.stdout"}
    folder = found["out.tar"]
    data = Path(folder.where).read_bytes()
    assert (folder.kind, folder.size, folder.sha256) == ("folder", len(data), hashlib.sha256(data).hexdigest())
    with tarfile.open(folder.where) as archive:
        members = {member.name: member for member in archive}
    assert set(members) == {".", "./deep", "./report.txt", "./deep/a.log", "./deep/back"}
    assert members["./deep/back"].linkname == "../report.txt"
    assert members["./report.txt"].mode == 0o755
    assert {member.uid for member in members.values()} == {0}
    assert {entry.path for entry in folder.refused} == {"passwd", "pipe", "sparse"}
    assert "No such file" in found["must"].problem
    assert "answer" in Path(found["logs/agent/step.00.stdout"].where).read_text()
    assert result.timing.artifacts_s is not None


@pytest.mark.parametrize(
    ("name", "command", "more", "state"),
    [
        ("timeout", "sleep 1000", {"timeouts": {"agent_s": 3}}, S.TIMED_OUT),
        ("failure", "exit 3", {}, S.FAILED),
    ],
)
def test_they_come_back_also_when_the_harness_failed(
    stack: LocalStack, name: str, command: str, more: dict[str, Any], state: RolloutState
) -> None:
    task = shell_task(f"artifacts-{name}", f"echo kept > made.txt; {command}", artifacts=[{"path": "made.txt"}], **more)
    result = run(stack, task)
    assert result.outcome.state is state
    assert Path(named(result)["made.txt"].where).read_text() == "kept\n"


def test_they_come_back_when_the_rollout_is_cancelled(stack: LocalStack) -> None:
    command = "echo kept > made.txt; echo x > goes-on.txt; sleep 1000"
    stack.client.submit(shell_task("artifacts-cancel", command, artifacts=[{"path": "made.txt"}]))
    rollouts = stack.home / "state" / "node0" / "rollouts"
    wait_until(lambda: bool(list(rollouts.glob("artifacts-cancel*/**/goes-on.txt"))), timeout_s=170)
    stack.client.cancel("artifacts-cancel")
    result = stack.client.wait("artifacts-cancel", timeout_s=300).results[0]
    assert result.outcome.state is S.CANCELLED
    assert Path(named(result)["made.txt"].where).read_text() == "kept\n"


def test_limits_hold_and_what_was_left_out_is_said(stack: LocalStack) -> None:
    command = "mkdir many; for i in $(seq 30); do head -c 1000 /dev/zero > many/$i; done; head -c 9000 /dev/zero > big"
    declared = [
        {"path": "many/*", "max_files": 5},
        {"path": "many", "max_bytes": 4500},
        {"path": "big", "max_bytes": 100},
    ]
    found = run(stack, shell_task("artifacts-limits", command, artifacts=declared)).artifacts
    files = [one for one in found if one.kind == "file" and one.where]
    assert len(files) == 5
    problems = {one.name: one.problem for one in found if one.problem}
    assert problems["many/*"] == "the limit of files was reached; 25 left out"
    assert "9000 bytes" in problems["big"] or "100 bytes" in problems["big"]
    (folder,) = [one for one in found if one.kind == "folder"]
    assert (folder.files, len(folder.refused)) == (4, 26)
