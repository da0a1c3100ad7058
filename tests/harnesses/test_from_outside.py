"""The page docs/adding-a-harness.md, done as it says: its blocks are what is run here."""

from __future__ import annotations

import json
import os
import re
import signal
import stat
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml

from polarq.contracts.rollout import RolloutState
from polarq.contracts.task import Task
from polarq.testing.stack import LocalStack

from ..leftovers import running
from ..runtimes.local_here import needs_bubblewrap

PAGE = Path(__file__).parents[2] / "docs" / "adding-a-harness.md"
PROGRAM = Path(__file__).with_name("pocket.py")
SCENARIO = """
name: pocket
scripts:
  - name: works
    turns:
      - tool_calls: [{name: sh, arguments: {command: printf hello > hello.txt}}]
      - content: It is written.
"""

pytestmark = pytest.mark.slow


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", PAGE.read_text("utf-8"), re.MULTILINE | re.DOTALL)


@pytest.fixture
def outside(tmp_path: Path) -> dict[str, str]:
    """A package that is installed beside polarq, and its program on PATH: the environment that has both."""
    program = tmp_path / "programs" / "bin" / "pocket"
    program.parent.mkdir(parents=True)
    program.write_text(PROGRAM.read_text("utf-8").replace("/usr/bin/env python3", "/usr/bin/python3"), "utf-8")
    program.chmod(program.stat().st_mode | stat.S_IXUSR | stat.S_IXGRP | stat.S_IXOTH)
    site = tmp_path / "site"
    described = site / "pocket_harness-1.0.dist-info"
    described.mkdir(parents=True)
    [code] = blocks("python")
    (site / "pocket_harness.py").write_text(code, "utf-8")
    (site / "pocket.yaml").write_text(blocks("yaml")[1], "utf-8")
    (described / "METADATA").write_text("Metadata-Version: 2.1\nName: pocket-harness\nVersion: 1.0\n", "utf-8")
    [toml] = blocks("toml")
    points = tomllib.loads(toml)["project"]["entry-points"]["polarq.harnesses"]
    lines = [f"{name} = {value}" for name, value in points.items()]
    (described / "entry_points.txt").write_text("\n".join(["[polarq.harnesses]", *lines, ""]), "utf-8")
    path = [str(program.parent), str(Path(sys.executable).parent), os.environ["PATH"]]
    python = [str(site), *filter(None, [os.environ.get("PYTHONPATH")])]
    # A cache of its own: what another run of this test left there has its program somewhere else.
    cache = {"XDG_CACHE_HOME": str(tmp_path / "cache")}
    return {"PATH": os.pathsep.join(path), "PYTHONPATH": os.pathsep.join(python), **cache}


def task(data: dict[str, Any]) -> Task:
    runtime = {"backend": "local", "workdir": "/polar/session/repo"}
    prepare = {"type": "exec", "command": "mkdir -p repo && git -C repo init -q"}
    look = '[ "$(cat hello.txt)" = hello ] && echo "PASSED t::hello"'
    config = {"repo_dir": "/polar/session/repo", "test_command": look, "expected_output_json": {"t::hello": "PASSED"}}
    return Task.parse(
        {
            "timeout_seconds": 240,
            **data,
            "runtime": {**runtime, "prepare": [prepare]},
            "evaluator": {"strategy": "test_on_output", "config": config},
        }
    )


def test_a_command_and_a_preset_of_another_package_are_harnesses(tmp_path: Path, outside: dict[str, str]) -> None:
    scenario = tmp_path / "scenario.yaml"
    scenario.write_text(SCENARIO, "utf-8")
    by_shell = yaml.safe_load(blocks("yaml")[0])
    by_preset = {**by_shell, "task_id": "by-preset", "agent": {"harness": "pocket"}}
    with LocalStack(tmp_path / "stack", scenario=str(scenario), env=outside) as stack:
        for data in (by_shell, by_preset):
            stack.client.submit(task(data))
        results = [stack.client.wait(name, 240).results[0] for name in ("by-shell", "by-preset")]
    for result in results:
        assert (result.outcome.state, result.outcome.reason) == (RolloutState.COMPLETED, "ok"), result.outcome
        assert result.reward is not None
        assert result.reward.outcome == 1.0
        assert result.trajectory is not None
        assert result.trajectory.fidelity.calls == 2
    report = results[1].harness
    assert report is not None
    assert report.metadata["program"]["origin"] == "image"
    assert report.metadata["program"]["version"] == "1.2.0"
    assert ".polarq/pocket/session.json" in [one.name for one in results[1].artifacts]


