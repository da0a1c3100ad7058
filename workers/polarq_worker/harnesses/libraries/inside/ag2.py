"""AG2's configuration of a model: of `ag2` (1.x), or of `autogen` as it was before."""

from __future__ import annotations

from importlib import import_module
from importlib.metadata import version
from typing import Any


def model(name: str, base_url: str, api_key: str, dialect: str) -> Any:
    if int(version("ag2").partition(".")[0]) < 1:
        return import_module("autogen").LLMConfig(
            {"api_type": "openai", "model": name, "base_url": f"{base_url}/v1", "api_key": api_key}
        )
    config = import_module("ag2.config")
    if dialect == "anthropic_messages":
        return config.AnthropicConfig(model=name, base_url=base_url, api_key=api_key)
    where = {"model": name, "base_url": f"{base_url}/v1", "api_key": api_key}
    if dialect == "openai_responses":
        # Its default is for a server that keeps answers.
        return config.OpenAIResponsesConfig(**where, store=False)
    return config.OpenAIConfig(**where)
