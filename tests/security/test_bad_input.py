"""Hostile and broken rollouts, whole: each ends with a clear outcome, never with a reward of zero that is not earned,
and the next one runs."""

from __future__ import annotations

import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from polarq.contracts import Boundary, RolloutState
from polarq.contracts.artifacts import Artifact
from polarq.contracts.rollout import RolloutResult
from polarq.contracts.sandbox import ExecCategory
from polarq.testing.stack import LocalStack
from polarq_worker.runtimes import cgroups
from tests.needs import not_here
from tests.runtimes.local_here import needs_bubblewrap
from tests.worker.conftest import ask, commands_with, shell_task, wait_until, write_scenario

S, B = RolloutState, Boundary
PATIENCE_S = 170.0


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalStack]:
    home: Path = tmp_path_factory.mktemp("bad")
    needs_bubblewrap()
    with LocalStack(home, scenario=str(write_scenario(home)), isolation="bubblewrap") as made:
        yield made


def run(stack: LocalStack, task: dict[str, Any]) -> RolloutResult:
    stack.client.submit(task)
    return stack.client.wait(task["task_id"], PATIENCE_S).results[0]


def named(result: RolloutResult) -> dict[str, Artifact]:
    return {artifact.name: artifact for artifact in result.artifacts}


def test_a_flood_of_output_is_cut_and_the_rollout_goes_on(stack: LocalStack) -> None:
    flood = "yes flood | head -c 150000000; yes x | head -c 50000000 >&2; true"
    result = run(stack, shell_task("bad-flood", f"{ask(1)}\n{flood}"))
    assert result.outcome.state is S.COMPLETED
    assert result.harness is not None
    (step,) = result.harness.steps
    assert step.truncated
    assert len(result.model_dump_json()) < 1 << 20
    log = named(result)["logs/agent/step.00.stdout"]
    assert 0 < log.size < 128 << 20
    assert Path(log.where).stat().st_size == log.size


def test_a_process_that_ignores_every_signal_ends_with_its_rollout(stack: LocalStack) -> None:
    stubborn = "trap '' TERM INT HUP; setsid sh -c \"trap '' TERM HUP; sleep 8765431\" & sleep 8765432; sleep 8765433"
    result = run(stack, shell_task("bad-stubborn", f"{ask(1)}\n{stubborn}", timeouts={"agent_s": 4}))
    assert (result.outcome.state, result.outcome.boundary) == (S.TIMED_OUT, B.HARNESS)
    wait_until(lambda: commands_with("sleep 876543") == [], PATIENCE_S)


ODD = """
mkdir -p out/closed; echo good > out/good; echo hidden > out/closed/file
mkfifo out/pipe; mknod out/device c 1 3 2>/dev/null || true; truncate -s 5G out/huge; truncate -s 5G huge
python3 -c 'import socket; socket.socket(socket.AF_UNIX).bind("out/socket")'
ln -s / out/root; ln out/good out/hard; chmod 4777 out/good
chown 12345:12345 out/closed/file out/closed 2>/dev/null || true; chmod 000 out/closed/file out/closed
"""


def test_files_of_every_odd_kind_lose_no_result(stack: LocalStack) -> None:
    declared = [{"path": "out"}, {"path": "huge"}]
    result = run(stack, shell_task("bad-files", f"{ask(1)}\n{ODD}", artifacts=declared))
    assert (result.outcome.state, result.reward and result.reward.outcome) == (S.COMPLETED, 1.0)
    found = named(result)
    assert "5368709120 bytes" in found["huge"].problem or "larger" in found["huge"].problem
    refused = {entry.path: entry.reason for entry in found["out.tar"].refused}
    assert {"pipe", "socket", "root", "huge"} <= set(refused)
    with tarfile.open(found["out.tar"].where) as archive:
        for member in archive:
            assert member.isfile() or member.isdir(), member.name
            assert member.mode & 0o7000 == 0
            assert (member.uid, member.gid) == (0, 0)
        names = archive.getnames()
    assert {"./good", "./hard"} <= set(names)
    assert run(stack, shell_task("bad-files-next", ask(1))).outcome.state is S.COMPLETED


BOMBS = """
import gzip, io, tarfile, zipfile
open("bomb.gz", "wb").write(gzip.compress(bytes(1 << 20), 9) * 5000)
nested = b"x"
for level in range(40):
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w", zipfile.ZIP_DEFLATED) as file:
        for copy in range(10):
            file.writestr(f"{level}.{copy}.zip", nested[:100_000])
    nested = packed.getvalue()
open("death.zip", "wb").write(nested)
with tarfile.open("links.tar", "w") as file:
    for name, kind, leads_to in (("../../up", b"0", ""), ("hard", b"1", "/etc/passwd"), ("soft", b"2", "/")):
        entry = tarfile.TarInfo(name)
        entry.type, entry.linkname = kind, leads_to
        file.addfile(entry)
"""


