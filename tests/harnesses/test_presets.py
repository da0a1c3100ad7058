"""What presets share: versions, settings, what a task asks in vain, files, and what an end comes to."""

from __future__ import annotations

import json
import tomllib
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from polarq.contracts.completion import Completion, CompletionLabel
from polarq.contracts.rollout import Boundary, ExecKind, HarnessReport, StepReport
from polarq.contracts.sandbox import ExecCategory
from polarq.contracts.specs import AgentSpec
from polarq.errors import HarnessFault, InvalidTask
from polarq.registry import names, plugin
from polarq.store.grants import GrantUse
from polarq.testing.conformance.scenario import load, shipped
from polarq_worker.harnesses.claude_code import ClaudeCodeHarness
from polarq_worker.harnesses.codex import CodexHarness
from polarq_worker.harnesses.configs import as_json, as_toml, as_yaml
from polarq_worker.harnesses.preset import LIMITS, SERVERS_S, Preset
from polarq_worker.harnesses.programs.program import PythonSource
from polarq_worker.harnesses.verdicts import CallsSeen, verdict_of
from polarq_worker.runtimes.local import LocalRuntime
from tests.harnesses.conftest import MakeContext

PRESETS = [name for name in names("harnesses") if issubclass(plugin("harnesses", name), Preset)]
CHECKED = [name for name in PRESETS if not issubclass(type(plugin("harnesses", name).program), PythonSource)]
"""The others cannot be had from a registry, and so are not run by the conformance suite."""
NEEDED = {"entrypoint"}
STDIO = {"name": "files", "command": "files-server", "args": ["--root", "/x y"]}
REMOTE = {"name": "far", "transport": "streamable-http", "url": "http://127.0.0.1:9/mcp"}
EVENTS = {"name": "old", "transport": "sse", "url": "http://127.0.0.1:9/sse"}


def agent(name: str, **fields: Any) -> dict[str, Any]:
    """An agent spec with what the program cannot do without, as its scenario has it."""
    known = load(name, plugin("harnesses", name).conformance).agent if name in CHECKED else {}
    needed = {key: value for key, value in known.get("settings", {}).items() if key in NEEDED}
    settings = {**needed, **fields.pop("settings", {})}
    return {"harness": name, **fields, "settings": settings}


def made(name: str, **fields: Any) -> Preset:
    preset: Preset = plugin("harnesses", name)(AgentSpec.parse(agent(name, **fields)))
    return preset


@pytest.mark.parametrize("name", PRESETS)
def test_the_pinned_version_is_a_supported_one_and_is_what_is_installed(name: str) -> None:
    preset = made(name)
    versions = preset.program.versions
    assert versions.supports(versions.default)
    (action,) = preset.recipe()
    assert action.env is not None
    assert (action.env["POLARQ_VERSION"], action.env["POLARQ_BELOW"]) == (versions.default, versions.below)


@pytest.mark.parametrize("name", PRESETS)
def test_another_version_is_installed_where_a_task_asks_and_refused_beyond_the_range(name: str) -> None:
    versions = plugin("harnesses", name).program.versions
    (action,) = made(name, settings={"version": versions.at_least}).recipe()
    assert action.env is not None
    assert (action.env["POLARQ_VERSION"], action.env["POLARQ_BELOW"]) == (versions.at_least, "")
    with pytest.raises(InvalidTask) as refused:
        made(name, settings={"version": versions.below})
    assert len(refused.value.problems) == 1
    assert f"{versions.below} is not in the supported range {versions}" in str(refused.value)
    (tried,) = made(name, settings={"version": versions.below, "untested_version": True}).recipe()
    assert (tried.env or {})["POLARQ_VERSION"] == versions.below


@pytest.mark.parametrize("asked", ["newest", "latest", "", ">=0.171.0", "^0.171.0", "0.171.x", "0.171.\u0660"])
def test_what_is_no_single_version_is_refused_with_an_example(asked: str) -> None:
    with pytest.raises(InvalidTask) as refused:
        made("codex", settings={"version": asked, "untested_version": True})
    said = f"version: '{asked}' is no version of Codex CLI; name one release, such as 0.171.0"
    assert refused.value.problems == (said,)


