"""The calculator scenario: its commands really run, and the real mini-swe-agent really follows it.

No outcome here comes from a script's name: the repository's own tests are run on what the agent left behind.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from polarq.contracts.task import Task
from polarq.testing.calculator import REPO, TASK_FILE
from polarq.testing.inference import ScriptedInference, expected_logprobs, load_scenario

from ...needs import not_here

SCENARIO = load_scenario("calculator")
TASK = Task.load(TASK_FILE)
SCORING = TASK.evaluator.config if TASK.evaluator else {}
EXAMPLE = Path(__file__).parents[3] / "examples" / "calculator" / "task.yaml"
TESTS = re.findall(r"def (test_\w+)", (REPO / "tests" / "test_calculator.py").read_text())
PASSED_BY_THE_UNTOUCHED = 4
PASSED_AFTER = {"rewrites": len(TESTS), "breaks": 0, "edits": len(TESTS), "gives_up": PASSED_BY_THE_UNTOUCHED}
AGENT_LIMIT_S = 150


@pytest.fixture
def repo(tmp_path: Path) -> Path:
    return copy_of_the_repo(tmp_path / "repo")


def copy_of_the_repo(target: Path) -> Path:
    shutil.copytree(REPO, target, ignore=shutil.ignore_patterns("__pycache__"))
    return target


def outcomes(repo: Path) -> dict[str, str]:
    """What the repository's tests say: {test id: PASSED|FAILED|ERROR}."""
    done = subprocess.run(
        ["bash", "-c", SCORING["test_command"]], cwd=repo, check=False, capture_output=True, text=True
    )
    found = {name: outcome for outcome, name in (line.split(" ", 1) for line in done.stdout.splitlines())}
    assert (done.returncode == 0) == (set(found.values()) == {"PASSED"}), done.stderr
    return found


def passed(repo: Path) -> int:
    return list(outcomes(repo).values()).count("PASSED")


def test_the_untouched_repository_fails_some_tests_and_passes_others(repo: Path) -> None:
    found = outcomes(repo)

    assert sorted(found) == sorted(f"tests/test_calculator.py::CalculatorTest::{name}" for name in TESTS)
    assert passed(repo) == PASSED_BY_THE_UNTOUCHED
    assert set(found.values()) == {"PASSED", "FAILED", "ERROR"}


def test_the_task_expects_exactly_the_tests_that_there_are(repo: Path) -> None:
    assert SCORING["expected_output_json"] == dict.fromkeys(outcomes(repo), "PASSED")


def test_the_task_among_the_examples_is_the_one_that_is_installed() -> None:
    def told(task: Task) -> dict[str, Any]:
        fields = task.model_dump(exclude={"task_id"})
        for action in fields["runtime"]["prepare"]:
            action["source"] = action["source"] and Path(action["source"]).resolve()
        return fields

    assert told(Task.load(EXAMPLE)) == told(TASK)


def test_a_module_that_cannot_be_imported_is_one_error_and_no_pass(repo: Path) -> None:
    (repo / "calculator.py").write_text("def evaluate(:\n")

    assert outcomes(repo) == {"tests/test_calculator.py": "ERROR"}


@pytest.mark.parametrize("shell", ["bash", "sh"])
@pytest.mark.parametrize("name", PASSED_AFTER)
def test_a_scripts_commands_do_to_the_repository_what_its_agent_claims_or_not(
    repo: Path, name: str, shell: str
) -> None:
    script = next(script for script in SCENARIO.scripts if script.name == name)

    commands = [call.arguments["command"] for turn in script.turns for call in turn.tool_calls]
    for command in commands:
        done = subprocess.run([shell, "-c", command], cwd=repo, check=False, capture_output=True, text=True)
        assert done.returncode == 0 and done.stdout, done.stderr

    assert done.stdout == "COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT\n"
    assert passed(repo) == PASSED_AFTER[name]
    unchanged = (repo / "calculator.py").read_bytes() == (REPO / "calculator.py").read_bytes()
    assert unchanged == (name == "gives_up")
    for path in (REPO / "tests").glob("*.py"):
        assert (repo / "tests" / path.name).read_bytes() == path.read_bytes()


def test_four_scripts_take_three_to_five_turns_and_reason_in_each() -> None:
    assert SCENARIO.script_names == tuple(PASSED_AFTER)
    for script in SCENARIO.scripts:
        assert 3 <= len(script.turns) <= 5
        assert all(len(turn.content) > 20 and turn.tool_calls for turn in script.turns)


def agent_environment(base_url: str, home: Path) -> dict[str, str]:
    """What mini-swe-agent needs, and nothing of ours. Byte-code may be written: without it litellm takes three
    times as long to import."""
    home.mkdir()
    return {
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
        "HOME": str(home),
        "OPENAI_API_KEY": "secret",
        "OPENAI_BASE_URL": f"{base_url}/v1",
        "MSWEA_CONFIGURED": "true",
        "MSWEA_COST_TRACKING": "ignore_errors",
        "MSWEA_SILENT_STARTUP": "1",
        "LITELLM_LOCAL_MODEL_COST_MAP": "True",
    }


async def run_mini(server: ScriptedInference, script: str, folder: Path) -> dict[str, Any]:
    """One run of the unmodified `mini` program in its own copy of the repository; returns its own record of it."""
    repo = copy_of_the_repo(folder / "repo")
    record = folder / "record.json"
    model = f"openai/{server.options.served_model_name}:{script}"
    command = ["mini", "-m", model, "-t", TASK.instruction, "-y", "--exit-immediately", "-o", str(record)]
    process = await asyncio.create_subprocess_exec(
        *command,
        cwd=repo,
        env=agent_environment(server.base_url, folder / "home"),
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )
    try:
        output, _ = await asyncio.wait_for(process.communicate(), AGENT_LIMIT_S)
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    assert process.returncode == 0, output.decode()
    return dict(json.loads(record.read_text()))


@pytest.mark.slow
async def test_the_real_mini_swe_agent_plays_all_four_scripts(tmp_path: Path) -> None:
    if shutil.which("mini", path=str(Path(sys.executable).parent)) is None:
        not_here("mini-swe-agent is not installed")
    async with ScriptedInference(scenario=SCENARIO, served_model_name="demo") as server:
        folders = {script.name: tmp_path / script.name for script in SCENARIO.scripts}
        for folder in folders.values():
            folder.mkdir()
        records = dict(
            zip(
                folders,
                await asyncio.gather(*(run_mini(server, name, folder) for name, folder in folders.items())),
                strict=True,
            )
        )

    assert {name: passed(folder / "repo") for name, folder in folders.items()} == PASSED_AFTER
    for script in SCENARIO.scripts:
        info = records[script.name]["info"]
        assert info["exit_status"] == "Submitted"
        assert info["model_stats"]["api_calls"] == len(script.turns)
        calls = [call for call in server.ledger if call.script == script.name]
        assert [call.turn_index for call in calls] == list(range(len(script.turns)))
        whole: list[int] = []
        for call in calls:  # the agent sends its history back unchanged, so each prompt continues the ids before it
            assert list(call.prompt_ids[: len(whole)]) == whole
            assert call.logprobs == expected_logprobs(call.prompt_ids, call.sampled_ids)
            whole = [*call.prompt_ids, *call.sampled_ids]
