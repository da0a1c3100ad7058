"""The examples are what they say, and work: with the real programs, in real sandboxes, and a scripted model."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from examples.count_stars.draw import picture
from polarq.contracts.rollout import RolloutState
from polarq.contracts.task import Task
from polarq.registry import plugin
from polarq.testing.conformance.scenario import shipped
from polarq.testing.inference import Script, ToolCall, Turn
from polarq.testing.inference.images import IMAGE_TOKENS
from polarq.testing.inference.scenario import load_scenario
from polarq.testing.inference.tokenizer import load_tokenizer
from polarq.trainers.rows import rows

from .rig import EXAMPLES, asking, ends, has_a_shell_tool, images, results, sha256, shell_turn, stack

LOOKS = {
    "claude_code": ToolCall(name="Read", arguments={"file_path": "/polar/session/stars/stars.png"}),
    "codex": ToolCall(name="view_image", arguments={"path": "/polar/session/stars/stars.png"}),
    "gemini_cli": ToolCall(name="read_file", arguments={"file_path": "stars.png"}),
}
"""How each program's own tool looks at a picture."""
PICTURE = load_tokenizer().image_token_id
OVER = [name for name in shipped() if has_a_shell_tool(name)]
LIBRARIES = ("ag2", "autogen", "langchain", "openai_agents", "pydantic_ai", "smolagents")


@pytest.mark.parametrize("file", sorted(EXAMPLES.rglob("*.yaml")), ids=lambda file: str(file.relative_to(EXAMPLES)))
def test_a_task_file_is_a_task_and_a_scenario_a_scenario(file: Path) -> None:
    if file.name == "scenario.yaml":
        assert load_scenario(file).scripts
    else:
        assert Task.load(file).instruction


@pytest.mark.parametrize("name", ["langgraph", "ag2"])
def test_an_agent_of_ones_own_is_about_thirty_lines(name: str) -> None:
    assert len((EXAMPLES / "custom_agent" / f"{name}_agent.py").read_text("utf-8").splitlines()) <= 36


def test_the_picture_has_the_stars_that_are_scored() -> None:
    assert (EXAMPLES / "count_stars/stars.png").read_bytes() == picture(7)
    assert "= 7 ]" in Task.load(EXAMPLES / "count_stars/task.yaml").model_dump_json()


def test_the_installed_calculator_task_is_the_examples() -> None:
    ours, theirs = (Task.load(path) for path in (EXAMPLES / "calculator/task.yaml", _installed()))
    assert ours.instruction == theirs.instruction
    assert ours.evaluator == theirs.evaluator


def _installed() -> Path:
    from polarq.testing.calculator import TASK_FILE

    return TASK_FILE


# --- with the programs


def _counts(harness: str, number: int) -> Script:
    look = Turn(content="I look at the picture.", tool_calls=(LOOKS[harness],))
    return Script(
        name=f"says_{number}", turns=(look, shell_turn(harness, f"printf {number} > count.txt"), ends(harness))
    )


@pytest.fixture(params=sorted(set(LOOKS) & set(shipped())))
def counting(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[tuple[str, Any]]:
    harness = request.param
    with stack(tmp_path, harness, _counts(harness, 7), _counts(harness, 5)) as made:
        yield harness, made


@pytest.mark.harness
@pytest.mark.timeout(1800)
def test_the_picture_reaches_the_model_and_the_count_is_scored(counting: tuple[str, Any]) -> None:
    harness, made = counting
    for number, reward in ((7, 1.0), (5, 0.0)):
        task = asking("count_stars/task.yaml", f"says_{number}", num_samples=1, agent={"harness": harness})
        (result,) = results(made, task)
        assert result.outcome.state is RolloutState.COMPLETED, result.outcome
        assert result.reward is not None
        assert result.reward.outcome == reward
        before, *after = images(made, result.rollout_id)
        assert before == []
        star = sha256(EXAMPLES / "count_stars/stars.png")
        assert after == [[star]] * 2
        # The record says which picture it was, and which ids of the sequence stand for it.
        (last, *_) = [row for row in rows(result) if row.images]
        assert {one.sha256 for one in last.images} == {star}
        whole = [*last.prompt_ids, *last.response_ids]
        assert {tuple(whole[one.start : one.end]) for one in last.images} == {(PICTURE,) * IMAGE_TOKENS}


def _rewrites() -> str:
    (script,) = [one for one in load_scenario("calculator").scripts if one.name == "rewrites"]
    (command,) = [
        call.arguments["command"] for turn in script.turns for call in turn.tool_calls
        if str(call.arguments["command"]).startswith("cat > calculator.py")
    ]  # fmt: skip
    return str(command)


@pytest.mark.harness
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("name", ["langgraph", "ag2"])
def test_an_agent_of_ones_own_solves_the_calculator(name: str, tmp_path: Path) -> None:
    harness = Task.load(EXAMPLES / f"custom_agent/{name}.yaml").agent.harness or ""
    solves = Script(name="solves", turns=(shell_turn(harness, _rewrites()), ends(harness)))
    with stack(tmp_path, harness, solves) as made:
        for result in results(made, asking(f"custom_agent/{name}.yaml", "solves", num_samples=2)):
            assert result.outcome.state is RolloutState.COMPLETED, result.outcome
            assert result.reward is not None
            assert result.reward.outcome == 1.0
            assert result.trajectory is not None
            assert result.trajectory.fidelity.masked_tokens == 0


@pytest.mark.harness
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("harness", [name for name in OVER if name not in LIBRARIES])
def test_the_calculator_over_a_harness(harness: str, tmp_path: Path) -> None:
    assert plugin("harnesses", harness)
    solves = Script(name="solves", turns=(shell_turn(harness, _rewrites()), ends(harness)))
    idles = Script(name="idles", turns=(shell_turn(harness, "true"), ends(harness)))
    with stack(tmp_path, harness, solves, idles) as made:
        for script, reward in (("solves", 1.0), ("idles", 0.0)):
            task = asking("calculator/task.yaml", script, num_samples=2, agent={"harness": harness})
            told = [result.reward and result.reward.outcome for result in results(made, task)]
            assert told == [reward] * 2
