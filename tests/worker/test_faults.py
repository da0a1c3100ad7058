"""What can go wrong, with the real thing: each ends in one clear line and an outcome with its boundary."""

from __future__ import annotations

import json
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from polarq.contracts import Boundary, ExecKind, RolloutResult, RolloutState
from polarq.contracts.endings import Ending
from polarq.errors import InvalidTask, TaskNotFound
from polarq.testing.stack import LocalStack
from polarq_worker.runtimes.capture import LOG_CAP_BYTES
from tests.needs import not_here
from tests.worker.conftest import ask, commands_with, shell_task, wait_until

S = RolloutState
B = Boundary


def run(stack: LocalStack, task: dict[str, Any]) -> RolloutResult:
    stack.client.submit(task)
    result = stack.client.wait(task["task_id"], 90).results[0]
    json.dumps(result.model_dump(mode="json"), allow_nan=False)
    assert "\n" not in result.outcome.message
    return result


def test_a_bad_exit_before_the_first_model_call_is_the_harness_and_no_zero(stack: LocalStack) -> None:
    result = run(stack, shell_task("fault-exit", "echo no such flag >&2; exit 3"))
    assert (result.outcome.state, result.outcome.boundary) == (S.FAILED, B.HARNESS)
    assert "exit code 3: no such flag" in result.outcome.message
    assert (result.reward, result.outcome.trainable) == (None, False)


def test_a_harness_that_cannot_start_is_the_infrastructure_and_run_again(stack: LocalStack) -> None:
    agent = {"harness": "shell", "custom_shell": {"command": "true", "cwd": "/no/such"}}
    result = run(stack, {**shell_task("fault-start", "true", max_replacements=1), "agent": agent})
    assert (result.outcome.state, result.outcome.boundary) == (S.FAILED, B.RUNTIME)
    assert (result.outcome.ending, result.outcome.reason) == (Ending.RUNTIME, "harness_could_not_start")
    assert "there is no folder '/no/such' to run in" in result.outcome.message
    assert (result.reward, result.outcome.trainable, result.attempt) == (None, False, 2)


def test_a_bad_exit_after_model_calls_is_scored_by_the_work_and_kept_beside_it(stack: LocalStack) -> None:
    result = run(stack, shell_task("fault-exit-late", f"{ask(2)}\nexit 4"))
    assert (result.outcome.state, result.outcome.boundary) == (S.FAILED, B.HARNESS)
    assert result.reward is not None
    assert result.harness is not None
    assert (result.reward.outcome, result.harness.ok, result.outcome.trainable) == (0.0, False, True)
    assert result.trajectory is not None
    assert result.trajectory.fidelity.calls == 2


def test_a_failing_part_of_a_pipe_fails_the_harness(stack: LocalStack) -> None:
    result = run(stack, shell_task("fault-pipe", "false | cat"))
    assert (result.outcome.state, result.outcome.boundary) == (S.FAILED, B.HARNESS)


def test_a_harness_that_hangs_is_stopped_at_its_budget_and_what_was_sampled_is_kept(stack: LocalStack) -> None:
    command = f"{ask(2)}\nsleep 7654322"
    result = run(stack, shell_task("fault-hang", command, timeouts={"agent_s": 3}))
    assert (result.outcome.state, result.outcome.boundary) == (S.TIMED_OUT, B.HARNESS)
    assert result.trajectory is not None
    assert result.trajectory.fidelity.trainable_tokens > 0
    assert result.harness is not None
    assert result.harness.steps[-1].kind is ExecKind.TIMED_OUT
    assert "First answer." in result.harness.steps[-1].stdout_tail
    assert commands_with("sleep 7654322") == []


def test_a_harness_that_forks_away_leaves_nothing_running(stack: LocalStack) -> None:
    command = f"{ask(1)}\n(setsid sleep 7654323 >/dev/null 2>&1 &)\nnohup sleep 7654324 >/dev/null 2>&1 &"
    result = run(stack, shell_task("fault-fork", command))
    assert result.outcome.state is S.COMPLETED
    assert commands_with("sleep 765432") == []


