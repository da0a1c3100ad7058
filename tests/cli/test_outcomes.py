"""The exit code is the outcome, and every error is one clear line."""

from __future__ import annotations

import json
import socket
from pathlib import Path

import pytest

from polarq.client import Client
from polarq.contracts.rollout import Boundary, Outcome, RolloutState
from tests.cli import driving
from tests.cli.conftest import Cli
from tests.cli.driving import advance, claim, failed, finish, record, task

CANCELLED = Outcome(state=RolloutState.CANCELLED, boundary=Boundary.CONTROL, reason="cancelled")
TIMED_OUT = Outcome(state=RolloutState.TIMED_OUT, boundary=Boundary.HARNESS, reason="timeout")


@pytest.mark.parametrize(
    ("ends", "code"),
    [
        ([driving.OK, driving.OK], 0),
        ([driving.OK, failed("exit 3")], 1),
        ([TIMED_OUT, CANCELLED], 1),
        ([driving.OK, CANCELLED], 4),
    ],
)
def test_show_ends_with_the_outcome_of_the_task(client: Client, cli: Cli, ends: list[Outcome], code: int) -> None:
    record(client, task("t", len(ends)))
    for index, outcome in enumerate(ends):
        finish(client, f"t.{index}", outcome, 1.0 if outcome is driving.OK else None)
    ran = cli("show", "t")
    assert ran.code == code
    assert ran.err == ""
    assert cli("show", "t", "--json").json["exit_code"] == code


def test_show_of_a_rollout_ends_with_the_outcome_of_the_rollout(client: Client, cli: Cli) -> None:
    record(client, task("t", 2))
    finish(client, "t.0")
    finish(client, "t.1", failed("exit 3"), None)
    assert cli("show", "t.0").code == 0
    assert cli("show", "t.1").code == 1


def test_show_of_what_has_not_ended_is_not_taken_for_success(client: Client, cli: Cli) -> None:
    record(client, task("t", 2))
    finish(client, "t.0")
    granted = claim(client, "t.1")
    advance(client, granted, RolloutState.READY, RolloutState.RUNNING)
    ran = cli("show", "t")
    assert ran.code == 5
    assert "running" in ran.out
    assert cli("show", "t.1").code == 5


def test_a_cancelled_task_ends_with_4(client: Client, cli: Cli) -> None:
    record(client, task("t", 2))
    assert cli("cancel", "t").code == 0
    assert cli("show", "t").code == 4
    again = cli("cancel", "t")
    assert again.code == 0
    assert "had ended already" in again.out


def test_one_rollout_can_be_cancelled(client: Client, cli: Cli) -> None:
    record(client, task("t", 2))
    assert cli("cancel", "t.1", "--json").json == {"target": "t.1", "already_over": False, "stopping": []}
    assert [r.state.value for r in client.record("t").rollouts] == ["queued", "cancelled"]


@pytest.mark.parametrize("arguments", [("show", "t[/x]"), ("tail", "nope"), ("cancel", "nope.3"), ("drain", "nope")])
def test_an_unknown_id_is_bad_input(cli: Cli, arguments: tuple[str, ...]) -> None:
    ran = cli(*arguments)
    assert ran.code == 2
    assert len(ran.err.splitlines()) == 1
    assert arguments[1].split(".")[0] in ran.err


def test_a_rollout_that_the_task_does_not_have_is_bad_input(client: Client, cli: Cli) -> None:
    record(client, task("t", 2))
    ran = cli("show", "t.7")
    assert ran.code == 2
    assert "2 rollouts" in ran.err


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("instruction: x\nnum_sampels: 3\nagent: {harness: shell}\n", "'num_samples'"),
        ("instruction: x\nnum_samples: 0\nagent: {harness: a}\n", "num_samples"),
        ("[1, 2]", "mapping"),
        ("a: [", "cannot be parsed"),
    ],
)
def test_a_bad_task_file_is_one_line_on_stderr(tmp_path: Path, cli: Cli, text: str, words: str) -> None:
    path = tmp_path / "task.yaml"
    path.write_text(text, encoding="utf-8")
    ran = cli("submit", str(path))
    assert (ran.code, ran.out) == (2, "")
    assert len(ran.err.splitlines()) == 1
    assert words in ran.err