def test_a_preset_of_another_package_is_listed_shown_and_checked(outside: dict[str, str]) -> None:
    needs_bubblewrap()

    def polarq(*words: str) -> dict[str, Any]:
        command = [sys.executable, "-m", "polarq.cli", "harness", *words, "--json"]
        said = subprocess.run(
            command, env={**os.environ, **outside}, capture_output=True, text=True, timeout=600, check=False
        )
        assert said.stdout, said.stderr
        found: dict[str, Any] = json.loads(said.stdout)
        return found

    assert "pocket" in [one["harness"] for one in polarq("list")["harnesses"]]
    shown = polarq("show", "pocket")
    assert (shown["version"], shown["supported"]) == ("1.2.0", ">=1.1,<1.3")
    assert shown["settings"]["max_turns"] == {"type": "int = 50", "about": ""}
    assert shown["settings"]["version"]["about"].startswith("Release to run; None: one in the supported range")
    # It exits with 0 after a call that was refused or failed: that is told from success all the same.
    wanted = ("works", "continues", "model_error", "overflow", "busy", "mcp", "skills", "limits")
    checked = polarq("check", "pocket", *(word for name in wanted for word in ("--only", name)))
    found = {one["check"]: one for one in checked["findings"]}
    assert {name for name in wanted if not found[name]["ok"]} == {"busy"}, found
    assert {name for name in wanted if found[name]["refused"]} == {"mcp", "skills"}
    assert found["skills"]["detail"] == "skills_path: Pocket Agent has no skills; leave it out"
    assert "failed/model/model_failed" in found["busy"]["detail"], "it does not try again"
    assert found["works"]["version"] == "1.2.0"


def check(outside: dict[str, str], tmp_path: Path, *only: str) -> subprocess.Popen[str]:
    """`polarq harness check pocket`, with a folder of its own for what is temporary."""
    (tmp_path / "temporary").mkdir()
    words = ["harness", "check", "pocket", *(word for name in only for word in ("--only", name))]
    return subprocess.Popen(
        [sys.executable, "-m", "polarq.cli", *words],
        env={**os.environ, **outside, "TMPDIR": str(tmp_path / "temporary")},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def left_in(tmp_path: Path) -> list[str]:
    """Programs that still run, and temporary files. The counter of ports is for all programs of all times."""
    files = [path.name for path in (tmp_path / "temporary").iterdir()]
    return [*running(tmp_path).values(), *(name for name in files if not name.startswith("polarq-testing-ports"))]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_check_that_is_ended_in_the_middle_leaves_nothing(
    tmp_path: Path, outside: dict[str, str], number: signal.Signals
) -> None:
    needs_bubblewrap()
    with check(outside, tmp_path, "works", "timed_out") as program:
        assert program.stdout is not None
        assert "works" in program.stdout.readline()
        assert "polarq_proxy" in " ".join(running(tmp_path).values())
        # The second one's model is silent for ten seconds and more.
        program.send_signal(number)
        said, complained = program.communicate(timeout=120)
    assert (program.returncode, said, complained) == (128 + number, "", "")
    assert left_in(tmp_path) == []
    assert list((tmp_path / "cache").rglob("sandboxes/*")) == []


def test_a_check_whose_worker_does_not_start_says_why_and_leaves_nothing(
    tmp_path: Path, outside: dict[str, str]
) -> None:
    needs_bubblewrap()
    state = tmp_path / "cache" / "polarq" / "conformance" / "local-pocket" / "node0"
    state.parent.mkdir(parents=True)
    state.write_text("no folder", "utf-8")
    with check(outside, tmp_path) as program:
        said, complained = program.communicate(timeout=120)
    assert (program.returncode, said) == (1, ""), complained
    assert complained.startswith("polarq: the worker node0 ended with code "), complained
    assert "polarq: | " in complained
    assert left_in(tmp_path) == []
