"""Whole rollouts in instances of the real program: their worker, proxy and Redis are real too."""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator
from typing import Any

import pytest

from polarq.contracts.rollout import RolloutResult, RolloutState
from polarq.contracts.specs import NetworkPolicy
from polarq.contracts.task import Task
from polarq.testing.stack import LocalStack
from polarq_worker.runtimes.apptainer.instance import Note, is_same
from tests.worker.conftest import ask, shell_task, write_scenario

from .apptainer_here import IMAGE, PROGRAM, needs_apptainer

pytestmark = pytest.mark.apptainer
PATIENCE_S = 150.0


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalStack]:
    needs_apptainer()
    home = tmp_path_factory.mktemp("apptainer")
    runtime = {"backend": "apptainer", "image": str(IMAGE)}
    node = {"default_runtime": runtime, "runtimes": {"apptainer": {"program": str(PROGRAM)}}}
    with LocalStack(home, scenario=str(write_scenario(home)), nodes={"node0": node}) as made:
        yield made


def task(name: str, command: str, **runtime: Any) -> Task:
    wanted = {"backend": "apptainer", "image": str(IMAGE), **runtime}
    return Task.parse(shell_task(name, command, runtime=wanted, timeout_seconds=120))


def rollout(stack: LocalStack, name: str, command: str, **runtime: Any) -> RolloutResult:
    stack.client.submit(task(name, command, **runtime))
    (result,) = stack.client.wait(name, PATIENCE_S).results
    return result


def notes(stack: LocalStack) -> list[Note]:
    found = (Note.read(path) for path in (stack.home / "state").rglob("apptainer/instances/*.json"))
    return [note for note in found if note is not None]


def test_an_offline_harness_asks_the_model_through_its_door(stack: LocalStack) -> None:
    result = rollout(stack, "offline", ask() + "tail -n +3 /proc/net/dev | cut -d: -f1")
    assert result.outcome.state is RolloutState.COMPLETED, result.outcome
    assert result.harness is not None
    assert result.harness.steps[0].stdout_tail.split("\n")[0] == "First answer."
    assert result.harness.steps[0].stdout_tail.split()[-1] == "lo"
    assert result.sandbox is not None
    assert (result.sandbox.network, result.sandbox.isolation) == (NetworkPolicy.PROXY_ONLY, "apptainer")


def test_the_second_rollout_of_a_recipe_starts_from_what_the_first_one_prepared(stack: LocalStack) -> None:
    prepare = [{"type": "exec", "command": "date +%s%N > /opt/prepared || { mkdir /opt; date +%s%N > /opt/prepared; }"}]
    seen = [rollout(stack, f"prepared{number}", ask() + "cat /opt/prepared", prepare=prepare) for number in range(2)]
    first, second = (result.harness.steps[0].stdout_tail for result in seen if result.harness is not None)
    assert first == second
    assert seen[1].sandbox is not None
    assert seen[1].sandbox.origin in {"snapshot", "warm"}


def test_a_killed_worker_leaves_no_instance_and_the_next_one_goes_on(stack: LocalStack) -> None:
    stack.client.submit(task("left", ask() + "sleep 1000"))
    deadline = time.monotonic() + PATIENCE_S
    while not (before := [note for note in notes(stack) if is_same(note)]):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    stack.workers["node0"].signal(signal.SIGKILL)
    stack.workers["node0"].wait(PATIENCE_S)
    while any(is_same(note) for note in before):
        assert time.monotonic() < deadline + PATIENCE_S
        time.sleep(0.05)
    stack.start_worker("node0")
    stack.client.cancel("left")
    stack.client.wait("left", PATIENCE_S)
    result = rollout(stack, "after", ask())
    assert result.outcome.state is RolloutState.COMPLETED, result.outcome
    assert not {note.name for note in before} & {note.name for note in notes(stack)}
