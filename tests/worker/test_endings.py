"""What a task wants done with rollouts by the way they ended, on a real worker."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from polarq.contracts import Boundary, RolloutState, Task
from polarq.contracts.endings import Ending
from polarq.errors import InvalidTask
from polarq.testing.stack import LocalStack
from tests.worker.conftest import ask, shell_task, wait_until

FAILING = 'echo x >> "$TRIES"; [ "$(wc -l < "$TRIES")" -gt %d ]'
WAIT_S = 120


def fails_at_first(task_id: str, home: Path, times: int, **more: Any) -> dict[str, Any]:
    """A task whose sandbox cannot be prepared that many times."""
    tries = home / "tries"
    tries.touch()
    prepare = [{"type": "exec", "command": FAILING % times}]
    runtime = {"backend": "local", "prepare": prepare, "env": {"TRIES": str(tries)}}
    return shell_task(task_id, ask(), runtime=runtime, **more)


def test_a_group_arrives_whole_though_sandboxes_failed(stack: LocalStack, tmp_path: Path) -> None:
    stack.client.submit(fails_at_first("whole", tmp_path, 2, num_samples=2, max_replacements=2))
    result = stack.client.wait("whole", WAIT_S)
    assert [one.outcome.state for one in result.results] == [RolloutState.COMPLETED] * 2
    assert sum(one.attempt - 1 for one in result.results) >= 2
    assert all(one.losses == [] and one.outcome.trainable for one in result.results)
    again = [
        event.data["reason"]
        for event in stack.client.follow("whole", after="0", wait_s=1)
        if event.type == "session.state_changed" and "replaced" in str(event.data.get("reason"))
    ]
    assert again
    assert all(reason.startswith("replaced: runtime (") for reason in again)


def test_replacing_has_its_limit_and_then_the_last_end_stands(stack: LocalStack, tmp_path: Path) -> None:
    stack.client.submit(fails_at_first("limit", tmp_path, 99, max_replacements=2))
    (result,) = stack.client.wait("limit", WAIT_S).results
    assert (result.outcome.state, result.outcome.boundary, result.attempt) == (
        RolloutState.FAILED,
        Boundary.PREPARE,
        3,
    )
    assert (result.outcome.ending, result.outcome.trainable, result.reward) == (Ending.RUNTIME, False, None)


def test_a_cancellation_ends_a_rollout_that_is_being_replaced(stack: LocalStack, tmp_path: Path) -> None:
    tries = tmp_path / "tries"
    tries.touch()
    # The second try goes on until somebody ends it.
    command = 'echo x >> "$TRIES"; [ "$(wc -l < "$TRIES")" -gt 1 ] && sleep 300; exit 1'
    runtime = {"backend": "local", "prepare": [{"type": "exec", "command": command}], "env": {"TRIES": str(tries)}}
    stack.client.submit(shell_task("stopped", ask(), runtime=runtime, max_replacements=10))
    wait_until(lambda: len(tries.read_text().split()) == 2, WAIT_S)
    stack.client.cancel("stopped")
    (result,) = stack.client.wait("stopped", WAIT_S).results
    assert (result.outcome.state, result.outcome.ending, result.attempt) == (
        RolloutState.CANCELLED,
        Ending.CANCELLED,
        2,
    )
    assert (result.outcome.trainable, result.reward) == (False, None)
    assert len(tries.read_text().split()) == 2, "it was not run again"


def test_nothing_is_replaced_that_the_task_does_not_ask_for(stack: LocalStack, tmp_path: Path) -> None:
    stack.client.submit(fails_at_first("once", tmp_path, 1))
    (result,) = stack.client.wait("once", WAIT_S).results
    assert (result.outcome.state, result.attempt) == (RolloutState.FAILED, 1)


@pytest.mark.parametrize(
    ("rule", "trainable", "reward"), [("mask", False, 0.0), (-0.5, True, -0.5), ("train", True, 0.0)]
)
def test_an_agent_that_failed_is_dealt_with_as_its_task_says(
    stack: LocalStack, rule: str | float, trainable: bool, reward: float
) -> None:
    name = f"agent-{rule}".replace(".", "")
    stack.client.submit(shell_task(name, f"{ask()}\nexit 3", endings={"agent_failed": rule}))
    (result,) = stack.client.wait(name, WAIT_S).results
    assert result.outcome.ending is Ending.AGENT_FAILED
    assert result.reward is not None
    assert (result.outcome.trainable, result.reward.outcome) == (trainable, reward)
    assert result.trajectory is not None
    assert [trace.reward for trace in result.trajectory.traces] == [reward]


@pytest.mark.parametrize(
    ("endings", "why"),
    [
        ({"runtime": 0.0}, "runtime: is not the policy's doing and carries no reward; mask or replace it"),
        ({"cancelled": "replace"}, "cancelled: cannot be replaced"),
        ({"completed": {"use": "mask", "reward": 1.0}}, "reward: goes with use 'train', not with 'mask'"),
        ({"agent_faild": "mask"}, "agent_faild"),
        ({"agent_failed": "drop"}, "train"),
    ],
)
def test_rules_that_make_no_sense_are_refused(endings: dict[str, Any], why: str) -> None:
    with pytest.raises(InvalidTask) as refused:
        Task.load(shell_task("t", "true", endings=endings))
    assert why in str(refused.value)
