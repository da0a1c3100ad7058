"""Harness `qwen_code`: Qwen Code, over Chat Completions, Responses or Messages.

Its settings are the system's, which win over those of a repository's .qwen; and what a `.env` there says of a variable
that is set is not taken. Of MCP servers only the task's start, of a repository's hooks and commands none: `config` may
say otherwise (`disableAllHooks: false`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from pydantic import Field

from polarq.contracts.rollout import HarnessReport
from polarq.contracts.specs import McpServerSpec
from polarq_worker.harnesses.base import HarnessContext
from polarq_worker.harnesses.configs import as_json, given, merged, table
from polarq_worker.harnesses.environment import held
from polarq_worker.harnesses.preset import Preset, PresetSettings
from polarq_worker.harnesses.programs.program import NpmProgram
from polarq_worker.harnesses.programs.versions import Versions
from polarq_worker.harnesses.verdicts import CallsSeen, exit_code

LOGINS = {"openai_chat": "openai", "openai_responses": "openai-responses", "anthropic_messages": "anthropic"}
"""Its own word for each API."""

STARTED_UNASKED = {
    "disableAllHooks": True,
    "mcp": {"serverCommand": ""},
    "tools": {"discoveryCommand": "", "callCommand": "", "sandbox": False},
}
"""Of a repository's settings, those that start something; unless the task's `config` has its own word for them."""

LIMITS: Mapping[int | None, str] = {53: "max_turns", 55: "max_tool_calls"}
"""By its exit code."""


DOLLAR = "POLARQ_DOLLAR"
"""A variable that holds a dollar sign: its settings have no other way to say one in front of a name."""


class QwenCodeSettings(PresetSettings):
    """`agent.settings` of harness `qwen_code`."""

    max_turns: int | None = Field(None, gt=0)
    """Turns of the agent at most."""
    max_tool_calls: int | None = Field(None, ge=0, le=1_000_000)
    """Then it exits with 55."""
    context_window: int | None = Field(None, gt=0)
    """Tokens; it compresses its history before they are used up."""
    max_retries: int | None = Field(None, ge=0)
    """Tries of a failing call beyond the first."""
    append_system_prompt: str | None = None
    config: dict[str, Any] = {}
    """More of its settings.json; polarq's own keys win."""


class QwenCodeHarness(Preset):
    """See the module's text."""

    name: ClassVar[str] = "qwen_code"
    title: ClassVar[str] = "Qwen Code"
    program: ClassVar[NpmProgram] = NpmProgram(
        "@qwen-code/qwen-code", "qwen", Versions("0.24.4", "0.24.0", "0.25.0"), node="22"
    )
    dialects: ClassVar[tuple[str, ...]] = tuple(LOGINS)
    settings_class: ClassVar[type[PresetSettings]] = QwenCodeSettings
    mcp_transports: ClassVar[frozenset[str]] = frozenset({"stdio", "sse", "streamable-http"})
    takes_skills: ClassVar[bool] = True
    mcp_names: ClassVar[str] = "[^,]+"
    commands: ClassVar[str] = "/"
    turn_limit: ClassVar[str] = "max_turns"
    kept: ClassVar[tuple[str, ...]] = ("projects",)
    settings: QwenCodeSettings

    def command(self, context: HarnessContext) -> Sequence[str]:
        wanted = self.settings
        options = {
            "--max-session-turns": wanted.max_turns,
            "--max-tool-calls": wanted.max_tool_calls,
            "--append-system-prompt": wanted.append_system_prompt,
            "--allowed-mcp-server-names": ",".join(self._servers()),
        }
        given_ = [f"{name}={value}" for name, value in options.items() if value is not None]
        login = f"--auth-type={LOGINS[self.dialect]}"
        return [f"--model={self.model}", "--yolo", login, "--output-format=stream-json", *given_]

    def stdin(self, context: HarnessContext) -> bytes:
        return self.instruction(context).encode()

    def environment(self, context: HarnessContext) -> Mapping[str, str]:
        return {
            **held(context.env),
            "QWEN_HOME": self.folder(context.layout),
            "QWEN_CODE_SYSTEM_SETTINGS_PATH": self._settings_path(context),
            "QWEN_TELEMETRY_ENABLED": "false",
            "OPENAI_MODEL": self.model,
            "ANTHROPIC_MODEL": self.model,
            "QWEN_CODE_NO_RELAUNCH": "true",
            DOLLAR: "$",
        }

    def literal(self, text: str) -> str:
        return text.replace("$", f"${{{DOLLAR}}}")

    def files(self, context: HarnessContext) -> Mapping[str, bytes]:
        return {self._settings_path(context): as_json(self.config(context))}

    def at_limit(self, report: HarnessReport, seen: CallsSeen) -> str:
        return LIMITS.get(exit_code(report), "")

    def config(self, context: HarnessContext) -> dict[str, Any]:
        """Its settings.json."""
        wanted = self.settings
        limits = {"contextWindowSize": wanted.context_window, "maxRetries": wanted.max_retries}
        generation = merged(table(table(wanted.config, "model"), "generationConfig"), given(limits))
        own = {
            "privacy": {"usageStatisticsEnabled": False},
            "telemetry": {"enabled": False},
            "general": {"enableAutoUpdate": False},
            "security": {"auth": {"selectedType": LOGINS[self.dialect]}},
            "model": {"name": self.literal(self.model), "generationConfig": generation},
            # One of the repository's would win over every variable.
            "modelProviders": {LOGINS[self.dialect]: [self._provider(context, generation)]},
            "mcpServers": {name: _mcp(server) for name, server in self.servers.items()},
        }
        return merged(merged(STARTED_UNASKED, wanted.config), own)

    def _servers(self) -> list[str]:
        """Names of the task's MCP servers; empty: none may start."""
        return [*table(self.settings.config, "mcpServers"), *(server.name for server in self.spec.mcp_servers)]

    def _provider(self, context: HarnessContext, generation: Mapping[str, Any]) -> dict[str, Any]:
        """Its model, with where that is. What else holds for a model is read from here alone."""
        anthropic = self.dialect == "anthropic_messages"
        return {
            "id": self.literal(self.model),
            "name": self.literal(self.model),
            "baseUrl": context.base_url if anthropic else f"{context.base_url}/v1",
            "envKey": "ANTHROPIC_API_KEY" if anthropic else "OPENAI_API_KEY",
            "generationConfig": generation,
        }

    def _settings_path(self, context: HarnessContext) -> str:
        return f"{self.folder(context.layout)}/settings.json"


def _mcp(server: McpServerSpec) -> dict[str, Any]:
    """`alwaysLoadTools`: else its tools are hidden behind a search."""
    common = {"trust": True, "alwaysLoadTools": True}
    if server.transport == "stdio":
        return {"command": server.command, "args": list(server.args), **common}
    return {"url" if server.transport == "sse" else "httpUrl": server.url, **common}
