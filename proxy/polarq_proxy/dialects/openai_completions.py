"""Legacy completions dialect."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from polarq_proxy.dialects.base import Route
from polarq_proxy.dialects.openai_chat import OpenAIChatDialect


class OpenAICompletionsDialect(OpenAIChatDialect):
    name: ClassVar[str] = "openai_completions"
    fallback: ClassVar[bool] = False
    routes: ClassVar[Sequence[Route]] = ()
