"""submit, tail, status, nodes: what happens is told while it happens."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import yaml

from polarq.client import Client
from polarq.contracts.node import NodeHealth
from polarq.contracts.rollout import RolloutState
from polarq.testing.redis import EmbeddedRedis
from tests.cli.conftest import POLARQ, Cli, program
from tests.cli.driving import advance, announce, claim, failed, finish, record, task, when_submitted
from tests.cli.terminals import Terminal


@pytest.fixture
def task_file(tmp_path: Path) -> Path:
    path = tmp_path / "task.yaml"
    wanted = task("from-file", 2).model_dump(mode="json", exclude_defaults=True)
    path.write_text(yaml.safe_dump(wanted), encoding="utf-8")
    return path


def both_end(client: Client) -> None:
    finish(client, "from-file.0")
    finish(client, "from-file.1", failed("exit 3"), None)


def test_submit_waits_for_the_end_and_prints_every_rollout(cli: Cli, task_file: Path, deployment: Path) -> None:
    thread = when_submitted(deployment, "from-file", both_end)
    ran = cli("submit", str(task_file))
    thread.join()
    assert ran.code == 1
    # No node lives here, which is said when it is asked for before the first claim.
    lines = [line for line in ran.out.splitlines() if not line.startswith("waits for a node")]
    assert lines[0] == "task from-file, 2 samples"
    told = [line.split()[2:] for line in lines[1:5]]
    assert told == [
        ["from-file.0", "preparing", "on", "node0"],
        ["from-file.0", "completed", "reward", "1"],
        ["from-file.1", "preparing", "on", "node0"],
        ["from-file.1", "failed", "reward", "-"],
    ]
    [row] = [line for line in lines if line.startswith("from-file.0") and "1" in line]
    assert row.split() == ["from-file.0", "completed", "1", "1", "1", "3", "0.01", "0.20", "3.5", "0.02", "0.40", "4.2"]
    assert any("harness/exit_code" in line and "exit 3" in line for line in lines)
    assert lines[-1] == "2 rollouts: 1 completed, 1 failed"


def test_submit_with_json_prints_one_document(cli: Cli, task_file: Path, deployment: Path) -> None:
    thread = when_submitted(deployment, "from-file", both_end)
    document = cli("submit", str(task_file), "--json").json
    thread.join()
    assert document["exit_code"] == 1
    assert [r["state"] for r in document["rollouts"]] == ["completed", "failed"]
    assert document["rollouts"][0]["sampled_tokens"] == 3
    assert document["counts"] == {
        "total": 2, "queued": 0, "running": 0, "completed": 1, "failed": 1, "timed_out": 0, "cancelled": 0,
    }  # fmt: skip


def test_submit_draws_progress_over_on_a_terminal_and_leaves_the_table(task_file: Path, client: Client) -> None:
    terminal = Terminal([*POLARQ, "submit", str(task_file)], columns=140)
    terminal.read_until(b"2 queued")
    granted = claim(client, "from-file.0")
    advance(client, granted, RolloutState.READY, RolloutState.RUNNING)
    terminal.read_until(b"running")
    client.ledger.do(client.ledger.calls.release("from-file.0", granted.token, counted=False, reason="test"))
    finish(client, "from-file.0")
    finish(client, "from-file.1")
    drawn = terminal.end()
    assert drawn.code == 0
    assert "\x1b[?25l" in drawn.text  # the cursor is hidden while it is drawn over
    assert drawn.text.rindex("\x1b[?25h") < drawn.text.rindex("2 rollouts: 2 completed")


def test_submit_takes_the_number_of_samples_from_the_command_line(cli: Cli, task_file: Path, client: Client) -> None:
    ran = cli("submit", str(task_file), "-n", "3", "--no-wait")
    assert (ran.code, ran.out) == (0, "from-file\n")
    assert len(client.record("from-file").rollouts) == 3


def test_submitting_the_same_again_is_the_same_task_and_another_under_its_id_is_refused(
    cli: Cli, task_file: Path
) -> None:
    assert cli("submit", str(task_file), "--no-wait", "--json").json == {"task_id": "from-file", "created": True}
    assert cli("submit", str(task_file), "--no-wait", "--json").json == {"task_id": "from-file", "created": False}
    ran = cli("submit", str(task_file), "--no-wait", "-n", "7")
    assert ran.code == 2
    assert "taken" in ran.err


def test_a_wait_that_is_over_is_124_and_the_task_goes_on(cli: Cli, task_file: Path, client: Client) -> None:
    ran = cli("submit", str(task_file), "--timeout", "0.2")
    assert ran.code == 124
    assert "polarq show from-file" in ran.err
    assert client.record("from-file").state.value == "running"


def test_ctrl_c_leaves_the_task_running_and_says_so(task_file: Path, client: Client) -> None:
    terminal = Terminal([*POLARQ, "submit", str(task_file)], columns=140)
    terminal.read_until(b"2 queued")
    terminal.process.send_signal(2)
    drawn = terminal.end()
    assert drawn.code == 130
    assert "polarq cancel from-file" in drawn.text
    assert "\x1b[?25h" in drawn.text  # the cursor is back
    assert client.record("from-file").state.value == "running"


def test_tail_of_a_task_tells_it_from_its_start_even_after_its_end(client: Client, cli: Cli) -> None:
    record(client, task("other"))
    record(client, task("t"))
    finish(client, "t.0")
    ran = cli("tail", "t", "--json")
    assert ran.code == 0
    events = [json.loads(line) for line in ran.out.splitlines()]
    changed = ["session.state_changed"] * 2
    assert [event["type"] for event in events] == ["task.created", *changed, "task.completed"]
    assert {event["data"]["task_id"] for event in events} == {"t"}


def test_tail_goes_on_after_the_event_it_is_given(client: Client, cli: Cli) -> None:
    record(client, task("t"))
    finish(client, "t.0")
    events = [json.loads(line) for line in cli("tail", "t", "--json").out.splitlines()]
    again = cli("tail", "t", "--json", "--after", events[1]["event_id"])
    assert [json.loads(line) for line in again.out.splitlines()] == events[2:]
    assert cli("tail", "t", "--after", "yesterday").code == 2


def test_status_shows_nodes_and_the_latest_tasks(client: Client, cli: Cli) -> None:
    record(client, task("older"))
    record(client, task("newer", 2))
    finish(client, "newer.0")
    announce(client, "node-a", model="scripted", health=NodeHealth(proxy=True, inference=False, message="it is [down]"))
    ran = cli("status")
    assert ran.code == 0
    lines = ran.out.splitlines()
    assert next(line for line in lines if line.startswith("node-a")).split()[1] == "up"
    assert "node-a  it is [down]" in lines
    [newer, older] = [line.split() for line in lines if line.startswith(("newer", "older"))]
    assert newer[:4] == ["newer", "running", "1/2", "0"]
    assert older[0] == "older"
    tasks = cli("status", "-n", "1", "--json").json["tasks"]
    assert [entry["task_id"] for entry in tasks] == ["newer"]


def test_status_without_anything_says_what_to_do(cli: Cli) -> None:
    out = cli("status").out
    assert "celery -A polarq worker -Q node0" in out
    assert "polarq submit" in out


def test_drain_and_its_undo_are_seen_by_nodes(client: Client, cli: Cli) -> None:
    announce(client, "node-a")
    assert cli("drain", "node-a").code == 0
    assert cli("nodes", "--json").json[0]["draining"] is True
    assert "draining" in cli("nodes").out
    assert cli("drain", "node-a", "--undo").code == 0
    assert cli("nodes", "--json").json[0]["draining"] is False


def test_times_are_local_and_name_their_zone(client: Client) -> None:
    assert client
    record(client, task("t"))
    finish(client, "t.0")
    ran = program("show", "t.0", env={**os.environ, "TZ": "XYZ-5"})
    assert "2026-01-01 17:00:00 XYZ" in ran.stdout


def test_show_writes_the_whole_result_to_a_file(client: Client, cli: Cli, tmp_path: Path) -> None:
    record(client, task("t", 2))
    finish(client, "t.0")
    finish(client, "t.1")
    out = tmp_path / "t.json"
    assert cli("show", "t", "--out", str(out)).code == 0
    document = json.loads(out.read_text(encoding="utf-8"))
    assert [r["rollout_id"] for r in document["results"]] == ["t.0", "t.1"]
    assert document["results"][0]["trajectory"]["traces"][0]["response_ids"] == [3, 4, 5]


def test_show_of_a_rollout_tells_the_evidence_of_its_reward_and_the_harness_steps(client: Client, cli: Cli) -> None:
    record(client, task("t"))
    finish(client, "t.0", reward=0.5, report={"passed": 5, "failed": ["test_a"]})
    out = cli("show", "t.0").out
    assert "reward 0.5 by test_on_output" in out
    assert "passed: 5" in out
    assert 'failed: ["test_a"]' in out
    assert "step 0: exited 0" in out
    assert "1 calls, 1 traces, 3 sampled tokens, 3 trainable" in out
    assert "Do it." not in out
    assert "Do it." in cli("show", "t.0", "--trajectory").out


def test_a_redis_that_goes_away_after_the_task_was_recorded_is_3_and_the_line_says_how_to_go_on(
    cli: Cli, task_file: Path, deployment: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with EmbeddedRedis(appendonly=True) as server:
        monkeypatch.setenv("POLARQ_REDIS_URL", server.url)
        thread = when_submitted(deployment, "from-file", lambda _: server.kill())
        ran = cli("submit", str(task_file))
        thread.join()
    assert ran.code == 3
    assert "from-file" in ran.err
    assert "Traceback" not in ran.err


def test_a_redis_that_goes_away_while_it_is_waited_for_is_3_and_the_task_goes_on(
    task_file: Path, deployment: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with EmbeddedRedis(appendonly=True) as server:
        monkeypatch.setenv("POLARQ_REDIS_URL", server.url)
        terminal = Terminal([*POLARQ, "submit", str(task_file), "-c", str(deployment)], columns=200)
        terminal.read_until(b"2 queued")
        server.kill()
        drawn = terminal.end()
    assert drawn.code == 3
    assert "polarq show from-file" in drawn.text
    assert "Traceback" not in drawn.text
