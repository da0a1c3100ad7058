"""Any command line is a harness, and an instruction stays text wherever the command wants it."""

from __future__ import annotations

import hashlib
import subprocess
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from polarq.contracts.rollout import ExecKind, HarnessReport
from polarq.contracts.specs import AgentSpec
from polarq.errors import InvalidTask, UnknownPlugin
from polarq.testing.runtime_contract import appears, lives
from polarq_worker.harnesses.base import run_harness
from polarq_worker.harnesses.create import create_harness
from polarq_worker.harnesses.placeholder import with_instruction
from polarq_worker.runtimes.local import LocalRuntime
from tests.harnesses.conftest import MakeContext

HOSTILE = (
    "it's \"quoted\" $(touch pwned) `touch pwned` ${HOME} \\ \\' \n; touch pwned #\n'EOF'\nEOF\n* ~ !! \U0001f9ea\t"
)


async def run(
    runtime: LocalRuntime,
    make_context: MakeContext,
    command: str,
    instruction: str = "Do it.",
    timeout_s: float = 60.0,
    **fields: Any,
) -> HarnessReport:
    settings = fields.pop("settings", {})
    agent = {"harness": "shell", "custom_shell": {"command": command, **fields}, "settings": settings}
    context = make_context(instruction, agent=agent)
    return await run_harness(create_harness(context.task.agent, []), runtime, context, timeout_s=timeout_s)


async def test_the_command_runs_in_the_workdir_with_the_instruction_as_file_and_variable(
    runtime: LocalRuntime, make_context: MakeContext
) -> None:
    report = await run(
        runtime, make_context, 'pwd; cat "$POLARQ_INSTRUCTION_FILE"; echo; echo "$POLARQ_INSTRUCTION"', "Fix the bug."
    )
    assert (report.name, report.ok) == ("shell", True)
    assert report.steps[0].stdout_tail == f"{runtime.workdir}\nFix the bug.\nFix the bug.\n"
    assert report.steps[0].log == "agent/step.00"
    assert (runtime.host_log_dir / "agent/step.00.stdout").read_text() == report.steps[0].stdout_tail


async def test_an_instruction_of_two_megabytes_arrives_by_file_and_by_placeholder(
    runtime: LocalRuntime, make_context: MakeContext
) -> None:
    instruction = "Lies dies: äöü \U0001f9ea\n" * 100_000
    report = await run(
        runtime,
        make_context,
        'sha256sum < "$POLARQ_INSTRUCTION_FILE"; printf %s {{INSTRUCTION}} | sha256sum;'
        ' echo "${POLARQ_INSTRUCTION-unset}"',
        instruction,
    )
    digest = hashlib.sha256(instruction.encode()).hexdigest()
    assert report.steps[0].stdout_tail.split() == [digest, "-", digest, "-", "unset"], report


async def test_an_instruction_can_come_on_standard_input(runtime: LocalRuntime, make_context: MakeContext) -> None:
    report = await run(runtime, make_context, "sha256sum", "x" * 3_000_000, settings={"instruction_on_stdin": True})
    assert report.steps[0].stdout_tail.split()[0] == hashlib.sha256(b"x" * 3_000_000).hexdigest()


async def test_a_program_that_waits_for_the_end_of_stdin_starts_at_once(
    runtime: LocalRuntime, make_context: MakeContext
) -> None:
    report = await run(runtime, make_context, "cat >/dev/null; echo work; exit 0")
    assert report.steps[0].stdout_tail == "work\n"


async def test_a_failing_part_of_a_pipe_fails_the_harness(runtime: LocalRuntime, make_context: MakeContext) -> None:
    report = await run(runtime, make_context, '(echo trouble >&2; exit 5) | tee "$AGENT_LOG_DIR/agent.txt"')
    assert (report.ok, report.steps[0].exit_code, report.steps[0].stderr_tail) == (False, 5, "trouble\n")


async def test_a_hanging_harness_is_ended_with_what_it_printed(
    runtime: LocalRuntime, make_context: MakeContext
) -> None:
    report = await run(runtime, make_context, "echo begun; sleep 1000", timeout_s=1.0)
    assert (report.ok, report.steps[0].kind, report.steps[0].stdout_tail) == (False, ExecKind.TIMED_OUT, "begun\n")


async def test_a_missing_program_is_the_shells_127(runtime: LocalRuntime, make_context: MakeContext) -> None:
    report = await run(runtime, make_context, "no-such-agent --go")
    assert (report.ok, report.steps[0].exit_code) == (False, 127)
    assert "no-such-agent: command not found" in report.steps[0].stderr_tail


async def test_a_hundred_megabytes_of_output_leave_a_small_report(
    runtime: LocalRuntime, make_context: MakeContext
) -> None:
    report = await run(runtime, make_context, "head -c 100000000 /dev/zero | tr '\\0' x; echo end")
    assert report.ok
    assert report.steps[0].truncated
    assert len(report.model_dump_json()) < 20_000
    assert report.steps[0].stdout_tail.endswith("xend\n")


async def test_non_utf8_output_stays_valid_json(runtime: LocalRuntime, make_context: MakeContext) -> None:
    report = await run(runtime, make_context, "printf 'ok\\360\\237\\n'; head -c 300 /dev/urandom >&2")
    assert HarnessReport.model_validate_json(report.model_dump_json()) == report
    assert report.steps[0].stdout_tail == "ok\ufffd\n"


async def test_a_harness_that_forks_away_ends_at_once_and_its_service_stays(
    runtime: LocalRuntime, make_context: MakeContext
) -> None:
    report = await run(runtime, make_context, "(sleep 1000; true) & echo $! > pid; echo done")
    assert (report.ok, report.steps[0].stdout_tail) == (True, "done\n")
    assert await lives(runtime, await appears(runtime, "pid"))
    await runtime.stop()
    assert (await runtime.exec("true", timeout_s=60)).kind is ExecKind.SANDBOX_LOST


