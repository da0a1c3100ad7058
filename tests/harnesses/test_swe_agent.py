"""SWE-agent, which no registry ships: its configuration, and a stand-in that does what a recorded run of it did."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from polarq.contracts.rollout import HarnessReport
from polarq.contracts.specs import AgentSpec
from polarq.errors import HarnessFault
from polarq.testing.conformance.scenario import load
from polarq.testing.inference.server import ScriptedInference
from polarq_worker.harnesses.base import run_harness
from polarq_worker.harnesses.environment import prepare_env
from polarq_worker.harnesses.swe_agent import SweAgentHarness
from polarq_worker.runtimes.local import LocalRuntime
from polarq_worker.stages.prepare import PrepareFailed, prepare
from tests.harnesses.conftest import MakeContext

HOME = "/polar/session/SWE-agent"
STAND_IN = Path(__file__).parent / "sweagent_stand_in.py"


def harness(**fields: Any) -> SweAgentHarness:
    return SweAgentHarness(AgentSpec.parse({"harness": "swe_agent", **fields}))


@pytest.fixture
async def image(tmp_path: Path, runtime: LocalRuntime) -> dict[str, str]:
    """SWE-agent's source with the stand-in as its program: the variables by which a sandbox has it."""
    home = tmp_path / "SWE-agent"
    for name in ("config", "tools/registry", "tools/review_on_submit_m", "sweagent-1.1.0.dist-info", "bin"):
        (home / name).mkdir(parents=True)
    templates = {"instance_template": "<uploaded_files>{{working_dir}}</uploaded_files> {{problem_statement}}"}
    default = {"agent": {"templates": templates, "tools": {"bundles": [{"path": "tools/edit_anthropic"}]}}}
    (home / "config/default.yaml").write_text(yaml.safe_dump(default))
    (home / "sweagent-1.1.0.dist-info/METADATA").write_text("Metadata-Version: 2.1\nName: sweagent\nVersion: 1.1.0\n")
    program = home / "bin/sweagent"
    program.write_text(f"#!{sys.executable}\n{STAND_IN.read_text()}")
    program.chmod(0o755)
    await runtime.put_dir(home, HOME)
    return {"PATH": f"{HOME}/bin:/usr/bin:/bin", "PYTHONPATH": HOME}


async def run(
    runtime: LocalRuntime, make_context: MakeContext, image: dict[str, str], base_url: str, **settings: Any
) -> HarnessReport:
    agent = {"harness": "swe_agent", "env": image, "settings": {"home": HOME, **settings}, "model_name": "scripted"}
    context = make_context("Write it. [script: works]", base_url=base_url, agent=agent)
    preset = SweAgentHarness(context.task.agent)
    env = {**prepare_env(runtime.spec, runtime.layout), **image}
    await prepare(runtime, preset.recipe(), env=env, timeout_s=60, upload_roots=[])
    return await run_harness(preset, runtime, context, timeout_s=60)


async def test_the_recorded_run_is_done_again_in_the_repository_as_it_stands(
    runtime: LocalRuntime, make_context: MakeContext, image: dict[str, str]
) -> None:
    await runtime.exec("git init -q && echo not committed > dirty.txt", timeout_s=60)
    async with ScriptedInference(scenario=load("swe_agent").scenario()) as inference:
        report = await run(runtime, make_context, image, inference.base_url)
    assert report.ok, report
    told = {key: report.metadata[key] for key in ("exit_status", "model_calls", "cost")}
    assert told == {"exit_status": "submitted", "model_calls": 2, "cost": 0}
    assert report.metadata["program"]["version"] == "1.1.0"
    there = await runtime.exec("cat hello.txt dirty.txt", timeout_s=60)
    assert there.stdout_text == "hellonot committed\n"
    assert len(inference.ledger) == 2


async def test_a_prompt_names_the_repository_also_without_the_edit_tool(
    runtime: LocalRuntime, make_context: MakeContext
) -> None:
    await runtime.exec("git init -q && mkdir src", timeout_s=60)
    await runtime.put_bytes(b"image\n1.1.0\n/x\n", "/polar/session/.polarq/programs/swe_agent/installed")
    for bundles, told in (
        (["tools/registry"], {"working_dir": str(runtime.workdir)}),
        (["tools/registry", "tools/edit_anthropic"], {}),
    ):
        preset = harness(settings={"bundles": bundles, "workdir": f"{runtime.workdir}/src"})
        await preset.setup(runtime, make_context())
        config = preset.config(make_context())
        assert config["problem_statement"]["extra_fields"] == told
        assert config["env"]["repo"]["repo_name"] == str(runtime.workdir).lstrip("/")
        assert [one["path"] for one in config["agent"]["tools"]["bundles"]] == [f"/opt/SWE-agent/{b}" for b in bundles]


async def test_what_is_no_repository_is_refused(runtime: LocalRuntime, make_context: MakeContext) -> None:
    with pytest.raises(HarnessFault, match="SWE-agent works on a git repository"):
        await harness().setup(runtime, make_context())


async def test_an_image_without_it_is_told_so(runtime: LocalRuntime) -> None:
    env = {**prepare_env(runtime.spec, runtime.layout), "PATH": "/usr/bin:/bin"}
    with pytest.raises(PrepareFailed, match=r"no registry ships sweagent: it has to be in the image"):
        await prepare(runtime, harness().recipe(), env=env, timeout_s=60, upload_roots=[])


def test_the_settings_become_its_configuration(make_context: MakeContext) -> None:
    preset = harness(
        model_name="m",
        settings={"dialect": "anthropic_messages", "call_limit": 9, "command_timeout_s": 5, "retries": 2, "home": "/s"},
    )
    agent = preset.config(make_context())["agent"]
    assert agent["model"] == {
        "name": "anthropic/m",
        "api_base": "http://127.0.0.1:9/s/secret",
        "api_key": "secret",
        "per_instance_call_limit": 9,
        "per_instance_cost_limit": 0.0,
        "total_cost_limit": 0,
        "max_input_tokens": 0,
        "retry": {"retries": 2, "min_wait": 4.0, "max_wait": 30.0},
    }
    assert agent["tools"]["execution_timeout"] == 5
    assert {"max_requeries", "total_execution_timeout"}.isdisjoint({*agent, *agent["tools"]})
    assert preset.command(make_context())[1] == "--config=/s/config/default.yaml"
