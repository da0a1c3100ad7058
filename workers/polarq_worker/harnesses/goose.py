"""Harness `goose`: the Goose program, over chat completions, Responses or Messages.

The npm package is its native program for x64 Linux. A custom provider of its configuration says where the model is: the
built-in ones would look at the list of models first and guess the API from the model's name. The instruction is its
standard input. It exits with 0 whatever happened, also when the model failed, overflowed or answered nothing: only what
the proxy saw tells. Without streaming it drops the text beside a tool call, so that histories do not go on exactly.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar
from urllib.parse import urlsplit

from pydantic import Field

from polarq.contracts.rollout import HarnessReport
from polarq.contracts.specs import McpServerSpec
from polarq_worker.harnesses.base import HarnessContext
from polarq_worker.harnesses.configs import as_json, as_yaml, given
from polarq_worker.harnesses.preset import Preset, PresetSettings
from polarq_worker.harnesses.programs.program import NpmProgram
from polarq_worker.harnesses.programs.versions import Versions
from polarq_worker.harnesses.verdicts import CallsSeen

ENGINES = {
    "openai_chat": ("openai", "v1/chat/completions"),
    "openai_responses": ("openai", "v1/responses"),
    "anthropic_messages": ("anthropic", None),
}
"""Goose's engine for a dialect; for an OpenAI API also its path, which takes the place of the address's own."""
PROVIDER = "polarq"


class GooseSettings(PresetSettings):
    """`agent.settings` of harness `goose`."""

    max_turns: int | None = Field(None, gt=0)
    """Model calls at most; None: the program's own (1000)."""
    max_tool_repetitions: int | None = Field(None, gt=0)
    """How often in a row the same tool may be called with the same arguments."""
    temperature: float | None = Field(None, ge=0)
    max_tokens: int | None = Field(None, gt=0)
    """Tokens per answer at most."""
    context_window: int = Field(128_000, gt=0)
    """Tokens that the model takes; the program compacts at four fifths of them."""
    stream: bool = True
    extensions: dict[str, dict[str, Any]] = {}
    """More of `extensions` in its config.yaml, by name."""


class GooseHarness(Preset):
    """See the module's text."""

    name: ClassVar[str] = "goose"
    title: ClassVar[str] = "Goose"
    program: ClassVar[NpmProgram] = NpmProgram(
        "@aaif/goose-binary-linux-x64",
        "goose",
        Versions("1.52.0", "1.50.0", "1.53.0"),
        link="goose-binary-linux-x64",
    )
    dialects: ClassVar[tuple[str, ...]] = tuple(ENGINES)
    settings_class: ClassVar[type[PresetSettings]] = GooseSettings
    mcp_transports: ClassVar[frozenset[str]] = frozenset({"stdio", "streamable-http"})
    takes_skills: ClassVar[bool] = True
    turn_limit: ClassVar[str] = "max_turns"
    kept: ClassVar[tuple[str, ...]] = ("data/sessions", "state/logs")
    settings: GooseSettings

    def command(self, context: HarnessContext) -> Sequence[str]:
        wanted = self.settings
        limits = {"--max-turns": wanted.max_turns, "--max-tool-repetitions": wanted.max_tool_repetitions}
        given_limits = [f"{flag}={value}" for flag, value in limits.items() if value is not None]
        return ["run", "--instructions=-", "--output-format=stream-json", "--quiet", *given_limits]

    def stdin(self, context: HarnessContext) -> bytes:
        return context.task.instruction.encode()

    def environment(self, context: HarnessContext) -> Mapping[str, str]:
        wanted = self.settings
        optional = {"GOOSE_TEMPERATURE": wanted.temperature, "GOOSE_MAX_TOKENS": wanted.max_tokens}
        return {
            "GOOSE_PATH_ROOT": self.folder(context.layout),
            "GOOSE_PROVIDER": PROVIDER,
            "GOOSE_MODEL": self.model,
            "GOOSE_MODE": "auto",
            "GOOSE_DISABLE_KEYRING": "1",
            "GOOSE_DISABLE_SESSION_NAMING": "true",
            "GOOSE_TOOL_PAIR_SUMMARIZATION": "false",
            "GOOSE_TELEMETRY_ENABLED": "false",
            **{name: str(value) for name, value in optional.items() if value is not None},
        }

    def files(self, context: HarnessContext) -> Mapping[str, bytes]:
        config = f"{self.folder(context.layout)}/config"
        return {
            f"{config}/custom_providers/{PROVIDER}.json": as_json(self.provider(context)),
            f"{config}/config.yaml": as_yaml(self.config()),
        }

    def provider(self, context: HarnessContext) -> dict[str, Any]:
        engine, path = ENGINES[self.dialect]
        own = urlsplit(context.base_url).path.lstrip("/")
        provider = {
            "name": PROVIDER,
            "engine": engine,
            "display_name": PROVIDER,
            "description": "",
            "api_key_env": "OPENAI_API_KEY",
            "base_url": context.base_url,
            "base_path": None if path is None else f"{own}/{path}",
            "models": [{"name": self.model, "context_limit": self.settings.context_window}],
            "supports_streaming": self.settings.stream,
            "requires_auth": True,
        }
        return given(provider)

    def config(self) -> dict[str, Any]:
        servers = {name: _mcp(server) for name, server in self.servers.items()}
        return {"extensions": {**self.settings.extensions, **servers}}

    def at_limit(self, report: HarnessReport, seen: CallsSeen) -> str:
        # It says so in words only, and exits with 0: what it was asked to do last it did, and asked no more.
        stopped = seen.last is not None and seen.last.reply.get("tool_calls")
        return "max_turns" if stopped and report.ok else ""

    def skills_target(self, context: HarnessContext) -> str:
        return f"{self.folder(context.layout)}/config/skills"


def _mcp(server: McpServerSpec) -> dict[str, Any]:
    common = {"enabled": True, "name": server.name, "timeout": 300}
    if server.transport == "stdio":
        return given({**common, "type": "stdio", "cmd": server.command, "args": list(server.args), "envs": {}})
    return {**common, "type": "streamable_http", "uri": server.url}
