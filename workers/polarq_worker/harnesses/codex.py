"""Harness `codex`: OpenAI's Codex CLI, over the Responses API.

Its variables do not say where the model is (it ignores OPENAI_BASE_URL): a provider of its configuration file does.
What it would ask of other hosts is off, and so are its built-in tools that need a server of OpenAI's.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Literal

from pydantic import Field, field_validator

from polarq.contracts.specs import McpServerSpec
from polarq_worker.harnesses.base import HarnessContext
from polarq_worker.harnesses.configs import as_toml, given, merged
from polarq_worker.harnesses.preset import SERVERS_S, Preset, PresetSettings
from polarq_worker.harnesses.programs.program import NpmProgram
from polarq_worker.harnesses.programs.versions import Versions

KEY = "POLARQ_CODEX_KEY"


class CodexSettings(PresetSettings):
    """`agent.settings` of harness `codex`."""

    reasoning_effort: Literal["minimal", "low", "medium", "high", "xhigh"] | None = None
    reasoning_summary: Literal["auto", "concise", "detailed", "none"] | None = None
    context_window: int | None = Field(None, gt=0)
    """Tokens; None: what the program takes an unknown model's for. It compacts before they are used up."""
    compact_at: int | None = Field(None, gt=0)
    """Tokens of history at which it compacts."""
    request_retries: int | None = Field(None, ge=0, le=100)
    """Tries of a failing call; None: the program's own (4)."""
    stream_retries: int | None = Field(None, ge=0, le=100)
    """Tries of a stream that broke off; None: the program's own (5)."""
    instructions: str | None = None
    """Added to its own, as a developer's message."""
    config: dict[str, Any] = {}
    """More of its config.toml; polarq's own keys win."""

    @field_validator("config")
    @classmethod
    def _fits_toml(cls, value: dict[str, Any]) -> dict[str, Any]:
        try:
            as_toml(value)
        except (TypeError, ValueError) as exc:
            raise ValueError(f"TOML cannot hold it: {exc}") from None
        return value


class CodexHarness(Preset):
    """See the module's text."""

    name: ClassVar[str] = "codex"
    title: ClassVar[str] = "Codex CLI"
    program: ClassVar[NpmProgram] = NpmProgram("@openai/codex", "codex", Versions("0.171.0", "0.171.0", "0.172.0"))
    dialects: ClassVar[tuple[str, ...]] = ("openai_responses",)
    settings_class: ClassVar[type[PresetSettings]] = CodexSettings
    mcp_transports: ClassVar[frozenset[str]] = frozenset({"stdio", "streamable-http"})
    mcp_names: ClassVar[str] = r"[A-Za-z0-9_:@/.-]+"
    takes_skills: ClassVar[bool] = True
    kept: ClassVar[tuple[str, ...]] = ("sessions",)
    settings: CodexSettings

    def command(self, context: HarnessContext) -> Sequence[str]:
        return ["exec", "--json", "--skip-git-repo-check", "--dangerously-bypass-approvals-and-sandbox", "-"]

    def stdin(self, context: HarnessContext) -> bytes:
        return context.task.instruction.encode()

    def environment(self, context: HarnessContext) -> Mapping[str, str]:
        return {"CODEX_HOME": self.folder(context.layout), KEY: context.api_key}

    def files(self, context: HarnessContext) -> Mapping[str, bytes]:
        return {f"{self.folder(context.layout)}/config.toml": as_toml(self.config(context))}

    def config(self, context: HarnessContext) -> dict[str, Any]:
        wanted = self.settings
        provider = {
            "name": "polarq",
            "base_url": f"{context.base_url}/v1",
            "env_key": KEY,
            "wire_api": "responses",
            "request_max_retries": wanted.request_retries,
            "stream_max_retries": wanted.stream_retries,
        }
        own = {
            "model": self.model,
            "model_provider": "polarq",
            "model_providers": {"polarq": provider},
            "model_reasoning_effort": wanted.reasoning_effort,
            "model_reasoning_summary": wanted.reasoning_summary,
            "model_context_window": wanted.context_window,
            "model_auto_compact_token_limit": wanted.compact_at,
            "developer_instructions": wanted.instructions,
            "check_for_update_on_startup": False,
            "web_search": "disabled",
            "analytics": {"enabled": False},
            "features": {"plugins": False, "apps": False},
            "mcp_servers": {name: _mcp(server) for name, server in self.servers.items()},
        }
        return merged(wanted.config, given(own))


def _mcp(server: McpServerSpec) -> dict[str, Any]:
    # Without `required` it goes on as if a server that does not start had not been asked for.
    common = {"required": True, "startup_timeout_sec": SERVERS_S}
    if server.transport == "stdio":
        return {**common, "command": server.command, "args": list(server.args)}
    return {**common, "url": server.url}
