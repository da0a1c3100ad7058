"""Harness `langchain`: an agent written with LangChain or LangGraph."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from polarq_worker.harnesses.base import HarnessContext
from polarq_worker.harnesses.libraries.base import LibraryPreset
from polarq_worker.harnesses.programs.program import PythonProgram
from polarq_worker.harnesses.programs.versions import Versions


class LangChainHarness(LibraryPreset):
    """See the module's text. `model` is a chat model."""

    name: ClassVar[str] = "langchain"
    title: ClassVar[str] = "LangChain"
    program: ClassVar[PythonProgram] = PythonProgram(
        "langchain",
        "python",
        Versions("1.5.2", "1.0.0", "1.6.0"),
        with_=("langgraph~=1.2", "langchain-openai~=1.7", "langchain-anthropic~=1.7", "langchain-google-genai~=4.4"),
    )
    dialects: ClassVar[tuple[str, ...]] = ("openai_chat", "openai_responses", "anthropic_messages", "google_generate")

    def environment(self, context: HarnessContext) -> Mapping[str, str]:
        return {**super().environment(context), "LANGSMITH_TRACING": "false", "LANGCHAIN_TRACING_V2": "false"}
