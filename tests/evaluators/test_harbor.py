"""A Harbor task's verifier says what the reward is, whatever the agent left behind (field case E10)."""

from __future__ import annotations

import json
import socket
import textwrap
from pathlib import Path
from typing import Any

import pytest

from polarq.client.limits import Judge
from polarq.contracts.evaluators import folders_of
from polarq.contracts.harbor import HarborToml, task_fields
from polarq.contracts.rollout import Reward
from polarq.contracts.specs import EvaluatorSpec
from polarq.contracts.task import Task
from polarq.contracts.trajectory import Trajectory
from polarq.errors import EvaluatorFault, InvalidTask
from polarq.topology import Topology
from polarq_worker.evaluators.base import EvaluationTimedOut, NodeRules
from polarq_worker.evaluators.create import create_evaluator
from polarq_worker.evaluators.judge import JudgeFailed
from tests.evaluators.conftest import FIX, REPO, Bench
from tests.evaluators.judging import scripted_judge
from tests.evaluators.traces import trace, trajectory

TESTS, LOGS = "/polar/session/tests", "/polar/session/verifier"
SUMS = 'if PYTHONPATH=. python "$TEST_DIR/sums.py"; then echo 1; else echo 0; fi > "$VERIFIER_DIR/reward.txt"'
TOML = """
[metadata]
difficulty = "easy"
[agent]
timeout_sec = 30.0
[verifier]
timeout_sec = 40.0
env = { WORD = "from toml" }
[environment]
memory = "2G"
cpus = 1
docker_image = "somewhere/image:1"
"""


def directory(folder: Path, script: str = SUMS, toml: str = TOML) -> Path:
    task = folder / "task"
    (task / "tests").mkdir(parents=True)
    (task / "environment").mkdir()
    (task / "instruction.md").write_text("Mend add.\n")
    (task / "task.toml").write_text(toml)
    (task / "tests" / "test.sh").write_text(f"#!/bin/bash\ncd $REPO\n{textwrap.dedent(script)}\n")
    (task / "tests" / "sums.py").write_text("from calc import add\nassert add(1, 2) == 3\n")
    return task


def harbor(task: Path, *, fresh: bool = False, strategy: str = "harbor", **config: Any) -> EvaluatorSpec:
    whole = {"task_dir": str(task), "tests_target": TESTS, "verifier_dir": LOGS, **config}
    return EvaluatorSpec(strategy=strategy, config=whole, refresh_runtime=fresh)


async def begun(bench: Bench, spec: EvaluatorSpec) -> None:
    """`$REPO` is the repository, wherever the sandbox has it."""
    bench.env = {"REPO": f"{bench.session}/repo"}
    await bench.start(spec)


async def outcome(bench: Bench, spec: EvaluatorSpec, *agent: str) -> Reward:
    await begun(bench, spec)
    await bench.agent(*agent)
    return await bench.verdict()


@pytest.mark.parametrize(
    ("agent", "right"),
    [
        (FIX, 1.0),
        ("true", 0.0),
        (f"{FIX}; mkdir -p ../verifier; echo 0 > ../verifier/reward.txt", 1.0),
        ("mkdir -p ../verifier; echo 1 > ../verifier/reward.txt; echo 1 > ../verifier/reward.json", 0.0),
        ("mkdir -p ../tests; echo 'echo 1 > $VERIFIER_DIR/reward.txt' > ../tests/test.sh", 0.0),
        ("ln -s /dev/null ../verifier", 0.0),
    ],
)
async def test_what_the_verifier_wrote_counts(agent: str, right: float, bench: Bench, tmp_path: Path) -> None:
    reward = await outcome(bench, harbor(directory(tmp_path)), agent)
    assert (reward.outcome, reward.report["graded_in"]) == (right, "live"), reward
    assert reward.report["reward_channel"] == "descriptor"


@pytest.mark.parametrize(
    ("written", "right"),
    [
        ({"reward.txt": "0.5\n"}, 0.5),
        ({"reward.json": "0.25"}, 0.25),
        ({"reward.json": '{"reward": 0.75, "other": 0}'}, 0.75),
        ({"reward.json": '{"a": 1, "b": 0, "c": 0.5}'}, 0.5),
        ({"reward.txt": "1", "reward.json": "0"}, 1.0),
    ],
)
async def test_a_number_or_a_map_is_read(written: dict[str, str], right: float, bench: Bench, tmp_path: Path) -> None:
    script = "\n".join(f"printf '%s' '{text}' > $VERIFIER_DIR/{name}" for name, text in written.items())
    reward = await outcome(bench, harbor(directory(tmp_path, script)))
    assert reward.outcome == right


