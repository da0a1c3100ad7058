"""Harness `opencode`: OpenCode, over any of four APIs by the client libraries that it brings.

A session gets its title from polarq: else the program asks the model for one before the first turn. Its tools `grep`,
`glob` and `skill` need ripgrep, which it would fetch from another host at the first call of one: it is installed too.

A repository's opencode.json and .opencode start servers and tools: they are read with `project_config` only. The switch
for that has the program pass over AGENTS.md too, which is named to it instead. Files in .opencode/plugin are run by it
whatever it is told.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from pydantic import Field, field_validator

from polarq.contracts.sandbox import ExecCategory
from polarq.contracts.specs import AgentSpec, McpServerSpec
from polarq.errors import HarnessFault
from polarq_worker.harnesses.base import HarnessContext
from polarq_worker.harnesses.configs import as_json, given, merged
from polarq_worker.harnesses.preset import SERVERS_S, Preset, PresetSettings
from polarq_worker.harnesses.programs.program import NpmProgram, home_of
from polarq_worker.harnesses.programs.versions import Versions
from polarq_worker.runtimes.base import Runtime

PROVIDER = "polarq"
CLIENTS = {
    "openai_chat": ("@ai-sdk/openai-compatible", "/v1"),
    "openai_responses": ("@ai-sdk/openai", "/v1"),
    "anthropic_messages": ("@ai-sdk/anthropic", "/v1"),
    "google_generate": ("@ai-sdk/google", "/v1beta"),
}
"""The library for each API, and what follows the base URL."""

_BRACE = "\ufdd0"
"""Stands for a brace until the file is written, where it gets the escape of JSON: `{env:NAME}` and `{file:PATH}` are
replaced in the text of the file, before it is parsed."""
_LOOK_S = 60.0
_LINKED = """\
bin="${XDG_CACHE_HOME:-$HOME/.cache}/opencode/bin"
for rg in "$1"/node_modules/@vscode/ripgrep-*/bin/rg; do
  [ ! -x "$rg" ] || { mkdir -p "$bin" && ln -sf "$rg" "$bin/rg"; } || exit
done
"""
"""Where it looks for ripgrep, and would put it."""
_TELLING = """\
top=$(git rev-parse --show-toplevel 2>/dev/null) || top=/
for name in AGENTS.md CLAUDE.md CONTEXT.md; do
  at=$(pwd) found=
  while :; do
    [ ! -f "$at/$name" ] || { found=1; printf '%s\\0' "$at/$name"; }
    [ "$at" != "$top" ] && [ "$at" != / ] || break
    at=$(dirname "$at")
  done
  [ -z "$found" ] || exit 0
done
"""
"""Finds what a repository tells the agent, as the program does: the files of the first name that there is."""


class OpenCodeSettings(PresetSettings):
    """`agent.settings` of harness `opencode`."""

    context_window: int = Field(200_000, gt=0)
    """Tokens; it compacts its history before they are used up."""
    max_output_tokens: int = Field(32_000, gt=0)
    """Per answer."""
    max_steps: int | None = Field(None, gt=0)
    """Model calls of the agent at most: in the last one it is told to answer without tools. Nothing but the task's
    `model.max_calls` stops a model that calls one all the same."""
    agent: str | None = None
    """One of its own agents (`build`, `plan`), or with `project_config` of the folder it works in."""
    project_config: bool = False
    """Whether the folder's opencode.json and .opencode are read: its servers and plugins are started then."""
    config: dict[str, Any] = {}
    """More of its opencode.json; polarq's own keys win."""

    @field_validator("config")
    @classmethod
    def _instructions_are_a_list(cls, value: dict[str, Any]) -> dict[str, Any]:
        named = value.get("instructions", [])
        if not isinstance(named, list) or not all(isinstance(one, str) for one in named):
            raise ValueError("its instructions are a list of paths and patterns")
        return value


