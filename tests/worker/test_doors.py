"""The ways in, through a real worker started by its documented command."""

from __future__ import annotations

import json
import queue
import subprocess
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import httpx
import pytest
from celery import Celery

from polarq.celery import make_app
from polarq.contracts import RolloutState, TaskResult
from polarq.errors import InvalidTask
from polarq.testing.ports import free_port
from polarq.testing.program import Program
from polarq.testing.stack import LocalStack
from tests.worker.conftest import ask, shell_task, wait_until

TRAINER = """
import json, sys
from polarq import submit_rollout
batch = submit_rollout.delay(json.loads(sys.argv[1]))
before = batch.state
result = batch.get(timeout=60)
loaded = sorted(name for name in sys.modules if name.split(".")[0] in ("polarq_worker", "polarq_proxy", "aiohttp"))
print(json.dumps({"before": before, "after": batch.state, "ready": batch.ready(), "loaded": loaded,
                  "progress": batch.progress(), "result": result.model_dump(mode="json")}))
"""


def as_a_trainer(stack: LocalStack, task: dict[str, Any]) -> dict[str, Any]:
    done = subprocess.run(
        [sys.executable, "-c", TRAINER, json.dumps(task)],
        env=stack.env,
        capture_output=True,
        text=True,
        timeout=90,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    answer: dict[str, Any] = json.loads(done.stdout)
    return answer


def test_delay_and_get_give_the_complete_result_in_a_process_that_knows_only_polarq(stack: LocalStack) -> None:
    answer = as_a_trainer(stack, shell_task("door-delay", ask(3), num_samples=2))
    result = TaskResult.model_validate(answer["result"])
    assert answer["loaded"] == []
    assert answer["before"] in {"PENDING", "STARTED", "PROGRESS"}
    assert (answer["after"], answer["ready"]) == ("SUCCESS", True)
    assert answer["progress"]["completed"] == 2
    assert [r.index for r in result.results] == [0, 1]
    for rollout in result.results:
        assert rollout.outcome.state is RolloutState.COMPLETED
        assert rollout.outcome.trainable
        assert rollout.reward is not None
        assert rollout.reward.outcome == 1.0
        assert rollout.trajectory is not None
        assert rollout.trajectory.fidelity.calls == len(rollout.trajectory.traces) == 3
        assert rollout.trajectory.fidelity.trainable_tokens == rollout.trajectory.fidelity.sampled_tokens > 0
        assert all(value < 0 for trace in rollout.trajectory.traces for value in trace.logprobs)
        assert rollout.timing.agent_s is not None


def test_a_foreign_celery_client_that_knows_only_the_name_gets_json(stack: LocalStack) -> None:
    foreign = Celery("foreign", set_as_current=False)
    ours = make_app(stack.topology, stack.settings).conf
    for key in ("broker_url", "result_backend", "broker_transport_options", "result_backend_transport_options"):
        foreign.conf[key] = ours[key]
    task = shell_task("unused", ask(1))
    del task["task_id"]
    pending = foreign.send_task("polarq.submit_rollout", [task], queue="polarq")
    value = pending.get(timeout=60)
    assert pending.state == "SUCCESS"
    assert (value["state"], value["rewards"], value["trajectories"]) == ("completed", [1.0], "full")
    assert value["task_id"] == pending.id
    assert value["results"][0]["trajectory"]["traces"][0]["response_ids"]
    json.dumps(value, allow_nan=False)


def test_a_foreign_clients_bad_task_fails_its_result_with_the_line(stack: LocalStack) -> None:
    app = make_app(stack.topology, stack.settings)
    pending = app.send_task("polarq.submit_rollout", [{"instructions": "x"}], queue="polarq")
    with pytest.raises(Exception, match="did you mean 'instruction'"):
        pending.get(timeout=60)
    assert pending.state == "FAILURE"


def test_a_bad_task_raises_in_the_caller_before_anything_is_enqueued(stack: LocalStack) -> None:
    before = stack.client.ledger.do(stack.client.ledger.calls.last_event_id())
    with pytest.raises(InvalidTask, match="did you mean 'num_samples'"):
        stack.client.submit({**shell_task("door-bad", "true"), "num_smaples": 2})
    assert stack.client.ledger.do(stack.client.ledger.calls.last_event_id()) == before


def test_submitting_the_same_task_again_runs_nothing_again(stack: LocalStack) -> None:
    task = shell_task("door-twice", ask(1))
    first = stack.client.submit(task)
    assert stack.client.wait("door-twice", 60).counts.completed == 1
    again = stack.client.submit(task)
    assert (first.created, again.created) == (True, False)
    assert stack.client.wait("door-twice", 60).results[0].attempt == 1


def ready_line(program: Program, marker: str) -> None:
    """Returns when a program has printed `marker`."""
    deadline = time.monotonic() + 60
    while marker not in program.last_lines(200):
        assert program.exit_code is None, program.last_lines()
        assert time.monotonic() < deadline, program.last_lines()
        time.sleep(0.05)


def test_the_http_door_answers_polars_client_with_a_real_rollout(stack: LocalStack) -> None:
    port = free_port()
    command = [sys.executable, "-m", "polarq.cli", "serve", "--host", "127.0.0.1", "--port", str(port)]
    shim = Program("shim", command, stack.home / "logs" / "shim.log", stack.env).start()
    try:
        ready_line(shim, str(port))
        with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=90, trust_env=False) as http:
            task = {**shell_task("door-http", ask(2)), "metadata": {"group_id": 7}}
            assert http.post("/rollout/task/submit", json=task).json() == {"task_id": "door-http", "status": "running"}
            answer = http.get("/rollout/task/door-http", params={"wait": 60}).json()
            assert (answer["status"], answer["completed_sessions"], answer["total_sessions"]) == ("completed", 1, 1)
            session = answer["results"][0]
            assert (session["status"], session["error"]) == ("COMPLETED", None)
            assert session["metadata"]["group_id"] == 7
            trace = session["trajectory"]["traces"][-1]
            assert trace["reward"] == 1.0
            assert len(trace["response_ids"]) == len(trace["loss_mask"]) == len(trace["response_logprobs"]) > 0
            refused = http.post("/rollout/task/submit", json={**task, "num_smaples": 2})
            assert refused.status_code == 422
            assert "num_samples" in refused.text
    finally:
        assert shim.stop() == 0


