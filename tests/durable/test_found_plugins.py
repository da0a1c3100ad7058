"""What a plug-in raises, does or answers is the end of its own rollout: told as that, once, and of nothing else."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from polarq.contracts.rollout import Boundary, RolloutResult, RolloutState
from polarq.testing.stack import LocalStack
from tests.durable.gates import PATIENCE_S
from tests.worker.conftest import ask, shell_task, write_scenario

REPOSITORY = Path(__file__).parents[2]
MODULE = "tests.durable.misbehaving"


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalStack]:
    home = tmp_path_factory.mktemp("misbehaving")
    installed = home / "site" / "misbehaving-1.0.dist-info"
    installed.mkdir(parents=True)
    (installed / "METADATA").write_text("Metadata-Version: 2.1\nName: misbehaving\nVersion: 1.0\n")
    (installed / "entry_points.txt").write_text(f"[polarq.builders]\nbreaks_off = {MODULE}:BreaksOff\n")
    path = os.pathsep.join([str(installed.parent), str(REPOSITORY), os.environ.get("PYTHONPATH", "")])
    with LocalStack(
        home,
        scenario=str(write_scenario(home)),
        sections={"security": {"allowed_modules": [MODULE]}},
        env={"PYTHONPATH": path},
    ) as made:
        yield made


def the_end_of(stack: LocalStack, task_id: str, **more: Any) -> RolloutResult:
    """How a rollout ended that asked the model once."""
    stack.client.submit(shell_task(task_id, ask(1), **more))
    (result,) = stack.client.wait(task_id, PATIENCE_S).results
    return result


def the_worker_goes_on(stack: LocalStack, after: str) -> None:
    """The same worker takes work, and nothing is left of what failed."""
    result = the_end_of(stack, f"{after}-next")
    assert (result.outcome.state, result.attempt) == (RolloutState.COMPLETED, 1)
    stack.check_worker()
    assert list((stack.home / "state" / "node0" / "rollouts").iterdir()) == []


@pytest.mark.parametrize(
    ("how", "boundary"),
    [
        ("breaks", Boundary.EVALUATOR),
        ("exits", Boundary.EVALUATOR),
        ("exits in a part", Boundary.EVALUATOR),
        ("interrupts", Boundary.EVALUATOR),
        ("no reward", Boundary.EVALUATOR),
        ("not a number", Boundary.EVALUATOR),
        ("object", Boundary.EVALUATOR),
    ],
)
def test_an_evaluator_that_misbehaves_ends_its_rollout_and_keeps_what_was_sampled(
    stack: LocalStack, how: str, boundary: Boundary
) -> None:
    task_id = f"evaluator-{how.replace(' ', '-')}"
    evaluator = {"strategy": f"{MODULE}:Misbehaves", "config": {"how": how}}
    result = the_end_of(stack, task_id, evaluator=evaluator)
    assert (result.outcome.state, result.outcome.boundary) == (RolloutState.FAILED, boundary)
    assert result.attempt == 1
    assert result.reward is None
    assert not result.outcome.trainable
    assert result.trajectory is not None
    assert result.trajectory.fidelity.calls == 1
    the_worker_goes_on(stack, task_id)


@pytest.mark.parametrize(("how", "kept"), [("deep", {"left_out_of_report": ["a"]}), ("surrogate", {"x": "?"})])
def test_evidence_that_cannot_be_stored_costs_no_verdict(stack: LocalStack, how: str, kept: dict[str, Any]) -> None:
    evaluator = {"strategy": f"{MODULE}:Misbehaves", "config": {"how": how}}
    result = the_end_of(stack, f"evidence-{how}", evaluator=evaluator)
    assert (result.outcome.state, result.outcome.trainable) == (RolloutState.COMPLETED, True)
    assert result.reward is not None
    assert (result.reward.outcome, result.reward.report) == (1.0, kept)


def test_a_builder_that_breaks_off_ends_its_rollout(stack: LocalStack) -> None:
    result = the_end_of(stack, "builder", builder={"strategy": "breaks_off"})
    assert (result.outcome.state, result.outcome.boundary) == (RolloutState.FAILED, Boundary.BUILDER)
    assert "what nobody foresaw" in result.outcome.message
    assert result.attempt == 1
    the_worker_goes_on(stack, "builder")
