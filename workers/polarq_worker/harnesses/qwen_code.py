"""Harness `qwen_code`: Qwen Code, over Chat Completions, Responses or Messages."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from pydantic import Field

from polarq.contracts.rollout import HarnessReport
from polarq.contracts.specs import McpServerSpec
from polarq_worker.harnesses.base import HarnessContext
from polarq_worker.harnesses.configs import as_json, given, merged
from polarq_worker.harnesses.preset import Preset, PresetSettings
from polarq_worker.harnesses.programs.program import NpmProgram
from polarq_worker.harnesses.programs.versions import Versions
from polarq_worker.harnesses.verdicts import CallsSeen, exit_code

LOGINS = {"openai_chat": "openai", "openai_responses": "openai-responses", "anthropic_messages": "anthropic"}
"""Its own word for each API."""

LIMITS: Mapping[int | None, str] = {53: "max_turns", 55: "max_tool_calls"}
"""By its exit code."""


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
    dialects: ClassVar[tuple[str, ...]] = ("openai_chat", "anthropic_messages")
    settings_class: ClassVar[type[PresetSettings]] = QwenCodeSettings
    mcp_transports: ClassVar[frozenset[str]] = frozenset({"stdio", "sse", "streamable-http"})
    takes_skills: ClassVar[bool] = True
    turn_limit: ClassVar[str] = "max_turns"
    kept: ClassVar[tuple[str, ...]] = ("projects",)
    settings: QwenCodeSettings

    def command(self, context: HarnessContext) -> Sequence[str]:
        wanted = self.settings
        options = {
            "--max-session-turns": wanted.max_turns,
            "--max-tool-calls": wanted.max_tool_calls,
            "--append-system-prompt": wanted.append_system_prompt,
        }
        given_ = [f"{name}={value}" for name, value in options.items() if value is not None]
        login = f"--auth-type={LOGINS[self.dialect]}"
        return [f"--model={self.model}", "--yolo", login, "--output-format=stream-json", *given_]

    def stdin(self, context: HarnessContext) -> bytes:
        return context.task.instruction.encode()

    def environment(self, context: HarnessContext) -> Mapping[str, str]:
        return {
            "QWEN_HOME": self.folder(context.layout),
            "OPENAI_MODEL": self.model,
            "ANTHROPIC_MODEL": self.model,
            "QWEN_CODE_NO_RELAUNCH": "true",
        }

    def files(self, context: HarnessContext) -> Mapping[str, bytes]:
        return {f"{self.folder(context.layout)}/settings.json": as_json(self.config())}

    def at_limit(self, report: HarnessReport, seen: CallsSeen) -> str:
        return LIMITS.get(exit_code(report), "")

    def config(self) -> dict[str, Any]:
        """Its settings.json."""
        wanted = self.settings
        model = {
            "name": self.model,
            "generationConfig": {"contextWindowSize": wanted.context_window, "maxRetries": wanted.max_retries},
        }
        own = {
            "privacy": {"usageStatisticsEnabled": False},
            "telemetry": {"enabled": False},
            "general": {"enableAutoUpdate": False},
            "security": {"auth": {"selectedType": LOGINS[self.dialect]}},
            "model": given(model),
            "mcpServers": {server.name: _mcp(server) for server in self.spec.mcp_servers},
        }
        return merged(wanted.config, own)


def _mcp(server: McpServerSpec) -> dict[str, Any]:
    """`alwaysLoadTools`: else its tools are hidden behind a search."""
    common = {"trust": True, "alwaysLoadTools": True}
    if server.transport == "stdio":
        return {"command": server.command, "args": list(server.args), **common}
    return {"url" if server.transport == "sse" else "httpUrl": server.url, **common}
