"""Harness `claude_code`: Anthropic's Claude Code, over the Messages API.

The instruction comes on standard input, so that it may be as long as it likes. The program's own traffic beside the
model is off, and every name of a model that it may ask for is the task's.

Variables that a repository's .claude/settings.json sets win over the program's own: those that say where the model is
stand in settings of the command line too, which win over the repository's. Its hooks are off by the same settings, and
of MCP servers only the task's start; what it tells the agent (CLAUDE.md, skills) is read.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Literal

from pydantic import Field

from polarq.contracts.rollout import HarnessReport, StepReport
from polarq_worker.harnesses.base import HarnessContext
from polarq_worker.harnesses.configs import as_json
from polarq_worker.harnesses.environment import held
from polarq_worker.harnesses.mcp import mcp_entry, without_braced_variables
from polarq_worker.harnesses.preset import SERVERS_S, Preset, PresetSettings
from polarq_worker.harnesses.programs.program import NpmProgram
from polarq_worker.harnesses.programs.versions import Versions
from polarq_worker.harnesses.results import last_words
from polarq_worker.harnesses.verdicts import CallsSeen
from polarq_worker.runtimes.base import Runtime

LIMITS = {"error_max_turns", "error_max_budget_usd"}
"""What it says when it stopped at a limit."""
ELSEWHERE = (
    "ANTHROPIC_AUTH_TOKEN",
    "ANTHROPIC_CUSTOM_HEADERS",
    "CLAUDE_CODE_ENABLE_TELEMETRY",
    "CLAUDE_CODE_OAUTH_TOKEN",
    "CLAUDE_CODE_USE_BEDROCK",
    "CLAUDE_CODE_USE_FOUNDRY",
    "CLAUDE_CODE_USE_VERTEX",
)
"""Variables by which it asks another server, or tells one what it does."""


class ClaudeCodeSettings(PresetSettings):
    """`agent.settings` of harness `claude_code`."""

    max_turns: int | None = Field(None, gt=0)
    """Turns of the agent at most; then it ends with an error of its own."""
    reasoning_effort: Literal["low", "medium", "high", "xhigh", "max"] | None = None
    max_thinking_tokens: int | None = Field(None, ge=0)
    max_output_tokens: int | None = Field(None, gt=0)
    """Per answer; None: 32,000 for a model that the program does not know."""
    max_budget_usd: float | None = Field(None, gt=0)
    """By the program's own price list."""
    append_system_prompt: str | None = None
    allowed_tools: list[str] = []
    disallowed_tools: list[str] = []
    retries: int = Field(1, ge=0)
    """Tries of a failing call beyond the first; its own default (10) takes minutes."""
    request_timeout_s: float = Field(14_400.0, gt=0)
    bash_timeout_s: float = Field(600.0, gt=0)
    """For one command of the agent, unless the agent asks for less."""


