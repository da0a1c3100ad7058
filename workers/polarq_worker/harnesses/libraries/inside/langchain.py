"""LangChain's chat models, which LangGraph takes too."""

from __future__ import annotations

from importlib import import_module
from typing import Any


def model(name: str, base_url: str, api_key: str, dialect: str) -> Any:
    if dialect == "anthropic_messages":
        return import_module("langchain_anthropic").ChatAnthropic(model=name, base_url=base_url, api_key=api_key)
    if dialect == "google_generate":
        return import_module("langchain_google_genai").ChatGoogleGenerativeAI(
            model=name, base_url=base_url, api_key=api_key
        )
    responses = dialect == "openai_responses"
    return import_module("langchain_openai").ChatOpenAI(
        model=name, base_url=f"{base_url}/v1", api_key=api_key, use_responses_api=responses
    )