def test_a_hundred_megabytes_of_output_are_cut_and_the_rollout_goes_on(stack: LocalStack) -> None:
    result = run(stack, shell_task("fault-flood", f"{ask(1)}\nhead -c 100000000 /dev/zero | tr '\\0' a; echo the end"))
    assert result.outcome.state is S.COMPLETED
    assert result.harness is not None
    step = result.harness.steps[-1]
    assert step.truncated
    assert step.stdout_tail.endswith("the end\n")
    assert len(step.stdout_tail) < 10_000


def test_of_a_harness_that_floods_with_what_is_no_text_and_will_not_end_the_files_come_back(stack: LocalStack) -> None:
    command = rf"""{ask(1)}
mkdir out; echo kept > out/$'\xff\xfe'; echo kept > out/$'a\nb'
trap '' TERM INT HUP
while :; do head -c 1000000 /dev/urandom; head -c 1000000 /dev/urandom >&2; done"""
    task = shell_task("fault-deaf", command, timeouts={"agent_s": 5}, artifacts=[{"path": "out/*"}])
    result = run(stack, task)
    assert (result.outcome.state, result.outcome.reason) == (S.TIMED_OUT, "agent_timeout")
    assert result.harness is not None
    assert result.harness.steps[-1].truncated
    files = {one.name: one for one in result.artifacts}
    assert {"out/\\xff\\xfe", "out/a\\nb"} < set(files)
    assert files["out/a\\nb"].size == len("kept\n")
    logs = [files[f"logs/agent/step.00.{stream}"] for stream in ("stdout", "stderr")]
    assert all(0 < one.size < LOG_CAP_BYTES + 1_100_000 for one in logs)


def test_output_that_is_no_text_does_no_harm(stack: LocalStack) -> None:
    result = run(stack, shell_task("fault-bytes", f"{ask(1)}\nprintf 'ok\\360\\237\\n'; printf 'a\\0b'; exit 0"))
    assert result.outcome.state is S.COMPLETED


def test_an_instruction_of_two_megabytes_arrives_whole(stack: LocalStack) -> None:
    text = "ä" * (1024 * 1024)
    command = 'test "$(wc -c <"$POLARQ_INSTRUCTION_FILE")" = 2097152'
    assert run(stack, shell_task("fault-large", command, instruction=text)).outcome.state is S.COMPLETED


def test_a_harness_program_that_only_an_image_can_have_is_named_where_it_is_missing(stack: LocalStack) -> None:
    result = run(stack, {**shell_task("fault-missing", "true"), "agent": {"harness": "swe_agent"}})
    assert (result.outcome.state, result.outcome.boundary) == (S.FAILED, B.PREPARE)
    assert "sweagent" in result.outcome.message


@pytest.mark.parametrize(
    ("name", "change", "boundary", "says"),
    [
        ("harness", {"agent": {"harness": "no_such"}}, B.TASK, "no_such"),
        ("evaluator", {"evaluator": {"strategy": "no_such"}}, B.TASK, "no_such"),
        ("builder", {"builder": {"strategy": "no_such"}}, B.TASK, "no_such"),
        ("gpus", {"runtime": {"backend": "local", "gpus": 1}}, B.TASK, "gpus"),
    ],
)
def test_what_is_not_there_is_named_before_a_sandbox_is_made(
    stack: LocalStack, name: str, change: dict[str, Any], boundary: Boundary, says: str
) -> None:
    result = run(stack, {**shell_task(f"fault-unknown-{name}", "true"), **change})
    assert (result.outcome.state, result.outcome.boundary) == (S.FAILED, boundary)
    assert says in result.outcome.message
    assert result.timing.agent_s is None


def test_a_kind_of_sandbox_that_no_node_has_is_refused_at_submit(stack: LocalStack) -> None:
    with pytest.raises(InvalidTask, match=r"runtime.backend: no node has 'no_such' \(installed: .*local"):
        stack.client.submit(shell_task("fault-no-sandbox", "true", runtime={"backend": "no_such"}))


