"""Harness `hermes`: Hermes Agent's one-shot mode, over chat completions, Responses or Messages.

Its folder (HERMES_HOME) has a config.yaml with one provider. Its program takes the instruction as an argument only, and
Linux takes no argument over 128 KiB: its own entry point is called with an instruction that was read from the file. It
streams. It exits with 0 when the model failed (its last words are the error) and when the answer is empty; its usage
file says whether it failed. Its limit of turns is 90 in this mode, whatever its configuration says: a task's limit is
`model.max_calls`. Before its first call it asks the address for things that other servers have (404). Over
chat completions the thinking of earlier turns does not come back.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Literal

from pydantic import Field

from polarq.contracts.rollout import HarnessReport, StepReport
from polarq.contracts.specs import McpServerSpec
from polarq.errors import InvalidTask
from polarq_worker.harnesses.base import HarnessContext
from polarq_worker.harnesses.configs import as_yaml, given, merged
from polarq_worker.harnesses.preset import SERVERS_S, Preset, PresetSettings
from polarq_worker.harnesses.programs.program import PythonProgram
from polarq_worker.harnesses.programs.versions import Versions
from polarq_worker.harnesses.verdicts import CallsSeen
from polarq_worker.runtimes.base import Runtime

MODES = {
    "openai_chat": ("chat_completions", "/v1"),
    "openai_responses": ("codex_responses", "/v1"),
    "anthropic_messages": ("anthropic_messages", ""),
}
"""Hermes's name for a dialect, and what its address ends in."""
PROVIDER = "custom:polarq"
SAMPLING = ("temperature", "top_p", "seed")
TOOLSETS = frozenset({
    "browser", "clarify", "code_execution", "coding", "computer_use", "context_engine", "cronjob", "debugging",
    "delegation", "discord", "discord_admin", "feishu_doc", "feishu_drive", "file", "homeassistant", "image_gen",
    "kanban", "memory", "project", "safe", "search", "session_search", "skills", "spotify", "terminal", "todo",
    "tts", "video", "video_gen", "vision", "web", "x_search", "yuanbao"
})  # fmt: skip
"""Its own. A server's tools are a toolset of the server's name, and under one of these they are not offered."""
TURNS = 90
"""Where it stops; without a terminal it can be told no other number."""
FRESH = {
    "memory": {"memory_enabled": False, "user_profile_enabled": False},
    "skills": {"creation_nudge_interval": 0},
    "curator": {"enabled": False},
}
"""Nothing is learnt from one rollout to the next, unless a task's `config` says so: after ten steps the program would
look back over them, in model calls beside the task."""
RUN = """\
import sys
from pathlib import Path

sys.argv = ["hermes", "--oneshot=" + Path(sys.argv[1]).read_bytes().decode(), *sys.argv[2:]]
from hermes_cli.main import main

sys.exit(main())
"""


class HermesSettings(PresetSettings):
    """`agent.settings` of harness `hermes`."""

    temperature: float | None = Field(None, ge=0)
    """With top_p and seed: sent with every call, but over Anthropic's messages."""
    top_p: float | None = Field(None, gt=0, le=1)
    seed: int | None = None
    max_tokens: int | None = Field(None, gt=0)
    """Tokens per answer at most."""
    context_window: int = Field(128_000, ge=64_000)
    """Tokens that the model takes; the program refuses to work with less than 64,000."""
    reasoning_effort: Literal["none", "minimal", "low", "medium", "high", "xhigh"] | None = None
    retries: int | None = Field(None, ge=1)
    """Tries of a failing call; None: the program's own (3)."""
    toolsets: list[str] | None = None
    """Names of its toolsets (terminal, file, ...); None: its command line's own."""
    config: dict[str, Any] = {}
    """More of its config.yaml; polarq's own keys win."""


