"""An agent that stops at a limit of its own: told from other ends, and scored by its tree."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import yaml

from polarq import bubblewrap
from polarq.contracts.endings import Ending
from polarq.contracts.rollout import Boundary, ExecKind, HarnessReport, Outcome, RolloutResult, RolloutState, StepReport
from polarq.contracts.specs import AgentSpec
from polarq.contracts.task import Task
from polarq.registry import plugin
from polarq.store.grants import GrantUse
from polarq.testing.calculator import TASK_FILE
from polarq.testing.conformance.bench import Bench, default_cache
from polarq.testing.conformance.scenario import load
from polarq.testing.inference.scenario import load_scenario
from polarq.testing.stack import LocalStack
from polarq_worker.harnesses.preset import Preset
from polarq_worker.harnesses.verdicts import CallsSeen
from polarq_worker.runtimes.local import LocalRuntime

from ..needs import not_here
from ..runtimes.local_here import needs_bubblewrap
from .conftest import MakeContext
from .test_presets import call

STEP_LIMIT = 12
MARK = "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"
CLAUDE = '{"type":"assistant"}\n{"type":"result","subtype":"error_max_turns","num_turns":2}\n'


def made(name: str) -> Preset:
    preset: Preset = plugin("harnesses", name)(AgentSpec.parse({"harness": name}))
    return preset


@pytest.mark.parametrize(
    ("name", "code", "metadata", "limit"),
    [
        ("mini_swe_agent", 0, {"exit_status": "LimitsExceeded"}, "LimitsExceeded"),
        ("mini_swe_agent", 0, {"exit_status": "Submitted"}, ""),
        ("mini_swe_agent", 0, {}, ""),
        ("claude_code", 1, {"exit_status": "error_max_turns"}, "error_max_turns"),
        ("claude_code", 1, {"exit_status": "error_during_execution"}, ""),
        ("gemini_cli", 53, {}, "max_turns"),
        ("gemini_cli", 1, {}, ""),
        ("qwen_code", 53, {}, "max_turns"),
        ("qwen_code", 55, {}, "max_tool_calls"),
        ("openhands_sdk", 0, {"exit_status": "MaxIterationsReached"}, "MaxIterationsReached"),
        ("openhands_sdk", 0, {"exit_status": "stuck"}, ""),
        ("terminus_2", 0, {"usage": {"complete": False, "error": None}}, "max_turns"),
        ("terminus_2", 0, {"usage": {"complete": True, "error": None}}, ""),
        ("terminus_2", 1, {"usage": {"complete": False, "error": "RuntimeError: x"}}, ""),
        ("terminus_2", 0, {}, ""),
        ("swe_agent", 0, {"exit_status": "submitted (exit_cost)"}, "exit_cost"),
        ("swe_agent", 0, {"exit_status": "submitted (exit_context)"}, ""),
        ("swe_agent", 0, {"exit_status": "submitted"}, ""),
    ],
)
def test_each_program_tells_of_its_limits_in_its_own_way(
    name: str, code: int, metadata: dict[str, Any], limit: str
) -> None:
    step = StepReport(kind=ExecKind.EXITED, exit_code=code)
    report = HarnessReport(name=name, ok=code == 0, steps=[step], metadata=metadata)
    verdict = made(name).judge(report, CallsSeen.of([call(0)], GrantUse()))
    assert (verdict.reason if verdict else "") == ("agent_limit" if limit else "")
    if verdict is not None:
        assert verdict.message == (
            f"the agent stopped at a limit of its own ({limit}); the harness ended with exit code {code}"
        )


@pytest.mark.parametrize(
    ("usage", "reason"),
    [
        ({"completed": False, "failed": False, "api_calls": 90}, "agent_limit"),
        ({"completed": False, "failed": False, "api_calls": 89}, None),
        ({"completed": False, "failed": True, "api_calls": 90}, None),
        ({"completed": True, "failed": False, "api_calls": 90}, None),
        ({}, None),
    ],
)
def test_hermes_says_that_it_did_not_complete(usage: dict[str, Any], reason: str | None) -> None:
    step = StepReport(kind=ExecKind.EXITED, exit_code=0)
    report = HarnessReport(name="hermes", ok=True, steps=[step], metadata={"usage": usage})
    verdict = made("hermes").judge(report, CallsSeen.of([call(0), call(1)], GrantUse()))
    assert (verdict.reason if verdict else None) == reason


@pytest.mark.parametrize(
    ("reply", "reason"),
    [({"content": "", "tool_calls": [{}]}, "agent_limit"), ({"content": "It is done."}, None)],
)
def test_goose_that_did_not_ask_again_after_its_tools_has_stopped_at_its_limit(
    reply: dict[str, Any], reason: str | None
) -> None:
    report = HarnessReport(name="goose", ok=True, steps=[StepReport(kind=ExecKind.EXITED, exit_code=0)])
    verdict = made("goose").judge(report, CallsSeen.of([call(0), call(1, reply=reply)], GrantUse()))
    assert (verdict.reason if verdict else None) == reason


def test_a_model_that_failed_at_the_limit_is_no_limit() -> None:
    step = StepReport(kind=ExecKind.EXITED, exit_code=0)
    report = HarnessReport(name="x", ok=True, steps=[step], metadata={"exit_status": "LimitsExceeded"})
    seen = CallsSeen.of([call(0)], GrantUse(last_problem="engine_fault: broke off", last_problem_seq=1))
    verdict = made("mini_swe_agent").judge(report, seen)
    assert verdict is not None
    assert verdict.reason == "model_failed"


@pytest.mark.parametrize("reason", ["agent_limit", "call_limit"])
def test_a_limit_of_the_agent_or_of_its_task_is_one_kind_of_end(reason: str) -> None:
    outcome = Outcome(state=RolloutState.FAILED, boundary=Boundary.HARNESS, reason=reason)
    assert outcome.ending is Ending.AGENT_LIMIT


@pytest.mark.parametrize(("printed", "status"), [(CLAUDE, "error_max_turns"), ("no JSON\n", None), ("", None)])
async def test_claude_codes_last_line_is_its_verdict(
    printed: str, status: str | None, runtime: LocalRuntime, make_context: MakeContext
) -> None:
    # Longer than what a report keeps of it.
    filler = CLAUDE.partition("\n")[0].replace("assistant", "x" * 10_000)
    done = await runtime.exec(["printf", "%s", f"{filler}\n{printed}"], timeout_s=60, log="agent/step.00")
    found = await made("claude_code").results(runtime, make_context(), [done.report("agent/step.00")])
    assert found.get("exit_status") == status


def _noisy() -> Task:
    data = Task.load(TASK_FILE).model_dump(mode="json", exclude={"task_id"})
    noise = "printf 'echo motd one\\necho motd two\\n' > /polar/session/noise.sh"
    data["runtime"]["prepare"].insert(0, {"type": "exec", "command": noise, "env": {"BASH_ENV": ""}})
    data["runtime"]["env"] = {"BASH_ENV": "/polar/session/noise.sh"}
    data["agent"] = {"harness": "mini_swe_agent", "settings": {"step_limit": STEP_LIMIT}}
    return Task.load({**data, "num_samples": 1, "timeout_seconds": 240})


@pytest.mark.slow
def test_a_submission_that_noise_hid_is_scored_by_the_tree(tmp_path: Path) -> None:
    # Field case H06. The task names a path that a sandbox has behind walls alone.
    needs_bubblewrap()
    scenario = load_scenario("calculator").model_dump(mode="json", exclude_none=True)
    script = scenario["scripts"][0]
    (submits,) = script["turns"][-1]["tool_calls"]
    assert MARK in submits["arguments"]["command"]
    submits["arguments"]["command"] = f"bash -c '{MARK}'"
    file = tmp_path / "scenario.yaml"
    file.write_text(yaml.safe_dump({**scenario, "scripts": [script]}, sort_keys=False), "utf-8")
    with LocalStack(tmp_path / "stack", scenario=str(file), isolation="auto") as stack:
        task = _noisy()
        stack.client.submit(task)
        (result,) = stack.client.wait(task.task_id, 280).results
    _at_its_limit(result)
    assert result.outcome.trainable
    assert result.harness is not None
    assert result.harness.metadata["exit_status"] == "LimitsExceeded"
    assert result.harness.metadata["model_calls"] == STEP_LIMIT
    assert result.trajectory is not None
    assert result.trajectory.fidelity.calls == STEP_LIMIT


def _at_its_limit(result: RolloutResult) -> None:
    outcome = result.outcome
    assert (outcome.ending, outcome.reason, outcome.state) == (Ending.AGENT_LIMIT, "agent_limit", RolloutState.FAILED)
    assert result.reward is not None
    assert result.reward.outcome == 1.0


REAL = {
    "claude_code": {"max_turns": 1},
    "gemini_cli": {"max_turns": 1},
    "goose": {"max_turns": 1},
    "mini_swe_agent": {"step_limit": 1},
    "openhands_sdk": {"max_iterations": 1},
    "qwen_code": {"max_turns": 1},
}


@pytest.mark.harness
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("name", REAL)
def test_a_real_program_at_its_limit_of_one_call_has_done_what_that_call_did(name: str) -> None:
    if why := bubblewrap.why_not():
        not_here(why)
    scenario = load(name)
    settings = {**scenario.agent.get("settings", {}), **REAL[name]}
    scenario = scenario.model_copy(update={"agent": {**scenario.agent, "settings": settings}})
    cache = Path(os.environ.get("HARNESS_CACHE") or default_cache())
    with Bench(scenario, plugin("harnesses", name).dialects[0], {"backend": "local"}, cache=cache) as bench:
        bench.submit(bench.task("limit", "works"))
        ran = bench.ended("limit")
    _at_its_limit(ran.result)
    assert len(ran.whole) == 1