def test_what_an_agent_program_does_not_support_is_refused_at_submit(stack: LocalStack) -> None:
    agent = {"harness": "aider", "skills_path": "/skills", "mcp_servers": [{"name": "x", "command": "x"}]}
    task = {**shell_task("fault-unsupported", "true"), "agent": agent}
    with pytest.raises(InvalidTask) as refused:
        stack.client.submit(task)
    assert refused.value.problems == (
        "mcp_servers: Aider takes no server of transport 'stdio' (x); it takes: none",
        "skills_path: Aider has no skills; leave it out",
    )
    with pytest.raises(TaskNotFound):
        stack.client.head("fault-unsupported")


def test_a_failing_prepare_action_names_itself(stack: LocalStack) -> None:
    runtime = {"backend": "local", "prepare": [{"type": "exec", "command": "echo broken recipe >&2; exit 9"}]}
    result = run(stack, shell_task("fault-prepare", "true", runtime=runtime))
    assert (result.outcome.state, result.outcome.boundary) == (S.FAILED, B.PREPARE)
    assert "prepare action 0" in result.outcome.message
    assert "broken recipe" in result.outcome.message


def test_a_prepare_that_hangs_ends_at_its_own_budget(stack: LocalStack) -> None:
    runtime = {"backend": "local", "prepare": [{"type": "exec", "command": "sleep 7654325"}]}
    result = run(stack, shell_task("fault-prepare-hang", "true", runtime=runtime, timeouts={"prepare_s": 2}))
    assert (result.outcome.state, result.outcome.boundary) == (S.TIMED_OUT, B.PREPARE)
    assert commands_with("sleep 7654325") == []


def test_a_rollout_that_waited_longer_than_its_queue_budget_never_starts(stack: LocalStack) -> None:
    result = run(stack, shell_task("fault-queue", "true", timeouts={"queue_s": 0.000001}))
    assert (result.outcome.state, result.outcome.boundary) == (S.TIMED_OUT, B.QUEUE)
    assert result.timing.prepare_s is None


def test_an_evaluator_that_cannot_reach_a_verdict_gives_no_reward(stack: LocalStack) -> None:
    prepare = [
        {
            "type": "exec",
            "command": "git init -q . && git -c user.name=a -c user.email=a@b commit -q --allow-empty -m x",
        }
    ]
    evaluator = {
        "strategy": "test_on_output",
        "config": {
            "repo_dir": "/polar/session",
            "test_command": "no-such-interpreter run",
            "expected_output_json": {"tests/test_a.py::test_a": "PASSED"},
        },
    }
    task = shell_task("fault-evaluator", f"{ask(1)}\necho x > made.txt", evaluator=evaluator)
    result = run(stack, {**task, "runtime": {"backend": "local", "prepare": prepare}})
    assert (result.outcome.state, result.outcome.boundary) == (S.FAILED, B.EVALUATOR), result.reward
    assert (result.reward, result.outcome.trainable) == (None, False)
    assert result.trajectory is not None
    assert result.trajectory.fidelity.sampled_tokens > 0


@pytest.mark.parametrize("script", ["no_ids", "nan_logprob"])
def test_calls_that_cannot_be_trained_on_are_kept_and_say_why(stack: LocalStack, script: str) -> None:
    task = shell_task(f"fault-{script.replace('_', '-')}", ask(1), instruction=f"[script: {script}] go")
    result = run(stack, task)
    assert (result.outcome.state, result.outcome.trainable) == (S.COMPLETED, False)
    assert result.outcome.reason == "no_trainable_tokens"
    assert result.trajectory is not None
    assert result.trajectory.fidelity.trainable_tokens == 0
    assert result.trajectory.fidelity.calls == 1


