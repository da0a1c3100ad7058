"""The configuration files of presets: what a task asks stands in them as the program reads it."""

from __future__ import annotations

import json
from typing import Any

import pytest

from polarq.contracts.specs import AgentSpec
from polarq.registry import plugin
from polarq_worker.harnesses.base import HarnessContext
from polarq_worker.harnesses.configs import merged
from polarq_worker.harnesses.preset import Preset
from tests.harnesses.conftest import MakeContext

SERVERS = [
    {"name": "files", "command": "files-server", "args": ["--root", "/x y"]},
    {"name": "far", "transport": "streamable-http", "url": "http://127.0.0.1:9/mcp"},
    {"name": "old", "transport": "sse", "url": "http://127.0.0.1:9/sse"},
]


def made(make_context: MakeContext, name: str, **fields: Any) -> tuple[Preset, HarnessContext]:
    spec = {"harness": name, "model_name": "Qwen/Qwen3.5-4B", "mcp_servers": SERVERS, **fields}
    preset: Preset = plugin("harnesses", name)(AgentSpec.parse(spec))
    return preset, make_context(agent=spec)


def only_file(preset: Preset, context: HarnessContext) -> tuple[str, dict[str, Any]]:
    [(path, data)] = preset.files(context).items()
    return path.removeprefix(context.layout.session_dir), json.loads(data)


def test_gemini_cli_logs_in_by_its_settings_and_has_a_models_name(make_context: MakeContext) -> None:
    config = {"ui": {"theme": "x"}, "general": {"enableAutoUpdate": True, "vimMode": True}}
    settings = {"max_turns": 9, "compress_at": 0.7, "config": config}
    preset, context = made(make_context, "gemini_cli", settings=settings)
    path, found = only_file(preset, context)
    assert path == "/.polarq/gemini_cli/.gemini/settings.json"
    assert found["security"]["auth"] == {"selectedType": "gemini-api-key"}
    assert found["privacy"] == {"usageStatisticsEnabled": False}
    assert found["general"] == {"enableAutoUpdate": False, "enableAutoUpdateNotification": False, "vimMode": True}
    assert found["ui"] == {"theme": "x"}
    assert found["model"] == {"name": "Qwen/Qwen3.5-4B", "maxSessionTurns": 9, "compressionThreshold": 0.7}
    assert found["mcpServers"] == {
        "files": {"command": "files-server", "args": ["--root", "/x y"], "trust": True},
        "far": {"httpUrl": "http://127.0.0.1:9/mcp", "trust": True},
        "old": {"url": "http://127.0.0.1:9/sse", "trust": True},
    }
    (step,) = preset.steps(context)
    assert "--model=Qwen/Qwen3.5-4B" in step.command
    assert step.env["GEMINI_CLI_HOME"].endswith("/.polarq/gemini_cli")
    # It looks whether it trusts the folder before it reads its options: a repository's settings are not read.
    assert found["security"]["folderTrust"] == {"enabled": True}
    assert "--skip-trust" in step.command
    assert "GEMINI_CLI_TRUST_WORKSPACE" not in step.env
    # Where a task lets it read them, neither they nor the `.env` lead it elsewhere.
    assert step.env["GEMINI_CLI_SYSTEM_SETTINGS_PATH"] == f"{context.layout.session_dir}{path}"
    held = {"GOOGLE_VERTEX_BASE_URL": context.base_url, "CODE_ASSIST_ENDPOINT": context.base_url, "HTTPS_PROXY": ""}
    assert step.env.items() >= {**held, "GEMINI_TELEMETRY_ENABLED": "false"}.items()