@pytest.mark.parametrize(
    "script",
    [
        "true",
        "exit 1",
        "echo nan > $VERIFIER_DIR/reward.txt",
        "echo 2 > $VERIFIER_DIR/reward.txt",
        "echo -1 > $VERIFIER_DIR/reward.txt",
        "echo good > $VERIFIER_DIR/reward.txt",
        "echo '{\"a\": NaN}' > $VERIFIER_DIR/reward.json",
        "echo '{}' > $VERIFIER_DIR/reward.json",
        "echo '{\"a\": true}' > $VERIFIER_DIR/reward.json",
        "echo '[1' > $VERIFIER_DIR/reward.json",
        "kill -9 $PPID",
    ],
)
async def test_what_is_no_reward_is_a_fault(script: str, bench: Bench, tmp_path: Path) -> None:
    with pytest.raises(EvaluatorFault):
        await outcome(bench, harbor(directory(tmp_path, script)))


async def test_an_exit_code_counts_where_the_task_says_so(bench: Bench, tmp_path: Path) -> None:
    task = directory(tmp_path, "echo 1 > $VERIFIER_DIR/reward.txt; exit 3")
    await begun(bench, harbor(task))
    assert (await bench.verdict()).outcome == 1.0
    with pytest.raises(EvaluatorFault, match="exit code 3"):
        await outcome(bench, harbor(task, require_exit_0=True))
    (task / "tests" / "test.sh").write_text("echo 1 > $VERIFIER_DIR/reward.txt")
    assert (await outcome(bench, harbor(task, require_exit_0=True))).outcome == 1.0


async def test_who_destroys_the_record_of_the_repository_gets_the_least_reward(bench: Bench, tmp_path: Path) -> None:
    await begun(bench, harbor(directory(tmp_path), repo_dir=REPO, min_reward=-1))
    await bench.agent("cd .. && rm -rf .polarq repo")
    assert (await bench.verdict()).outcome == -1.0


async def test_a_verifier_that_hangs_is_a_fault(bench: Bench, tmp_path: Path) -> None:
    with pytest.raises(EvaluationTimedOut):
        await outcome(bench, harbor(directory(tmp_path, "sleep 60"), verifier_timeout=0.5))


async def test_programs_that_close_what_they_inherit_still_hand_in(bench: Bench, tmp_path: Path) -> None:
    script = "python -c \"import subprocess; subprocess.run(['bash', '-c', 'echo 1 > $VERIFIER_DIR/reward.txt'])\""
    reward = await outcome(bench, harbor(directory(tmp_path, script)))
    assert (reward.outcome, reward.report["verified_again"]) == (1.0, "not inherited")


async def test_a_finished_file_may_be_put_in_place(bench: Bench, tmp_path: Path) -> None:
    script = "echo 1 > $VERIFIER_DIR/part; mv $VERIFIER_DIR/part $VERIFIER_DIR/reward.txt"
    for channel in ("descriptor", "file"):
        reward = await outcome(bench, harbor(directory(tmp_path / channel, script), reward_channel=channel))
        assert reward.outcome == 1.0


SERVER = "python -m http.server $PORT --bind 127.0.0.1"
ASKS = """
ask() { python - <<'P'
import os, urllib.request
assert b"def add" in urllib.request.urlopen(f"http://127.0.0.1:{os.environ['PORT']}/calc.py", timeout=20).read()
P
}
if ask && ask; then echo 1; else echo 0; fi > $VERIFIER_DIR/reward.txt
"""
UP = "for _ in $(seq 300); do (: < /dev/tcp/127.0.0.1/$PORT) 2> /dev/null && exit 0; sleep 0.1; done; exit 1"


@pytest.fixture
def port() -> int:
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        return int(held.getsockname()[1])


@pytest.mark.parametrize("start", ["nohup {} > /dev/null 2>&1 &", "setsid {} > /dev/null 2>&1 &", "{} &> /dev/null &"])
async def test_a_service_lives_until_the_verifier_ends(start: str, bench: Bench, tmp_path: Path, port: int) -> None:
    await begun(bench, harbor(directory(tmp_path, f"export PORT={port}\n{ASKS}")))
    await bench.agent(f"export PORT={port}; {start.format(SERVER)}", f"export PORT={port}; {UP}")
    assert (await bench.verdict()).outcome == 1.0
    with socket.socket() as free:
        free.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        free.bind(("127.0.0.1", port))
        free.listen()


