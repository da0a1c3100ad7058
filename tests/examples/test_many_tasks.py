"""The examples of many tasks, by the commands of their READMEs, in local sandboxes with a scripted model.

mini-swe-agent works on SWE-bench, a small agent of ours on the rest.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml

from examples import many
from examples.offline_sft import check
from examples.swe_gym import local as of_swe_gym
from examples.swebench_verified import local
from polarq.client import Client
from polarq.contracts.rollout import TaskResult
from polarq.contracts.task import Task
from polarq.testing.inference.scenario import load_scenario
from polarq.testing.stack import LocalStack
from polarq.topology.models import LimitsSection
from tests.worker.conftest import shell_task

from .rig import EXAMPLES

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1500)]

SCENARIOS = ("offline_sft", "swebench_verified", "terminal_tasks")
"""The first one's scripts are said by the number of the sample, the others' are named by the tasks."""
LOST = "ours__lost-1"
"""A row whose repository is not there."""


@dataclass(frozen=True)
class Ran:
    """The stack, the folder that the programs wrote to, and how each ended."""

    stack: LocalStack
    folder: Path
    programs: dict[str, subprocess.CompletedProcess[str]]

    def again(self, *words: str) -> subprocess.CompletedProcess[str]:
        return program(self.stack, *words)

    def ended(self, name: str) -> dict[str, many.Ended]:
        return {ended.name: ended for ended in many.read(self.folder / f"{name}.jsonl")}


def program(stack: LocalStack, *words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", *words]
    return subprocess.run(
        command, cwd=EXAMPLES.parent, env=stack.env, capture_output=True, text=True, timeout=1200, check=False
    )


def commands(folder: Path) -> dict[str, list[str]]:
    rows = local.make(folder / "swebench")
    lost = {**rows[0], "instance_id": LOST}
    (folder / "swebench/rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in [*rows, lost]))
    of_swe_gym.make(folder / "swe_gym")
    swebench, swe_gym = (str(folder / name) for name in ("swebench", "swe_gym"))
    small = {name: ["--task", str(with_small_agent(name, folder))] for name in ("swe_gym", *SCENARIOS)}
    words = {
        "swebench_verified": ["run", f"{swebench}/rows.jsonl", "--local", swebench],
        "swe_gym": ["run", f"{swe_gym}/rows.jsonl", "--local", swe_gym, "-n", "1", "--limit", "1", *small["swe_gym"]],
        "terminal_tasks": ["run", "--local", *small["terminal_tasks"]],
        "offline_sft": ["generate", "-n", "2", *small["offline_sft"]],
    }
    return {
        name: [f"examples.{name}.{module}", *rest, "--results", str(folder / f"{name}.jsonl")]
        for name, (module, *rest) in words.items()
    }


def with_small_agent(name: str, folder: Path) -> Path:
    """The example's task file, but for the agent."""
    file = EXAMPLES / name / "task.yaml"
    program = (
        f"python3 - <<'SMALL_AGENT'\n{Path(__file__).with_name('small_agent.py').read_text('utf-8')}\nSMALL_AGENT\n"
    )
    agent = {"harness": "shell", "custom_shell": {"command": program}}
    folder.mkdir(exist_ok=True)
    small = folder / f"{name}.yaml"
    small.write_text(yaml.safe_dump({**yaml.safe_load(file.read_text("utf-8")), "agent": agent}), "utf-8")
    return small


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ran]:
    """All of them at the same time, over one worker."""
    folder: Path = tmp_path_factory.mktemp("many")
    scripts = [script for name in SCENARIOS for script in load_scenario(EXAMPLES / name / "scenario.yaml").scripts]
    scenario = folder / "scenario.yaml"
    told = {"name": "many", "scripts": [script.model_dump(mode="json", exclude_none=True) for script in scripts]}
    scenario.write_text(yaml.safe_dump(told), "utf-8")
    node = {"max_run_workers": 3}
    with LocalStack(
        folder / "stack", scenario=str(scenario), nodes={"node0": node}, isolation="bubblewrap", bound=True
    ) as stack:
        with ThreadPoolExecutor() as threads:
            runs = {name: threads.submit(program, stack, *words) for name, words in commands(folder).items()}
        yield Ran(stack, folder, {name: run.result() for name, run in runs.items()})


def test_swebench_grades_what_the_agents_did(ran: Ran) -> None:
    ended = ran.programs["swebench_verified"]
    assert ended.stdout.splitlines()[-1] == "3 tasks: 1 resolved, 1 unresolved, 1 failed (prepare 1)", ended
    assert (ended.returncode, ended.stderr) == (1, "")
    verdicts = ran.ended("swebench_verified")
    assert {name: one.rewards for name, one in verdicts.items()} == {
        "ours__roman-4": [1.0],
        "ours__slug-2": [0.0],
        LOST: [None],
    }
    result = ran.stack.client.rollout(f"{verdicts['ours__slug-2'].task_id}.0")
    assert result.reward is not None
    test = "test_signs_in_a_row_are_one_hyphen"
    assert result.reward.report["tests"] == {
        "FAIL_TO_PASS.success": 1,
        "FAIL_TO_PASS.failure": 1,
        "FAIL_TO_PASS.failed": [f"{test} (tests.test_slug.Slug.{test})"],
        "PASS_TO_PASS.success": 2,
    }


