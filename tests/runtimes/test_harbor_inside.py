"""What runs a command inside a Harbor environment, and what its answers become; on this machine's own bash."""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
from pathlib import Path

import pytest

from polarq.contracts.rollout import ExecKind
from polarq_worker.runtimes.base import ExecResult, Host
from polarq_worker.runtimes.harbor.commands import INSIDE
from polarq_worker.runtimes.harbor.orders import result_of, write_order
from polarq_worker.runtimes.harbor.runtime import HarborRuntime

from .test_harbor import harbor_spec


class Inside:
    """The script in a folder of its own, as in a sandbox."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        shutil.copy(INSIDE, folder / "inside.sh")
        self.number = 0

    def run(
        self,
        command: str | list[str],
        *,
        timeout_ms: int = 100_000,
        half: int = 1000,
        env: dict[str, str] | None = None,
        stdin: bytes = b"",
        cwd: Path | None = None,
    ) -> ExecResult:
        self.number += 1
        order = write_order(self.folder / str(self.number), command, env or {}, stdin)
        where = str(cwd or self.folder)
        words = ["bash", str(self.folder / "inside.sh"), "run", str(order), f"t{self.number}", str(timeout_ms)]
        done = subprocess.run([*words, str(half), where], capture_output=True, text=True, check=False, cwd="/")
        answer = {words[0]: words[1:] for line in done.stdout.splitlines() if (words := line.split())}
        return result_of(answer, 0.0, where, command if isinstance(command, str) else command[0])


@pytest.fixture
def inside(tmp_path: Path) -> Inside:
    return Inside(tmp_path)


def test_an_exit_code_and_both_streams_come_apart(inside: Inside) -> None:
    result = inside.run("printf 'a\\0b'; echo err >&2; exit 137")
    assert (result.kind, result.exit_code) == (ExecKind.EXITED, 137)
    assert (result.stdout, result.stderr) == (b"a\0b", b"err\n")


def test_a_signal_is_told_from_the_exit_code_of_its_number(inside: Inside) -> None:
    result = inside.run("kill -9 $$")
    assert (result.kind, result.exit_code, result.signal) == (ExecKind.SIGNALLED, None, 9)
    assert inside.run("sleep 0.2; kill -TERM $$").signal == 15


def test_a_list_is_an_argv_and_the_environment_comes_by_file(inside: Inside) -> None:
    result = inside.run(["bash", "-c", 'cat; echo "$1|$A"', "x", "two words"], env={"A": "b\nc"}, stdin=b"fed ")
    assert result.stdout == b"fed two words|b\nc\n"


def test_output_keeps_its_head_and_tail(inside: Inside) -> None:
    result = inside.run("echo first; head -c 100000 /dev/zero; echo last", half=50)
    assert result.truncated
    assert result.stdout_bytes == 100_011
    assert result.stdout.startswith(b"first\n") and result.stdout.endswith(b"last\n")
    assert len(result.stdout) < 200


def test_a_missing_program_and_a_missing_folder_are_said(inside: Inside, tmp_path: Path) -> None:
    missing = inside.run(["no-such-program"])
    assert missing.kind is ExecKind.COULD_NOT_START
    assert "no-such-program" in missing.message
    nowhere = inside.run("true", cwd=tmp_path / "nowhere")
    assert nowhere.kind is ExecKind.COULD_NOT_START
    assert "nowhere" in nowhere.message


def test_a_timeout_ends_also_what_left_the_session(inside: Inside, tmp_path: Path) -> None:
    script = "(setsid bash -c 'echo $$ > stray; sleep 1000' &); sleep 1000 & echo $! > child; echo partial; wait"
    result = inside.run(script, timeout_ms=3000)
    assert (result.kind, result.stdout, result.message) == (ExecKind.TIMED_OUT, b"partial\n", "")
    for name in ("stray", "child"):
        status = Path(f"/proc/{int((tmp_path / name).read_text())}/stat")
        assert not status.exists() or status.read_text().rpartition(")")[2].split()[0] == "Z"


def test_a_timeout_ends_nothing_else_of_the_machine(inside: Inside, tmp_path: Path) -> None:
    # It lost its parent while the command ran, and the machine's first process has it now.
    script = "env -i setsid bash -c 'echo $$ > other; exec sleep 1000'"
    order = f"until [ -e go ]; do sleep 0.01; done; ({script} &)"
    other = subprocess.Popen(["bash", "-c", order], cwd=tmp_path)
    inside.run("touch go; until [ -s other ]; do sleep 0.01; done; sleep 1000", timeout_ms=3000)
    other.wait()
    pid = int((tmp_path / "other").read_text())
    try:
        assert Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "S"
    finally:
        os.kill(pid, 9)


def test_what_a_command_leaves_behind_goes_on(inside: Inside, tmp_path: Path) -> None:
    assert inside.run("setsid sleep 1000 & echo $! > pid").ok
    pid = int((tmp_path / "pid").read_text())
    try:
        assert Path(f"/proc/{pid}").exists()
    finally:
        os.kill(pid, 9)


def test_without_the_package_the_one_problem_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    [problem] = HarborRuntime.problems(harbor_spec(), Host())
    assert "harbor" in problem
    assert problem.startswith("backend: ")
