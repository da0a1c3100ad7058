"""The same commands through the HTTP shim say the same as through Redis."""

from __future__ import annotations

import json
import os
import secrets
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from polarq.client import Client
from polarq.contracts.rollout import RolloutState
from polarq.testing.redis import EmbeddedRedis
from tests.cli.conftest import POLARQ, Cli, clean_environment
from tests.cli.driving import advance, announce, claim, failed, finish, record, task, when_submitted


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory, redis_server: EmbeddedRedis) -> dict[str, str]:
    """One deployment for the tests of this file; each has a task of its own."""
    path = tmp_path_factory.mktemp("shim") / "topology.yaml"
    path.write_text(yaml.safe_dump({"redis": {"prefix": f"test-{secrets.token_hex(6)}"}}), encoding="utf-8")
    return {"POLARQ_TOPOLOGY": str(path), "POLARQ_REDIS_URL": redis_server.url}


@pytest.fixture
def deployment(place: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> Path:
    clean_environment(monkeypatch)
    for name, value in place.items():
        monkeypatch.setenv(name, value)
    return Path(place["POLARQ_TOPOLOGY"])


@pytest.fixture(scope="module")
def shim(place: dict[str, str]) -> Iterator[str]:
    """A shim with a token; answers its address."""
    process = subprocess.Popen(
        [*POLARQ, "serve", "--host", "127.0.0.1", "--port", "0"],
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, **place, "POLARQ_TOKEN": "the-token"},
    )
    assert process.stderr is not None
    yield process.stderr.readline().split()[-1]
    process.terminate()
    process.communicate(timeout=30)


@pytest.fixture
def t() -> str:
    """The id of a task that no other test has."""
    return f"t-{secrets.token_hex(4)}"


