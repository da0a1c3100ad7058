"""Harness `openai_agents`: an agent written with the OpenAI Agents SDK."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from polarq_worker.harnesses.base import HarnessContext
from polarq_worker.harnesses.libraries.base import LibraryPreset
from polarq_worker.harnesses.programs.program import PythonProgram
from polarq_worker.harnesses.programs.versions import Versions


class OpenAIAgentsHarness(LibraryPreset):
    """See the module's text. `model` is a model object; agents without one are given it too."""

    name: ClassVar[str] = "openai_agents"
    title: ClassVar[str] = "OpenAI Agents SDK"
    program: ClassVar[PythonProgram] = PythonProgram(
        "openai-agents", "python", Versions("0.24.0", "0.20.0", "0.25.0"), python="3.10"
    )
    dialects: ClassVar[tuple[str, ...]] = ("openai_responses", "openai_chat")

    def environment(self, context: HarnessContext) -> Mapping[str, str]:
        # Traces would go to OpenAI.
        own = {"OPENAI_AGENTS_DISABLE_TRACING": "1", "OPENAI_DEFAULT_MODEL": self.model}
        return {**super().environment(context), **own}
