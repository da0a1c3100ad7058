"""Harness `gemini_cli`: Google's Gemini CLI, over generateContent.

It always gets a model's name (without one it first asks a small model which to take), and the way to log in by its
settings: without that it does not start.

A repository's .gemini (settings, with their MCP servers, hooks and commands for tools; `.env`) is not read: the program
asks whether it trusts the folder before it reads its options, and learns only then that it does (`--skip-trust`), so
that all else of a trusted folder holds. GEMINI_CLI_TRUST_WORKSPACE=true among the task's variables lets it be read.
Even then polarq's settings are the system's, which win where the program trusts the file (root's alone, with all
folders above it), and the servers of other ways to log in are the model's address: such a call goes nowhere else.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from pydantic import Field

from polarq.contracts.rollout import HarnessReport
from polarq.contracts.specs import McpServerSpec
from polarq_worker.harnesses.base import HarnessContext
from polarq_worker.harnesses.configs import as_json, given, merged
from polarq_worker.harnesses.environment import held
from polarq_worker.harnesses.preset import Preset, PresetSettings
from polarq_worker.harnesses.programs.program import NpmProgram
from polarq_worker.harnesses.programs.versions import Versions
from polarq_worker.harnesses.verdicts import CallsSeen, exit_code

TURN_LIMIT = 53
"""Its exit code."""
OTHER_LOGINS = ("GOOGLE_VERTEX_BASE_URL", "CODE_ASSIST_ENDPOINT")
"""Variables that say where the servers of its other ways to log in are."""


class GeminiCliSettings(PresetSettings):
    """`agent.settings` of harness `gemini_cli`."""

    max_turns: int | None = Field(None, gt=0)
    """Turns of the agent at most; then it exits with 53."""
    compress_at: float | None = Field(None, gt=0, le=1)
    """Share of the context at which it compresses its history; None: its own (0.5)."""
    config: dict[str, Any] = {}
    """More of its settings.json; polarq's own keys win."""


class GeminiCliHarness(Preset):
    """See the module's text."""

    name: ClassVar[str] = "gemini_cli"
    title: ClassVar[str] = "Gemini CLI"
    program: ClassVar[NpmProgram] = NpmProgram(
        "@google/gemini-cli", "gemini", Versions("0.61.0", "0.61.0", "0.62.0"), node="20"
    )
    dialects: ClassVar[tuple[str, ...]] = ("google_generate",)
    settings_class: ClassVar[type[PresetSettings]] = GeminiCliSettings
    mcp_transports: ClassVar[frozenset[str]] = frozenset({"stdio", "sse", "streamable-http"})
    takes_skills: ClassVar[bool] = True
    commands: ClassVar[str] = "/"
    turn_limit: ClassVar[str] = "max_turns"
    kept: ClassVar[tuple[str, ...]] = (".gemini/tmp",)
    settings: GeminiCliSettings

    def command(self, context: HarnessContext) -> Sequence[str]:
        return [f"--model={self.model}", "--yolo", "--skip-trust", "--output-format=stream-json"]

    def stdin(self, context: HarnessContext) -> bytes:
        return self.instruction(context).encode()

    def environment(self, context: HarnessContext) -> Mapping[str, str]:
        return {
            **held(context.env),
            "GEMINI_CLI_HOME": self.folder(context.layout),
            "GEMINI_CLI_SYSTEM_SETTINGS_PATH": self._settings_path(context),
            "GEMINI_TELEMETRY_ENABLED": "false",
            **dict.fromkeys(OTHER_LOGINS, context.base_url),
            # Else it starts itself again to have more memory.
            "GEMINI_CLI_NO_RELAUNCH": "true",
        }

    def skills_target(self, context: HarnessContext) -> str:
        return f"{self.folder(context.layout)}/.gemini/skills"

    def literal(self, text: str) -> str:
        # What it does not find it replaces by the default: a dollar sign.
        return text.replace("$", "${POLARQ_DOLLAR:-$}")

    def files(self, context: HarnessContext) -> Mapping[str, bytes]:
        return {self._settings_path(context): as_json(self.config())}

    def at_limit(self, report: HarnessReport, seen: CallsSeen) -> str:
        return "max_turns" if exit_code(report) == TURN_LIMIT else ""

    def config(self) -> dict[str, Any]:
        """Its settings.json."""
        own = {
            "security": {"auth": {"selectedType": "gemini-api-key"}, "folderTrust": {"enabled": True}},
            "privacy": {"usageStatisticsEnabled": False},
            "telemetry": {"enabled": False},
            "general": {"enableAutoUpdate": False, "enableAutoUpdateNotification": False},
            "model": given(
                {
                    "name": self.literal(self.model),
                    "maxSessionTurns": self.settings.max_turns,
                    "compressionThreshold": self.settings.compress_at,
                }
            ),
            "mcpServers": {name: _mcp(server) for name, server in self.servers.items()},
        }
        return merged(self.settings.config, own)

    def _settings_path(self, context: HarnessContext) -> str:
        return f"{self.folder(context.layout)}/.gemini/settings.json"


def _mcp(server: McpServerSpec) -> dict[str, Any]:
    if server.transport == "stdio":
        return {"command": server.command, "args": list(server.args), "trust": True}
    return {"url" if server.transport == "sse" else "httpUrl": server.url, "trust": True}