@pytest.mark.parametrize("asked", ["v0.171.0", " 0.171.0", "0.171.0\n", "0.171", "0!0.171.0"])
def test_a_version_that_no_registry_spells_so_is_refused_before_it_is_asked_for(asked: str) -> None:
    with pytest.raises(InvalidTask, match=r"is not how Codex CLI spells a release; write it like 0\.171\.0$"):
        made("codex", settings={"version": asked, "untested_version": True})


@pytest.mark.parametrize("asked", ["0.171.0", "0.172.0-alpha.3", "0.171.0-1", "0.171.0.1"])
def test_a_release_is_taken_as_it_is_spelt(asked: str) -> None:
    assert made("codex", settings={"version": asked, "untested_version": True}).version == asked


def test_a_configuration_that_toml_cannot_hold_is_refused_in_one_line() -> None:
    with pytest.raises(InvalidTask, match=r"config: TOML cannot hold it: .*NoneType"):
        made("codex", settings={"config": {"notify": ["a", None]}})
    made("codex", settings={"config": {"notify": None}})


@pytest.mark.parametrize("name", PRESETS)
def test_what_a_program_cannot_be_told_is_refused_in_one_line(name: str) -> None:
    preset = plugin("harnesses", name)
    with pytest.raises(InvalidTask, match=r"top_k: .* cannot be told; set it in the task's model\.sampling"):
        made(name, settings={"top_k": 3})
    with pytest.raises(InvalidTask, match="unknown key 'no_such_setting'"):
        made(name, settings={"no_such_setting": 1})
    with pytest.raises(InvalidTask, match=rf"settings\.dialect: {preset.title} does not speak 'latin'"):
        made(name, settings={"dialect": "latin"})
    for server in (STDIO, REMOTE, EVENTS):
        if server.get("transport", "stdio") not in preset.mcp_transports:
            with pytest.raises(InvalidTask, match=r"mcp_servers: .* takes no server of transport"):
                made(name, mcp_servers=[server])
    if not preset.takes_skills:
        with pytest.raises(InvalidTask, match=r"skills_path: .* has no skills"):
            made(name, skills_path="/skills")


@pytest.mark.parametrize("name", PRESETS)
def test_a_limit_of_turns_that_the_program_has_not_is_refused_with_what_to_set(name: str) -> None:
    preset = plugin("harnesses", name)
    known = set(preset.settings_class.model_fields) & LIMITS
    assert known == ({preset.turn_limit} if preset.turn_limit else set())
    says = f"its limit is {preset.turn_limit}" if preset.turn_limit else "set the task's model.max_calls"
    for word in sorted(LIMITS - known):
        with pytest.raises(InvalidTask) as refused:
            made(name, settings={word: 2})
        assert refused.value.problems == (f"{word}: {preset.title} cannot be told; {says}",)


@pytest.mark.parametrize("name", PRESETS)
def test_the_instruction_stands_in_no_argument_and_no_variable(name: str, make_context: MakeContext) -> None:
    context = make_context("the instruction's own words " * 50_000, agent=agent(name))
    for step in made(name).steps(context):
        assert "own words" not in str(step.command)
        assert "own words" not in str(step.env)


@pytest.mark.parametrize("name", CHECKED)
def test_each_has_a_scenario_for_the_conformance_suite(name: str) -> None:
    scenario = load(name, plugin("harnesses", name).conformance)
    assert scenario.harness == name
    assert set(scenario.dialects) <= set(plugin("harnesses", name).dialects)
    made(name, **scenario.agent)


def test_no_scenario_is_left_without_its_harness() -> None:
    assert set(shipped()) <= set(PRESETS)


async def test_a_program_that_was_not_installed_is_said_before_it_is_started(
    runtime: LocalRuntime, make_context: MakeContext
) -> None:
    with pytest.raises(HarnessFault, match="the program of harness 'codex' is not in the sandbox"):
        await made("codex").setup(runtime, make_context(agent={"harness": "codex"}))


