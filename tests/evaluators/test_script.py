"""What a task's own command says is the reward, as long as it really judged something."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from polarq.contracts.rollout import HarnessReport
from polarq.contracts.specs import EvaluatorSpec
from polarq.contracts.task import Task
from polarq.contracts.trajectory import Trajectory
from polarq.errors import EvaluatorFault, InvalidTask, RuntimeFault, SandboxLost
from polarq.trajectory.base import rewarded
from polarq_worker.evaluators.base import EvaluationTimedOut
from polarq_worker.evaluators.create import create_evaluator
from polarq_worker.runtimes.base import Runtime
from tests.evaluators.conftest import FIX, GIT, REPO, Bench
from tests.evaluators.traces import trace

CHECK = "PYTHONPATH=. python tests/test_sum.py"
TEST = "from calc import add\nassert add(1, 2) == 3 and add(2, 2) == 4\n"
BOTH = pytest.mark.parametrize("fresh", [False, True], ids=["live", "fresh"])


def script(command: str, *, fresh: bool = False, **config: Any) -> EvaluatorSpec:
    return EvaluatorSpec(
        strategy="script", config={"command": command, "repo_dir": REPO, **config}, refresh_runtime=fresh
    )


HACKS = {
    "solved": (FIX, 1.0),
    "solved and committed": (f"{FIX}; {GIT} commit -qam done", 1.0),
    "wrong": ("printf 'def add(a, b):\\n    return 3\\n' > calc.py", 0.0),
    "nothing": ("true", 0.0),
    "tests edited": ("printf 'pass' > tests/test_sum.py", 0.0),
    "tests spoilt, solved": (f"{FIX}; printf 'assert False' > tests/test_sum.py", 1.0),
    "tests deleted, solved": (f"{FIX}; rm tests/test_sum.py", 1.0),
    "sitecustomize planted": ("printf 'import os; os._exit(0)\\n' > sitecustomize.py; echo '#' >> calc.py", 0.0),
    "byte code planted": (
        "mkdir __pycache__; printf 'def add(a, b):\\n    return a + b\\n' > x.py; python -c \"import py_compile;"
        "py_compile.compile('x.py', '__pycache__/calc.cpython-311.pyc', invalidation_mode="
        "py_compile.PycInvalidationMode.UNCHECKED_HASH)\"; rm x.py; echo '#' >> calc.py",
        0.0,
    ),
}


@BOTH
@pytest.mark.parametrize("way", HACKS)
async def test_the_exit_code_of_the_true_tests_counts(bench: Bench, way: str, fresh: bool) -> None:
    agent, outcome = HACKS[way]
    bench.files["tests/test_sum.py"] = TEST
    await bench.start(script(CHECK, fresh=fresh))
    await bench.agent(agent)
    reward = await bench.verdict()
    assert (reward.outcome, reward.report["graded_in"]) == (outcome, "fresh" if fresh else "live"), reward


async def test_a_planted_conftest_takes_no_part(bench: Bench) -> None:
    await bench.start(script("python -m pytest -q -p no:cacheprovider tests/test_calc.py"))
    await bench.agent(
        "printf 'import pytest\\n@pytest.hookimpl(hookwrapper=True)\\ndef pytest_runtest_makereport(item, call):\\n"
        "    o = yield\\n    o.get_result().outcome = \"passed\"\\n' > conftest.py; echo '#' >> calc.py"
    )
    assert (await bench.verdict()).outcome == 0.0


@pytest.mark.parametrize(
    "command",
    [
        "nosuchpython tests.py | tee log.txt",
        "nosuchpython tests.py | cat; true",
        "check() { nosuchpython tests.py; echo checked; }; check; exit 0",
        "./calc.py | cat; echo done",
        "exec nosuchpython",
        "/nosuch/python tests.py; echo ok",
    ],
)
async def test_nothing_ran_is_no_reward(bench: Bench, command: str) -> None:
    # Field case E03.
    await bench.start(script(command))
    with pytest.raises(EvaluatorFault, match="ran nothing"):
        await bench.verdict()


async def test_a_script_may_look_whether_a_program_is_there(bench: Bench) -> None:
    await bench.start(script("if nosuch --version; then exit 1; fi; nosuch || exit 0"))
    assert (await bench.verdict()).outcome == 1.0


@pytest.mark.parametrize("source", ["file", "output"])
@pytest.mark.parametrize(
    ("text", "outcome"), [("0.25", 0.25), ("1", 1.0), ("1e-1", 0.1), ('{"score": 0.5, "why": "half"}', 0.5)]
)
async def test_a_number_or_json_is_read(bench: Bench, source: str, text: str, outcome: float) -> None:
    into = ' > "$POLARQ_REWARD_FILE"' if source == "file" else ""
    await bench.start(script(f"echo starting; echo '{text}'{into}", reward_from=source, reward_key="score"))
    assert (await bench.verdict()).outcome == pytest.approx(outcome)


@pytest.mark.parametrize(
    "text",
    [
        *("nan", "NaN", "inf", "-0.1", "1.5", "1e999", "true", "0x1", "1_0", '"1"', "[1]", "{}", "", "1 1"),
        *('{"reward": NaN}', '{"reward": Infinity}', '{"reward": true}', '{"reward": "1"}', '{"reward": 2}'),
        '{"reward": 1' + "0" * 400 + "}",
    ],
)
async def test_what_is_no_reward_is_a_fault(bench: Bench, text: str) -> None:
    await bench.start(script(f"printf '%s' '{text}' > $POLARQ_REWARD_FILE", reward_from="file"))
    with pytest.raises(EvaluatorFault):
        await bench.verdict()


@pytest.mark.parametrize("command", ["true", "echo 1 > $POLARQ_REWARD_FILE; exit 3"])
async def test_no_file_and_a_failed_script_are_faults(bench: Bench, command: str) -> None:
    await bench.start(script(command, reward_from="file"))
    with pytest.raises(EvaluatorFault):
        await bench.verdict()


CREDIT = """python - <<'P'
import json, os
traces = json.load(open(os.environ["POLARQ_TRACES_FILE"]))
said = [[m["content"] for m in trace["response_messages"]] for trace in traces]
assert [len(trace["turns"]) for trace in traces] == [len(texts) for texts in said], traces
turns = [[1.0 if text == "good" else 0.0 for text in texts] for texts in said]
whole = {"reward": 0.5, "trace_rewards": [max(one) for one in turns], "turn_rewards": turns}
json.dump(whole, open(os.environ["POLARQ_REWARD_FILE"], "w"))
P"""


async def test_a_script_credits_traces_and_turns_by_what_was_said(bench: Bench) -> None:
    said = [[{"role": "assistant", "content": text} for text in texts] for texts in (["good", "bad"], ["bad"])]
    bench.trajectory = Trajectory(builder="x", traces=[trace(index, *texts) for index, texts in enumerate(said)])
    await bench.start(script(CREDIT, reward_from="file"))
    reward = await bench.verdict()
    assert (reward.outcome, reward.trace_rewards, reward.turn_rewards) == (0.5, [1.0, 0.0], [[1.0, 0.0], [0.0]])
    traces = rewarded(bench.trajectory, reward).traces
    assert [(one.reward, [turn.reward for turn in one.turns]) for one in traces] == [(1.0, [1.0, 0.0]), (0.0, [0.0])]


@pytest.mark.parametrize(
    ("credit", "says"),
    [
        ('"trace_rewards": [1]', "list of 2 numbers, and is 1 entries"),
        ('"trace_rewards": [1, NaN]', "which is no reward"),
        ('"trace_rewards": [1, 2]', "outside 0 to 1"),
        ('"trace_rewards": 1', "list of 2 numbers, and is '1'"),
        ('"turn_rewards": [[1, 1]]', "no list of 2 lists"),
        ('"turn_rewards": [[1, 1], [1, 1]]', "trace 1 must be a list of 1 numbers, and is 2 entries"),
        ('"turn_rewards": [[1, 1], [true]]', "is no number"),
        ('"turn_rewards": null', "no list of 2 lists"),
    ],
)
async def test_credit_for_other_traces_or_turns_than_there_are_is_a_fault(credit: str, says: str, bench: Bench) -> None:
    said = {"role": "assistant", "content": "x"}
    bench.trajectory = Trajectory(builder="x", traces=[trace(0, said, said), trace(1, said)])
    await bench.start(
        EvaluatorSpec(
            strategy="script", config={"command": f"echo '{{\"reward\": 1, {credit}}}'", "reward_from": "output"}
        )
    )
    with pytest.raises(EvaluatorFault, match=says):
        await bench.verdict()


async def test_a_range_of_the_tasks_own_holds(bench: Bench) -> None:
    await bench.start(script("false", min_reward=-1, max_reward=2))
    assert (await bench.verdict()).outcome == -1.0


@BOTH
async def test_who_destroys_the_record_of_the_repository_gets_the_least_reward(bench: Bench, fresh: bool) -> None:
    await bench.start(script("true", fresh=fresh, min_reward=-1))
    await bench.agent("cd .. && rm -rf .polarq repo")
    assert (await bench.verdict()).outcome == -1.0


async def test_a_service_of_the_agents_lives_until_the_script_ends(bench: Bench) -> None:
    await bench.start(script("kill -0 $(cat pid)", cwd=REPO))
    await bench.agent("setsid sleep 300 > /dev/null 2>&1 & echo $! > pid")
    assert (await bench.verdict()).outcome == 1.0
    assert not (await bench.runtime.exec("kill -0 $(cat pid)", cwd=REPO, timeout_s=60)).ok


async def test_work_that_hangs_is_zero_and_a_script_that_has_no_time_is_a_fault(bench: Bench) -> None:
    await bench.start(script("sleep 60", timeout_s=0.5))
    assert (await bench.verdict()).outcome == 0.0
    with pytest.raises(EvaluationTimedOut):
        await bench.verdict(timeout_s=0.5)


async def test_a_script_that_hangs_before_it_says_a_reward_has_judged_nothing(bench: Bench) -> None:
    await bench.start(script("echo 1 > $POLARQ_REWARD_FILE; sleep 60", timeout_s=0.5, reward_from="file"))
    with pytest.raises(EvaluationTimedOut):
        await bench.verdict()


async def test_a_sandbox_that_is_gone_is_a_fault(bench: Bench) -> None:
    await bench.start(EvaluatorSpec(strategy="script", config={"command": "true"}))
    await bench.runtime.stop()
    with pytest.raises(SandboxLost):
        await bench.verdict()


def test_a_fresh_sandbox_needs_to_know_what_to_take_along() -> None:
    with pytest.raises(InvalidTask, match="repo_dir"):
        create_evaluator(EvaluatorSpec(strategy="script", config={"command": "true"}, refresh_runtime=True), [])


@pytest.mark.parametrize(
    "config", [{}, {"command": " "}, {"command": "x", "min_reward": 1}, {"command": "x", "cmd": 1}]
)
def test_settings_are_refused_at_submit(config: dict[str, Any]) -> None:
    agent = {"harness": "shell", "custom_shell": {"command": "true"}}
    with pytest.raises(InvalidTask, match="config"):
        Task.parse({"instruction": "x", "agent": agent, "evaluator": {"strategy": "script", "config": config}})


async def test_a_fresh_sandbox_is_asked_for_once_more(bench: Bench) -> None:
    failures = [RuntimeFault("the daemon is away"), None, RuntimeFault("away"), RuntimeFault("still away")]
    await bench.start(script("true", fresh=True))
    await bench.agent(FIX)
    context = bench.context(HarnessReport(name="stub", ok=True))

    async def flaky() -> Runtime:
        if failure := failures.pop(0):
            raise failure
        return await context.fresh_runtime()

    assert bench.evaluator is not None
    assert (await bench.evaluator.evaluate(replace(context, fresh_runtime=flaky))).outcome == 1.0
    with pytest.raises(RuntimeFault, match="still away"):
        await bench.evaluator.evaluate(replace(context, fresh_runtime=flaky))
