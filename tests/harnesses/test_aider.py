"""What Aider is told, and what of the repository it must leave alone."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import yaml

from polarq.contracts.specs import AgentSpec
from polarq.errors import InvalidTask
from polarq_worker.harnesses.aider import AiderHarness
from polarq_worker.harnesses.programs.program import home_of
from polarq_worker.runtimes.local import LocalRuntime
from tests.harnesses.conftest import MakeContext

FOLDER = "/polar/session/.polarq/aider"


def harness(**fields: Any) -> AiderHarness:
    return AiderHarness(AgentSpec.parse({"harness": "aider", **fields}))


def config(preset: AiderHarness, make_context: MakeContext) -> dict[str, Any]:
    files = preset.files(make_context())
    (text,) = [data for path, data in files.items() if path.endswith("/config.yml")]
    read: dict[str, Any] = yaml.safe_load(text)
    return read


async def set_up(
    preset: AiderHarness, runtime: LocalRuntime, make_context: MakeContext, tmp_path: Path
) -> dict[str, Any]:
    """The configuration as it lies in the sandbox."""
    await runtime.put_bytes(b"image\n0.86.2\n/usr/bin/aider\n", f"{home_of('aider', runtime.layout)}/installed")
    context = make_context()
    await preset.setup(runtime, context)
    fetched = tmp_path / "config.yml"
    await runtime.get_file(f"{preset.folder(runtime.layout)}/config.yml", fetched, 100_000)
    read: dict[str, Any] = yaml.safe_load(fetched.read_text())
    return read


def test_the_model_is_named_where_no_file_of_the_repository_can_say_otherwise(make_context: MakeContext) -> None:
    told = config(harness(), make_context)
    assert told["model"] == "openai/polarq"
    assert {"OPENAI_API_BASE=http://127.0.0.1:9/s/secret/v1", "OPENAI_API_KEY=secret"} <= set(told["set-env"])
    assert (
        config(harness(settings={"dialect": "anthropic_messages"}, model_name="m"), make_context)["model"]
        == "anthropic/m"
    )


def test_the_settings_become_its_configuration(make_context: MakeContext) -> None:
    settings = {
        "stream": False,
        "edit_format": "diff",
        "files": ["-odd name.py"],
        "test_command": "make test",
        "map_tokens": 0,
        "reasoning_effort": "low",
        "config": {"dark-mode": True, "auto-commits": True},
    }
    told = config(harness(settings=settings), make_context)
    wanted = {
        "stream": False,
        "edit-format": "diff",
        "file": ["-odd name.py"],
        "test-cmd": "make test",
        "auto-test": True,
        "map-tokens": 0,
        "reasoning-effort": "low",
        "dark-mode": True,
        "auto-commits": False,
    }
    assert {key: told[key] for key in wanted} == wanted
    assert not {"read", "lint-cmd", "thinking-tokens"} & set(told)


@pytest.mark.parametrize(
    ("instruction", "shown"),
    [
        ("Fix it.\n", "Fix it.\n"),
        ("/srv/app does not start", "\n/srv/app does not start"),
        ("!important: fix it", "\n!important: fix it"),
        ("", ""),
    ],
)
def test_an_instruction_is_never_one_of_its_commands(instruction: str, shown: str, make_context: MakeContext) -> None:
    files = harness().files(make_context(instruction or " "))
    (text,) = [data for path, data in files.items() if path.endswith("/message.txt")]
    assert text.decode() == (shown or " ")


@pytest.mark.parametrize("repository", [True, False])
async def test_its_cache_is_gone_when_it_has_ended_and_nothing_else(
    repository: bool, runtime: LocalRuntime, make_context: MakeContext, tmp_path: Path
) -> None:
    await runtime.exec(["git", "init", "-q"] if repository else ["true"], timeout_s=60)
    await runtime.exec(["mkdir", "-p", "src"], timeout_s=60)
    preset = harness(settings={"workdir": f"{runtime.workdir}/src"})
    told = await set_up(preset, runtime, make_context, tmp_path)
    assert told.get("git") is (None if repository else False)
    made = "touch work.py && mkdir .aider.tags.cache.v4 && touch .aider.tags.cache.v4/cache.db"
    where = str(runtime.workdir) if repository else f"{runtime.workdir}/src"
    assert (await runtime.exec(made, cwd=where, timeout_s=60)).ok
    await preset.postprocess(runtime, make_context(), [])
    left = await runtime.exec(["ls", "-A", "--ignore=.git", "--ignore=src"], cwd=where, timeout_s=60)
    assert left.stdout_text == "work.py\n"


async def test_where_there_is_no_repository_it_makes_none(
    runtime: LocalRuntime, make_context: MakeContext, tmp_path: Path
) -> None:
    assert (await set_up(harness(), runtime, make_context, tmp_path))["git"] is False


async def test_words_of_the_shell_do_not_hide_the_repository(
    runtime: LocalRuntime, make_context: MakeContext, tmp_path: Path
) -> None:
    await runtime.exec("git init -q", timeout_s=60)
    await runtime.put_bytes(b"echo motd one\necho motd two\n", "/polar/session/noise.sh")
    noise = {"backend": "local", "env": {"BASH_ENV": f"{runtime.layout.session_dir}/noise.sh"}}
    told = await set_up(harness(), runtime, partial(make_context, runtime=noise), tmp_path)
    assert "git" not in told


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        (
            {"settings": {"temperature": 0.5}},
            r"temperature: Aider cannot be told; set it in .* model\.sampling",
        ),
        ({"settings": {"step_limit": 3}}, "step_limit"),
        ({"settings": {"config": {"message": "hello"}}}, "config: 'message' is not for a task to say"),
        ({"settings": {"dialect": "openai_responses"}}, "does not speak 'openai_responses'"),
        ({"settings": {"version": "0.50.1"}}, r"Aider 0\.50\.1 is not in the supported range"),
        ({"mcp_servers": [{"name": "x", "command": "y"}]}, "takes no server of transport 'stdio'"),
        ({"skills_path": "/skills"}, "has no skills"),
    ],
)
def test_what_it_cannot_do_is_refused_in_one_line(fields: dict[str, Any], words: str) -> None:
    with pytest.raises(InvalidTask, match=words):
        harness(**fields)