# --- files


TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=60)


@given(TEXT, TEXT)
def test_any_text_survives_each_kind_of_file(key: str, value: str) -> None:
    import yaml

    data = {"plain": value, "table": {key: value, "list": [value]}}
    assert json.loads(as_json(data)) == data
    assert tomllib.loads(as_toml(data).decode()) == data
    assert yaml.safe_load(as_yaml(data)) == data


def test_codex_is_told_of_model_servers_and_limits_by_its_configuration(make_context: MakeContext) -> None:
    spec = {
        "harness": "codex",
        "model_name": 'Qwen/Qwen3.5-4B"',
        "mcp_servers": [STDIO, REMOTE],
        "settings": {
            "reasoning_effort": "low",
            "compact_at": 9000,
            "config": {"model": "mine", "hide_agent_reasoning": True, "features": {"plugins": True, "x": True}},
        },
    }
    context = make_context(agent=spec)
    preset = CodexHarness(AgentSpec.parse(spec))
    [(path, data)] = preset.files(context).items()
    config = tomllib.loads(data.decode())
    assert path == f"{context.layout.session_dir}/.polarq/codex/config.toml"
    assert config["model"] == 'Qwen/Qwen3.5-4B"'
    assert config["model_providers"]["polarq"]["base_url"] == f"{context.base_url}/v1"
    assert (config["model_reasoning_effort"], config["model_auto_compact_token_limit"]) == ("low", 9000)
    assert config["hide_agent_reasoning"] is True
    assert config["features"] == {"plugins": False, "apps": False, "x": True}
    waited_for = {"required": True, "startup_timeout_sec": SERVERS_S}
    assert config["mcp_servers"] == {
        "files": {**waited_for, "command": "files-server", "args": ["--root", "/x y"]},
        "far": {**waited_for, "url": "http://127.0.0.1:9/mcp"},
    }
    (step,) = preset.steps(context)
    assert step.stdin == b"Do it."
    assert step.env["POLARQ_CODEX_KEY"] == "secret"


def test_claude_code_is_told_of_model_servers_and_limits_by_options_and_variables(make_context: MakeContext) -> None:
    spec = {
        "harness": "claude_code",
        "model_name": "--model",
        "mcp_servers": [STDIO, REMOTE, EVENTS],
        "settings": {"max_turns": 7, "allowed_tools": ["Bash(git *)", "Edit"], "max_thinking_tokens": 0},
    }
    context = make_context(agent=spec)
    preset = ClaudeCodeHarness(AgentSpec.parse(spec))
    path = f"{preset.folder(context.layout)}/mcp.json"
    assert json.loads(preset.files(context)[path])["mcpServers"] == {
        "files": {"command": "files-server", "args": ["--root", "/x y"], "alwaysLoad": True},
        "far": {"type": "http", "url": "http://127.0.0.1:9/mcp", "alwaysLoad": True},
        "old": {"type": "sse", "url": "http://127.0.0.1:9/sse", "alwaysLoad": True},
    }
    (step,) = preset.steps(context)
    assert {"--model=--model", "--max-turns=7", "--allowed-tools=Bash(git *),Edit", f"--mcp-config={path}"} <= set(
        step.command
    )
    assert (step.env["MAX_THINKING_TOKENS"], step.env["ANTHROPIC_DEFAULT_HAIKU_MODEL"]) == ("0", "--model")
    assert step.stdin == b"Do it."


