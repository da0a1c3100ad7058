"""Harness `autogen`: an agent written with AutoGen (autogen-agentchat)."""

from __future__ import annotations

from typing import ClassVar

from polarq_worker.harnesses.libraries.base import LibraryPreset
from polarq_worker.harnesses.programs.program import PythonProgram
from polarq_worker.harnesses.programs.versions import Versions


class AutoGenHarness(LibraryPreset):
    """See the module's text. `model` is a chat completion client."""

    name: ClassVar[str] = "autogen"
    title: ClassVar[str] = "AutoGen"
    program: ClassVar[PythonProgram] = PythonProgram(
        "autogen-agentchat",
        "python",
        Versions("0.7.5", "0.7.0", "0.8.0"),
        python="3.10",
        with_=("autogen-ext[openai,anthropic]~=0.7",),
    )
    dialects: ClassVar[tuple[str, ...]] = ("openai_chat", "anthropic_messages")
