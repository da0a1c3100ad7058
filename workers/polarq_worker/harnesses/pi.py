"""Harness `pi`: the coding agent pi, over any of four APIs.

Its folder (PI_CODING_AGENT_DIR) says where the model is: models.json has one provider, settings.json makes its model
the default, so that no name is taken for a pattern. The instruction is its standard input. It always streams. It exits
with 0 when the context overflows and when the answer is empty, with 1 when the model fails after its retries.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Literal

from pydantic import Field

from polarq.contracts.specs import McpServerSpec
from polarq.errors import InvalidTask
from polarq_worker.harnesses.base import HarnessContext
from polarq_worker.harnesses.configs import as_json, given, merged
from polarq_worker.harnesses.preset import Preset, PresetSettings
from polarq_worker.harnesses.programs.program import NpmProgram
from polarq_worker.harnesses.programs.versions import Versions

APIS = {
    "openai_chat": ("openai-completions", "/v1"),
    "openai_responses": ("openai-responses", "/v1"),
    "anthropic_messages": ("anthropic-messages", ""),
    "google_generate": ("google-generative-ai", "/v1beta"),
}
"""pi's name for a dialect, and what its address ends in."""
SAMPLED_BY = ("temperature", "top_p", "seed")


class PiSettings(PresetSettings):
    """`agent.settings` of harness `pi`."""

    thinking: Literal["off", "minimal", "low", "medium", "high", "xhigh", "max"] | None = None
    """None: the program's own (`medium`)."""
    temperature: float | None = Field(None, ge=0)
    """With top_p and seed, over the OpenAI APIs only."""
    top_p: float | None = Field(None, gt=0, le=1)
    seed: int | None = None
    max_tokens: int = Field(16384, gt=0)
    """Tokens per answer at most."""
    context_window: int = Field(128_000, gt=0)
    """Tokens that the model takes; the program compacts before they are used up."""
    compaction: bool = True
    retries: int | None = Field(None, ge=0)
    """Tries of a failing call after the first, 2 s, 4 s, 8 s ... apart; None: the program's own (3)."""
    tools: list[str] | None = None
    """Names of its tools (read, bash, edit, write, grep, find, ls); `+name` and `-name` change its own choice."""
    images: bool = False
    """Whether the model takes images."""
    config: dict[str, Any] = {}
    """More of its settings.json; polarq's own keys win."""


class PiHarness(Preset):
    """See the module's text."""

    name: ClassVar[str] = "pi"
    title: ClassVar[str] = "pi"
    program: ClassVar[NpmProgram] = NpmProgram(
        "@earendil-works/pi-coding-agent", "pi", Versions("1.6.0", "1.5.0", "1.7.0"), node="22.19"
    )
    dialects: ClassVar[tuple[str, ...]] = tuple(APIS)
    settings_class: ClassVar[type[PresetSettings]] = PiSettings
    mcp_transports: ClassVar[frozenset[str]] = frozenset({"stdio", "streamable-http"})
    mcp_names: ClassVar[str] = "[A-Za-z0-9_-]+"
    takes_skills: ClassVar[bool] = True
    kept: ClassVar[tuple[str, ...]] = ("sessions",)
    settings: PiSettings

    def command(self, context: HarnessContext) -> Sequence[str]:
        return ["--print", "--no-approve", "--session-dir", f"{self.folder(context.layout)}/sessions"]

    def stdin(self, context: HarnessContext) -> bytes:
        return context.task.instruction.encode()

    def environment(self, context: HarnessContext) -> Mapping[str, str]:
        return {
            "PI_CODING_AGENT_DIR": self.folder(context.layout),
            "PI_OFFLINE": "1",
            "PI_SKIP_VERSION_CHECK": "1",
            "PI_TELEMETRY": "0",
        }

    def files(self, context: HarnessContext) -> Mapping[str, bytes]:
        folder = self.folder(context.layout)
        servers = {name: _mcp(server) for name, server in self.servers.items()}
        return {
            f"{folder}/models.json": as_json(self.models(context)),
            f"{folder}/settings.json": as_json(self.config()),
            f"{folder}/mcp.json": as_json({"mcpServers": servers}),
        }

    def models(self, context: HarnessContext) -> dict[str, Any]:
        wanted = self.settings
        api, ending = APIS[self.dialect]
        model = {
            "id": self.model,
            "reasoning": True,
            "input": ["text", "image"] if wanted.images else ["text"],
            "contextWindow": wanted.context_window,
            "maxTokens": wanted.max_tokens,
            "samplingParams": given({name: getattr(wanted, name) for name in SAMPLED_BY}) or None,
        }
        provider = {
            "baseUrl": f"{context.base_url}{ending}",
            "api": api,
            "apiKey": "$OPENAI_API_KEY",
            "models": [given(model)],
        }
        return {"providers": {"polarq": provider}}

    def config(self) -> dict[str, Any]:
        wanted = self.settings
        own = {
            "defaultProvider": "polarq",
            "defaultModel": self.model,
            "defaultThinkingLevel": wanted.thinking,
            "defaultTools": wanted.tools,
            "defaultProjectTrust": "never",
            "enableInstallTelemetry": False,
            "cacheWarming": "off",
            "compaction": {"enabled": wanted.compaction},
            "retry": {"maxRetries": wanted.retries},
        }
        return merged(wanted.config, given(own))

    def _check(self) -> None:
        super()._check()
        if not self.dialect.startswith("openai"):
            named = [name for name in SAMPLED_BY if getattr(self.settings, name) is not None]
            raise_for(named, f"pi sends it over the OpenAI APIs only, not over '{self.dialect}'")


def raise_for(names: Sequence[str], why: str) -> None:
    """Raises `InvalidTask` for settings that cannot be had."""
    if names:
        raise InvalidTask("agent.settings", [f"{name}: {why}; set it in the task's model.sampling" for name in names])


def _mcp(server: McpServerSpec) -> dict[str, Any]:
    """`direct`: its tools are in the first request."""
    if server.transport == "stdio":
        return {"command": server.command, "args": list(server.args), "exposure": "direct"}
    return {"type": "http", "url": server.url, "exposure": "direct"}
