"""Harness `openclaw`: OpenClaw's `agent exec`, over any of four APIs.

Its folder (OPENCLAW_STATE_DIR) has an openclaw.json with one provider; the instruction is its standard input. It
streams. Tools for which it puts a note about running work behind the newest message of every request are denied: with
that note no request is the continuation of the one before. After a failed call it goes on with one more message that
says so. Exit code 1: a failed run or an empty answer; 2: its own time limit, which is set out of the way.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Literal

from pydantic import Field

from polarq.contracts.specs import McpServerSpec
from polarq.errors import InvalidTask
from polarq_worker.harnesses.base import HarnessContext
from polarq_worker.harnesses.configs import as_json, given, merged
from polarq_worker.harnesses.preset import SERVERS_S, Preset, PresetSettings
from polarq_worker.harnesses.programs.program import NpmProgram
from polarq_worker.harnesses.programs.versions import Versions

APIS = {
    "openai_chat": ("openai-completions", "/v1"),
    "openai_responses": ("openai-responses", "/v1"),
    "anthropic_messages": ("anthropic-messages", ""),
    "google_generate": ("google-generative-ai", "/v1beta"),
}
"""OpenClaw's name for a dialect, and what its address ends in."""
FOLLOWED = ("process", "sessions_spawn", "subagents", "image_generate", "music_generate", "video_generate")
"""Tools whose running work it notes behind the newest message."""
_VARIABLE = re.compile(r"\$\{[A-Z_][A-Z0-9_]*\}")
"""What its configuration has replaced, or does not start for where there is none of that name."""
NO_LIMIT_S = 7 * 24 * 3600


class OpenClawSettings(PresetSettings):
    """`agent.settings` of harness `openclaw`."""

    thinking: Literal["off", "minimal", "low", "medium", "high", "xhigh", "adaptive", "max"] | None = None
    temperature: float | None = Field(None, ge=0)
    """Over Anthropic's messages it sends one only with `thinking: off`."""
    max_tokens: int = Field(16_384, gt=0)
    """Tokens per answer at most."""
    context_window: int = Field(128_000, gt=0)
    """Tokens that the model takes; the program compacts before they are used up."""
    code_mode: Literal["direct", "auto", "code"] = "direct"
    """Whether tools are called one by one, or from code that the model writes."""
    tool_search: bool = False
    """Whether tools of MCP servers have to be searched for by the model, and are not offered before."""
    allow: list[str] | None = None
    """Names of tools that it has; None: those of its coding profile."""
    deny: list[str] = ["message", *FOLLOWED]
    """Names of tools that it has not."""
    images: bool = False
    """Whether the model takes images."""
    config: dict[str, Any] = {}
    """More of its openclaw.json; polarq's own keys win."""


class OpenClawHarness(Preset):
    """See the module's text."""

    name: ClassVar[str] = "openclaw"
    title: ClassVar[str] = "OpenClaw"
    program: ClassVar[NpmProgram] = NpmProgram(
        "openclaw", "openclaw", Versions("2026.9.6", "2026.9.6", "2026.10.0"), node="24.16"
    )
    dialects: ClassVar[tuple[str, ...]] = tuple(APIS)
    settings_class: ClassVar[type[PresetSettings]] = OpenClawSettings
    mcp_transports: ClassVar[frozenset[str]] = frozenset({"stdio", "sse", "streamable-http"})
    takes_skills: ClassVar[bool] = True
    kept: ClassVar[tuple[str, ...]] = ("agents",)
    settings: OpenClawSettings

    def _check(self) -> None:
        super()._check()
        wanted = self.settings
        if self.dialect == "anthropic_messages" and wanted.temperature is not None and wanted.thinking != "off":
            text = (
                "temperature: over anthropic_messages OpenClaw sends none while the model thinks; set thinking: 'off'"
            )
            raise InvalidTask("agent.settings", [f"{text}, or leave it to the task's model.sampling"])

    def command(self, context: HarnessContext) -> Sequence[str]:
        folder = self.folder(context.layout)
        thinking = [] if self.settings.thinking is None else [f"--thinking={self.settings.thinking}"]
        return [
            "agent",
            "exec",
            "--json",
            "--message-file=-",
            f"--config={folder}/openclaw.json",
            f"--state-dir={folder}",
            f"--model=polarq/{self.model}",
            f"--code-mode={self.settings.code_mode}",
            f"--timeout={NO_LIMIT_S}",
            *thinking,
        ]

    def stdin(self, context: HarnessContext) -> bytes:
        return context.task.instruction.encode()

    def environment(self, context: HarnessContext) -> Mapping[str, str]:
        return {"OPENCLAW_STATE_DIR": self.folder(context.layout)}

    def files(self, context: HarnessContext) -> Mapping[str, bytes]:
        return {f"{self.folder(context.layout)}/openclaw.json": as_json(self.config(context))}

    def literal(self, text: str) -> str:
        return _VARIABLE.sub(r"$\g<0>", text)

    def config(self, context: HarnessContext) -> dict[str, Any]:
        wanted = self.settings
        api, ending = APIS[self.dialect]
        model = {
            "id": self.literal(self.model),
            "name": self.literal(self.model),
            "reasoning": True,
            "input": ["text", "image"] if wanted.images else ["text"],
            "cost": {"input": 0, "output": 0, "cacheRead": 0, "cacheWrite": 0},
            "contextWindow": wanted.context_window,
            "maxTokens": wanted.max_tokens,
        }
        provider = {
            "baseUrl": f"{context.base_url}{ending}",
            "api": api,
            "apiKey": "${OPENAI_API_KEY}",
            "models": [model],
        }
        own = {
            "agents": {"defaults": {"params": given({"temperature": wanted.temperature})}},
            "gateway": {"mode": "local"},
            "models": {"mode": "replace", "providers": {"polarq": provider}},
            "tools": {"allow": wanted.allow, "deny": wanted.deny, "toolSearch": wanted.tool_search},
            "telemetry": {"enabled": False},
            "update": {"checkOnStart": False},
            # It would have each turn put into vectors by a vendor's service.
            "memory": {"search": {"enabled": False}},
            "mcp": {"servers": {name: _mcp(server) for name, server in self.servers.items()}},
        }
        return merged(wanted.config, given(own))


def _mcp(server: McpServerSpec) -> dict[str, Any]:
    wait = {"connectionTimeoutMs": round(SERVERS_S * 1000)}
    if server.transport == "stdio":
        return {**wait, "command": server.command, "args": list(server.args)}
    return {**wait, "transport": server.transport, "url": server.url}
