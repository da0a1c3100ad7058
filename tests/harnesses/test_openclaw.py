"""OpenClaw: its configuration."""

from __future__ import annotations

import json
from typing import Any

import pytest

from polarq.contracts.specs import AgentSpec
from polarq.errors import InvalidTask
from polarq_worker.harnesses.openclaw import FOLLOWED, OpenClawHarness
from tests.harnesses.conftest import MakeContext


def openclaw(**fields: Any) -> OpenClawHarness:
    return OpenClawHarness(AgentSpec.parse({"harness": "openclaw", **fields}))


@pytest.mark.parametrize(
    ("dialect", "api", "address"),
    [
        ("openai_chat", "openai-completions", "http://127.0.0.1:9/s/secret/v1"),
        ("openai_responses", "openai-responses", "http://127.0.0.1:9/s/secret/v1"),
        ("anthropic_messages", "anthropic-messages", "http://127.0.0.1:9/s/secret"),
        ("google_generate", "google-generative-ai", "http://127.0.0.1:9/s/secret/v1beta"),
    ],
)
def test_its_one_provider_is_the_proxy(dialect: str, api: str, address: str, make_context: MakeContext) -> None:
    context = make_context()
    harness = openclaw(model_name="Qwen/Qwen3.5-4B", settings={"dialect": dialect, "config": {"models": {"mode": "x"}}})
    models = harness.config(context)["models"]
    provider = models["providers"]["polarq"]
    assert (models["mode"], provider["api"], provider["baseUrl"]) == ("replace", api, address)
    assert [model["id"] for model in provider["models"]] == ["Qwen/Qwen3.5-4B"]
    assert "--model=polarq/Qwen/Qwen3.5-4B" in harness.command(context)


def test_tools_whose_work_it_notes_in_every_request_are_denied_unless_a_task_wants_them(
    make_context: MakeContext,
) -> None:
    context = make_context()
    tools = openclaw(settings={"config": {"tools": {"deny": [], "exec": {"timeoutSec": 9}}}}).config(context)["tools"]
    assert set(FOLLOWED) < set(tools["deny"])
    assert tools["exec"] == {"timeoutSec": 9}
    assert "allow" not in tools
    tools = openclaw(settings={"deny": ["write"], "allow": ["exec", "write"]}).config(context)["tools"]
    assert (tools["deny"], tools["allow"]) == (["write"], ["exec", "write"])


def test_a_temperature_is_said_where_it_is_read_and_tools_of_servers_are_offered_at_once(
    make_context: MakeContext,
) -> None:
    """It passes over `params` of a provider's model."""
    context = make_context()
    config = openclaw(settings={"temperature": 0.5, "tool_search": True}).config(context)
    assert config["agents"] == {"defaults": {"params": {"temperature": 0.5}}}
    assert config["tools"]["toolSearch"] is True
    assert openclaw().config(context)["tools"]["toolSearch"] is False


def test_over_messages_a_temperature_goes_with_no_thinking() -> None:
    """It sends none while the model thinks."""
    settings = {"dialect": "anthropic_messages", "temperature": 0.5}
    with pytest.raises(InvalidTask, match="thinking: 'off'"):
        openclaw(settings=settings)
    openclaw(settings={**settings, "thinking": "off"})
    openclaw(settings={**settings, "dialect": "openai_chat"})


def test_its_file_is_where_its_command_says_and_names_its_servers(make_context: MakeContext) -> None:
    servers = [
        {"name": "files", "command": "files-server", "args": ["--root", "/x y"]},
        {"name": "old", "transport": "sse", "url": "http://127.0.0.1:9/sse"},
    ]
    context = make_context()
    harness = openclaw(mcp_servers=servers, settings={"thinking": "low"})
    ((path, data),) = harness.files(context).items()
    command = harness.command(context)
    folder = harness.environment(context)["OPENCLAW_STATE_DIR"]
    assert path == f"{folder}/openclaw.json"
    assert {f"--config={path}", f"--state-dir={folder}", "--thinking=low", "--message-file=-"} <= set(command)
    assert json.loads(data)["mcp"]["servers"] == {
        "files": {"connectionTimeoutMs": 120_000, "command": "files-server", "args": ["--root", "/x y"]},
        "old": {"connectionTimeoutMs": 120_000, "transport": "sse", "url": "http://127.0.0.1:9/sse"},
    }
    assert harness.skills_target(context) == f"{folder}/skills"
