"""AutoGen's clients for chat models (autogen-ext). What a model of an unknown name can do has to be told."""

from __future__ import annotations

from importlib import import_module
from typing import Any

ABLE = {
    "vision": True,
    "function_calling": True,
    "json_output": True,
    "structured_output": True,
    "family": "unknown",
    "multiple_system_messages": False,
}


def model(name: str, base_url: str, api_key: str, dialect: str) -> Any:
    if dialect == "anthropic_messages":
        client, url = import_module("autogen_ext.models.anthropic").AnthropicChatCompletionClient, base_url
    else:
        client, url = import_module("autogen_ext.models.openai").OpenAIChatCompletionClient, f"{base_url}/v1"
    return client(model=name, base_url=url, api_key=api_key, model_info=ABLE)
