"""Harness `aider`: Aider, over chat completions (streamed by default) or Anthropic's messages.

It has no tools: the model answers with edits, and Aider asks again only for what it could not apply, a file that the
answer names, or failed lints and tests (three times at most). Each request rewrites the history: the files move to its
end and the last message loses its reminder, so that no prompt continues the one before.

It exits with 0 whatever happened (a refused call, an overflow, an empty answer): the proxy's view decides. Commits are
off, and with them the two calls for each message; so are URLs in the instruction, which it would open, and commands
that the model suggests, which it runs for nobody who is not there.

It reads a repository's .aider.conf.yml, .env (also for its own options, and over the environment) and
.aider.model.settings.yml: options of the command line, and files that they name, win over all of them.
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Literal

from pydantic import Field

from polarq.contracts.rollout import StepReport
from polarq.contracts.sandbox import ExecCategory
from polarq.contracts.specs import AgentSpec
from polarq.errors import HarnessFault, InvalidTask
from polarq_worker.harnesses.base import HarnessContext
from polarq_worker.harnesses.configs import as_json, as_yaml, git_settings, given
from polarq_worker.harnesses.environment import LITELLM, held
from polarq_worker.harnesses.preset import Preset, PresetSettings
from polarq_worker.harnesses.programs.program import PythonProgram
from polarq_worker.harnesses.programs.versions import Versions
from polarq_worker.runtimes.base import ExecResult, Runtime

_ANY_MODEL = "aider/extra_params"
"""Its name for settings of every model."""
_ADDRESS_OPTIONS = ("OPENAI_API_BASE", "OPENAI_API_KEY", "ANTHROPIC_API_KEY")
_SHELL_S = 60.0
_PROVIDERS = {"openai_chat": "openai", "anthropic_messages": "anthropic"}
_NO_REPOSITORY = 3
_LOOK = f"git rev-parse --is-inside-work-tree >/dev/null 2>&1 || exit {_NO_REPOSITORY}"
"""Told by its exit code: what a shell prints may be an image's own words."""
_CLEAN = """\
rm -rf .aider.tags.cache.v*
top=$(git rev-parse --show-toplevel 2>/dev/null) || exit 0
rm -rf "$top"/.aider.tags.cache.v*
"""


class AiderSettings(PresetSettings):
    """`agent.settings` of harness `aider`."""

    stream: bool = True
    edit_format: Literal["whole", "diff", "diff-fenced", "udiff", "udiff-simple", "patch", "architect"] | None = None
    """How the model writes edits; None: the program's own for that model (`whole` for one it does not know)."""
    files: list[str] = []
    """In the chat from the start, and to be edited."""
    read_only: list[str] = []
    """In the chat from the start, and not to be edited."""
    map_tokens: int | None = Field(None, ge=0)
    """Size of its map of the repository; 0: none; None: the program's own (1024)."""
    context_window: int | None = Field(None, gt=0)
    """Tokens; None: not known to it."""
    max_chat_history_tokens: int | None = Field(None, gt=0)
    auto_lint: bool = True
    """Lint after each edit; what is found goes back to the model."""
    lint_commands: list[str] = []
    """`language: command` each, for its own linters."""
    test_command: str | None = None
    """Run after each edit; where it fails, its output goes back to the model."""
    reasoning_effort: str | None = None
    thinking_tokens: int | None = Field(None, ge=0)
    config: dict[str, Any] = {}
    """More of its .aider.conf.yml; polarq's own keys win."""


