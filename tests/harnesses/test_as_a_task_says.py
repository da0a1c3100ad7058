"""What a task says reaches the program as the task says it: no command, no variable and no other server's tool."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from polarq.contracts.specs import AgentSpec
from polarq.errors import InvalidTask
from polarq.registry import plugin
from polarq_worker.harnesses.preset import Preset
from tests.harnesses.conftest import MakeContext

Env = Mapping[str, str]


def made(name: str, **fields: Any) -> Preset:
    preset: Preset = plugin("harnesses", name)(AgentSpec.parse({"harness": name, **fields}))
    return preset


def servers(*names: str) -> list[dict[str, Any]]:
    return [{"name": name, "command": "files-server"} for name in names]


# --- the instruction


@pytest.mark.parametrize("name", ["claude_code", "gemini_cli", "qwen_code", "aider"])
@pytest.mark.parametrize("instruction", ["/init", "/clear the table", "/etc/hosts is wrong", " /x", "mend a/b!", "!ls"])
def test_an_instruction_is_no_command_of_the_programs(name: str, instruction: str, make_context: MakeContext) -> None:
    preset, context = made(name), make_context(instruction, agent={"harness": name})
    told = preset.stdin(context) or preset.files(context)[f"{preset.folder(context.layout)}/message.txt"]
    marks = "/!" if name == "aider" else "/"
    assert told.decode() == (f"\n{instruction}" if instruction[0] in marks else instruction)


@pytest.mark.parametrize("name", ["codex", "opencode", "pi", "goose"])
def test_a_program_that_looks_for_no_commands_gets_the_instruction_as_it_is(
    name: str, make_context: MakeContext
) -> None:
    assert made(name).stdin(make_context("/init", agent={"harness": name})) == b"/init"


# --- its configuration


def claude_code(text: str, env: Env) -> str:
    """As the program's source has it; so are the next ones."""
    parts = re.compile(r"\$\{([^}]+)\}")
    return parts.sub(lambda found: _or_default(found, *found[1].split(":-", 1), env=env), text)


def _or_default(found: re.Match[str], name: str, default: str | None = None, *, env: Env) -> str:
    return env.get(name, found[0] if default is None else default)


def gemini_cli(text: str, env: Env) -> str:
    parts = re.compile(r"\$(?:(\w+)|{([^}]+?)(?::-([^}]*))?})", re.ASCII)
    return parts.sub(lambda found: _or_default(found, found[1] or found[2], found[3], env=env), text)


def qwen_code(text: str, env: Env) -> str:
    parts = re.compile(r"\$(?:(\w+)|{([^}]+)})", re.ASCII)
    return parts.sub(lambda found: env.get(found[1] or found[2], found[0]), text)


def openhands(text: str, env: Env) -> str:
    parts = re.compile(r"\$\{([a-zA-Z_][a-zA-Z0-9_]*)(?::-([^}]*))?\}")
    return parts.sub(lambda found: _or_default(found, found[1], found[2], env=env), text)


def openclaw(text: str, env: Env) -> str:
    """Raises `KeyError` for a variable that there is not, as the program does not start then."""
    parts = re.compile(r"\$(\$?)\{([A-Z_][A-Z0-9_]*)\}")
    return parts.sub(lambda found: f"${{{found[2]}}}" if found[1] else env[found[2]], text)


def unreplaced(text: str, env: Env) -> str:
    return text


READ: dict[str, tuple[str, Callable[[str, Env], str]]] = {
    "claude_code": ("mcp.json", claude_code),
    "gemini_cli": (".gemini/settings.json", gemini_cli),
    "qwen_code": ("settings.json", qwen_code),
    "openclaw": ("openclaw.json", openclaw),
    "openhands_sdk": ("settings.json", openhands),
    "pi": ("mcp.json", unreplaced),
}
WORDS = ["A$HOME B", "${HOME}", "${HOME:-x}", "$$HOME", "$${HOME}", "^x$", "$", "${", "$OPENAI_API_KEY", "${A}${HOME}"]


