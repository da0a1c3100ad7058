"""Goose: its provider, its limits, its extensions."""

from __future__ import annotations

import json
from typing import Any

import pytest
import yaml

from polarq.contracts.specs import AgentSpec
from polarq_worker.harnesses.goose import GooseHarness
from tests.harnesses.conftest import MakeContext


def goose(**fields: Any) -> GooseHarness:
    return GooseHarness(AgentSpec.parse({"harness": "goose", **fields}))


@pytest.mark.parametrize(
    ("dialect", "engine", "path"),
    [
        ("openai_chat", "openai", "s/secret/v1/chat/completions"),
        ("openai_responses", "openai", "s/secret/v1/responses"),
        ("anthropic_messages", "anthropic", None),
    ],
)
def test_its_api_is_the_one_asked_for_whatever_the_models_name(
    dialect: str, engine: str, path: str | None, make_context: MakeContext
) -> None:
    provider = goose(model_name="gpt-5-codex", settings={"dialect": dialect}).provider(make_context())
    assert (provider["engine"], provider.get("base_path")) == (engine, path)
    assert provider["base_url"] == "http://127.0.0.1:9/s/secret"
    assert provider["models"] == [{"name": "gpt-5-codex", "context_limit": 128_000}]
    assert provider["supports_streaming"] is True


def test_its_files_are_below_its_folder_and_name_its_servers(make_context: MakeContext) -> None:
    servers = [
        {"name": "files", "command": "files-server", "args": ["--root", "/x y"]},
        {"name": "far", "transport": "streamable-http", "url": "http://127.0.0.1:9/mcp"},
    ]
    context = make_context()
    harness = goose(mcp_servers=servers, settings={"stream": False})
    root = harness.environment(context)["GOOSE_PATH_ROOT"]
    files = {path.removeprefix(f"{root}/"): data for path, data in harness.files(context).items()}
    assert json.loads(files.pop("config/custom_providers/polarq.json"))["supports_streaming"] is False
    extensions = yaml.safe_load(files.pop("config/config.yaml"))["extensions"]
    assert not files
    assert {name: (one["type"], one["enabled"]) for name, one in extensions.items()} == {
        "files": ("stdio", True),
        "far": ("streamable_http", True),
    }
    assert (extensions["files"]["cmd"], extensions["files"]["args"]) == ("files-server", ["--root", "/x y"])
    assert extensions["far"]["uri"] == "http://127.0.0.1:9/mcp"
    assert harness.skills_target(context) == f"{root}/config/skills"


def test_its_limits_are_arguments_and_variables(make_context: MakeContext) -> None:
    context = make_context()
    harness = goose(settings={"max_turns": 7, "max_tool_repetitions": 2, "temperature": 0.0, "max_tokens": 99})
    assert {"--max-turns=7", "--max-tool-repetitions=2"} <= set(harness.command(context))
    env = harness.environment(context)
    assert (env["GOOSE_TEMPERATURE"], env["GOOSE_MAX_TOKENS"]) == ("0.0", "99")
    bare = goose()
    assert not any(argument.startswith("--max") for argument in bare.command(context))
    assert "GOOSE_TEMPERATURE" not in bare.environment(context)