async def test_a_fresh_sandbox_has_no_service_and_says_so(bench: Bench, tmp_path: Path, port: int) -> None:
    task = directory(tmp_path, f"export PORT={port}\n{ASKS}")
    await begun(bench, harbor(task, fresh=True, repo_dir=REPO))
    await bench.agent(f"export PORT={port}; nohup {SERVER} > /dev/null 2>&1 & {FIX}", f"export PORT={port}; {UP}")
    reward = await bench.verdict()
    assert (reward.outcome, reward.report["graded_in"]) == (0.0, "fresh")


async def test_a_fresh_sandbox_has_the_work(bench: Bench, tmp_path: Path) -> None:
    reward = await outcome(bench, harbor(directory(tmp_path), fresh=True, repo_dir=REPO), FIX)
    assert (reward.outcome, reward.report["graded_in"]) == (1.0, "fresh")


FORGERS = {
    "writes": 'while :; do echo 1 > "$D/reward.txt"; done',
    "replaces": 'while :; do echo 1 > "$D/x" && mv "$D/x" "$D/reward.txt"; done',
    "unlinks": 'while :; do rm -f "$D/reward.txt"; echo 1 > "$D/reward.txt"; done',
    "writes json": 'while :; do echo 1 > "$D/reward.json"; done',
}


@pytest.mark.parametrize("right", [0.0, 1.0], ids=["wrong", "right"])
@pytest.mark.parametrize("forger", FORGERS)
async def test_a_process_that_forges_the_reward_changes_nothing(
    forger: str, right: float, bench: Bench, tmp_path: Path
) -> None:
    # The verifier takes a while to end after it has written: whoever reads the path then reads the forger's.
    await begun(bench, harbor(directory(tmp_path, f"{SUMS}\nsleep 1")))
    forged = FORGERS[forger].replace("echo 1", f"echo {1 - right:g}")
    work = FIX if right else "true"
    await bench.agent(f"{work}; export D=$PWD/../verifier; (setsid bash -c '{forged}' &> /dev/null &)")
    reward = await bench.verdict()
    assert reward.outcome == right, reward


async def test_the_verifier_has_the_tasks_variables(bench: Bench, tmp_path: Path) -> None:
    script = 'if [ "$WORD" = "from toml" ]; then echo 1; else echo 0; fi > $VERIFIER_DIR/reward.txt'
    assert (await outcome(bench, harbor(directory(tmp_path, script)))).outcome == 1.0


async def test_tests_come_only_from_where_the_operator_says(bench: Bench, tmp_path: Path) -> None:
    bench.rules = NodeRules(upload_roots=["/elsewhere"])
    with pytest.raises(EvaluatorFault, match="upload_roots"):
        await outcome(bench, harbor(directory(tmp_path)))


def test_a_directory_becomes_a_task(tmp_path: Path) -> None:
    fields = task_fields(directory(tmp_path), backend="docker")
    agent = {"harness": "shell", "custom_shell": {"command": "true"}}
    task = Task.parse({**fields, "agent": agent})
    assert (task.instruction, task.budgets().agent_s, task.budgets().evaluate_s) == ("Mend add.\n", 30.0, 160.0)
    assert task.runtime is not None
    assert (task.runtime.image, task.runtime.memory_mb, task.runtime.cpus) == ("somewhere/image:1", 2048, 1.0)
    (tmp_path / "task" / "instruction.md").unlink()
    with pytest.raises(InvalidTask, match=r"instruction\.md"):
        task_fields(tmp_path / "task", backend="docker")


@pytest.mark.parametrize("within", [False, True], ids=["itself", "as a part"])
def test_a_folder_is_taken_relative_to_the_task_file_and_held_to_the_operators_word(
    within: bool, tmp_path: Path
) -> None:
    evaluator: dict[str, Any] = {"strategy": "harbor", "config": {"task_dir": "task"}}
    if within:
        evaluator = {"strategy": "composite", "config": {"parts": [{"name": "verifier", **evaluator}]}}
    agent = {"harness": "shell", "custom_shell": {"command": "true"}}
    (tmp_path / "task.json").write_text(json.dumps({"instruction": "x", "agent": agent, "evaluator": evaluator}))
    task = Task.load(tmp_path / "task.json")
    assert task.evaluator is not None
    assert folders_of(task.evaluator) == [str(tmp_path / "task")]
    assert Judge(task, Topology(), {}).problems("node0") == []
    elsewhere = Topology.model_validate({"security": {"upload_roots": ["/elsewhere"]}})
    (problem,) = Judge(task, elsewhere, {}).problems("node0")
    assert "security.upload_roots" in problem


