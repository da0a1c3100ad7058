"""Harness `pydantic_ai`: an agent written with Pydantic AI."""

from __future__ import annotations

from typing import ClassVar

from polarq_worker.harnesses.libraries.base import LibraryPreset
from polarq_worker.harnesses.programs.program import PythonProgram
from polarq_worker.harnesses.programs.versions import Versions


class PydanticAIHarness(LibraryPreset):
    """See the module's text. `model` is a model with its provider."""

    name: ClassVar[str] = "pydantic_ai"
    title: ClassVar[str] = "Pydantic AI"
    program: ClassVar[PythonProgram] = PythonProgram(
        "pydantic-ai-slim",
        "python",
        Versions("2.68.0", "2.0.0", "2.69.0"),
        with_=("pydantic-ai-slim[openai,anthropic,google]",),
    )
    dialects: ClassVar[tuple[str, ...]] = ("openai_chat", "openai_responses", "anthropic_messages", "google_generate")