async def test_the_commands_own_environment_cannot_redirect_the_model(
    runtime: LocalRuntime, make_context: MakeContext
) -> None:
    report = await run(
        runtime,
        make_context,
        'echo "$OPENAI_BASE_URL $MINE $NO_PROXY"',
        env={"OPENAI_BASE_URL": "http://elsewhere", "MINE": "1", "NO_PROXY": "mine.example"},
    )
    base, mine, no_proxy = report.steps[0].stdout_tail.split()
    assert (base, mine) == ("http://127.0.0.1:9/s/secret/v1", "1")
    assert {"mine.example", "127.0.0.1", "::1", "localhost"} <= set(no_proxy.split(","))


PLACES = {
    "bare": "printf %s {{INSTRUCTION}}",
    "spaced": "printf %s {{ INSTRUCTION }}",
    "escaped": "printf %s \\{{INSTRUCTION}}",
    "in double quotes": 'printf %s "{{INSTRUCTION}}"',
    "in single quotes": "printf %s '{{INSTRUCTION}}'",
    "in ansi quotes": "printf %s $'{{INSTRUCTION}}'",
    "glued to an option": "printf %s --task={{INSTRUCTION}} | tail -c +8",
    "after quotes": "printf %s \"it's\"{{INSTRUCTION}} 'and \"' | tail -c +5 | head -c -5",
    "in a substitution": 'x="$(printf "%s." \'{{INSTRUCTION}}\')"; printf %s "${x%.}"',
    "in backticks": "x=`printf '%s.' {{INSTRUCTION}}`; printf %s \"${x%.}\"",
    "in an assignment": 'x={{INSTRUCTION}}; printf %s "$x"',
    "in a here-document": "cat <<END | head -c -1\n{{INSTRUCTION}}\nEND",
    "in a tabbed here-document": "cat <<-END | head -c -1\n\t{{INSTRUCTION}}\n\tEND",
    "in a here-string": "cat <<< {{INSTRUCTION}} | head -c -1",
    "after a quoted here-document": "cat <<'END' > /dev/null\nit's\nEND\nprintf %s '{{INSTRUCTION}}'",
    "after a comment": "# don't\nprintf %s '{{INSTRUCTION}}'",
    "after a shift": "x=$((1 << 2)); ((x << 1)); printf %s '{{INSTRUCTION}}'",
    "in a subshell": "(printf %s '{{INSTRUCTION}}')",
}


def filled(command: str, instruction: str, folder: Path) -> bytes:
    """What bash makes of the filled-in command, run as the runtime runs it."""
    (folder / "instruction").write_text(instruction)
    script = folder / "script"
    script.write_text(with_instruction(command))
    env = {"POLARQ_INSTRUCTION_FILE": str(folder / "instruction"), "PATH": "/usr/bin:/bin", "LANG": "C.UTF-8"}
    done = subprocess.run(["bash", "-o", "pipefail", str(script)], env=env, cwd=folder, capture_output=True, check=True)
    assert done.stderr == b""
    return done.stdout


@pytest.mark.parametrize("place", PLACES)
def test_a_hostile_instruction_stays_text_in_every_place(place: str, tmp_path: Path) -> None:
    assert filled(PLACES[place], HOSTILE, tmp_path) == HOSTILE.encode()
    assert not (tmp_path / "pwned").exists()


@settings(max_examples=60, deadline=None)
@given(
    instruction=st.text(st.characters(exclude_characters="\0\r", exclude_categories=["Cs"]), min_size=1),
    place=st.sampled_from(sorted(PLACES)),
)
def test_any_instruction_stays_text_in_any_place(
    instruction: str, place: str, tmp_path_factory: pytest.TempPathFactory
) -> None:
    assert filled(PLACES[place], instruction, tmp_path_factory.mktemp("place")) == instruction.encode()


def test_a_placeholder_where_nothing_is_expanded_is_refused() -> None:
    with pytest.raises(InvalidTask, match=r"here-document 'END'.*POLARQ_INSTRUCTION_FILE"):
        with_instruction("cat <<'END'\n{{INSTRUCTION}}\nEND")


def test_a_command_without_a_placeholder_is_not_touched() -> None:
    command = "agent <<'END' \"$(x)\" # don't\nEND"
    assert with_instruction(command) == command


def test_unknown_settings_are_refused_with_the_nearest_known() -> None:
    spec = AgentSpec.parse(
        {"harness": "shell", "custom_shell": {"command": "true"}, "settings": {"instruction_on_stdn": True}}
    )
    with pytest.raises(InvalidTask, match=r"agent\.settings: .*did you mean 'instruction_on_stdin'"):
        create_harness(spec, [])


def test_an_unknown_harness_is_answered_with_what_is_there() -> None:
    with pytest.raises(UnknownPlugin, match=r"harness 'codx' is not installed here \(installed: .*shell"):
        create_harness(AgentSpec(harness="codx"), [])


def test_an_import_path_must_be_allowed_and_lead_to_a_harness() -> None:
    path = "polarq_worker.harnesses.mini_swe_agent:MiniSweAgentHarness"
    with pytest.raises(UnknownPlugin, match="allowed_modules"):
        create_harness(AgentSpec(import_path=path), [])
    assert create_harness(AgentSpec(import_path=path), ["polarq_worker"]).name == "mini_swe_agent"
    with pytest.raises(UnknownPlugin, match="not a polarq harness"):
        create_harness(AgentSpec(import_path="pathlib:Path"), ["pathlib"])
