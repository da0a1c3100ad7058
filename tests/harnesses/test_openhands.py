"""What OpenHands' two programs are told."""

from __future__ import annotations

import json
import subprocess
from typing import Any

import pytest

from polarq.contracts.specs import AgentSpec
from polarq.errors import InvalidTask
from polarq_worker.harnesses.configs import git_settings
from polarq_worker.harnesses.openhands_cli import OpenHandsCliHarness
from polarq_worker.harnesses.openhands_sdk import OpenHandsSdkHarness
from tests.harnesses.conftest import MakeContext

BASE = "http://127.0.0.1:9/s/secret"
SERVERS = [
    {"name": "files", "command": "server", "args": ["--root", "/x y"]},
    {"name": "far", "transport": "streamable-http", "url": "http://127.0.0.1:9/mcp"},
    {"name": "old", "transport": "sse", "url": "http://127.0.0.1:9/sse"},
]
AS_THEIRS = {
    "files": {"transport": "stdio", "command": "server", "args": ["--root", "/x y"]},
    "far": {"transport": "http", "url": "http://127.0.0.1:9/mcp"},
    "old": {"transport": "sse", "url": "http://127.0.0.1:9/sse"},
}


def sdk(**fields: Any) -> OpenHandsSdkHarness:
    return OpenHandsSdkHarness(AgentSpec.parse({"harness": "openhands_sdk", **fields}))


def cli(**fields: Any) -> OpenHandsCliHarness:
    return OpenHandsCliHarness(AgentSpec.parse({"harness": "openhands_cli", **fields}))


@pytest.mark.parametrize(
    ("dialect", "model", "base_url", "mode"),
    [
        ("openai_chat", "openai/m", f"{BASE}/v1", "chat"),
        ("anthropic_messages", "anthropic/m", BASE, "chat"),
        ("openai_responses", "openai/m", f"{BASE}/v1", "responses"),
    ],
)
def test_the_sdks_model_is_the_proxy_in_each_dialect(
    dialect: str, model: str, base_url: str, mode: str, make_context: MakeContext
) -> None:
    llm = sdk(model_name="m", settings={"dialect": dialect, "llm": {"seed": 3}}).config(make_context())["llm"]
    told = {key: llm[key] for key in ("model", "base_url", "api_mode", "seed", "reasoning_effort")}
    wanted = {"model": model, "base_url": base_url, "api_mode": mode, "seed": 3, "reasoning_effort": None}
    assert told == wanted
    assert "secret" not in json.dumps({key: value for key, value in llm.items() if key != "base_url"})


def test_the_sdk_gets_servers_skills_and_limits(make_context: MakeContext) -> None:
    preset = sdk(
        mcp_servers=SERVERS,
        skills_path="/skills",
        settings={"max_iterations": 7, "condense_after": None, "stream": True, "project_skills": False},
    )
    context = make_context()
    told = preset.config(context)
    assert told["mcp_servers"] == AS_THEIRS
    assert told["skills"] == preset.skills_target(context)
    assert (told["max_iterations"], told["condense_after"], told["llm"]["stream"]) == (7, None, True)
    assert told["project_skills"] is False
    assert sdk().config(context)["skills"] is None


@pytest.mark.parametrize("version", [None, "1.58.1"])
def test_the_sdks_tools_are_of_the_same_release(version: str | None) -> None:
    (action,) = sdk(settings={"version": version}).recipe()
    assert (action.env or {})["POLARQ_WITH"] == f"openhands-tools=={version or '1.58.2'}"


@pytest.mark.parametrize("key", ["model", "base_url", "api_key", "api_mode", "stream", "usage_id"])
def test_what_leads_to_the_model_is_not_for_the_open_settings(key: str) -> None:
    with pytest.raises(InvalidTask, match=f"llm: '{key}' is not for this place to say"):
        sdk(settings={"llm": {key: "x"}})


def test_the_clis_agent_is_a_file_and_its_model_variables(make_context: MakeContext) -> None:
    preset = cli(
        model_name="m",
        mcp_servers=SERVERS,
        settings={"num_retries": 2, "context_window": 5000, "condense_after": 30, "dialect": "anthropic_messages"},
    )
    context = make_context()
    files = {path.rpartition("/")[2]: json.loads(data) for path, data in preset.files(context).items()}
    assert files["mcp.json"] == {"mcpServers": AS_THEIRS}
    agent = files["agent_settings.json"]
    assert agent["llm"] == {
        "model": "anthropic/m",
        "max_input_tokens": 5000,
        "native_tool_calling": True,
        "num_retries": 2,
        "retry_min_wait": 8,
        "retry_max_wait": 64,
        "reasoning_effort": None,
        "usage_id": "agent",
    }
    assert agent["condenser"]["max_size"] == 30
    assert agent["condenser"]["llm"] == {**agent["llm"], "usage_id": "condenser"}
    env = preset.environment(context)
    assert (env["LLM_MODEL"], env["LLM_BASE_URL"], env["LLM_API_KEY"]) == ("anthropic/m", BASE, "secret")
    folder = preset.folder(context.layout)
    assert all(path.startswith(f"{env['OPENHANDS_PERSISTENCE_DIR']}/") for path in preset.files(context))
    assert env["OPENHANDS_CONVERSATIONS_DIR"] == f"{folder}/{preset.kept[0]}"


def test_a_long_instruction_comes_to_the_cli_by_file(make_context: MakeContext) -> None:
    assert cli().command(make_context("--help me"))[-1] == "--task=--help me"
    context = make_context("ä" * 40_000)
    assert cli().command(context)[-1] == f"--file={context.instruction_path}"


def test_gits_own_rules_come_on_top_of_a_tasks() -> None:
    task = {"GIT_CONFIG_COUNT": "1", "GIT_CONFIG_KEY_0": "user.name", "GIT_CONFIG_VALUE_0": "Somebody"}
    env = {**task, **git_settings(task, {"user.email": "a@b"}), "PATH": "/usr/bin:/bin"}
    for key, value in (("user.name", "Somebody"), ("user.email", "a@b")):
        said = subprocess.run(["git", "config", "--get", key], env=env, capture_output=True, text=True, check=True)
        assert said.stdout == f"{value}\n"


def test_the_cli_clones_no_registry_of_skills(make_context: MakeContext) -> None:
    env = {"PATH": "/usr/bin:/bin", **cli().environment(make_context())}
    command = ["git", "ls-remote", "https://github.com/OpenHands/extensions"]
    said = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    assert said.returncode != 0
    assert "/nowhere/" in said.stderr