@pytest.mark.parametrize(
    ("dialect", "login", "ending", "key"),
    [
        (None, "openai", "/v1", "OPENAI_API_KEY"),
        ("openai_chat", "openai", "/v1", "OPENAI_API_KEY"),
        ("openai_responses", "openai-responses", "/v1", "OPENAI_API_KEY"),
        ("anthropic_messages", "anthropic", "", "ANTHROPIC_API_KEY"),
    ],
)
def test_qwen_code_logs_in_to_the_api_that_it_is_to_speak(
    make_context: MakeContext, dialect: str | None, login: str, ending: str, key: str
) -> None:
    settings: dict[str, Any] = {
        "dialect": dialect,
        "max_turns": 9,
        "max_tool_calls": 0,
        "max_retries": 0,
        "context_window": 32_000,
    }
    settings["config"] = {"model": {"generationConfig": {"maxRetries": 5, "samplingParams": {"top_p": 0.5}}}}
    preset, context = made(make_context, "qwen_code", settings=settings)
    path, found = only_file(preset, context)
    assert path == "/.polarq/qwen_code/settings.json"
    assert found["security"]["auth"]["selectedType"] == login
    generation = {"contextWindowSize": 32_000, "maxRetries": 0, "samplingParams": {"top_p": 0.5}}
    assert found["model"]["generationConfig"] == generation
    provider = {"id": "Qwen/Qwen3.5-4B", "name": "Qwen/Qwen3.5-4B", "envKey": key, "generationConfig": generation}
    assert found["modelProviders"] == {login: [{**provider, "baseUrl": f"{context.base_url}{ending}"}]}
    far = {"httpUrl": "http://127.0.0.1:9/mcp", "trust": True, "alwaysLoadTools": True}
    assert found["mcpServers"]["far"] == far, "its tools are in the first request"
    (step,) = preset.steps(context)
    assert {f"--auth-type={login}", "--max-session-turns=9", "--max-tool-calls=0"} <= set(step.command)
    # Neither a repository's settings nor its `.env` lead it elsewhere.
    assert step.env["QWEN_CODE_SYSTEM_SETTINGS_PATH"] == f"{context.layout.session_dir}{path}"
    assert step.env.items() >= {"HTTPS_PROXY": "", "OPENAI_API_KEY": "secret"}.items()


@pytest.mark.parametrize(
    ("dialect", "client", "path"),
    [
        (None, "@ai-sdk/openai-compatible", "/v1"),
        ("openai_responses", "@ai-sdk/openai", "/v1"),
        ("anthropic_messages", "@ai-sdk/anthropic", "/v1"),
        ("google_generate", "@ai-sdk/google", "/v1beta"),
    ],
)
def test_opencode_reaches_the_model_by_the_client_of_its_dialect(
    make_context: MakeContext, dialect: str | None, client: str, path: str
) -> None:
    settings = {"dialect": dialect, "max_steps": 12, "config": {"small_model": "x/y", "theme": "dark"}}
    preset, context = made(make_context, "opencode", settings=settings)
    file, found = only_file(preset, context)
    provider = found["provider"]["polarq"]
    assert provider["npm"] == client
    assert provider["options"] == {"baseURL": f"{context.base_url}{path}", "apiKey": "secret"}
    assert provider["models"]["Qwen/Qwen3.5-4B"]["limit"] == {"context": 200_000, "output": 32_000}
    assert (found["model"], found["small_model"]) == ("polarq/Qwen/Qwen3.5-4B",) * 2
    assert (found["theme"], found["agent"]) == ("dark", {"build": {"steps": 12}})
    files = found["mcp"]["files"]
    assert (files["type"], files["command"], files["enabled"]) == ("local", ["files-server", "--root", "/x y"], True)
    (step,) = preset.steps(context)
    assert any(word.startswith("--title=") for word in step.command), "else it asks the model for one"
    # What it reads last: neither a repository's own file nor a model of another provider wins over it.
    assert f"{context.layout.session_dir}{file}" == f"{step.env['OPENCODE_CONFIG_DIR']}/opencode.json"
    assert (found["enabled_providers"], found["disabled_providers"]) == (["polarq"], [])


def test_in_both_files_ours_holds_however_deep() -> None:
    assert merged({"a": {"b": 1, "c": 2}, "d": 3}, {"a": {"b": 9}, "e": {"f": 1}}) == {
        "a": {"b": 9, "c": 2},
        "d": 3,
        "e": {"f": 1},
    }
    assert merged({"a": 1}, {"a": {"b": 2}}) == {"a": {"b": 2}}