@pytest.mark.parametrize(
    ("toml", "says"),
    [
        ("x =", "task.toml"),
        ("[verifier]\ntimeout_sec = 0", "verifier.timeout_sec"),
        ('environment = "x"', "environment"),
        ('[environment]\nmemory = "much"', "no size"),
    ],
)
def test_a_task_toml_that_cannot_be_used_says_where(toml: str, says: str, tmp_path: Path) -> None:
    with pytest.raises(InvalidTask, match=says):
        HarborToml.load(directory(tmp_path, toml=toml))


@pytest.mark.parametrize(
    ("config", "fresh", "says"),
    [
        ({}, False, "exactly one of 'task_dir' and 'tests_dir'"),
        ({"tests_dir": "/nosuch"}, False, "there is no folder /nosuch"),
        ({"tests_dir": "/tmp"}, True, "needs config.repo_dir"),
    ],
)
def test_settings_are_refused(config: dict[str, Any], fresh: bool, says: str) -> None:
    with pytest.raises(InvalidTask, match=says):
        create_evaluator(EvaluatorSpec(strategy="harbor", config=config, refresh_runtime=fresh), [])


def rubric(task: Path, url: str, **config: Any) -> EvaluatorSpec:
    (task / "tests" / "rubric.md").write_text("Small steps.")
    return harbor(task, strategy="harbor_rubric", judge_base_url=url, judge_model="j", **config)


SCORES = json.dumps({"trace_0": 5, "trace_1": -5})


@pytest.mark.parametrize(
    ("bad", "what"),
    [
        ('{"trace_0": 5}', "trace_1"),
        ('{"trace_0": 5, "trace_1": 6}', "off"),
        ('{"trace_0": 5, "trace_1": 0.5}', "whole"),
        ('{"trace_0": 5, "trace_1": 5, "trace_2": 5}', "no trace by 'trace_2'"),
    ],
)
async def test_a_rubric_credits_each_trace(bad: str, what: str, bench: Bench, tmp_path: Path) -> None:
    bench.trajectory = trajectory("I look.", "I break it.")
    async with scripted_judge(bad, SCORES) as judge:
        reward = await outcome(bench, rubric(directory(tmp_path), judge.url), FIX)
        asked = judge.bodies[0]["messages"][1]["content"]
    assert (reward.outcome, reward.trace_rewards) == (1.0, [1.2, 0.8])
    assert what in reward.report["judge_refused"][0]
    assert [text in asked for text in ("Small steps.", "I look.", "I break it.")] == [True] * 3


async def test_a_judge_that_fails_leaves_no_reward_unless_the_task_says_so(bench: Bench, tmp_path: Path) -> None:
    bench.trajectory = trajectory("I look.", "I break it.")
    async with scripted_judge(*["no"] * 6) as judge:
        task = directory(tmp_path)
        with pytest.raises(JudgeFailed):
            await outcome(bench, rubric(task, judge.url), FIX)
        reward = await outcome(bench, rubric(task, judge.url, on_judge_failure="outcome_only"), FIX)
    assert (reward.trace_rewards, "judge_failed" in reward.report) == (None, True)


async def test_a_rollout_without_traces_asks_no_judge(bench: Bench, tmp_path: Path) -> None:
    bench.trajectory = Trajectory(builder="x")
    async with scripted_judge() as judge:
        await outcome(bench, rubric(directory(tmp_path), judge.url))
        assert not judge.bodies


async def test_many_traces_are_judged_some_at_a_time_without_what_tools_said(bench: Bench, tmp_path: Path) -> None:
    tool = {"role": "tool", "content": "a long listing"}
    traces = [trace(index, {"role": "assistant", "content": f"step {index}"}, tool) for index in range(3)]
    bench.trajectory = Trajectory(builder="x", traces=traces)
    async with scripted_judge('{"trace_0": 1, "trace_1": 2}', '{"trace_2": 3}') as judge:
        config = {"judge_max_traces_per_call": 2, "judge_include_tool_outputs": False, "rubric_coefficient": 1}
        reward = await outcome(bench, rubric(directory(tmp_path), judge.url, **config))
        asked = [body["messages"][1]["content"] for body in judge.bodies]
    assert reward.trace_rewards == pytest.approx([0.2, 0.4, 0.6])
    assert ["step 2" in text for text in asked] == [False, True]
    assert not any("a long listing" in text for text in asked)