def test_a_repositorys_settings_do_not_lead_claude_code_to_another_server(make_context: MakeContext) -> None:
    context = make_context(agent={"harness": "claude_code", "env": {"HTTPS_PROXY": "http://corporate:3128"}})
    preset = ClaudeCodeHarness(AgentSpec.parse({"harness": "claude_code"}))
    (step,) = preset.steps(context)
    (path,) = [word.partition("=")[2] for word in step.command if word.startswith("--settings=")]
    settings = json.loads(preset.files(context)[path])
    # Variables of its settings win over its own environment's, and those of the command line's over the repository's.
    planted = {
        "ANTHROPIC_BASE_URL": context.base_url,
        "ANTHROPIC_API_KEY": "secret",
        "ANTHROPIC_AUTH_TOKEN": "",
        "CLAUDE_CODE_USE_BEDROCK": "",
        "CLAUDE_CODE_ENABLE_TELEMETRY": "",
        "HTTPS_PROXY": "http://corporate:3128",
        "HTTP_PROXY": "",
        "NO_PROXY": context.env["NO_PROXY"],
        **step.env,
    }
    assert settings["env"].items() >= planted.items()
    assert settings["apiKeyHelper"] == ""


async def test_skills_are_copied_to_where_the_program_looks(
    runtime: LocalRuntime, make_context: MakeContext, tmp_path: Path
) -> None:
    await runtime.put_bytes(b"# how", "/polar/session/mine/git/SKILL.md")
    await runtime.put_bytes(b"npm\n1.2.3\n/x\n", "/polar/session/.polarq/programs/codex/installed")
    spec = {"harness": "codex", "skills_path": f"{runtime.layout.session_dir}/mine"}
    context = make_context(agent=spec)
    preset = CodexHarness(AgentSpec.parse(spec))
    await preset.setup(runtime, context)
    await runtime.get_file(f"{preset.skills_target(context)}/git/SKILL.md", tmp_path / "got", 100)
    assert (tmp_path / "got").read_bytes() == b"# how"
    missing = CodexHarness(AgentSpec.parse({**spec, "skills_path": "/no/such"}))
    with pytest.raises(HarnessFault, match=r"agent\.skills_path: '/no/such' is no folder in the sandbox"):
        await missing.setup(runtime, context)


async def test_a_skill_that_is_a_link_comes_whole_and_a_folder_without_one_is_refused(
    runtime: LocalRuntime, make_context: MakeContext, tmp_path: Path
) -> None:
    session = runtime.layout.session_dir
    await runtime.put_bytes(b"# how", "/polar/session/shared/git/SKILL.md")
    await runtime.put_bytes(b"npm\n1.2.3\n/x\n", "/polar/session/.polarq/programs/codex/installed")
    links = "mkdir -p mine none && ln -s ../shared/git mine/git && mkdir gone && ln -s ../nowhere gone/git"
    assert (await runtime.exec(links, cwd=session, timeout_s=30, category=ExecCategory.SETUP)).ok

    async def set_up(folder: str) -> str:
        spec = {"harness": "codex", "skills_path": f"{session}/{folder}"}
        context = make_context(agent=spec)
        preset = CodexHarness(AgentSpec.parse(spec))
        await preset.setup(runtime, context)
        return preset.skills_target(context)

    target = await set_up("mine")
    # The folder that it was a link to may be changed or go: this is a copy.
    await runtime.get_file(f"{target}/git/SKILL.md", tmp_path / "got", 100)
    assert (tmp_path / "got").read_bytes() == b"# how"
    assert (await runtime.exec(["rm", "-r", target], timeout_s=30, category=ExecCategory.SETUP)).ok
    for empty in ("none", "shared/git"):
        with pytest.raises(HarnessFault, match=f"there is no skill in '{session}/{empty}': each is a folder with a"):
            await set_up(empty)
    with pytest.raises(HarnessFault, match=r"is no folder in the sandbox that can be copied .*cannot stat .*git"):
        await set_up("gone")


# --- the end


def call(seq: int, **fields: Any) -> Completion:
    whole = {
        "rollout_id": "t.0",
        "attempt": 1,
        "seq": seq,
        "completion_id": f"c{seq}",
        "requested_at": "2026-01-01T00:00:00Z",
        "answered_at": "2026-01-01T00:00:00Z",
        "latency_s": 0,
        "dialect": "openai_chat",
        "path": "/x",
        "request_digest": f"d{seq}",
        "sampled_ids": [1],
        "reply": {"role": "assistant", "content": "done"},
        "finish_reason": "stop",
        **fields,
    }
    return Completion.model_validate(whole)


