"""What Aider is told, and what of the repository it must leave alone."""

from __future__ import annotations

from functools import partial
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


def told_of(preset: AiderHarness, make_context: MakeContext) -> dict[str, list[str]]:
    """Its options by name; those that are on or off have no value."""
    told: dict[str, list[str]] = {}
    for word in preset.command(make_context()):
        name, given, value = word.removeprefix("--").partition("=")
        told.setdefault(name, []).extend([value] if given else [])
    return told


def file_of(preset: AiderHarness, make_context: MakeContext, name: str) -> str:
    return preset.files(make_context())[f"{FOLDER}/{name}"].decode()


async def set_up(preset: AiderHarness, runtime: LocalRuntime, make_context: MakeContext) -> dict[str, list[str]]:
    """Its options once it is set up."""
    await runtime.put_bytes(b"image\n0.86.2\n/usr/bin/aider\n", f"{home_of('aider', runtime.layout)}/installed")
    await preset.setup(runtime, make_context())
    return told_of(preset, make_context)


@pytest.mark.parametrize(("dialect", "ending"), [("openai_chat", "/v1"), ("anthropic_messages", "")])
def test_the_model_is_named_where_no_file_of_the_repository_can_say_otherwise(
    dialect: str, ending: str, make_context: MakeContext
) -> None:
    preset = harness(settings={"dialect": dialect}, model_name="m")
    told = told_of(preset, make_context)
    assert told["model"] == [f"{dialect.partition('_')[0]}/m"]
    # A variable of a `.env` wins over a configuration file, a file of variables that is named over others.
    assert told["env-file"] == [f"{FOLDER}/held.env"]
    assert {
        "OPENAI_API_BASE=http://127.0.0.1:9/s/secret/v1",
        "AIDER_OPENAI_API_BASE=http://127.0.0.1:9/s/secret/v1",
        "ANTHROPIC_API_BASE=http://127.0.0.1:9/s/secret",
        "AIDER_OPENAI_API_KEY=secret",
        "HTTP_PROXY=''",
    } <= set(file_of(preset, make_context, "held.env").splitlines())
    # Those are set last of all, unless this is said here.
    assert told["set-env"] == ["LITELLM_LOCAL_MODEL_COST_MAP=True"]
    # And parameters of a model win over every variable.
    assert told["model-settings-file"] == [f"{FOLDER}/models.yml"]
    (settings,) = yaml.safe_load(file_of(preset, make_context, "models.yml"))
    where = f"http://127.0.0.1:9/s/secret{ending}"
    assert settings == {
        "name": "aider/extra_params",
        "extra_params": {"api_base": where, "base_url": where, "api_key": "secret"},
    }


def test_the_settings_become_its_options_and_its_configuration(make_context: MakeContext) -> None:
    settings = {
        "stream": False,
        "edit_format": "diff",
        "files": ["-odd name.py", "b.py"],
        "test_command": "make test",
        "map_tokens": 0,
        "reasoning_effort": "low",
        "config": {"dark-mode": True, "auto-commits": True},
    }
    told = told_of(harness(settings=settings), make_context)
    wanted = {
        "no-stream": [],
        "edit-format": ["diff"],
        "file": ["-odd name.py", "b.py"],
        "test-cmd": ["make test"],
        "auto-test": [],
        "map-tokens": ["0"],
        "reasoning-effort": ["low"],
        "no-auto-commits": [],
    }
    assert {key: told[key] for key in wanted} == wanted
    assert not {"read", "lint-cmd", "thinking-tokens", "stream", "auto-commits"} & set(told)
    assert yaml.safe_load(file_of(harness(settings=settings), make_context, "config.yml")) == settings["config"]


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
    repository: bool, runtime: LocalRuntime, make_context: MakeContext
) -> None:
    await runtime.exec(["git", "init", "-q"] if repository else ["true"], timeout_s=60)
    await runtime.exec(["mkdir", "-p", "src"], timeout_s=60)
    preset = harness(settings={"workdir": f"{runtime.workdir}/src"})
    told = await set_up(preset, runtime, make_context)
    assert ("no-git" in told) is not repository
    made = "touch work.py && mkdir .aider.tags.cache.v4 && touch .aider.tags.cache.v4/cache.db"
    where = str(runtime.workdir) if repository else f"{runtime.workdir}/src"
    assert (await runtime.exec(made, cwd=where, timeout_s=60)).ok
    await preset.postprocess(runtime, make_context(), [])
    left = await runtime.exec(["ls", "-A", "--ignore=.git", "--ignore=src"], cwd=where, timeout_s=60)
    assert left.stdout_text == "work.py\n"


async def test_where_there_is_no_repository_it_makes_none(runtime: LocalRuntime, make_context: MakeContext) -> None:
    assert "no-git" in await set_up(harness(), runtime, make_context)


async def test_words_of_the_shell_do_not_hide_the_repository(runtime: LocalRuntime, make_context: MakeContext) -> None:
    await runtime.exec("git init -q", timeout_s=60)
    await runtime.put_bytes(b"echo motd one\necho motd two\n", "/polar/session/noise.sh")
    noise = {"backend": "local", "env": {"BASH_ENV": f"{runtime.layout.session_dir}/noise.sh"}}
    assert "no-git" not in await set_up(harness(), runtime, partial(make_context, runtime=noise))


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