@pytest.mark.parametrize("name", READ)
def test_an_argument_of_an_mcp_server_is_no_variable(name: str, make_context: MakeContext) -> None:
    server = {"name": "files", "command": "$HOME/files", "args": WORDS}
    far = {"name": "far", "transport": "streamable-http", "url": "http://127.0.0.1:9/${HOME}"}
    spec = {"harness": name, "mcp_servers": [server, far]}
    preset, context = made(name, mcp_servers=[server, far]), make_context(agent=spec)
    file, read = READ[name]
    config = json.loads(preset.files(context)[f"{preset.folder(context.layout)}/{file}"])
    written = config.get("mcpServers") or config.get("mcp_servers") or config["mcp"]["servers"]
    env = {"HOME": "/polar/home", "OPENAI_API_KEY": "secret", **preset.environment(context)}
    assert [read(word, env) for word in written["files"]["args"]] == WORDS
    assert read(written["files"]["command"], env) == "$HOME/files"
    assert read(written["far"].get("url") or written["far"]["httpUrl"], env) == "http://127.0.0.1:9/${HOME}"


@given(st.text("$ {}:-aHOME_", max_size=12))
def test_any_text_is_read_as_it_is(text: str) -> None:
    for name in ("claude_code", "gemini_cli", "qwen_code", "openhands_sdk", "openclaw"):
        written = made(name).literal(text)
        assert READ[name][1](written, {"HOME": "/polar/home", "HOM": "x", "a": "y", "POLARQ_DOLLAR": "$"}) == text


def test_what_opencode_would_replace_in_its_file_is_escaped_there_but_in_a_tasks_own_configuration(
    make_context: MakeContext,
) -> None:
    asked = {
        "model_name": "mine{env:HOME}",
        "mcp_servers": [{"name": "files", "command": "x", "args": ["{env:HOME}", "{file:/etc/passwd}", "{a}"]}],
        "settings": {"config": {"username": "{env:USER}"}},
    }
    preset, context = made("opencode", **asked), make_context(agent={"harness": "opencode", **asked})
    [text] = [data.decode() for data in preset.files(context).values()]
    assert re.findall(r"\{(?:env|file):[^}]+\}", text) == ["{env:USER}"]
    found = json.loads(text)
    assert found["mcp"]["files"]["command"] == ["x", "{env:HOME}", "{file:/etc/passwd}", "{a}"]
    assert found["model"] == "polarq/mine{env:HOME}"
    assert list(found["provider"]["polarq"]["models"]) == ["mine{env:HOME}"]


@pytest.mark.parametrize("instructions", ["RULES.md", None, 5, [1]])
def test_instructions_that_are_no_list_are_refused(instructions: Any) -> None:
    with pytest.raises(InvalidTask, match="config: its instructions are a list of paths and patterns"):
        made("opencode", settings={"config": {"instructions": instructions}})


# --- names of MCP servers


@pytest.mark.parametrize(
    ("name", "server"),
    [("codex", "my server"), ("codex", "bücher"), ("pi", "my.server"), ("qwen_code", "a,b")],
)
def test_a_server_that_the_program_would_leave_out_or_fail_of_is_refused(name: str, server: str) -> None:
    with pytest.raises(InvalidTask) as refused:
        made(name, mcp_servers=servers("files", server))
    [problem] = refused.value.problems
    title = plugin("harnesses", name).title
    assert problem == (
        f"mcp_servers: {title} takes no server called '{server}'; name it with letters, digits, '_' and '-'"
    )


def test_a_server_may_have_any_name_that_the_program_can_use() -> None:
    made("codex", mcp_servers=servers("a.b/c:d@e-f_g"))
    made("claude_code", mcp_servers=servers("my server, the 2nd", "bücher"))


@pytest.mark.parametrize("name", ["claude_code", "gemini_cli", "goose", "opencode", "openhands_sdk"])
@pytest.mark.parametrize(("one", "other"), [("a.b", "a_b"), ("a-b", "a_b"), ("bücher", "b cher")])
def test_servers_whose_tools_would_be_called_alike_are_refused(name: str, one: str, other: str) -> None:
    with pytest.raises(InvalidTask) as refused:
        made(name, mcp_servers=servers(one, "files", other))
    alike = re.sub(r"\W", "_", one, flags=re.ASCII)
    assert refused.value.problems == (
        f"mcp_servers: the tools of '{one}' and '{other}' would be called alike ({alike})",
    )