def test_the_solution_is_not_in_the_agents_sandbox(ran: Ran) -> None:
    task_id = ran.ended("swebench_verified")["ours__roman-4"].task_id
    result = ran.stack.client.rollout(f"{task_id}.0")
    assert result.trajectory is not None
    seen = json.dumps([trace.response_messages for trace in result.trajectory.traces])
    assert " base" in seen  # the agent looks at the whole history
    assert " gold" not in seen


def test_what_has_ended_is_not_submitted_again(ran: Ran) -> None:
    words = [*commands(ran.folder / "twice")["swebench_verified"][:-1], str(ran.folder / "swebench_verified.jsonl")]
    lines = (ran.folder / "swebench_verified.jsonl").read_text()
    ended = ran.again(*words, "--limit", "2")
    assert ended.stdout.splitlines() == [
        f"2 of 2 have ended before, see {ran.folder}/swebench_verified.jsonl",
        "2 tasks: 1 resolved, 1 unresolved, 0 failed",
    ], ended
    assert ended.returncode == 0
    assert (ran.folder / "swebench_verified.jsonl").read_text() == lines


def test_a_run_that_lost_its_results_file_finds_its_tasks_again(ran: Ran) -> None:
    words = commands(ran.folder / "lost")["terminal_tasks"]
    ended = ran.again(*words)
    assert ended.stdout.splitlines()[-1] == ran.programs["terminal_tasks"].stdout.splitlines()[-1], ended
    task_id = ran.ended("terminal_tasks")["word_store"].task_id
    assert {one.task_id for one in many.read(ran.folder / "lost/terminal_tasks.jsonl")} == {
        one.task_id for one in ran.ended("terminal_tasks").values()
    }
    assert ran.stack.client.record(task_id).rollouts[0].attempt == 1


def test_pytests_names_grade_a_row_of_swe_gym(ran: Ran) -> None:
    ended = ran.programs["swe_gym"]
    assert ended.stdout.splitlines() == [
        "resolved   ours__roman-4  reward 1",
        "1 task: 1 resolved, 0 unresolved, 0 failed",
    ], ended


def test_a_harbor_verifier_grades_a_service_that_goes_on(ran: Ran) -> None:
    # Field case E10.
    ended = ran.programs["terminal_tasks"]
    assert (ended.returncode, ended.stderr) == (0, ""), ended
    assert ended.stdout.splitlines()[-1] == "3 tasks: 2 resolved, 1 unresolved, 0 failed"
    rewards = {name: one.rewards for name, one in ran.ended("terminal_tasks").items()}
    assert rewards == {"word_store": [1.0], "log_report": [pytest.approx(2 / 3)], "mend_script": [1.0]}


def test_the_best_attempts_become_fine_tuning_data(ran: Ran, capsys: pytest.CaptureFixture[str]) -> None:
    ended = ran.programs["offline_sft"]
    assert ended.stdout.splitlines()[-1] == "2 tasks: 2 resolved, 0 unresolved, 0 failed", ended
    chat = ran.folder / "chat.jsonl"
    wanted = ["--run", "offline_sft", "--format", "sft", "--min-reward", "1", "--best-of-group", "2"]
    exported = program(ran.stack, "polarq.cli", "export", *wanted, "--to", str(chat))
    assert exported.returncode == 0, exported
    assert exported.stdout.splitlines()[0].startswith("2 records of 2 rollouts"), exported
    assert "left out: 1 the same conversation as another" in exported.stdout
    assert check.main(chat) == 0
    assert capsys.readouterr().out.splitlines() == [
        "2 conversations of 2 tasks, 4 answers to learn from, 0 broken",
        "  1 of offline_sft-leap_years",
        "  1 of offline_sft-word_count",
    ]


def test_what_failed_is_submitted_again_where_that_is_asked(ran: Ran) -> None:
    (ran.folder / "swebench/ours__roman-4").rename(ran.folder / "swebench" / LOST)
    rows = [f"{ran.folder}/swebench/rows.jsonl", "--local", f"{ran.folder}/swebench", "--ids", LOST]
    words = ["examples.swebench_verified.run", *rows, "--task", f"{ran.folder}/swebench_verified.yaml"]
    results = ran.folder / "swebench_verified.jsonl"
    assert ran.again(*words, "--results", str(results)).returncode == 1
    told = ran.again(*words, "--results", str(results)).stdout.splitlines()[0]
    assert told == f"1 of 1 have ended before, see {results}; 1 without a reward, which --again runs as new tasks"
    ended = ran.again(*words, "--results", str(results), "--again")
    assert ended.stdout.splitlines() == [
        f"resolved   {LOST}  reward 1",
        "1 task: 1 resolved, 0 unresolved, 0 failed",
    ], ended
    assert [one.rewards for one in many.read(results) if one.name == LOST] == [[None], [1.0]]


class Waiting(Client):
    """The node takes nothing until somebody waits for results."""

    def groups(self, *args: Any, **more: Any) -> Iterator[TaskResult]:
        self.resume_node("node0")
        return super().groups(*args, **more)


def test_a_full_queue_is_filled_again_as_it_empties(ran: Ran) -> None:
    tasks = {f"full{n}": Task.parse(shell_task(f"full{n}", "true")) for n in range(4)}
    with Waiting(ran.stack.topology, ran.stack.settings) as client:
        before = client.limits().limits
        client.set_limits(LimitsSection(max_queued=2))
        client.pause_node("node0")
        try:
            assert {ended.name for ended in many.play(client, tasks)} == set(tasks)
        finally:
            client.set_limits(before)
