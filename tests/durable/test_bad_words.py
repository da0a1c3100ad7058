"""What is asked for by mistake at the doors of runs, pauses, limits and results gets one line, and changes nothing."""

from __future__ import annotations

import secrets
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from redis import Redis

from polarq.client import Client
from polarq.errors import InvalidInput, PolarqError, TaskNotFound
from polarq.ledger import Keys
from tests.cli import conftest as command_line
from tests.cli.conftest import Cli
from tests.durable.hand import a_client
from tests.http.rig import Rig, a_task, running_shim, topology_for

cli, deployment = command_line.cli, command_line.deployment
"""Fixtures."""

LONG = "x" * 129
HUGE = "9" * 5000


@pytest.fixture
def client(redis_url: str, keys: Keys) -> Iterator[Client]:
    with a_client(redis_url, topology_for(keys)) as made:
        yield made


@pytest.fixture
async def shim(redis_url: str, keys: Keys) -> AsyncIterator[Rig]:
    async with running_shim(redis_url, keys) as rig:
        yield rig


def written(redis_url: str, keys: Keys) -> list[bytes]:
    with Redis.from_url(redis_url) as redis:
        return list(redis.scan_iter(f"{keys.prefix}:*"))


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("policy", "a b", "1"), "run: 'a b' is no id"),
        (("policy", LONG, "1"), "is no id"),
        (("policy", "r", "-1"), "-1"),
        (("policy", "r", "1.5"), "[VERSION]"),
        (("policy", "r", HUGE), "[VERSION]"),
        (("pause", "--run", "ünï"), "run: 'ünï' is no id"),
        (("resume", "--run", ""), "run: '' is no id"),
        (("pause",), "name a node, or a run with --run"),
        (("inference", "pause", "--run", "a\nb"), "is no id"),
        (("inference", "pause", "--lease", "nan"), "--lease"),
        (("inference", "pause", "--lease", "1e300"), "--lease: 1e+300 is no number of seconds above 0"),
        (("inference", "pause", "--timeout", "inf"), "--timeout: inf is no number of seconds above 0"),
        (("inference", "stop"), "No such command 'stop'"),
        (("drain", "nowhere", "--deadline", "1e300"), "deadline_s: 1e+300; from 0 to"),
        (("limits",), "Missing command"),
        (("limits", "set", "--config", "/nowhere.yaml"), "there is no such file"),
        (("cancel", f"t.{HUGE}"), "no task 't.999"),
        (("cancel", "t.٣"), "no task 't.٣'"),
        (("acknowledge", "t.0"), "no task 't'"),
        (("show", ""), "no task ''"),
        (("runs", "--url", "http://127.0.0.1:port"), "--url: 'http://127.0.0.1:port' is not an http or https address"),
        (("runs", "--url", "http://[::1"), "is not an http or https address"),
    ],
)
def test_on_the_command_line(
    cli: Cli,
    redis_url: str,
    keys: Keys,
    arguments: tuple[str, ...],
    says: str,
) -> None:
    ran = cli(*arguments)
    assert ran.code == 2, ran
    [line] = ran.err.splitlines()
    assert line.startswith("polarq: ")
    assert says in line
    assert ran.out == ""
    assert written(redis_url, keys) == []


COMMANDS = [
    ("runs",),
    ("policy", "r"),
    ("policy", "r", "3"),
    ("limits", "show"),
    ("limits", "set"),
    ("inference", "status"),
    ("inference", "pause"),
    ("inference", "resume"),
    ("acknowledge", "t"),
]


@pytest.mark.parametrize("arguments", COMMANDS)
@pytest.mark.parametrize(
    "gone", [("POLARQ_REDIS_URL", "redis://:a-secret@127.0.0.1:1/0"), ("POLARQ_URL", "http://127.0.0.1:1")]
)
def test_a_door_that_is_not_there_is_one_line_without_its_password(
    cli: Cli,
    monkeypatch: pytest.MonkeyPatch,
    arguments: tuple[str, ...],
    gone: tuple[str, str],
) -> None:
    monkeypatch.setenv(*gone)
    ran = cli(*arguments)
    assert (ran.code, ran.out) == (3, "")
    [line] = ran.err.splitlines()
    assert "127.0.0.1:1" in line
    assert "a-secret" not in line


