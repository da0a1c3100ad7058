"""Anthropic Messages dialect."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from polarq_proxy.dialects.base import Route
from polarq_proxy.dialects.openai_chat import OpenAIChatDialect


class AnthropicMessagesDialect(OpenAIChatDialect):
    name: ClassVar[str] = "anthropic_messages"
    fallback: ClassVar[bool] = False
    routes: ClassVar[Sequence[Route]] = ()