def test_archives_that_would_burst_are_left_as_they_are(stack: LocalStack) -> None:
    script = f"{ask(1)}\nmkdir out; cd out; python3 - <<'END'\n{BOMBS}END"
    declared = [{"path": "out"}, {"path": "out/*"}]
    result = run(stack, shell_task("bad-bombs", script, artifacts=declared))
    assert (result.outcome.state, result.reward and result.reward.outcome) == (S.COMPLETED, 1.0)
    found = named(result)
    assert {"out.tar", "out/bomb.gz", "out/death.zip", "out/links.tar"} <= set(found)
    assert not any(artifact.problem for artifact in found.values())
    with tarfile.open(found["out.tar"].where) as archive:
        assert sorted(archive.getnames()) == [".", "./bomb.gz", "./death.zip", "./links.tar"]
    assert found["out.tar"].size < 20_000_000
    assert Path(found["out/bomb.gz"].where).stat().st_size == found["out/bomb.gz"].size < 10_000_000


def test_memory_that_runs_out_is_said_as_such(stack: LocalStack) -> None:
    if "memory" not in cgroups.usable():
        not_here("this user may limit no memory (no control group to write to)")
    hog = "python3 -c 'x = bytearray(1 << 30); print(len(x))'"
    runtime = {"backend": "local", "memory_mb": 200}
    result = run(stack, shell_task("bad-memory", f"{ask(1)}\n{hog}", runtime=runtime))
    outcome = result.outcome
    assert (outcome.state, outcome.boundary, outcome.reason) == (S.FAILED, B.RUNTIME, "out_of_memory"), outcome
    assert (result.reward, result.outcome.trainable) == (None, False)


REPOSITORY = """
set -e; git init -q -b main repo; cd repo; git config user.name a; git config user.email a@b
echo bug > file; git add .; git commit -qm one; echo fixed > file; git commit -qam two; git tag v2
git reset -q --hard HEAD~1
"""


@pytest.mark.parametrize("scrub", [None, False])
def test_a_repositorys_future_is_hidden_from_the_harness_and_that_is_recorded(
    stack: LocalStack, scrub: bool | None
) -> None:
    prepare = [{"type": "exec", "command": REPOSITORY}]
    runtime = {"backend": "local", "prepare": prepare, "scrub_history": scrub}
    evaluator = {
        "strategy": "test_on_output",
        "config": {
            "repo_dir": "/polar/session/repo",
            "test_command": "grep -q fixed file && echo PASSED t || echo FAILED t",
            "expected_output_json": {"t": "PASSED"},
        },
    }
    looks = "git checkout -q v2 2>/dev/null || git checkout -q HEAD@{1} 2>/dev/null || echo tried > tried"
    cheat = f"{ask(1)}\ncd repo; {looks}"
    for turn in ("first", "second"):
        task_id = f"bad-history-{turn}-{'on' if scrub is None else 'off'}"
        result = run(stack, shell_task(task_id, cheat, runtime=runtime, evaluator=evaluator))
        assert result.reward is not None, result.outcome
        assert result.reward.outcome == (0.0 if scrub is None else 1.0), result.reward.report
        assert result.sandbox is not None
        told = [(cut.repository, cut.refs_removed, cut.commits_removed, cut.problem) for cut in result.sandbox.history]
        assert told == ([("/polar/session/repo", 1, 1, "")] if scrub is None else [])
        counts = result.sandbox.exec_times.counts
        assert counts[ExecCategory.AGENT] == 1
        assert counts[ExecCategory.VERIFIER] >= 1
        assert counts[ExecCategory.REPOSITORY] >= 2
        timing = result.timing
        assert timing.sandbox_start_s is not None or result.sandbox.origin in {"warm", "reused"}
        parts = (timing.agent_setup_s or 0) + (timing.agent_exec_s or 0) + (timing.agent_postprocess_s or 0)
        assert 0 < parts <= (timing.agent_s or 0) + 0.001
        assert timing.sandbox_stop_s is not None
        assert timing.post_queue_s is not None


def test_a_task_that_insists_on_hidden_history_fails_where_there_is_none_to_hide(stack: LocalStack) -> None:
    result = run(stack, shell_task("bad-no-history", ask(1), runtime={"backend": "local", "scrub_history": True}))
    assert (result.outcome.state, result.outcome.boundary) == (S.FAILED, B.PREPARE)
    assert result.outcome.reason == "history_not_scrubbed"
    assert "runtime.scrub_history" in result.outcome.message
