"""Terminus-2: what its runner is told, and what the runner does with it."""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path
from textwrap import dedent
from typing import Any

from polarq.contracts.specs import AgentSpec
from polarq_worker.harnesses.base import HarnessContext
from polarq_worker.harnesses.terminus_2 import Terminus2Harness
from polarq_worker.runtimes.local import LocalRuntime
from tests.harnesses.conftest import MakeContext


def terminus(**fields: Any) -> Terminus2Harness:
    return Terminus2Harness(AgentSpec.parse({"harness": "terminus_2", **fields}))


def test_its_settings_become_its_agents_arguments(make_context: MakeContext) -> None:
    context = make_context()
    servers = [{"name": "files", "command": "files-server", "args": ["--root", "/x y"]}]
    harness = terminus(
        model_name="Qwen/Qwen3.5-4B",
        mcp_servers=servers,
        skills_path="/skills",
        settings={"max_turns": 7, "parser": "xml", "temperature": 0.0},
    )
    config = harness.config(context)
    assert config["instruction"] == context.instruction_path
    agent = config["agent"]
    assert (agent["model_name"], agent["api_base"]) == ("openai/Qwen/Qwen3.5-4B", "http://127.0.0.1:9/s/secret/v1")
    assert (agent["max_turns"], agent["parser_name"], agent["temperature"]) == (7, "xml", 0.0)
    assert agent["skills_dir"] == harness.skills_target(context)
    assert agent["mcp_servers"] == [
        {"name": "files", "transport": "stdio", "command": "files-server", "args": ["--root", "/x y"], "url": None}
    ]
    bare = terminus().config(context)["agent"]
    assert not {"max_turns", "temperature", "skills_dir"} & set(bare)


def test_it_needs_tmux_and_a_new_python() -> None:
    (action,) = terminus().recipe()
    assert action.env is not None
    assert (action.env["POLARQ_NEEDS"], action.env["POLARQ_PYTHON"]) == ("tmux", "3.12")


async def test_its_own_count_is_kept(runtime: LocalRuntime, make_context: MakeContext) -> None:
    context = make_context()
    harness = terminus()
    counted = b'{"turns": 3, "summaries": 0, "input_tokens": 9, "output_tokens": 2, "error": null}'
    await runtime.put_bytes(counted, f"{harness.folder(context.layout)}/logs/result.json")
    said = await harness.results(runtime, context, [])
    assert said["usage"]["turns"] == 3


STAND_IN = {
    "harbor/environments/base.py": """
        from dataclasses import dataclass

        @dataclass
        class ExecResult:
            stdout: str
            stderr: str
            return_code: int
    """,
    "harbor/models/agent/context.py": """
        class AgentContext:
            n_input_tokens = n_output_tokens = metadata = None
    """,
    "harbor/models/task/config.py": """
        from dataclasses import dataclass

        @dataclass
        class MCPServerConfig:
            name: str
    """,
    "harbor/agents/terminus_2/terminus_2.py": """
        class Terminus2:
            def __init__(self, logs_dir, mcp_servers, fails):
                self.servers, self.fails = mcp_servers, fails

            async def setup(self, environment):
                assert environment.default_user is None and await environment.is_dir("/")

            async def run(self, instruction, environment, context):
                if self.fails:
                    raise RuntimeError("no\\n more")
                done = await environment.exec("cat; printf %s \\"$X\\"; exit 3", env={"X": instruction}, timeout_sec=9)
                context.n_input_tokens, context.n_output_tokens = 5, done.return_code
                context.metadata = {"n_episodes": len(self.servers), "summarization_count": 0}
                (environment.trial_paths.agent_dir / "said").write_text(done.stdout)
    """,
}
"""The part of Harbor that the runner touches."""


async def run(tmp_path: Path, context: HarnessContext, *, fails: bool) -> tuple[int, dict[str, Any]]:
    for name, text in STAND_IN.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(dedent(text))
    runner = next(data for path, data in terminus().files(context).items() if path.endswith("run.py"))
    (tmp_path / "run.py").write_bytes(runner)
    (tmp_path / "instruction.txt").write_text("dö it")
    agent = {"fails": fails, "mcp_servers": [{"name": "files"}]}
    config = {"instruction": str(tmp_path / "instruction.txt"), "logs": str(tmp_path / "logs"), "agent": agent}
    (tmp_path / "run.json").write_text(json.dumps(config))
    process = await asyncio.create_subprocess_exec(sys.executable, "run.py", "run.json", cwd=tmp_path)
    code = await asyncio.wait_for(process.wait(), 60)
    return code, json.loads((tmp_path / "logs/result.json").read_text())


async def test_the_runner_lets_the_agent_work_where_it_stands(tmp_path: Path, make_context: MakeContext) -> None:
    code, result = await run(tmp_path, make_context(), fails=False)
    assert (code, (tmp_path / "logs/said").read_text()) == (0, "dö it")
    assert result == {"input_tokens": 5, "output_tokens": 3, "turns": 1, "summaries": 0, "error": None}


async def test_an_agent_that_raised_is_a_failed_run_with_its_words(tmp_path: Path, make_context: MakeContext) -> None:
    code, result = await run(tmp_path, make_context(), fails=True)
    assert (code, result["error"]) == (1, "RuntimeError: no more")
