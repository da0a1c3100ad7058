"""Pydantic AI's models, each with the provider that says where it is."""

from __future__ import annotations

from importlib import import_module
from typing import Any

MODELS = {
    "openai_chat": ("openai", "OpenAIChatModel", "OpenAIProvider", "/v1"),
    "openai_responses": ("openai", "OpenAIResponsesModel", "OpenAIProvider", "/v1"),
    "anthropic_messages": ("anthropic", "AnthropicModel", "AnthropicProvider", ""),
    "google_generate": ("google", "GoogleModel", "GoogleProvider", ""),
}


def model(name: str, base_url: str, api_key: str, dialect: str) -> Any:
    module, kind, provider, version = MODELS[dialect]
    made = getattr(import_module(f"pydantic_ai.providers.{module}"), provider)
    where = made(base_url=f"{base_url}{version}", api_key=api_key)
    return getattr(import_module(f"pydantic_ai.models.{module}"), kind)(name, provider=where)