class OpenCodeHarness(Preset):
    """See the module's text."""

    name: ClassVar[str] = "opencode"
    title: ClassVar[str] = "OpenCode"
    program: ClassVar[NpmProgram] = NpmProgram(
        "opencode-ai",
        "opencode",
        Versions("1.18.33", "1.18.0", "1.19.0"),
        finish="postinstall.mjs",
        with_=("@vscode/ripgrep@1.18.0",),
    )
    dialects: ClassVar[tuple[str, ...]] = tuple(CLIENTS)
    settings_class: ClassVar[type[PresetSettings]] = OpenCodeSettings
    mcp_transports: ClassVar[frozenset[str]] = frozenset({"stdio", "sse", "streamable-http"})
    takes_skills: ClassVar[bool] = True
    turn_limit: ClassVar[str] = "max_steps"
    kept: ClassVar[tuple[str, ...]] = ("data/opencode",)
    settings: OpenCodeSettings

    def __init__(self, spec: AgentSpec) -> None:
        super().__init__(spec)
        self._telling: list[str] = []

    async def setup(self, runtime: Runtime, context: HarnessContext) -> None:
        if not self.settings.project_config:
            self._telling = await self._told_by_the_repository(runtime, context)
        await super().setup(runtime, context)
        linking = ["sh", "-c", _LINKED, "sh", home_of(self.name, context.layout)]
        done = await runtime.exec(linking, env=context.env, timeout_s=_LOOK_S, category=ExecCategory.SETUP)
        if not done.ok:
            raise HarnessFault(f"OpenCode's ripgrep cannot be put where it looks for it: {done.why}")

    async def _told_by_the_repository(self, runtime: Runtime, context: HarnessContext) -> list[str]:
        cwd, argv = self.settings.workdir, ["sh", "-c", _TELLING]
        said = await runtime.exec(argv, cwd=cwd, env=context.env, timeout_s=_LOOK_S, category=ExecCategory.SETUP)
        if not said.ok:
            raise HarnessFault(f"the folder that OpenCode works in cannot be looked at: {said.why}")
        return said.stdout_text.split("\0")[:-1]

    def command(self, context: HarnessContext) -> Sequence[str]:
        agent = [] if self.settings.agent is None else [f"--agent={self.settings.agent}"]
        model = f"--model={PROVIDER}/{self.model}"
        return ["run", "--format=json", "--title=rollout", "--auto", model, *agent]

    def stdin(self, context: HarnessContext) -> bytes:
        return context.task.instruction.encode()

    def environment(self, context: HarnessContext) -> Mapping[str, str]:
        folder = self.folder(context.layout)
        return {
            "OPENCODE_CONFIG_DIR": f"{folder}/config",
            "XDG_DATA_HOME": f"{folder}/data",
            "XDG_STATE_HOME": f"{folder}/state",
            "OPENCODE_DISABLE_MODELS_FETCH": "1",
            "OPENCODE_DISABLE_AUTOUPDATE": "1",
            "OPENCODE_DISABLE_SHARE": "1",
            "OPENCODE_DISABLE_LSP_DOWNLOAD": "1",
            "OPENCODE_DISABLE_DEFAULT_PLUGINS": "1",
            "OPENCODE_DISABLE_PROJECT_CONFIG": "0" if self.settings.project_config else "1",
        }

    def skills_target(self, context: HarnessContext) -> str:
        return f"{self.folder(context.layout)}/config/skills"

    def files(self, context: HarnessContext) -> Mapping[str, bytes]:
        written = as_json(self.config(context)).replace(rb"\ufdd0", rb"\u007b")
        return {self._config_path(context): written}

    def literal(self, text: str) -> str:
        return text.replace("{env:", f"{_BRACE}env:").replace("{file:", f"{_BRACE}file:")

    def config(self, context: HarnessContext) -> dict[str, Any]:
        """Its opencode.json."""
        wanted = self.settings
        client, path = CLIENTS[self.dialect]
        model = self.literal(self.model)
        provider = {
            "npm": client,
            "name": PROVIDER,
            "options": {"baseURL": f"{context.base_url}{path}", "apiKey": context.api_key},
            "models": {
                model: {
                    "name": model,
                    "tool_call": True,
                    "limit": {"context": wanted.context_window, "output": wanted.max_output_tokens},
                }
            },
        }
        name = f"{PROVIDER}/{model}"
        steps = {} if wanted.max_steps is None else {wanted.agent or "build": {"steps": wanted.max_steps}}
        own = {
            "provider": {PROVIDER: provider},
            # A model of another's would be asked past the record.
            "enabled_providers": [PROVIDER],
            "disabled_providers": [],
            "model": name,
            "small_model": name,
            "autoupdate": False,
            "share": "disabled",
            "permission": {"*": "allow"},
            "instructions": [*wanted.config.get("instructions", []), *map(self.literal, self._telling)],
            "agent": steps,
            "mcp": {name: _mcp(server) for name, server in self.servers.items()},
        }
        return merged(wanted.config, given(own))

    def _config_path(self, context: HarnessContext) -> str:
        # This folder is read last: a file that OPENCODE_CONFIG names comes before the repository's, which win over it.
        return f"{self.folder(context.layout)}/config/opencode.json"


def _mcp(server: McpServerSpec) -> dict[str, Any]:
    # For its start and for each call.
    common = {"enabled": True, "timeout": round(SERVERS_S * 1000)}
    if server.transport == "stdio":
        return {**common, "type": "local", "command": [server.command, *server.args]}
    return {**common, "type": "remote", "url": server.url}