@pytest.mark.parametrize(
    "arguments", [("submit",), ("nonsense",), ("show", "--nope", "t"), ("status", "-n", "0"), ("config", "nonsense")]
)
def test_bad_usage_is_one_line_that_names_the_help(cli: Cli, arguments: tuple[str, ...]) -> None:
    ran = cli(*arguments)
    assert (ran.code, ran.out) == (2, "")
    assert len(ran.err.splitlines()) == 1
    assert "--help" in ran.err


@pytest.mark.parametrize(
    "arguments", [("status",), ("show", "t"), ("nodes",), ("tail",), ("cancel", "t"), ("drain", "n")]
)
def test_no_redis_is_3_and_one_line(cli: Cli, monkeypatch: pytest.MonkeyPatch, arguments: tuple[str, ...]) -> None:
    with socket.socket() as nobody:
        nobody.bind(("127.0.0.1", 0))
        port = nobody.getsockname()[1]
        monkeypatch.setenv("POLARQ_REDIS_URL", f"redis://:secret@127.0.0.1:{port}/0")
        ran = cli(*arguments)
    assert ran.code == 3
    assert len(ran.err.splitlines()) == 1
    assert "does not answer" in ran.err
    assert "secret" not in ran.err


@pytest.mark.parametrize("url", ["redis://h:port/0", "http://h/", "nonsense"])
def test_an_address_that_is_none_is_one_line(cli: Cli, monkeypatch: pytest.MonkeyPatch, url: str) -> None:
    monkeypatch.setenv("POLARQ_REDIS_URL", url)
    ran = cli("status")
    assert ran.code in {2, 3}
    assert len(ran.err.splitlines()) == 1


def test_a_bad_topology_is_one_line_with_its_line_number(cli: Cli, deployment: Path) -> None:
    deployment.write_text("redis:\n  prefixx: a\n", encoding="utf-8")
    ran = cli("nodes")
    assert ran.code == 2
    assert len(ran.err.splitlines()) == 1
    assert "line 2" in ran.err


def test_an_output_that_cannot_be_written_says_so(client: Client, cli: Cli, tmp_path: Path) -> None:
    record(client, task("t"))
    finish(client, "t.0")
    ran = cli("show", "t", "--out", str(tmp_path / "no" / "such" / "folder.json"))
    assert ran.code == 2
    assert "--out" in ran.err


def test_a_result_that_is_gone_from_the_store_is_not_bad_usage(client: Client, cli: Cli) -> None:
    record(client, task("t"))
    finish(client, "t.0")
    summary = client.record("t").rollouts[0].summary
    assert summary is not None
    assert summary.payload is not None
    client.ledger.redis.delete(f"{summary.payload.key}:0")
    assert cli("show", "t").code == 0
    ran = cli("show", "t.0")
    assert ran.code == 1
    assert "not in the store" in ran.err


def test_every_json_document_parses_and_nothing_else_is_printed(client: Client, cli: Cli) -> None:
    record(client, task("t", 2))
    finish(client, "t.0")
    finish(client, "t.1")
    driving.announce(client)
    commands = [
        ("status",), ("nodes",), ("show", "t"), ("show", "t.0"), ("show", "t", "--trajectory"), ("drain", "node0"),
        ("config", "show"), ("config", "check"), ("config", "reference"), ("worker", "--node", "node0"), ("doctor",),
    ]  # fmt: skip
    for command in commands:
        ran = cli(*command, "--json")
        json.loads(ran.out)
        assert ran.err == ""