@pytest.mark.parametrize(("command", "code"), [(ask(1), 0), ("exit 3", 1)])
def test_the_command_lines_exit_code_is_the_outcome(stack: LocalStack, tmp_path: Path, command: str, code: int) -> None:
    path = tmp_path / "task.json"
    path.write_text(json.dumps(shell_task(f"door-cli-{code}", command)), encoding="utf-8")
    done = subprocess.run(
        [sys.executable, "-m", "polarq.cli", "submit", str(path)],
        env=stack.env,
        capture_output=True,
        text=True,
        timeout=90,
        check=False,
    )
    assert done.returncode == code, done.stderr
    assert f"door-cli-{code}.0" in done.stdout


def test_flower_shows_names_and_states_and_never_the_instruction_or_a_secret(stack: LocalStack) -> None:
    port = free_port()
    flower_command = ["celery", "-A", "polarq", "flower", f"--port={port}", "--address=127.0.0.1", "--basic-auth=u:p"]
    flower_command[0] = str(Path(sys.executable).parent / "celery")
    flower = Program("flower", flower_command, stack.home / "logs" / "flower.log", stack.env).start()
    secret = "the-instruction-that-nobody-shall-see"
    try:
        with httpx.Client(base_url=f"http://127.0.0.1:{port}", auth=("u", "p"), timeout=30, trust_env=False) as http:
            wait_until(lambda: answers(http) and "node0@" in http.get("/api/workers", params={"refresh": 1}).text)
            stack.client.submit(shell_task("door-flower", ask(1), instruction=secret))
            stack.client.wait("door-flower", 60)
            app = make_app(stack.topology, stack.settings)
            foreign = app.send_task("polarq.submit_rollout", [shell_task("door-flower-2", ask(1), instruction=secret)])
            assert foreign.get(timeout=60)["rewards"] == [1.0]

            def done() -> set[str]:
                """Names of jobs that are over. The other door's job is over when its rollouts are, which Flower is not
                told."""
                tasks = http.get("/api/tasks").json().values()
                return {task["name"] for task in tasks if task["runtime"] or task["name"] == "polarq.submit_rollout"}

            wait_until(lambda: done() >= {"rollout.shell", "polarq.submit_rollout"})
            shown = http.get("/api/tasks").text
            tasks = http.get("/api/tasks").json()
            assert secret not in shown
            assert "pq-" not in shown
            for task_id in tasks:
                assert secret not in http.get(f"/task/{task_id}").text
            assert httpx.get(f"http://127.0.0.1:{port}/api/tasks", trust_env=False).status_code == 401
    finally:
        flower.stop()


def answers(http: httpx.Client) -> bool:
    try:
        return http.get("/api/workers").status_code == 200
    except httpx.TransportError:
        return False


def test_the_callback_of_a_finished_task_is_signed_and_has_the_result(stack: LocalStack) -> None:
    got: queue.Queue[tuple[dict[str, str], dict[str, Any]]] = queue.Queue()

    class Receiver(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["content-length"]))
            got.put((dict(self.headers), json.loads(body)))
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_: Any) -> None:
            return

    with ThreadingHTTPServer(("127.0.0.1", 0), Receiver) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        url = f"http://127.0.0.1:{server.server_port}/callback/task_result"
        stack.client.submit(shell_task("door-callback", ask(1), callback_url=url))
        headers, body = got.get(timeout=60)
        server.shutdown()
    assert (body["task_id"], body["status"]) == ("door-callback", "completed")
    assert body["results"][0]["trajectory"]["traces"][0]["reward"] == 1.0
    assert headers["X-Polarq-Delivery"]
