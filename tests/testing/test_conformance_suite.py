"""Parts of the conformance suite that are told apart without running a program."""

from __future__ import annotations

from polarq.testing.conformance.brought import CODE, SEALED, used
from polarq.testing.conformance.checks import own_files
from polarq.testing.conformance.scenario import LIMIT, load, shipped
from polarq.testing.inference.scenario import Turn


def test_what_polarq_leaves_of_any_rollout_is_no_file_of_the_program() -> None:
    of_any = ["logs/agent/step.00.stdout", "logs/eval/patch.diff", "logs/setup.00.stderr", "logs/prepare.00.stdout"]
    assert own_files(of_any) == []
    own = [".polarq/codex/sessions", "logs/agent/mini-swe-agent.traj.json"]
    assert own_files([*of_any, *own]) == own


def test_the_model_is_told_nothing_that_only_a_server_or_a_skill_can_tell() -> None:
    for name in shipped():
        for script in load(name).scenario().scripts:
            said = script.model_dump_json()
            assert CODE not in said
            assert SEALED not in said


def test_names_stand_where_a_scenario_file_has_words_for_them() -> None:
    turn = Turn.model_validate({"tool_calls": [{"name": "mcp__NAME__TOOL", "arguments": {"word": "WORD", "n": 3}}]})
    (call,) = used(turn, "pipe").tool_calls
    assert (call.name, call.arguments) == ("mcp__pipe__code_of", {"word": "aubergine", "n": 3})


def test_a_model_acts_for_ever_unless_the_program_asks_for_a_last_word() -> None:
    scripts = {script.name: script for script in load("codex").scenario().scripts}
    assert scripts["endless"].turn(LIMIT + 5).tool_calls
    scripts = {script.name: script for script in load("opencode").scenario().scripts}
    assert not scripts["endless"].turn(LIMIT + 5).tool_calls
