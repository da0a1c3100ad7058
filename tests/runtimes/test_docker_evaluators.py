"""Evaluators in containers: odd rewards and scripts that hang."""

from __future__ import annotations

from pathlib import Path

import pytest

from polarq.contracts.specs import EvaluatorSpec
from polarq.errors import OutOfMemory
from polarq_worker.evaluators.base import EvaluationTimedOut
from polarq_worker.runtimes.base import Runtime

from ..evaluators.conftest import FIX, REPO
from ..evaluators.odd_rewards import NOT_A_NUMBER, RUN_CASE, each_is_an_outcome
from ..evaluators.test_swebench_harness import BEFORE, RUN
from ..evaluators.test_swebench_harness import spec as swebench
from .docker_rig import Sandboxes
from .test_docker_harbor import DockerBench, harbor

pytestmark = pytest.mark.docker

STUBBORN = "trap '' TERM INT HUP; setsid -f sleep 98765; sleep 98765 & yes"
"""Ends of nothing but a KILL, leaves processes in other sessions, and prints all the while."""
LEFT = "grep -lzx '9876[5]' /proc/[0-9]*/cmdline"


@pytest.fixture
def bench(sandboxes: Sandboxes) -> DockerBench:
    return DockerBench(sandboxes)


def script(command: str, **config: object) -> EvaluatorSpec:
    return EvaluatorSpec(strategy="script", config={"command": command, "cwd": REPO, **config})


async def test_whatever_lies_where_a_scripts_reward_should_be_is_an_outcome(bench: DockerBench) -> None:
    spec = script(f'R="$POLARQ_REWARD_FILE"; {RUN_CASE}', reward_from="file")
    await each_is_an_outcome(bench, spec, {NOT_A_NUMBER: "the reward file is neither a number nor JSON"})


async def test_whatever_lies_where_a_verifiers_reward_should_be_is_an_outcome(
    bench: DockerBench, tmp_path: Path
) -> None:
    await each_is_an_outcome(bench, harbor(tmp_path, f"cd {REPO}; R=/logs/verifier/reward.txt; {RUN_CASE}"), {})


HUNGRY = "python3 -c \"x = b'x' * (1 << 30)\""


@pytest.fixture
def small(bench: DockerBench, monkeypatch: pytest.MonkeyPatch) -> DockerBench:
    """With too little memory for what is hungry."""

    def new(root: Path) -> Runtime:
        return bench.sandboxes.new(root.name, workdir=REPO, memory_mb=96)

    monkeypatch.setattr(bench, "new", new)
    return bench


STARVED = {
    "by its exit code": ("script", HUNGRY, {}),
    "by its last word": ("script", f"{HUNGRY} && echo 1 || echo 0", {"reward_from": "output"}),
    "a verifier that is killed": ("harbor", HUNGRY, {}),
    "a verifier whose tests are killed": ("harbor", f"({HUNGRY} && echo 1 || echo 0) > /logs/verifier/reward.txt", {}),
}


@pytest.mark.parametrize("name", STARVED)
async def test_a_sandbox_that_is_too_small_for_its_grading_says_nothing_of_the_work(
    name: str, small: DockerBench, tmp_path: Path
) -> None:
    kind, command, config = STARVED[name]
    await small.start(script(command, **config) if kind == "script" else harbor(tmp_path, command))
    with pytest.raises(OutOfMemory, match="the sandbox ran out of memory while it was graded"):
        await small.verdict()


@pytest.mark.parametrize("right", [True, False])
async def test_swebench_says_what_was_solved_and_nothing_of_the_rest(right: bool, small: DockerBench) -> None:
    small.files["tests/test_calc.py"] = BEFORE
    await small.start(swebench(test_command=f"{HUNGRY}\n{RUN.replace('python ', 'python3 ')}"))
    await small.agent(FIX if right else "echo '#' >> calc.py")
    if right:
        assert (await small.verdict()).outcome == 1.0
        return
    with pytest.raises(OutOfMemory, match="the sandbox ran out of memory while it was graded"):
        await small.verdict()


async def test_tests_that_are_killed_in_a_command_that_ends_well_say_nothing_of_the_work(small: DockerBench) -> None:
    await small.begin({"test_command": f"({HUNGRY} && python3 tests/check.py) || true"})
    await small.agent(FIX)
    with pytest.raises(OutOfMemory, match="the sandbox ran out of memory while it was graded"):
        await small.verdict()


async def test_work_that_is_right_although_something_was_killed_is_right(small: DockerBench, tmp_path: Path) -> None:
    await small.start(harbor(tmp_path, f"{HUNGRY}; echo 1 > /logs/verifier/reward.txt"))
    assert (await small.verdict()).outcome == 1.0


async def test_work_that_hangs_is_zero_and_nothing_of_it_is_left(bench: DockerBench) -> None:
    await bench.start(script(STUBBORN, timeout_s=1))
    await bench.agent("setsid -f sleep 98765 &> /dev/null")
    assert (await bench.runtime.exec(LEFT, timeout_s=60)).ok
    assert (await bench.verdict()).outcome == 0.0
    left = await bench.runtime.exec(LEFT, timeout_s=60)
    assert left.exit_code == 1, left


@pytest.mark.parametrize("kind", ["script", "harbor"])
async def test_an_evaluator_that_has_no_time_left_is_a_fault_and_nothing_of_it_is_left(
    kind: str, bench: DockerBench, tmp_path: Path
) -> None:
    reports = "echo 1 > $POLARQ_REWARD_FILE; "
    spec = script(reports + STUBBORN, reward_from="file") if kind == "script" else harbor(tmp_path, STUBBORN)
    await bench.start(spec)
    with pytest.raises(EvaluationTimedOut, match="timed out after"):
        await bench.verdict(timeout_s=2)
    left = await bench.runtime.exec(LEFT, timeout_s=60)
    assert left.exit_code == 1, left