def test_a_password_that_is_refused_is_one_line(cli: Cli, redis_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    user = f"u{secrets.token_hex(4)}"
    with Redis.from_url(redis_url) as admin:
        admin.acl_setuser(user, enabled=True, passwords=["+right"])
        try:
            monkeypatch.setenv("POLARQ_REDIS_URL", redis_url.replace("redis://", f"redis://{user}:wrong@"))
            for arguments in COMMANDS:
                ran = cli(*arguments)
                assert ran.code == 3
                [line] = ran.err.splitlines()
                assert "refuses the user or password; check POLARQ_REDIS_URL" in line
                assert "wrong" not in line
        finally:
            admin.acl_deluser(user)


@pytest.mark.parametrize(
    ("method", "path", "body", "code", "says"),
    [
        ("POST", "/runs/a%20b/pause", None, 422, "is no id"),
        ("GET", "/runs/%C3%BCn%C3%AF", None, 422, "is no id"),
        ("GET", f"/runs/{LONG}", None, 422, "is no id"),
        ("POST", "/admin/runs/r/policy-version?version=1e3", None, 422, "version"),
        ("POST", f"/admin/runs/r/policy-version?version={HUGE[:30]}", None, 422, "version"),
        ("POST", "/admin/inference/pause?lease_seconds=1e300", None, 422, "lease_seconds"),
        ("POST", "/admin/inference/pause?lease_seconds=inf", None, 422, "lease_seconds"),
        ("POST", "/admin/inference/pause?run_id=a%20b", None, 422, "run_id"),
        ("POST", "/admin/inference/pause?mode=stop", None, 422, "mode"),
        ("POST", "/admin/inference/pause", {"mode": "abort"}, 422, "parameters go into the query"),
        ("POST", "/admin/limits", {"max_queued": -1}, 422, "max_queued"),
        ("POST", "/admin/limits", {"runs": {"a b": {}}}, 422, "runs"),
        ("POST", "/admin/limits", {"runs": {"r": {"weight": 0}}}, 422, "weight"),
        ("POST", "/admin/limits", [1], 422, "must be a JSON object"),
        ("GET", "/limits?verbose=1", None, 422, "verbose"),
        ("DELETE", "/nodes/n?deadline_seconds=1e300", None, 422, "deadline_seconds"),
        ("GET", "/rollout/task/a%20b/callbacks", None, 404, "not found"),
        ("GET", f"/sessions/t.{HUGE[:9]}", None, 404, "not found"),
        ("POST", "/sessions/t.%D9%A3/acknowledge", None, 404, "not found"),
        ("GET", "/tasks?status=done", None, 422, "status"),
    ],
)
async def test_over_http(
    shim: Rig, redis_url: str, keys: Keys, method: str, path: str, body: Any, code: int, says: str
) -> None:
    answer = await shim.http.request(method, path, json=body)
    assert answer.status_code == code, answer.text
    detail = answer.json()["detail"]
    lines = [detail] if isinstance(detail, str) else [f"{'.'.join(d['loc'])}: {d['msg']}" for d in detail]
    assert any(says in line for line in lines), lines
    assert all("\n" not in line and len(line) < 500 for line in lines)
    assert written(redis_url, keys) == []


@pytest.mark.parametrize(
    "ask",
    [
        lambda c: c.pause_run("a b"),
        lambda c: c.resume_run(""),
        lambda c: c.run(LONG),
        lambda c: c.set_policy_version("r\n", 1),
        lambda c: c.set_policy_version("r", -1),
        lambda c: c.pause_inference(run_id="*"),
        lambda c: c.pause_inference(lease_s=float("nan")),
        lambda c: c.resume_inference(run_id="a:b"),
        lambda c: c.results(run_id="{r}"),
        lambda c: c.results(),
        lambda c: c.acknowledge(["not-a-rollout"]),
        lambda c: next(c.follow(after="yesterday")),
        lambda c: c.drain("n", deadline_s=-1),
    ],
)
def test_in_a_program(client: Client, redis_url: str, keys: Keys, ask: Callable[[Client], Any]) -> None:
    with pytest.raises(InvalidInput) as refused:
        ask(client)
    assert "\n" not in str(refused.value).replace("r\n", "r")
    assert written(redis_url, keys) == []


@pytest.mark.parametrize("rollout_id", [f"t.{HUGE}", "t.٣", "t.", "t", "", "t.-1", "t.1000000"])
def test_an_id_that_can_be_none_of_a_rollout_is_not_found(client: Client, rollout_id: str) -> None:
    client.submit(a_task("t."))
    for ask in (client.rollout, client.cancel, client.record):
        if rollout_id == "t." and ask is not client.rollout:
            continue
        with pytest.raises(TaskNotFound):
            ask(rollout_id)
    assert issubclass(TaskNotFound, PolarqError)


def test_the_help_of_every_command_is_there(cli: Cli, tmp_path: Path) -> None:
    for arguments in (*COMMANDS, ("inference",), ("limits",)):
        words = [word for word in arguments if word not in {"r", "t", "3"}]
        ran = cli(*words, "--help")
        assert ran.code == 0
        assert "Usage: polarq" in ran.out