class HermesHarness(Preset):
    """See the module's text."""

    name: ClassVar[str] = "hermes"
    title: ClassVar[str] = "Hermes Agent"
    program: ClassVar[PythonProgram] = PythonProgram(
        "hermes-agent",
        "python",
        Versions("0.19.0", "0.19.0", "0.20.0"),
        with_=("anthropic>=0.87,<1", "mcp>=1.26,<2"),
    )
    dialects: ClassVar[tuple[str, ...]] = tuple(MODES)
    settings_class: ClassVar[type[PresetSettings]] = HermesSettings
    mcp_transports: ClassVar[frozenset[str]] = frozenset({"stdio", "sse", "streamable-http"})
    takes_skills: ClassVar[bool] = True
    kept: ClassVar[tuple[str, ...]] = ("state.db", "logs", "usage.json")
    settings: HermesSettings

    def _check(self) -> None:
        super()._check()
        taken = [server.name for server in self.spec.mcp_servers if server.name in TOOLSETS]
        if taken:
            text = f"mcp_servers: '{{}}' is a toolset of {self.title}'s own, which wins; give the server another name"
            raise InvalidTask("agent", [text.format(name) for name in taken])
        replaced = [server.name for server in self.spec.mcp_servers if "${" in "\0".join(_texts(server))]
        if replaced:
            text = (
                f"mcp_servers: '${{{{' in a text of '{{}}': {self.title} puts a variable in there; have a script say it"
            )
            raise InvalidTask("agent", [text.format(name) for name in replaced])
        said = [name for name in SAMPLING if getattr(self.settings, name) is not None]
        if said and self.dialect == "anthropic_messages":
            text = f"{{}}: {self.title} cannot be told over anthropic_messages; set it in the task's model.sampling"
            raise InvalidTask("agent.settings", [text.format(name) for name in said])

    def command(self, context: HarnessContext) -> Sequence[str]:
        toolsets = [] if self.settings.toolsets is None else [f"--toolsets={','.join(self.settings.toolsets)}"]
        # -P: else modules of the folder that the agent works in would be taken for its own.
        return ["-P", "-c", RUN, context.instruction_path, "--usage-file", self._usage(context), *toolsets]

    def environment(self, context: HarnessContext) -> Mapping[str, str]:
        return {
            "HERMES_HOME": self.folder(context.layout),
            "TERMINAL_ENV": "local",
            "HERMES_DISABLE_LAZY_INSTALLS": "1",
        }

    def files(self, context: HarnessContext) -> Mapping[str, bytes]:
        return {f"{self.folder(context.layout)}/config.yaml": as_yaml(self.config(context))}

    def config(self, context: HarnessContext) -> dict[str, Any]:
        wanted = self.settings
        mode, ending = MODES[self.dialect]
        sampling = given({name: getattr(wanted, name) for name in SAMPLING})
        provider = {
            "name": PROVIDER.partition(":")[2],
            "model": self.model,
            "base_url": f"{context.base_url}{ending}",
            "key_env": "OPENAI_API_KEY",
            "api_mode": mode,
            "max_output_tokens": wanted.max_tokens,
            "discover_models": False,
            "extra_body": sampling or None,
        }
        own = {
            "model": {"default": self.model, "provider": PROVIDER, "context_length": wanted.context_window},
            "provider": PROVIDER,
            "custom_providers": [given(provider)],
            "agent": {
                "api_max_retries": wanted.retries,
                "reasoning_effort": wanted.reasoning_effort,
            },
            "security": {"allow_lazy_installs": False},
            "model_catalog": {"enabled": False},
            "auxiliary": {"title_generation": {"enabled": False}},
            "mcp_servers": {name: _mcp(server) for name, server in self.servers.items()},
            "mcp_discovery_timeout": SERVERS_S,
        }
        return merged(merged(FRESH, wanted.config), given(own))

    async def results(self, runtime: Runtime, context: HarnessContext, steps: list[StepReport]) -> Mapping[str, Any]:
        """Whether it says that it failed, and its own count of calls and tokens."""
        kept = runtime.host_log_dir / "agent" / "hermes-usage.json"
        kept.parent.mkdir(parents=True, exist_ok=True)
        await runtime.get_file(self._usage(context), kept, 1024 * 1024)
        usage = json.loads(kept.read_bytes())
        named = ("completed", "failed", "failure", "api_calls", "input_tokens", "output_tokens")
        return {"usage": {name: usage.get(name) for name in named}}

    def at_limit(self, report: HarnessReport, seen: CallsSeen) -> str:
        usage = report.metadata.get("usage", {})
        stopped = usage.get("completed") is False and not usage.get("failed")
        return f"max_turns: {TURNS}" if stopped and (usage.get("api_calls") or 0) >= TURNS else ""

    def _usage(self, context: HarnessContext) -> str:
        return f"{self.folder(context.layout)}/usage.json"


def _mcp(server: McpServerSpec) -> dict[str, Any]:
    if server.transport == "stdio":
        return {"command": server.command, "args": list(server.args)}
    return {"url": server.url, **({"transport": "sse"} if server.transport == "sse" else {})}


def _texts(server: McpServerSpec) -> list[str]:
    return [server.command or "", server.url or "", *server.args]
