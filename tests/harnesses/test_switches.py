"""What programs do beside their task (reporting home, updates, titles and other calls of their own) is switched off by
the words that each one's documentation has for it. That nothing comes of it is the conformance suite's to see."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import pytest
import yaml

from polarq.contracts.specs import AgentSpec
from polarq.registry import plugin
from polarq_worker.harnesses.preset import Preset
from tests.harnesses.conftest import MakeContext

LITELLM = {"LITELLM_LOCAL_MODEL_COST_MAP": "True", "LITELLM_MODE": "PRODUCTION"}
SWITCHES: dict[str, dict[str, Any]] = {
    "codex": {
        "analytics.enabled": False,
        "check_for_update_on_startup": False,
        "features.apps": False,
        "features.plugins": False,
        "web_search": "disabled",
    },
    # The first one stands for those of telemetry, error reports, feedback and updates.
    "claude_code": {"CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1", "DISABLE_AUTOUPDATER": "1"},
    "opencode": {
        "--title": "rollout",
        "OPENCODE_DISABLE_AUTOUPDATE": "1",
        "OPENCODE_DISABLE_LSP_DOWNLOAD": "1",
        "OPENCODE_DISABLE_MODELS_FETCH": "1",
        "OPENCODE_DISABLE_SHARE": "1",
        "autoupdate": False,
        "share": "disabled",
    },
    "gemini_cli": {
        "general.enableAutoUpdate": False,
        "general.enableAutoUpdateNotification": False,
        "privacy.usageStatisticsEnabled": False,
        "telemetry.enabled": False,
    },
    "qwen_code": {
        "general.enableAutoUpdate": False,
        "privacy.usageStatisticsEnabled": False,
        "telemetry.enabled": False,
    },
    "pi": {
        "PI_OFFLINE": "1",
        "PI_SKIP_VERSION_CHECK": "1",
        "PI_TELEMETRY": "0",
        "cacheWarming": "off",
        "enableInstallTelemetry": False,
    },
    "mini_swe_agent": LITELLM,
    "swe_agent": LITELLM,
    "openhands_sdk": LITELLM,
    "openhands_cli": {**LITELLM, "GIT_CONFIG_VALUE_0": "https://github.com/OpenHands/extensions"},
    "aider": {
        **LITELLM,
        "--no-analytics": "",
        "--no-auto-commits": "",
        "--no-check-update": "",
        "--no-dirty-commits": "",
        "--no-show-release-notes": "",
        "--no-suggest-shell-commands": "",
    },
    "terminus_2": LITELLM,
    "goose": {
        "GOOSE_DISABLE_SESSION_NAMING": "true",
        "GOOSE_TELEMETRY_ENABLED": "false",
        "GOOSE_TOOL_PAIR_SUMMARIZATION": "false",
    },
    "hermes": {
        "HERMES_DISABLE_LAZY_INSTALLS": "1",
        "auxiliary.title_generation.enabled": False,
        "curator.enabled": False,
        "memory.memory_enabled": False,
        "model_catalog.enabled": False,
        "skills.creation_nudge_interval": 0,
    },
    "openclaw": {"memory.search.enabled": False, "telemetry.enabled": False, "update.checkOnStart": False},
}
OWN_FILES: dict[str, dict[str, Any]] = {
    "claude_code": {"--strict-mcp-config": "", "disableAllHooks": True},
    "opencode": {"OPENCODE_DISABLE_PROJECT_CONFIG": "1"},
    "gemini_cli": {"--skip-trust": "", "security.folderTrust.enabled": True},
    "qwen_code": {
        "--allowed-mcp-server-names": "",
        "disableAllHooks": True,
        "mcp.serverCommand": "",
        "tools.callCommand": "",
        "tools.discoveryCommand": "",
        "tools.sandbox": False,
    },
    "openhands_cli": {"HTTPS_PROXY": "", "LMNR_PROJECT_API_KEY": "", "OTEL_EXPORTER_OTLP_ENDPOINT": ""},
    "pi": {"--no-approve": "", "defaultProjectTrust": "never"},
}
"""By which servers, hooks and commands that a repository's own files name are not started or asked. Codex, Goose and
the others start none. That nothing comes of these files either was seen with the real programs."""
READERS: dict[str, Callable[[str], Any]] = {
    "json": json.loads,
    "toml": tomllib.loads,
    "yaml": yaml.safe_load,
    "yml": yaml.safe_load,
}


def flat(data: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    if isinstance(data, Mapping):
        for key, value in data.items():
            yield from flat(value, f"{path}.{key}" if path else str(key))
    else:
        yield path, data


def told(preset: Preset, context: Any) -> dict[str, Any]:
    """All that the program is told, by variable, option, or path in a configuration file."""
    (step,) = preset.steps(context)
    found: dict[str, Any] = dict(step.env)
    options = (word.partition("=") for word in step.command if word.startswith("--"))
    found |= {name: value for name, _, value in options}
    for path, data in preset.files(context).items():
        if reader := READERS.get(path.rpartition(".")[2]):
            found |= dict(flat(reader(data.decode())))
    return found


@pytest.mark.parametrize("name", SWITCHES)
def test_what_a_program_does_unasked_is_switched_off_by_its_own_words(name: str, make_context: MakeContext) -> None:
    spec = {"harness": name}
    found = told(plugin("harnesses", name)(AgentSpec.parse(spec)), make_context(agent=spec))
    assert {key: found.get(key) for key in SWITCHES[name]} == SWITCHES[name]


@pytest.mark.parametrize("name", OWN_FILES)
def test_what_a_repositorys_own_files_would_start_is_not_started(name: str, make_context: MakeContext) -> None:
    spec = {"harness": name}
    found = told(plugin("harnesses", name)(AgentSpec.parse(spec)), make_context(agent=spec))
    assert {key: found.get(key) for key in OWN_FILES[name]} == OWN_FILES[name]


def test_of_mcp_servers_qwen_code_starts_the_tasks_own_and_hooks_if_the_task_has_some(
    make_context: MakeContext,
) -> None:
    config = {"mcpServers": {"two": {"command": "b"}}, "disableAllHooks": False}
    servers = [{"name": "one", "command": "a"}]
    spec = {"harness": "qwen_code", "mcp_servers": servers, "settings": {"config": config}}
    found = told(plugin("harnesses", "qwen_code")(AgentSpec.parse(spec)), make_context(agent=spec))
    assert (found["--allowed-mcp-server-names"], found["disableAllHooks"]) == ("two,one", False)


def test_a_task_can_have_hermes_look_back_over_long_turns(make_context: MakeContext) -> None:
    spec = {"harness": "hermes", "settings": {"config": {"skills": {"creation_nudge_interval": 5}}}}
    found = told(plugin("harnesses", "hermes")(AgentSpec.parse(spec)), make_context(agent=spec))
    assert found["skills.creation_nudge_interval"] == 5


@pytest.mark.parametrize(
    ("name", "file", "where", "said"),
    [
        ("codex", "config.toml", "mcp_servers.late", {"startup_timeout_sec": 120.0, "required": True}),
        ("opencode", "opencode.json", "mcp.late", {"timeout": 120_000}),
        ("openclaw", "openclaw.json", "mcp.servers.late", {"connectionTimeoutMs": 120_000}),
        ("hermes", "config.yaml", "", {"mcp_discovery_timeout": 120.0}),
        ("claude_code", "rollout.json", "env", {"MCP_TIMEOUT": "120000"}),
    ],
)
def test_a_server_that_starts_slowly_is_waited_for(
    make_context: MakeContext, name: str, file: str, where: str, said: dict[str, Any]
) -> None:
    """Their own limits are some seconds, and they go on without it."""
    servers = [{"name": "late", "command": "late-server"}]
    preset = plugin("harnesses", name)(AgentSpec.parse({"harness": name, "mcp_servers": servers}))
    (data,) = [data for path, data in preset.files(make_context()).items() if path.endswith(f"/{file}")]
    found = tomllib.loads(data.decode()) if file.endswith(".toml") else yaml.safe_load(data)
    for key in where.split(".") if where else ():
        found = found[key]
    assert found.items() >= said.items()
