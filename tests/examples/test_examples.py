"""The examples are what they say, and work: with the real programs, in real sandboxes, and a scripted model."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from examples.count_stars.draw import picture
from examples.over_harnesses import over, row, troubles
from polarq.client import Client
from polarq.contracts.rollout import Boundary, Outcome, RolloutState, TaskCounts, TaskResult, TaskState
from polarq.contracts.task import Task
from polarq.errors import InvalidTask
from polarq.ledger.keys import Keys
from polarq.settings import Settings
from polarq.testing.conformance.scenario import load, shipped
from polarq.testing.inference import Script, ToolCall, Turn
from polarq.testing.inference.images import IMAGE_TOKENS
from polarq.testing.inference.scenario import load_scenario
from polarq.testing.inference.tokenizer import load_tokenizer
from polarq.topology import Topology
from polarq.trainers.rows import rows

from ..export.samples import result
from .rig import EXAMPLES, asking, images, results, script, sha256, shell_turn, stack, writes

LOOKS = {
    "claude_code": ToolCall(name="Read", arguments={"file_path": "/polar/session/stars/stars.png"}),
    "codex": ToolCall(name="view_image", arguments={"path": "/polar/session/stars/stars.png"}),
    "gemini_cli": ToolCall(name="read_file", arguments={"file_path": "stars.png"}),
}
"""How each program's own tool looks at a picture."""
PICTURE = load_tokenizer().image_token_id
OVER = [name for name in shipped() if not load(name).not_run]


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


def test_over_harnesses_prints_rewards_and_why_there_is_none() -> None:
    lost = Outcome(state=RolloutState.FAILED, boundary=Boundary.MODEL, reason="model_failed", message="it broke off")
    now = datetime.now(UTC)
    found = TaskResult(
        task_id="t",
        run_id="r",
        state=TaskState.COMPLETED,
        counts=TaskCounts(total=2),
        results=[result(0, reward=0.0), result(1, reward=None, outcome=lost)],
        created_at=now,
        updated_at=now,
    )
    assert row("codex", found) == "codex            0 (ok), no reward (model_failed)"
    assert troubles(found) == ["  t.1: it broke off"]


def test_a_harness_that_is_refused_leaves_no_task_of_the_others(tmp_path: Path, keys: Keys, redis_url: str) -> None:
    settings = Settings.from_env({"POLARQ_REDIS_URL": redis_url, "POLARQ_STATE_DIR": str(tmp_path)})
    task = Task.load(EXAMPLES / "calculator" / "task.yaml")
    with Client(Topology.parse({"redis": {"prefix": keys.prefix}}), settings) as client:
        with pytest.raises(InvalidTask, match="harness 'shell' needs 'custom_shell'"):
            over(client, task, ["codex", "codex", "mini_swe_agent", "shell"])
        assert [run.active for run in client.runs()] == [False]


# --- with the programs


def _counts(harness: str, number: int) -> Script:
    look = Turn(content="I look at the picture.", tool_calls=(LOOKS[harness],))
    return script(harness, f"says_{number}", look, shell_turn(harness, f"printf {number} > count.txt"))


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


def _solution() -> str:
    """calculator.py as one of the scripted model's agents writes it."""
    (rewrites,) = [one for one in load_scenario("calculator").scripts if one.name == "rewrites"]
    commands = [str(call.arguments["command"]) for turn in rewrites.turns for call in turn.tool_calls]
    (command,) = [one for one in commands if one.startswith("cat > calculator.py")]
    return command.split("<<'EOF'\n")[1].split("EOF")[0]


@pytest.mark.harness
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("name", ["langgraph", "ag2"])
def test_an_agent_of_ones_own_solves_the_calculator(name: str, tmp_path: Path) -> None:
    harness = Task.load(EXAMPLES / f"custom_agent/{name}.yaml").agent.harness or ""
    solves = script(harness, "solves", writes(harness, "calculator.py", _solution()))
    with stack(tmp_path, harness, solves) as made:
        for result in results(made, asking(f"custom_agent/{name}.yaml", "solves", num_samples=2)):
            assert result.outcome.state is RolloutState.COMPLETED, result.outcome
            assert result.reward is not None
            assert result.reward.outcome == 1.0
            assert result.trajectory is not None
            assert result.trajectory.fidelity.masked_tokens == 0


@pytest.mark.harness
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("harness", OVER)
def test_the_calculator_over_a_harness(harness: str, tmp_path: Path) -> None:
    solves = script(harness, "solves", writes(harness, "calculator.py", _solution()))
    idles = script(harness, "idles", writes(harness, "notes.txt", "Nothing is done.\n"))
    with stack(tmp_path, harness, solves, idles) as made:
        for name, reward in (("solves", 1), ("idles", 0)):
            task = asking("calculator/task.yaml", name, harness, num_samples=2)
            told = over(made.client, task, [harness], {harness: task.agent.settings})
            assert row(harness, told[harness]) == f"{harness:16} {reward} (ok), {reward} (ok)"
