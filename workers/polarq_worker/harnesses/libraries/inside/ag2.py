"""AG2's configuration of a model."""

from __future__ import annotations

from importlib import import_module
from typing import Any


def model(name: str, base_url: str, api_key: str, dialect: str) -> Any:
    config = import_module("ag2.config")
    if dialect == "anthropic_messages":
        return config.AnthropicConfig(model=name, base_url=base_url, api_key=api_key)
    where = {"model": name, "base_url": f"{base_url}/v1", "api_key": api_key}
    if dialect == "openai_responses":
        # Its default is for a server that keeps answers.
        return config.OpenAIResponsesConfig(**where, store=False)
    return config.OpenAIConfig(**where)
