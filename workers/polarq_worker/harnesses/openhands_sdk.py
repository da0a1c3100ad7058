"""Harness `openhands_sdk`: the default agent of the OpenHands SDK, over chat completions, messages or Responses.

The SDK is a library: `programs/openhands_sdk_run.py` is carried into the sandbox and runs one conversation with it, in
its own Python. Its tools are a terminal, a file editor and a list of tasks; the browser is left out. It asks nothing of
other hosts: its registry of skills is not used, those of the repository are (`project_skills`).

What it is told of sampling it leaves out where it takes the model for one that reasons, as it does with an unknown one:
`model.sampling` of the task is what holds. An exit code other than 0 says that the model or the SDK failed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from importlib.resources import files
from typing import Any, ClassVar

from pydantic import Field

from polarq.contracts.rollout import ExecKind, HarnessReport, StepReport
from polarq.contracts.specs import AgentSpec, McpServerSpec, PrepareAction
from polarq.errors import InvalidTask
from polarq_worker.harnesses.base import HarnessContext
from polarq_worker.harnesses.configs import as_json, given
from polarq_worker.harnesses.environment import LITELLM
from polarq_worker.harnesses.mcp import without_braced_variables
from polarq_worker.harnesses.preset import Preset, PresetSettings
from polarq_worker.harnesses.programs.program import PythonProgram
from polarq_worker.harnesses.programs.versions import Versions
from polarq_worker.harnesses.results import fetched_json
from polarq_worker.harnesses.verdicts import CallsSeen
from polarq_worker.runtimes.base import Runtime

_DRIVER = "openhands_sdk_run.py"
LIMIT = "MaxIterationsReached"
_OWN = ("model", "api_key", "base_url", "api_mode", "stream", "usage_id")
_MAX_RESULT_BYTES = 64 * 1024


class OpenHandsSdkSettings(PresetSettings):
    """`agent.settings` of harness `openhands_sdk`."""

    stream: bool = False
    max_iterations: int = Field(500, gt=0)
    """Steps of the agent at most; at this limit it ends by itself."""
    reasoning_effort: str | None = None
    """None: none is asked for (the SDK's own would be `high`)."""
    context_window: int | None = Field(None, gt=0)
    """Tokens; None: not known to it."""
    condense_after: int | None = Field(240, ge=10)
    """Events after which older ones are summed up by a call of their own; null: never."""
    native_tool_calling: bool = True
    """False: tools are told of in the prompt, and called in text."""
    num_retries: int = Field(5, ge=1)
    """Tries of a failing model call, the first among them."""
    retry_min_wait_s: int = Field(8, ge=0)
    retry_max_wait_s: int = Field(64, ge=0)
    project_skills: bool = True
    """Read the repository's AGENTS.md and .openhands/skills."""
    llm: dict[str, Any] = {}
    """More fields of the SDK's `LLM`; one that it does not have is an error."""


class OpenHandsSdkHarness(Preset):
    """See the module's text."""

    name: ClassVar[str] = "openhands_sdk"
    title: ClassVar[str] = "OpenHands SDK"
    program: ClassVar[PythonProgram] = PythonProgram(
        "openhands-sdk", "python", Versions("1.58.2", "1.58.0", "1.59.0"), python="3.12"
    )
    dialects: ClassVar[tuple[str, ...]] = ("openai_chat", "anthropic_messages", "openai_responses")
    settings_class: ClassVar[type[PresetSettings]] = OpenHandsSdkSettings
    mcp_transports: ClassVar[frozenset[str]] = frozenset({"stdio", "sse", "streamable-http"})
    takes_skills: ClassVar[bool] = True
    turn_limit: ClassVar[str] = "max_iterations"
    kept: ClassVar[tuple[str, ...]] = ("conversations",)
    settings: OpenHandsSdkSettings

    def __init__(self, spec: AgentSpec) -> None:
        super().__init__(spec)
        if taken := sorted(set(_OWN) & set(self.settings.llm)):
            raise InvalidTask("agent.settings", [f"llm: '{key}' is not for this place to say" for key in taken])

    def recipe(self) -> Sequence[PrepareAction]:
        # Its tools are a package of their own, released with it.
        program = replace(self.program, with_=(f"openhands-tools=={self.version}",))
        return (program.install(self.name, self.version, exact=self.settings.version is not None),)

    def command(self, context: HarnessContext) -> Sequence[str]:
        return [self._path(context, _DRIVER), self._path(context, "settings.json")]

    def environment(self, context: HarnessContext) -> Mapping[str, str]:
        return {
            "OPENHANDS_SUPPRESS_BANNER": "1",
            "LOG_LEVEL": "WARNING",
            **LITELLM,
        }

    def literal(self, text: str) -> str:
        return without_braced_variables(text)

    def files(self, context: HarnessContext) -> Mapping[str, bytes]:
        driver = files("polarq_worker.harnesses.programs").joinpath(_DRIVER).read_bytes()
        return {
            self._path(context, _DRIVER): driver,
            self._path(context, "settings.json"): as_json(self.config(context)),
        }

    def config(self, context: HarnessContext) -> dict[str, Any]:
        """What the driver reads; its text says what becomes of each."""
        wanted = self.settings
        return {
            "llm": {**wanted.llm, **self._llm(context)},
            "condense_after": wanted.condense_after,
            "skills": self.skills_target(context) if self.spec.skills_path else None,
            "project_skills": wanted.project_skills,
            "mcp_servers": {name: mcp_server(server) for name, server in self.servers.items()},
            "instruction": context.instruction_path,
            "max_iterations": wanted.max_iterations,
            "conversations": self._path(context, "conversations"),
            "result": self._path(context, "result.json"),
        }

    async def results(self, runtime: Runtime, context: HarnessContext, steps: list[StepReport]) -> Mapping[str, Any]:
        """How the conversation ended: `exit_status` (finished, stuck, MaxIterationsReached, error) and `error`."""
        if not steps or steps[-1].kind is not ExecKind.EXITED:
            return {}
        source = self._path(context, "result.json")
        said: dict[str, Any] = await fetched_json(runtime, source, "openhands_sdk.result.json", _MAX_RESULT_BYTES)
        return said

    def at_limit(self, report: HarnessReport, seen: CallsSeen) -> str:
        return LIMIT if report.metadata.get("exit_status") == LIMIT else ""

    def _llm(self, context: HarnessContext) -> dict[str, Any]:
        anthropic, wanted = self.dialect == "anthropic_messages", self.settings
        own = {
            "model": f"{'anthropic' if anthropic else 'openai'}/{self.model}",
            "base_url": context.base_url if anthropic else f"{context.base_url}/v1",
            "api_mode": "responses" if self.dialect == "openai_responses" else "chat",
            "stream": wanted.stream,
            "max_input_tokens": wanted.context_window,
            "native_tool_calling": wanted.native_tool_calling,
            "num_retries": wanted.num_retries,
            "retry_min_wait": wanted.retry_min_wait_s,
            "retry_max_wait": wanted.retry_max_wait_s,
        }
        return {**given(own), "reasoning_effort": wanted.reasoning_effort}

    def _path(self, context: HarnessContext, name: str) -> str:
        return f"{self.folder(context.layout)}/{name}"


def mcp_server(server: McpServerSpec) -> dict[str, Any]:
    """An MCP server as OpenHands' programs have it."""
    if server.transport == "stdio":
        return {"transport": "stdio", "command": server.command, "args": list(server.args)}
    return {"transport": "sse" if server.transport == "sse" else "http", "url": server.url}