def ended(code: int | None, kind: ExecKind = ExecKind.EXITED) -> HarnessReport:
    return HarnessReport(name="x", ok=code == 0, steps=[StepReport(kind=kind, exit_code=code)])


SIDE = {"label": CompletionLabel.SIDE}
OVERFLOW = "context_overflow: 12 of 8 tokens"


@pytest.mark.parametrize(
    ("code", "calls", "problem", "reason"),
    [
        (0, [call(0)], ("", -1), None),
        (0, [call(0)], (OVERFLOW, 1), "context_overflow"),
        (1, [call(0)], (OVERFLOW, 1), "context_overflow"),
        (0, [call(0), call(2)], (OVERFLOW, 1), None),
        (0, [call(0), call(1, incomplete=True)], ("engine_fault: broke off", 1), "model_failed"),
        (1, [call(0)], ("engine_fault: broke off", 1), None),
        (1, [call(0)], ("too_many_calls: 1 call", 1), "call_limit"),
        (0, [call(0)], ("refused: what?", 1), "model_refused"),
        (0, [], ("", -1), "no_model_calls"),
        (0, [call(0, **SIDE)], ("", -1), "no_model_calls"),
        (0, [call(0), call(1, reply={"content": " "})], ("", -1), "empty_answer"),
        (0, [call(0, reply={"content": None, "tool_calls": [{}]})], ("", -1), None),
        (0, [call(0), call(1, finish_reason="length")], ("", -1), "answer_cut"),
        (1, [call(0), call(1, finish_reason="length")], ("", -1), "answer_cut"),
        (0, [call(0), call(1, finish_reason="length", reply={"content": ""})], ("", -1), "answer_cut"),
        (1, [call(0), call(1, finish_reason="tool_calls")], ("", -1), "invalid_tool_call"),
        (1, [call(0), call(1, incomplete=True)], ("engine_fault: broke off", 1), None),
        (0, [call(0), call(1, reply={"content": ""}, **SIDE)], ("", -1), None),
        (3, [call(0), call(1, reply={"content": ""})], ("", -1), None),
    ],
)
def test_what_an_exit_code_comes_to_with_what_the_proxy_saw(
    code: int, calls: list[Completion], problem: tuple[str, int], reason: str | None
) -> None:
    use = GrantUse(last_problem=problem[0], last_problem_seq=problem[1])
    verdict = verdict_of(ended(code), CallsSeen.of(calls, use))
    assert (verdict.reason if verdict else None) == reason
    if verdict is not None:
        assert f"exit code {code}" in verdict.message
        model = reason in {"model_failed", "model_refused"}
        assert verdict.boundary is (Boundary.MODEL if model else Boundary.HARNESS)


def test_who_ran_out_of_time_has_no_other_verdict() -> None:
    seen = CallsSeen.of([], GrantUse(last_problem=OVERFLOW, last_problem_seq=1))
    assert verdict_of(ended(None, ExecKind.TIMED_OUT), seen) is None


@pytest.mark.parametrize(
    ("code", "calls", "problem", "reason"),
    [
        (1, 2, "", "agent_limit"),
        (1, 1, "", None),
        (0, 2, "", None),
        (1, 2, "engine_fault: broke off", None),
        (1, 2, OVERFLOW, "context_overflow"),
    ],
)
def test_a_program_that_stops_where_it_was_told_to_is_told_from_one_that_failed(
    code: int, calls: int, problem: str, reason: str | None
) -> None:
    seen = CallsSeen.of(list(map(call, range(calls))), GrantUse(last_problem=problem, last_problem_seq=calls))
    verdict = made("opencode", settings={"max_steps": 2}).judge(ended(code), seen)
    assert (verdict.reason if verdict else None) == reason
    if reason == "agent_limit":
        assert verdict is not None
        words = "the agent stopped at a limit of its own (max_steps: 2); the harness ended with exit code 1"
        assert verdict.message == words
    unlimited = made("opencode").judge(ended(code), seen)
    assert (unlimited.reason if unlimited else None) == (None if reason == "agent_limit" else reason)
