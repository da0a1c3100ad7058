"""Hermes Agent: its configuration, its instruction, its word on how it went."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from polarq.contracts.specs import AgentSpec
from polarq.errors import InvalidTask
from polarq_worker.harnesses.hermes import HermesHarness
from polarq_worker.harnesses.preset import SERVERS_S
from polarq_worker.runtimes.local import LocalRuntime
from tests.harnesses.conftest import MakeContext

ENDS = "x\r\ny\r\n"


def hermes(**fields: Any) -> HermesHarness:
    return HermesHarness(AgentSpec.parse({"harness": "hermes", **fields}))


@pytest.mark.parametrize(
    ("dialect", "mode", "address"),
    [
        ("openai_chat", "chat_completions", "http://127.0.0.1:9/s/secret/v1"),
        ("openai_responses", "codex_responses", "http://127.0.0.1:9/s/secret/v1"),
        ("anthropic_messages", "anthropic_messages", "http://127.0.0.1:9/s/secret"),
    ],
)
def test_its_one_provider_is_the_proxy(dialect: str, mode: str, address: str, make_context: MakeContext) -> None:
    config = hermes(settings={"dialect": dialect, "config": {"provider": "mine"}}).config(make_context())
    (provider,) = config["custom_providers"]
    assert (provider["api_mode"], provider["base_url"], provider["key_env"]) == (mode, address, "OPENAI_API_KEY")
    assert config["provider"] == config["model"]["provider"] == "custom:polarq"


def test_its_settings_become_its_configuration(make_context: MakeContext) -> None:
    context = make_context()
    harness = hermes(
        mcp_servers=[
            {"name": "files", "command": "files-server", "args": ["--root", "/x y"]},
            {"name": "far", "transport": "streamable-http", "url": "http://127.0.0.1:9/mcp"},
            {"name": "old", "transport": "sse", "url": "http://127.0.0.1:9/sse"},
        ],
        settings={
            "retries": 2,
            "temperature": 0.0,
            "max_tokens": 99,
            "toolsets": ["terminal", "file"],
            "config": {
                "agent": {"api_max_retries": 9, "coding_context": "off"},
                "security": {"allow_lazy_installs": True},
            },
        },
    )
    ((path, data),) = harness.files(context).items()
    config = yaml.safe_load(data)
    assert path == f"{harness.environment(context)['HERMES_HOME']}/config.yaml"
    assert config["agent"] == {"api_max_retries": 2, "coding_context": "off"}
    assert config["custom_providers"][0]["extra_body"] == {"temperature": 0.0}
    assert config["custom_providers"][0]["max_output_tokens"] == 99
    assert config["security"] == {"allow_lazy_installs": False}
    assert config["mcp_servers"] == {
        "files": {"command": "files-server", "args": ["--root", "/x y"]},
        "far": {"url": "http://127.0.0.1:9/mcp"},
        "old": {"url": "http://127.0.0.1:9/sse", "transport": "sse"},
    }
    assert config["mcp_discovery_timeout"] == SERVERS_S
    assert harness.command(context)[-1] == "--toolsets=terminal,file"
    with pytest.raises(InvalidTask, match="context_window"):
        hermes(settings={"context_window": 32_000})


def test_over_messages_it_cannot_be_told_how_to_sample() -> None:
    with pytest.raises(InvalidTask, match=r"temperature: .* model\.sampling") as caught:
        hermes(settings={"dialect": "anthropic_messages", "temperature": 0.5, "seed": 0})
    assert len(caught.value.problems) == 2


def test_a_server_has_no_name_of_a_toolset_of_its_own() -> None:
    with pytest.raises(InvalidTask, match="'web' is a toolset of Hermes Agent's own") as caught:
        hermes(mcp_servers=[{"name": name, "command": "x"} for name in ("web", "mine")])
    assert len(caught.value.problems) == 1


def test_a_server_is_told_nothing_that_would_be_a_variable() -> None:
    with pytest.raises(InvalidTask) as caught:
        hermes(mcp_servers=[{"name": "a", "command": "x", "args": ["${HOME}"]}, {"name": "b", "command": "$HOME/x"}])
    assert caught.value.problems == (
        "mcp_servers: '${' in a text of 'a': Hermes Agent puts a variable in there; have a script say it",
    )


def test_its_instruction_may_be_longer_than_an_argument_and_no_module_of_a_repository_is_its_own(
    tmp_path: Path, make_context: MakeContext
) -> None:
    """Linux takes 128 KiB an argument; the stand-in has the entry point that the program has."""
    (tmp_path / "site/hermes_cli").mkdir(parents=True)
    (tmp_path / "site/hermes_cli/main.py").write_text(
        "import sys\n\ndef main():\n    print(len(sys.argv[1]), repr(sys.argv[1][-6:]), sys.argv[2:])\n"
    )
    (tmp_path / "repo").mkdir()
    for name in ("hermes_cli", "pathlib"):
        (tmp_path / f"repo/{name}.py").write_text("raise SystemExit('a module of the repository')\n")
    (tmp_path / "instruction.txt").write_bytes(("--é" * 100_000 + ENDS).encode())
    context = replace(make_context(), instruction_path=str(tmp_path / "instruction.txt"))
    command = [sys.executable, *hermes().command(context)]
    env = {**os.environ, "PYTHONPATH": str(tmp_path / "site")}
    said = subprocess.run(
        command, cwd=tmp_path / "repo", env=env, capture_output=True, text=True, check=False, timeout=60
    )
    usage = f"{hermes().folder(context.layout)}/usage.json"
    read = f"{len('--oneshot=') + 300_006} {ENDS!r}"
    assert said.stdout == f"{read} ['--usage-file', '{usage}']\n", said.stderr


async def test_its_usage_file_is_its_word_on_how_it_went(runtime: LocalRuntime, make_context: MakeContext) -> None:
    context = make_context()
    harness = hermes()
    usage = b'{"completed": false, "failed": true, "failure": "no", "api_calls": 2, "estimated_cost_usd": 0.0}'
    await runtime.put_bytes(usage, f"{harness.folder(context.layout)}/usage.json")
    said = await harness.results(runtime, context, [])
    assert (said["usage"]["failed"], said["usage"]["api_calls"]) == (True, 2)