@pytest.fixture
def token(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("POLARQ_TOKEN", "the-token")


def but(document: dict[str, Any], *names: str) -> dict[str, Any]:
    return {key: value for key, value in document.items() if key not in names}


def test_show_of_a_task_and_of_a_rollout_is_the_same_through_both_doors(
    client: Client, cli: Cli, t: str, shim: str, token: None
) -> None:
    record(client, task(t, 3))
    finish(client, f"{t}.0", report={"passed": 5})
    finish(client, f"{t}.1", failed("exit 3"), None)
    advance(client, claim(client, f"{t}.2"), RolloutState.READY, RolloutState.RUNNING)
    ours, theirs = cli("show", t, "--json"), cli("show", t, "--json", "--url", shim)
    assert ours.code == theirs.code == 1
    # A list of sessions does not say what the task's harness was.
    assert but(theirs.json, "harness", "model", "created_at", "updated_at") == but(
        ours.json, "harness", "model", "created_at", "updated_at"
    )
    ours, theirs = (cli("show", f"{t}.0", "--trajectory", "--json", *more) for more in ((), ("--url", shim)))
    assert theirs.json == ours.json


def test_an_export_is_the_same_through_both_doors(
    client: Client, cli: Cli, t: str, shim: str, token: None, tmp_path: Path
) -> None:
    record(client, task(t, 3, run_id=f"run-{t}"))
    finish(client, f"{t}.0")
    finish(client, f"{t}.1", failed("exit 3"), None)
    for target in ((t,), ("--run", f"run-{t}")):
        files = [tmp_path / f"{len(target)}-{door}.jsonl" for door in ("redis", "shim")]
        ours = cli("export", *target, "--to", str(files[0]), "--json")
        theirs = cli("export", *target, "--to", str(files[1]), "--json", "--url", shim)
        assert (ours.code, but(theirs.json, "file")) == (0, but(ours.json, "file"))
        assert files[0].read_bytes() == files[1].read_bytes() != b""
    ran = cli("export", t, "--format", "completions", "--to", str(tmp_path / "c"), "--url", shim)
    assert (ran.code, "captured calls are in Redis alone" in ran.err) == (2, True)
    ran = cli("export", "--run", "none", "--to", str(tmp_path / "n.jsonl"), "--url", shim)
    assert (ran.code, "no task of run 'none' in the ledger" in ran.err) == (2, True)


def test_submit_follows_the_task_over_http(
    cli: Cli, deployment: Path, t: str, shim: str, token: None, tmp_path: Path
) -> None:
    path = tmp_path / "task.yaml"
    path.write_text(yaml.safe_dump(task(t, 2).model_dump(mode="json", exclude_defaults=True)), encoding="utf-8")

    def work(client: Client) -> None:
        finish(client, f"{t}.0")
        finish(client, f"{t}.1")

    thread = when_submitted(deployment, t, work)
    ran = cli("submit", str(path), "--url", shim)
    thread.join()
    assert (ran.code, ran.err) == (0, "")
    assert "2 rollouts: 2 completed" in ran.out
    [*_, row] = [line for line in ran.out.splitlines() if line.startswith(f"{t}.1 ")]
    assert row.split()[:6] == [f"{t}.1", "completed", "1", "1", "1", "3"]


def test_a_wait_over_http_ends_with_124(cli: Cli, t: str, shim: str, token: None, tmp_path: Path) -> None:
    path = tmp_path / "task.yaml"
    path.write_text(yaml.safe_dump(task(t).model_dump(mode="json", exclude_defaults=True)), encoding="utf-8")
    assert cli("submit", str(path), "--url", shim, "--timeout", "0.5").code == 124


def test_status_nodes_drain_and_cancel_go_through_the_shim_too(
    client: Client, cli: Cli, t: str, shim: str, token: None
) -> None:
    announce(client, "node-a")
    record(client, task(t, 2))
    ours, theirs = (cli("status", "--json", *more).json for more in ((), ("--url", shim)))
    assert [but(entry, "created_at", "updated_at") for entry in theirs["tasks"]] == [
        but(entry, "created_at", "updated_at") for entry in ours["tasks"]
    ]
    assert theirs["nodes"] == ours["nodes"]
    assert cli("drain", "node-a", "--url", shim).code == 0
    assert client.nodes()[0].draining
    assert cli("drain", "node-a", "--undo", "--url", shim).code == 0
    assert not client.nodes()[0].draining
    assert cli("cancel", f"{t}.1", "--url", shim).code == 0
    assert [r.state.value for r in client.record(t).rollouts] == ["queued", "cancelled"]
    assert cli("cancel", t, "--url", shim).code == 0
    assert client.record(t).state.value == "cancelled"


def test_tail_of_a_task_tells_the_same_events(client: Client, cli: Cli, t: str, shim: str, token: None) -> None:
    record(client, task(t))
    finish(client, f"{t}.0")
    ours, theirs = (cli("tail", t, "--json", *more) for more in ((), ("--url", shim)))
    assert ours.code == theirs.code == 0
    assert [json.loads(line) for line in theirs.out.splitlines()] == [
        json.loads(line) for line in ours.out.splitlines()
    ]


@pytest.mark.parametrize("command", [("show", "nope"), ("tail", "nope"), ("cancel", "nope"), ("drain", "nope")])
def test_an_unknown_id_is_bad_input_through_the_shim(
    cli: Cli, shim: str, token: None, command: tuple[str, ...]
) -> None:
    ran = cli(*command, "--url", shim)
    assert ran.code == 2
    assert "'nope'" in ran.err
    assert len(ran.err.splitlines()) == 1


def test_a_bad_task_is_refused_with_the_shims_own_words(
    cli: Cli, t: str, shim: str, token: None, tmp_path: Path
) -> None:
    path = tmp_path / "task.yaml"
    body = task(t).model_dump(mode="json", exclude_defaults=True) | {"num_samples": 4000}
    path.write_text(yaml.safe_dump(body), encoding="utf-8")
    ran = cli("submit", str(path), "--url", shim)
    assert ran.code == 2
    assert "num_samples: 4000; this deployment allows 1024" in ran.err


def test_without_the_token_the_line_says_what_to_set(cli: Cli, shim: str) -> None:
    ran = cli("status", "--url", shim)
    assert ran.code == 2
    assert "POLARQ_TOKEN" in ran.err


def test_the_address_may_come_from_the_environment(
    cli: Cli, shim: str, token: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("POLARQ_URL", shim)
    monkeypatch.setenv("POLARQ_REDIS_URL", "redis://127.0.0.1:1/0")
    assert cli("status", "--json").json["door"] == f"shim {shim}"


def test_no_shim_is_3_and_an_address_that_is_none_is_2(cli: Cli) -> None:
    with socket.socket() as nobody:
        nobody.bind(("127.0.0.1", 0))
        ran = cli("status", "--url", f"http://127.0.0.1:{nobody.getsockname()[1]}")
    assert ran.code == 3
    assert len(ran.err.splitlines()) == 1
    assert cli("status", "--url", "nonsense").code == 2


def test_results_are_acknowledged_through_the_shim_too(
    client: Client, cli: Cli, t: str, shim: str, token: None
) -> None:
    record(client, task(t, 2))
    finish(client, f"{t}.0")
    refused = cli("acknowledge", t, "--url", shim)
    assert refused.code == 2
    assert f"rollout '{t}.1' is queued: only what has ended" in refused.err
    assert cli("acknowledge", f"{t}.0", "--url", shim, "--json").json == {"target": f"{t}.0", "acknowledged": 1}
    assert [r.acknowledged_at is not None for r in client.record(t).rollouts] == [True, False]
