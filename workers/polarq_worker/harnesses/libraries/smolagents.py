"""Harness `smolagents`: an agent written with smolagents. It tells the model of its own calls as text."""

from __future__ import annotations

from typing import ClassVar

from polarq_worker.harnesses.libraries.base import LibraryPreset
from polarq_worker.harnesses.programs.program import PythonProgram
from polarq_worker.harnesses.programs.versions import Versions


class SmolagentsHarness(LibraryPreset):
    """See the module's text. `model` is a server model."""

    name: ClassVar[str] = "smolagents"
    title: ClassVar[str] = "smolagents"
    program: ClassVar[PythonProgram] = PythonProgram(
        "smolagents", "python", Versions("1.26.0", "1.20.0", "1.27.0"), python="3.10", with_=("smolagents[openai]",)
    )
    dialects: ClassVar[tuple[str, ...]] = ("openai_chat",)
