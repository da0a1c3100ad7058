"""The real `mini` program, unmodified, against the scripted inference server."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from polarq.contracts.rollout import ExecKind, HarnessReport
from polarq.contracts.specs import AgentSpec
from polarq.contracts.task import Task
from polarq.errors import InvalidTask
from polarq.testing.calculator import REPO, TASK_FILE
from polarq.testing.inference.server import ScriptedInference
from polarq_worker.harnesses.base import run_harness
from polarq_worker.harnesses.create import create_harness
from polarq_worker.harnesses.environment import prepare_env
from polarq_worker.harnesses.mini_swe_agent import MiniSweAgentHarness, yaml_string
from polarq_worker.runtimes.local import LocalRuntime
from polarq_worker.stages.prepare import PrepareFailed, prepare
from tests.harnesses.conftest import MakeContext

INSTRUCTION = Task.load(TASK_FILE).instruction
MODEL = "scripted"
"""What the scripted server serves. (A proxy, which is not in these tests, serves its model whatever is asked for.)"""
TEST_COMMAND = "python3 -m tests.report"


async def run(
    runtime: LocalRuntime, make_context: MakeContext, base_url: str, instruction: str = INSTRUCTION, **fields: Any
) -> HarnessReport:
    context = make_context(instruction, base_url=base_url, agent={"harness": "mini_swe_agent", **fields})
    harness = create_harness(context.task.agent, [])
    env = prepare_env(runtime.spec, runtime.layout)
    await prepare(runtime, harness.recipe(), env=env, timeout_s=150, upload_roots=[])
    return await run_harness(harness, runtime, context, timeout_s=150)


@pytest.mark.slow
async def test_it_works_on_the_repository_and_submits(runtime: LocalRuntime, make_context: MakeContext) -> None:
    await runtime.put_dir(REPO, "/polar/session/repo")
    async with ScriptedInference(scenario="calculator") as inference:
        report = await run(runtime, make_context, inference.base_url, model_name=MODEL)
    assert report.ok, report
    metadata = report.metadata
    assert metadata["exit_status"] == "Submitted"
    assert metadata["model_calls"] == len(inference.ledger)
    assert metadata["cost"] == 0
    assert metadata["mini_version"].startswith("2.4")
    trajectory = json.loads((runtime.host_log_dir / metadata["trajectory"]).read_text())
    assert INSTRUCTION in trajectory["messages"][1]["content"]
    tests = await runtime.exec(TEST_COMMAND, timeout_s=60)
    assert "FAILED" not in tests.stdout_text and tests.stdout_text.count("PASSED") == 10


@pytest.mark.slow
async def test_a_step_limit_is_the_programs_own_end(runtime: LocalRuntime, make_context: MakeContext) -> None:
    await runtime.put_dir(REPO, "/polar/session/repo")
    async with ScriptedInference(scenario="calculator") as inference:
        report = await run(
            runtime,
            make_context,
            inference.base_url,
            model_name=MODEL,
            settings={"step_limit": 2, "model_kwargs": {"temperature": 1e-05, "seed": 7}},
        )
        calls = list(inference.ledger)
    assert (report.ok, report.metadata["exit_status"], report.metadata["model_calls"]) == (True, "LimitsExceeded", 2)
    assert len(calls) == 2


@pytest.mark.slow
async def test_an_unreachable_model_is_a_failed_step_with_its_words(
    runtime: LocalRuntime, make_context: MakeContext
) -> None:
    report = await run(runtime, make_context, "http://127.0.0.1:9/s/secret", settings={"model_retry_attempts": 1})
    assert (report.ok, report.steps[0].kind) == (False, ExecKind.EXITED)
    assert report.steps[0].exit_code == 1
    assert "InternalServerError" in report.steps[0].stderr_tail.splitlines()[-1]
    assert report.metadata["exit_status"] == "InternalServerError"


async def test_a_program_that_is_nowhere_is_named_with_what_to_do(
    runtime: LocalRuntime, make_context: MakeContext, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("PATH", "/usr/bin:/bin")
    monkeypatch.setattr(sys, "executable", str(tmp_path / "bin/python"))
    nowhere = {"PIP_INDEX_URL": "http://127.0.0.1:9/simple", "PIP_RETRIES": "0", "PIP_CONFIG_FILE": "/dev/null"}
    runtime.spec = runtime.spec.model_copy(update={"env": nowhere})
    with pytest.raises(PrepareFailed, match=r"mini-swe-agent 2\.4\.6 cannot be installed.*put it in the image"):
        await run(runtime, make_context, "http://127.0.0.1:9")


def harness(**fields: Any) -> MiniSweAgentHarness:
    return MiniSweAgentHarness(AgentSpec.parse({"harness": "mini_swe_agent", **fields}))


def test_the_settings_become_the_programs_configuration(make_context: MakeContext) -> None:
    config = yaml.safe_load(
        harness(
            settings={
                "step_limit": 12,
                "model_kwargs": {"temperature": 1e-05, "stop": ["</s>"]},
                "command_timeout_s": 99,
                "model_class": "litellm_textbased",
            }
        ).config(make_context("Fix it."))
    )
    assert config == {
        "agent": {"step_limit": 12, "cost_limit": 0.0, "wall_time_limit_seconds": 0},
        "environment": {"timeout": 99},
        "model": {"model_kwargs": {"temperature": 1e-05, "stop": ["</s>"]}, "model_class": "litellm_textbased"},
        "run": {"task": "Fix it."},
    }


def test_the_instruction_is_in_no_argument(make_context: MakeContext) -> None:
    (step,) = harness(settings={"workdir": "/polar/session/x"}).steps(make_context("the instruction's own words"))
    assert "own words" not in f"{step}"
    assert step.cwd == "/polar/session/x"
    assert not {"OPENAI_BASE_URL", "OPENAI_API_KEY"} & set(step.env)


@pytest.mark.parametrize(
    ("name", "shown"),
    [(None, "openai/polarq"), ("Qwen/Qwen3.5-4B", "openai/Qwen/Qwen3.5-4B"), ("openai/M", "openai/M")],
)
def test_the_model_has_its_provider_in_front(name: str | None, shown: str, make_context: MakeContext) -> None:
    (step,) = harness(model_name=name).steps(make_context())
    assert f"--model={shown}" in str(step.command)


@settings(max_examples=200, deadline=None)
@given(st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"])))
def test_any_instruction_survives_the_configuration_file(text: str) -> None:
    assert yaml.safe_load(f"task: {yaml_string(text)}\n") == {"task": text}


def test_settings_it_cannot_use_are_refused_with_their_key() -> None:
    with pytest.raises(InvalidTask, match=r"agent\.settings: .*'step_limt', did you mean 'step_limit'"):
        harness(settings={"step_limt": 3})
    with pytest.raises(InvalidTask, match="skills_path"):
        harness(skills_path="/x")
