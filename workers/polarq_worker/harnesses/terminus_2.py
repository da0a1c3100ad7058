"""Harness `terminus_2`: Harbor's Terminus-2, which types into a terminal (tmux) what the model says in JSON or XML.

Harbor is a library here: `programs/terminus_2_run.py` makes its agent and runs it in the sandbox itself, where
Harbor would run it beside. The sandbox needs tmux. It never streams and sends no tools; MCP servers and skills are told
to the model in words. Calls that fail are tried 3 times by its client, three times over. When the context overflows it
raises, unless it is told to go on with a summary. Its way over Responses is not for polarq: there it sends no history
but names the answer before, which the server would have to keep.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from importlib.resources import files
from typing import Any, ClassVar, Literal

from pydantic import Field

from polarq.contracts.rollout import HarnessReport, StepReport
from polarq_worker.harnesses.base import HarnessContext
from polarq_worker.harnesses.configs import as_json, given
from polarq_worker.harnesses.environment import LITELLM
from polarq_worker.harnesses.preset import Preset, PresetSettings
from polarq_worker.harnesses.programs.program import PythonProgram
from polarq_worker.harnesses.programs.versions import Versions
from polarq_worker.harnesses.verdicts import CallsSeen
from polarq_worker.runtimes.base import Runtime

MAX_RESULT_BYTES = 16 * 1024 * 1024


class Terminus2Settings(PresetSettings):
    """`agent.settings` of harness `terminus_2`."""

    max_turns: int | None = Field(None, gt=0)
    """Model calls at most; None: none."""
    parser: Literal["json", "xml"] = "json"
    """What the model answers in."""
    temperature: float | None = Field(None, ge=0)
    reasoning_effort: Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"] | None = None
    context_window: int = Field(128_000, gt=0)
    """Tokens that the model takes."""
    max_tokens: int = Field(16_384, gt=0)
    """Tokens per answer that it reckons with."""
    summarize: bool = False
    """Whether it goes on with a summary, as a new history, when the context is used up. It then asks for ever, several
    times a second, where the model refuses the shortest history too (`model.max_calls` ends that)."""
    summarize_at: int = Field(8000, ge=0)
    """With `summarize`: tokens left at which it does so unasked; 0: never."""
    interleaved_thinking: bool = False
    """Whether the thinking of earlier turns is sent again."""
    width: int = Field(160, gt=0)
    """Of the terminal, in characters; with height."""
    height: int = Field(40, gt=0)


class Terminus2Harness(Preset):
    """See the module's text."""

    name: ClassVar[str] = "terminus_2"
    title: ClassVar[str] = "Terminus-2"
    program: ClassVar[PythonProgram] = PythonProgram(
        "harbor", "python", Versions("0.26.0", "0.26.0", "0.27.0"), needs=("tmux",), python="3.12"
    )
    dialects: ClassVar[tuple[str, ...]] = ("openai_chat",)
    settings_class: ClassVar[type[PresetSettings]] = Terminus2Settings
    mcp_transports: ClassVar[frozenset[str]] = frozenset({"stdio", "sse", "streamable-http"})
    takes_skills: ClassVar[bool] = True
    turn_limit: ClassVar[str] = "max_turns"
    kept: ClassVar[tuple[str, ...]] = ("logs",)
    settings: Terminus2Settings

    def command(self, context: HarnessContext) -> Sequence[str]:
        return [f"{self.folder(context.layout)}/run.py", f"{self.folder(context.layout)}/run.json"]

    def environment(self, context: HarnessContext) -> Mapping[str, str]:
        return LITELLM

    def files(self, context: HarnessContext) -> Mapping[str, bytes]:
        folder = self.folder(context.layout)
        return {f"{folder}/run.py": _runner(), f"{folder}/run.json": as_json(self.config(context))}

    def config(self, context: HarnessContext) -> dict[str, Any]:
        wanted = self.settings
        folder = self.folder(context.layout)
        agent = {
            "model_name": f"openai/{self.model}",
            "api_base": f"{context.base_url}/v1",
            "max_turns": wanted.max_turns,
            "parser_name": wanted.parser,
            "temperature": wanted.temperature,
            "reasoning_effort": wanted.reasoning_effort,
            "enable_summarize": wanted.summarize,
            "proactive_summarization_threshold": wanted.summarize_at,
            "interleaved_thinking": wanted.interleaved_thinking,
            "model_info": {"max_input_tokens": wanted.context_window, "max_output_tokens": wanted.max_tokens},
            "tmux_pane_width": wanted.width,
            "tmux_pane_height": wanted.height,
            "record_terminal_session": False,
            "session_id": context.rollout_id,
            "mcp_servers": [server.model_dump(mode="json") for server in self.servers.values()],
            "skills_dir": self.skills_target(context) if self.spec.skills_path else None,
        }
        return {"instruction": context.instruction_path, "logs": f"{folder}/logs", "agent": given(agent)}

    async def results(self, runtime: Runtime, context: HarnessContext, steps: list[StepReport]) -> Mapping[str, Any]:
        """Its own count of calls and tokens; what it failed of, if it did."""
        kept = runtime.host_log_dir / "agent" / "terminus-2.json"
        kept.parent.mkdir(parents=True, exist_ok=True)
        await runtime.get_file(f"{self.folder(context.layout)}/logs/result.json", kept, MAX_RESULT_BYTES)
        result: dict[str, Any] = json.loads(kept.read_bytes())
        return {"usage": result}

    def at_limit(self, report: HarnessReport, seen: CallsSeen) -> str:
        usage = report.metadata.get("usage", {})
        return "max_turns" if (usage.get("complete"), usage.get("error")) == (False, None) else ""


def _runner() -> bytes:
    return files("polarq_worker.harnesses.programs").joinpath("terminus_2_run.py").read_bytes()