def test_a_model_that_fails_is_the_models_boundary_and_no_zero(stack: LocalStack) -> None:
    result = run(stack, shell_task("fault-model", ask(1), instruction="[script: broken] go"))
    assert (result.outcome.state, result.outcome.boundary) == (S.FAILED, B.MODEL)
    assert (result.reward, result.outcome.trainable) == (None, False)


def test_an_agent_whose_time_runs_out_while_the_model_fails_is_not_judged(stack: LocalStack) -> None:
    body = json.dumps({"model": "m", "messages": [{"role": "user", "content": "[script: broken] go"}]})
    post = f"curl -s -H \"Authorization: Bearer $OPENAI_API_KEY\" -d '{body}' $OPENAI_BASE_URL/chat/completions"
    command = f"{ask(1)}\nwhile true; do {post}; sleep 0.2; done"
    result = run(stack, shell_task("fault-model-away", command, timeouts={"agent_s": 8}))
    assert result.harness is not None
    assert result.harness.steps[-1].kind is ExecKind.TIMED_OUT
    assert (result.outcome.state, result.outcome.ending) == (S.FAILED, Ending.MODEL_ERROR)
    assert (result.reward, result.outcome.trainable) == (None, False)
    assert result.trajectory is not None
    assert result.trajectory.fidelity.trainable_tokens > 0


def test_an_engine_that_stands_still_is_no_time_out_of_the_agents(tmp_path: Path, scenario: Path) -> None:
    ready, go = tmp_path / "ready", tmp_path / "go"
    command = f"{ask(1)}\ntouch {ready}; until [ -e {go} ]; do sleep 0.05; done\n{ask(1)}"
    with LocalStack(tmp_path, scenario=str(scenario), nodes={"node0": {"inference": {"unanswered_s": 1}}}) as own:
        assert own.inference is not None
        own.client.submit(shell_task("fault-still", command, timeouts={"agent_s": 80}, timeout_seconds=200))
        wait_until(ready.exists)
        own.inference.signal(signal.SIGSTOP)
        try:
            go.touch()
            result = own.client.wait("fault-still", 150).results[0]
        finally:
            own.inference.signal(signal.SIGCONT)
    assert (result.outcome.state, result.outcome.ending) == (S.FAILED, Ending.MODEL_ERROR)
    assert "has answered nothing for 1 s" in result.outcome.message
    assert (result.reward, result.outcome.trainable) == (None, False)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A folder on a file system of 4 MiB."""
    folder = tmp_path / "small"
    folder.mkdir()
    done = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", str(folder)], capture_output=True, check=False
    )
    if done.returncode != 0:
        not_here(f"mounting a small file system needs root ({done.stderr.decode().strip()})")
    yield folder
    subprocess.run(["umount", "--lazy", str(folder)], check=True)


def test_a_full_disk_is_said_as_such_and_the_node_goes_on(small_disk: Path, tmp_path: Path, scenario: Path) -> None:
    big = tmp_path / "big"
    big.write_bytes(bytes(8 << 20))
    upload = {"type": "upload_file", "source": str(big), "target": "/polar/session/big"}
    env = {"POLARQ_STATE_DIR": str(small_disk)}
    with LocalStack(tmp_path, scenario=str(scenario), nodes={"node0": {"min_free_disk_mb": 0}}, env=env) as own:
        runtime = {"backend": "local", "prepare": [upload]}
        result = run(own, shell_task("full-upload", "true", runtime=runtime))
        assert (result.outcome.state, result.outcome.boundary) == (S.FAILED, B.RUNTIME)
        assert result.outcome.reason == "disk_full"
        assert "No space left" in result.outcome.message
        result = run(own, shell_task("full-write", f"{ask(1)}\nhead -c 9000000 /dev/zero > big || exit 7"))
        assert (result.outcome.state, result.outcome.boundary) == (S.FAILED, B.RUNTIME)
        assert (result.outcome.reason, result.reward) == ("disk_full", None)
        assert "No space left" in result.outcome.message
        assert run(own, shell_task("full-after", ask(1))).outcome.state is S.COMPLETED
