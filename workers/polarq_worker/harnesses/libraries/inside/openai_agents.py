"""The OpenAI Agents SDK: a model object, and the client and API that agents without one take."""

from __future__ import annotations

from importlib import import_module
from typing import Any


def _client(base_url: str, api_key: str) -> Any:
    return import_module("openai").AsyncOpenAI(base_url=f"{base_url}/v1", api_key=api_key)


def default(name: str, base_url: str, api_key: str, dialect: str) -> None:
    agents = import_module("agents")
    agents.set_default_openai_client(_client(base_url, api_key), use_for_tracing=False)
    agents.set_default_openai_api("responses" if dialect == "openai_responses" else "chat_completions")


def model(name: str, base_url: str, api_key: str, dialect: str) -> Any:
    agents = import_module("agents")
    made = agents.OpenAIResponsesModel if dialect == "openai_responses" else agents.OpenAIChatCompletionsModel
    return made(model=name, openai_client=_client(base_url, api_key))
