"""pi: its configuration files, and what it cannot be told."""

from __future__ import annotations

import json
from typing import Any

import pytest

from polarq.contracts.specs import AgentSpec
from polarq.errors import InvalidTask
from polarq_worker.harnesses.pi import PiHarness
from tests.harnesses.conftest import MakeContext


def pi(**fields: Any) -> PiHarness:
    return PiHarness(AgentSpec.parse({"harness": "pi", **fields}))


@pytest.mark.parametrize(
    ("dialect", "api", "address"),
    [
        ("openai_chat", "openai-completions", "http://127.0.0.1:9/s/secret/v1"),
        ("openai_responses", "openai-responses", "http://127.0.0.1:9/s/secret/v1"),
        ("anthropic_messages", "anthropic-messages", "http://127.0.0.1:9/s/secret"),
        ("google_generate", "google-generative-ai", "http://127.0.0.1:9/s/secret/v1beta"),
    ],
)
def test_its_one_provider_is_the_proxy(dialect: str, api: str, address: str, make_context: MakeContext) -> None:
    models = pi(model_name="Qwen/Qwen3:fast", settings={"dialect": dialect}).models(make_context())
    provider = models["providers"]["polarq"]
    assert (provider["api"], provider["baseUrl"]) == (api, address)
    assert provider["apiKey"] == "$OPENAI_API_KEY"
    assert [model["id"] for model in provider["models"]] == ["Qwen/Qwen3:fast"]


def test_its_files_are_where_it_looks_for_them(make_context: MakeContext) -> None:
    servers = [
        {"name": "files", "command": "files-server", "args": ["--root", "/x y"]},
        {"name": "far", "transport": "streamable-http", "url": "http://127.0.0.1:9/mcp"},
    ]
    context = make_context()
    harness = pi(mcp_servers=servers, settings={"retries": 0, "config": {"retry": {"baseDelayMs": 1}, "theme": "x"}})
    folder = harness.environment(context)["PI_CODING_AGENT_DIR"]
    files = {path.removeprefix(f"{folder}/"): json.loads(data) for path, data in harness.files(context).items()}
    assert set(files) == {"models.json", "settings.json", "mcp.json"}
    assert files["settings.json"]["retry"] == {"baseDelayMs": 1, "maxRetries": 0}
    assert files["settings.json"]["theme"] == "x"
    assert (files["settings.json"]["defaultProvider"], files["settings.json"]["defaultModel"]) == ("polarq", "polarq")
    assert files["mcp.json"]["mcpServers"] == {
        "files": {"command": "files-server", "args": ["--root", "/x y"], "exposure": "direct"},
        "far": {"type": "http", "url": "http://127.0.0.1:9/mcp", "exposure": "direct"},
    }
    assert harness.skills_target(context) == f"{folder}/skills"


def test_sampling_reaches_the_apis_that_it_sends_it_over_and_is_refused_elsewhere(make_context: MakeContext) -> None:
    settings = {"temperature": 0.0, "top_p": 0.5, "seed": 3}
    (model,) = pi(settings=settings).models(make_context())["providers"]["polarq"]["models"]
    assert model["samplingParams"] == settings
    with pytest.raises(InvalidTask, match="seed: pi sends it over the OpenAI APIs only, not over 'google_generate'"):
        pi(settings={"seed": 3, "dialect": "google_generate"})