class AiderHarness(Preset):
    """See the module's text."""

    name: ClassVar[str] = "aider"
    title: ClassVar[str] = "Aider"
    program: ClassVar[PythonProgram] = PythonProgram(
        "aider-chat", "aider", Versions("0.86.2", "0.86.0", "0.87.0"), python="3.10", python_below="3.13"
    )
    dialects: ClassVar[tuple[str, ...]] = tuple(_PROVIDERS)
    settings_class: ClassVar[type[PresetSettings]] = AiderSettings
    commands: ClassVar[str] = "/!"
    kept: ClassVar[tuple[str, ...]] = ("chat.md", "calls.txt")
    settings: AiderSettings

    def __init__(self, spec: AgentSpec) -> None:
        super().__init__(spec)
        self._in_repository = True
        taken = sorted(
            {"message", "message-file", "model", "config"} & {key.strip("-") for key in self.settings.config}
        )
        if taken:
            raise InvalidTask("agent.settings", [f"config: '{key}' is not for a task to say" for key in taken])

    async def setup(self, runtime: Runtime, context: HarnessContext) -> None:
        # It would make a repository where there is none.
        look = await self._shell(runtime, context, _LOOK)
        self._in_repository = look.exit_code != _NO_REPOSITORY
        await super().setup(runtime, context)

    def command(self, context: HarnessContext) -> Sequence[str]:
        own = [flag for key, value in self.options(context).items() for flag in _flags(key, value)]
        return [f"--config={self._path(context, 'config.yml')}", *own]

    def environment(self, context: HarnessContext) -> Mapping[str, str]:
        # It writes a name into the repository's configuration where there is none.
        author = git_settings(context.env, {"user.name": "aider", "user.email": "aider@localhost"})
        return {
            **author,
            **LITELLM,
        }

    def files(self, context: HarnessContext) -> Mapping[str, bytes]:
        return {
            self._path(context, "config.yml"): as_yaml(self.settings.config),
            self._path(context, "held.env"): self._variables(context).encode(),
            self._path(context, "models.json"): as_json({self._model: self._metadata()}),
            self._path(context, "models.yml"): as_yaml([{"name": _ANY_MODEL, "extra_params": self._address(context)}]),
            self._path(context, "message.txt"): self.instruction(context).encode(),
        }

    def options(self, context: HarnessContext) -> dict[str, Any]:
        """Its own words for what it is told, without what it is not."""
        wanted = self.settings
        own = {
            "model": self._model,
            "env-file": self._path(context, "held.env"),
            # What is said here is not read from any file.
            "set-env": ["LITELLM_LOCAL_MODEL_COST_MAP=True"],
            "model-settings-file": self._path(context, "models.yml"),
            "message-file": self._path(context, "message.txt"),
            # With an entry for its model it asks no server for a list of models.
            "model-metadata-file": self._path(context, "models.json"),
            "input-history-file": self._path(context, "input.txt"),
            "chat-history-file": self._path(context, "chat.md"),
            "llm-history-file": self._path(context, "calls.txt"),
            "yes-always": True,
            "stream": wanted.stream,
            "git": None if self._in_repository else False,
            "edit-format": wanted.edit_format,
            "file": wanted.files or None,
            "read": wanted.read_only or None,
            "map-tokens": wanted.map_tokens,
            "max-chat-history-tokens": wanted.max_chat_history_tokens,
            "auto-lint": wanted.auto_lint,
            "lint-cmd": wanted.lint_commands or None,
            "test-cmd": wanted.test_command,
            "auto-test": wanted.test_command is not None,
            "reasoning-effort": wanted.reasoning_effort,
            "thinking-tokens": wanted.thinking_tokens,
            "check-model-accepts-settings": False,
            "show-model-warnings": False,
            "show-release-notes": False,
            "check-update": False,
            "analytics": False,
            "auto-commits": False,
            "dirty-commits": False,
            "gitignore": False,
            "detect-urls": False,
            "disable-playwright": True,
            "suggest-shell-commands": False,
            "pretty": False,
            "fancy-input": False,
            "notifications": False,
        }
        return given(own)

    async def results(self, runtime: Runtime, context: HarnessContext, steps: list[StepReport]) -> Mapping[str, Any]:
        """Its cache, which lies in the work tree, is no work of the agent's."""
        await self._shell(runtime, context, _CLEAN)
        return {}

    async def _shell(self, runtime: Runtime, context: HarnessContext, script: str) -> ExecResult:
        cwd = self.settings.workdir
        done = await runtime.exec(script, cwd=cwd, env=context.env, timeout_s=_SHELL_S, category=ExecCategory.SETUP)
        if not done.ok and done.exit_code != _NO_REPOSITORY:
            raise HarnessFault(f"the folder that Aider works in cannot be looked at or cleaned: {done.why}")
        return done

    @property
    def _model(self) -> str:
        """With the provider in front by which it chooses its client."""
        return f"{_PROVIDERS[self.dialect]}/{self.model}"

    def _address(self, context: HarnessContext) -> dict[str, str]:
        """What every call is made with, whatever else says where the model is: LiteLLM has two words for it."""
        url = context.base_url if self.dialect == "anthropic_messages" else f"{context.base_url}/v1"
        return {"api_base": url, "base_url": url, "api_key": context.api_key}

    def _variables(self, context: HarnessContext) -> str:
        options = {f"AIDER_{name}": context.env[name] for name in _ADDRESS_OPTIONS}
        return "".join(f"{name}={shlex.quote(value)}\n" for name, value in (held(context.env) | options).items())

    def _metadata(self) -> dict[str, Any]:
        known = {"litellm_provider": _PROVIDERS[self.dialect], "mode": "chat"}
        return given({**known, "max_input_tokens": self.settings.context_window})

    def _path(self, context: HarnessContext, name: str) -> str:
        return f"{self.folder(context.layout)}/{name}"


def _flags(key: str, value: Any) -> list[str]:
    if isinstance(value, bool):
        return [f"--{key}" if value else f"--no-{key}"]
    return [f"--{key}={one}" for one in (value if isinstance(value, list) else [value])]
