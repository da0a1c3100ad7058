"""Harness `openhands_cli`: the OpenHands CLI without its terminal, over chat completions or Anthropic's messages.

Variables say where the model is, and its `agent_settings.json` the rest; it is never streamed. Its prompt has the time
to the microsecond, fixed for the conversation. It has no limit of steps, and asks again for as long as the answers are
empty: `model.max_calls` of the task is a limit.

It exits with 0 also where the model failed, refused or overflowed: the proxy's view decides. At every start it would
clone a registry of skills, which an own rule of git keeps it from; its question to the Python index whether there is a
newer release cannot be switched off, and does no harm where it is not answered.

It reads the `.env` of the folder it works in: what that says of a variable that is set, empty ones too, is not taken.
Hooks of a repository's .openhands/hooks.json are run, for which there is no switch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from pydantic import Field

from polarq_worker.harnesses.base import SMALL_INSTRUCTION_BYTES, HarnessContext
from polarq_worker.harnesses.configs import as_json, git_settings, given
from polarq_worker.harnesses.environment import LITELLM, held
from polarq_worker.harnesses.openhands_sdk import mcp_server
from polarq_worker.harnesses.preset import Preset, PresetSettings
from polarq_worker.harnesses.programs.program import PythonProgram
from polarq_worker.harnesses.programs.versions import Versions

TRACED_BY = (
    "LMNR_PROJECT_API_KEY",
    "OTEL_ENDPOINT",
    "OTEL_EXPORTER_OTLP_ENDPOINT",
    "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT",
)
"""Variables by which it tells another server what it does."""
_NO_SKILLS = {"url.file:///nowhere/.insteadOf": "https://github.com/OpenHands/extensions"}


class OpenHandsCliSettings(PresetSettings):
    """`agent.settings` of harness `openhands_cli`."""

    reasoning_effort: str | None = None
    """None: none is asked for (the program's own would be `high`)."""
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


class OpenHandsCliHarness(Preset):
    """See the module's text."""

    name: ClassVar[str] = "openhands_cli"
    title: ClassVar[str] = "OpenHands CLI"
    program: ClassVar[PythonProgram] = PythonProgram(
        "openhands", "openhands", Versions("1.16.0", "1.16.0", "1.17.0"), python="3.12", python_below="3.13"
    )
    dialects: ClassVar[tuple[str, ...]] = ("openai_chat", "anthropic_messages")
    settings_class: ClassVar[type[PresetSettings]] = OpenHandsCliSettings
    mcp_transports: ClassVar[frozenset[str]] = frozenset({"stdio", "sse", "streamable-http"})
    kept: ClassVar[tuple[str, ...]] = ("conversations",)
    settings: OpenHandsCliSettings

    def command(self, context: HarnessContext) -> Sequence[str]:
        return ["--headless", "--json", "--always-approve", "--override-with-envs", self._task(context)]

    def environment(self, context: HarnessContext) -> Mapping[str, str]:
        return {
            **held(context.env),
            **dict.fromkeys(TRACED_BY, ""),
            **git_settings(context.env, _NO_SKILLS),
            "LLM_MODEL": self._model,
            "LLM_BASE_URL": context.base_url if self._anthropic else f"{context.base_url}/v1",
            "LLM_API_KEY": context.api_key,
            "OPENHANDS_PERSISTENCE_DIR": self.folder(context.layout),
            "OPENHANDS_CONVERSATIONS_DIR": f"{self.folder(context.layout)}/conversations",
            "OPENHANDS_SUPPRESS_BANNER": "1",
            **LITELLM,
        }

    def files(self, context: HarnessContext) -> Mapping[str, bytes]:
        servers = {name: mcp_server(server) for name, server in self.servers.items()}
        return {
            f"{self.folder(context.layout)}/agent_settings.json": as_json(self.config()),
            f"{self.folder(context.layout)}/mcp.json": as_json({"mcpServers": servers}),
        }

    def config(self) -> dict[str, Any]:
        """Its agent, as it saves one. Tools and prompt it puts in itself."""
        wanted = self.settings
        llm = {
            "model": self._model,
            "max_input_tokens": wanted.context_window,
            "native_tool_calling": wanted.native_tool_calling,
            "num_retries": wanted.num_retries,
            "retry_min_wait": wanted.retry_min_wait_s,
            "retry_max_wait": wanted.retry_max_wait_s,
        }
        llm = {**given(llm), "reasoning_effort": wanted.reasoning_effort}
        agent: dict[str, Any] = {
            "kind": "Agent",
            "llm": {**llm, "usage_id": "agent"},
            "tools": [],
            "system_prompt_kwargs": {"cli_mode": True},
        }
        if wanted.condense_after is not None:
            condenser = {"kind": "LLMSummarizingCondenser", "max_size": wanted.condense_after, "keep_first": 2}
            agent["condenser"] = {**condenser, "llm": {**llm, "usage_id": "condenser"}}
        return agent

    def _task(self, context: HarnessContext) -> str:
        """A long instruction can only come by a file, which the program puts a frame of words around."""
        if len(context.task.instruction.encode()) <= SMALL_INSTRUCTION_BYTES:
            return f"--task={context.task.instruction}"
        return f"--file={context.instruction_path}"

    @property
    def _anthropic(self) -> bool:
        return self.dialect == "anthropic_messages"

    @property
    def _model(self) -> str:
        """With the provider in front by which it chooses its client."""
        return f"{'anthropic' if self._anthropic else 'openai'}/{self.model}"
