"""smolagents' model for an OpenAI-compatible server."""

from __future__ import annotations

from importlib import import_module
from typing import Any


def model(name: str, base_url: str, api_key: str, dialect: str) -> Any:
    return import_module("smolagents").OpenAIServerModel(name, api_base=f"{base_url}/v1", api_key=api_key)