class ClaudeCodeHarness(Preset):
    """See the module's text."""

    name: ClassVar[str] = "claude_code"
    title: ClassVar[str] = "Claude Code"
    program: ClassVar[NpmProgram] = NpmProgram(
        "@anthropic-ai/claude-code", "claude", Versions("2.1.332", "2.1.197", "2.1.333"), finish="install.cjs"
    )
    dialects: ClassVar[tuple[str, ...]] = ("anthropic_messages",)
    settings_class: ClassVar[type[PresetSettings]] = ClaudeCodeSettings
    mcp_transports: ClassVar[frozenset[str]] = frozenset({"stdio", "sse", "streamable-http"})
    takes_skills: ClassVar[bool] = True
    commands: ClassVar[str] = "/"
    turn_limit: ClassVar[str] = "max_turns"
    kept: ClassVar[tuple[str, ...]] = ("projects",)
    settings: ClaudeCodeSettings

    def command(self, context: HarnessContext) -> Sequence[str]:
        wanted = self.settings
        options = {
            "--model": self.model,
            "--max-turns": wanted.max_turns,
            "--effort": wanted.reasoning_effort,
            "--max-budget-usd": wanted.max_budget_usd,
            "--append-system-prompt": wanted.append_system_prompt,
            "--allowed-tools": ",".join(wanted.allowed_tools) or None,
            "--disallowed-tools": ",".join(wanted.disallowed_tools) or None,
            "--mcp-config": self._mcp_path(context) if self.spec.mcp_servers else None,
            "--settings": self._settings_path(context),
        }
        given = [f"{name}={value}" for name, value in options.items() if value is not None]
        fixed = ["--verbose", "--output-format=stream-json", "--dangerously-skip-permissions", "--strict-mcp-config"]
        return ["-p", *fixed, *given]

    def stdin(self, context: HarnessContext) -> bytes:
        return self.instruction(context).encode()

    def environment(self, context: HarnessContext) -> Mapping[str, str]:
        wanted = self.settings
        names = ("ANTHROPIC_MODEL", "ANTHROPIC_SMALL_FAST_MODEL", "CLAUDE_CODE_SUBAGENT_MODEL")
        kinds = (f"ANTHROPIC_DEFAULT_{kind}_MODEL" for kind in ("HAIKU", "SONNET", "OPUS"))
        limits = {
            "MAX_THINKING_TOKENS": wanted.max_thinking_tokens,
            "CLAUDE_CODE_MAX_OUTPUT_TOKENS": wanted.max_output_tokens,
        }
        return {
            "CLAUDE_CONFIG_DIR": self.folder(context.layout),
            "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
            "DISABLE_AUTOUPDATER": "1",
            # Root is let through where somebody says that this is a sandbox.
            "IS_SANDBOX": "1",
            "CLAUDE_CODE_MAX_RETRIES": str(wanted.retries),
            "API_TIMEOUT_MS": _ms(wanted.request_timeout_s),
            "MCP_TIMEOUT": _ms(SERVERS_S),
            "BASH_DEFAULT_TIMEOUT_MS": _ms(wanted.bash_timeout_s),
            "BASH_MAX_TIMEOUT_MS": _ms(wanted.bash_timeout_s),
            **dict.fromkeys((*names, *kinds), self.model),
            **{name: str(value) for name, value in limits.items() if value is not None},
        }

    def literal(self, text: str) -> str:
        return without_braced_variables(text)

    async def results(self, runtime: Runtime, context: HarnessContext, steps: list[StepReport]) -> Mapping[str, Any]:
        """Its own verdict: `exit_status` (`success`, or what ended it) and turns."""
        said = await last_words(runtime, steps)
        return {"exit_status": said.get("subtype"), "turns": said.get("num_turns")} if said else {}

    def at_limit(self, report: HarnessReport, seen: CallsSeen) -> str:
        status = report.metadata.get("exit_status")
        if status is None:  # nothing could be read of it
            return super().at_limit(report, seen)
        return str(status) if status in LIMITS else ""

    def files(self, context: HarnessContext) -> Mapping[str, bytes]:
        settings = {"env": self._held(context), "apiKeyHelper": "", "disableAllHooks": True}
        files = {self._settings_path(context): as_json(settings)}
        if not self.spec.mcp_servers:
            return files
        # Else a server's tools are hidden behind a search, and the list of tools grows in the middle of the history.
        servers: dict[str, Any] = {
            name: {**mcp_entry(server), "alwaysLoad": True} for name, server in self.servers.items()
        }
        return {**files, self._mcp_path(context): as_json({"mcpServers": servers})}

    def _held(self, context: HarnessContext) -> dict[str, str]:
        """Variables that nothing in the repository may set: as they are, or empty."""
        elsewhere = {name: context.env.get(name, "") for name in ELSEWHERE}
        return {**elsewhere, **held(context.env), **self.environment(context)}

    def _settings_path(self, context: HarnessContext) -> str:
        # `settings.json` there would be the user's, which the repository's win over.
        return f"{self.folder(context.layout)}/rollout.json"

    def _mcp_path(self, context: HarnessContext) -> str:
        return f"{self.folder(context.layout)}/mcp.json"


def _ms(seconds: float) -> str:
    return str(round(seconds * 1000))
