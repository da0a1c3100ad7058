"""Harness `ag2`: an agent written with AG2."""

from __future__ import annotations

from typing import ClassVar

from polarq_worker.harnesses.libraries.base import LibraryPreset
from polarq_worker.harnesses.programs.program import PythonProgram
from polarq_worker.harnesses.programs.versions import Versions


class Ag2Harness(LibraryPreset):
    """See the module's text. `model` is a model configuration (of `autogen`, before 1.0, an `LLMConfig`)."""

    name: ClassVar[str] = "ag2"
    title: ClassVar[str] = "AG2"
    program: ClassVar[PythonProgram] = PythonProgram(
        "ag2", "python", Versions("1.2.1", "0.9.0", "1.3.0"), python="3.10", with_=("ag2[openai,anthropic]",)
    )
    dialects: ClassVar[tuple[str, ...]] = ("openai_chat", "openai_responses", "anthropic_messages")
