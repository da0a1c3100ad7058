"""Gemini dialect."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from polarq_proxy.dialects.base import Route
from polarq_proxy.dialects.openai_chat import OpenAIChatDialect


class GoogleGenerateDialect(OpenAIChatDialect):
    name: ClassVar[str] = "google_generate"
    fallback: ClassVar[bool] = False
    routes: ClassVar[Sequence[Route]] = ()
