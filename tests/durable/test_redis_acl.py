"""Each part of polarq works with the rights that configs/redis-acl.conf gives it, and has no more."""

from __future__ import annotations

import inspect
import re
import sys
import urllib.request
from collections.abc import Iterator
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import pytest
import redis
from redis.backoff import NoBackoff
from redis.retry import Retry

from polarq.client import AsyncClient
from polarq.contracts.rollout import RolloutState
from polarq.errors import LedgerUnavailable
from polarq.ledger import Ledger, calls_for
from polarq.ledger.keys import Keys
from polarq.settings import Settings
from polarq.testing.ports import free_port
from polarq.testing.program import Program
from polarq.testing.redis import EmbeddedRedis
from polarq.testing.stack import LocalStack
from tests.durable.guarded import ROLES, SHIPPED, Guarded, with_passwords
from tests.worker.conftest import ask, shell_task, wait_until, write_scenario


@pytest.fixture(scope="module")
def guarded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Guarded]:
    home = tmp_path_factory.mktemp("guarded")
    conf = with_passwords(home)
    with EmbeddedRedis(password="administrator", config=[f'include "{conf}"']) as server:
        login = f"redis://{{0}}:{{0}}@127.0.0.1:{server.port}/0"
        stack = LocalStack(
            home,
            scenario=str(write_scenario(home)),
            redis=server,
            redis_url=login.format("polarq-worker"),
            env={"POLARQ_PROXY_REDIS_URL": login.format("polarq-proxy")},
        )
        with stack:
            yield Guarded(server, stack)


def test_a_task_runs_from_submit_to_acknowledge_with_each_part_under_its_own_user(guarded: Guarded) -> None:
    with guarded.client() as client:
        client.submit(shell_task("guarded", ask(2), num_samples=2))
        results = list(client.results(["guarded"]))
        assert [r.outcome.state for r in results] == [RolloutState.COMPLETED] * 2
        assert all(r.trajectory is not None and r.trajectory.traces for r in results)
        client.acknowledge([r.rollout_id for r in results])
    assert guarded.refusals() == []


def test_each_part_is_connected_as_its_own_user(guarded: Guarded) -> None:
    with redis.Redis.from_url(guarded.server.url, decode_responses=True) as admin:
        users = {entry["user"] for entry in admin.client_list()}
    assert {"polarq-worker", "polarq-proxy"} <= users


def test_a_trainer_cancels_pauses_and_drains_with_its_own_rights(guarded: Guarded) -> None:
    with guarded.client() as client:
        client.submit(shell_task("stopped", "sleep 600"))
        client.cancel("stopped")
        assert [r.outcome.state for r in client.results(["stopped"])] == [RolloutState.CANCELLED]
        client.pause_node("node0")
        client.resume_node("node0")
        client.drain("node0")
        client.drain("node0", on=False)
        client.set_capacity("node0", 2)
        client.pause_run("another")
        client.resume_run("another")
        client.set_policy_version("another", 3)
        assert [node.node_id for node in client.nodes()] == ["node0"]
        assert next(iter(client.follow("stopped", "0"))).data["task_id"] == "stopped"
    assert guarded.refusals() == []


async def test_a_trainer_holds_model_calls_back_with_its_own_rights(guarded: Guarded) -> None:
    env = {**guarded.stack.env, "POLARQ_REDIS_URL": guarded.url("polarq-trainer")}
    client = AsyncClient(guarded.stack.topology, Settings.from_env(env))
    try:
        await client.pause_inference()
        assert await client.resume_inference()
    finally:
        await client.aclose()
    assert guarded.refusals() == []


def test_flower_sees_the_workers_with_its_own_rights(guarded: Guarded) -> None:
    port = free_port()
    celery = Path(sys.executable).parent / "celery"
    command = [str(celery), "-A", "polarq", "flower", "--address=127.0.0.1", f"--port={port}"]
    env = {**guarded.stack.env, "POLARQ_REDIS_URL": guarded.url("polarq-flower"), "FLOWER_UNAUTHENTICATED_API": "true"}
    log = guarded.stack.home / "flower.log"
    flower = Program("flower", command, log, env, cwd=guarded.stack.home).start()

    def shows_the_worker() -> bool:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/api/workers?refresh=1", timeout=30) as reply:
                return b"node0" in reply.read()
        except OSError:
            return False

    try:
        wait_until(shows_the_worker)
    finally:
        flower.stop()
    assert guarded.refusals() == []


FORBIDDEN = [
    ("FLUSHALL",),
    ("FLUSHDB",),
    ("CONFIG", "SET", "maxmemory", "1"),
    ("KEYS", "*"),
    ("SCAN", "0"),
    ("ACL", "LIST"),
    ("MONITOR",),
    ("SHUTDOWN", "NOSAVE"),
    ("GET", "another:key"),
    ("SET", "another:key", "1"),
    ("EVAL", "return redis.call('SET', 'another:key', '1')", 1, "polarq:tasks"),
    ("PUBLISH", "another", "1"),
]
OTHERS_AFFAIRS = {
    "polarq-trainer": [("HSET", "polarq:grant:x", "state", "open"), ("SET", "polarq:reaper", "me")],
    "polarq-worker": [],
    "polarq-proxy": [
        ("HGETALL", "polarq:{guarded}:task"),
        ("GET", "polarq:{guarded}:payload:0:1-1:0"),
        ("LPUSH", "polarq:celery:node0", "job"),
        ("XADD", "polarq:events", "*", "a", "b"),
    ],
    "polarq-flower": [
        ("HGETALL", "polarq:{guarded}:task"),
        ("LPUSH", "polarq:celery:node0", "job"),
        ("GET", "polarq:celery:celery-task-meta-guarded"),
        ("HSET", "polarq:grant:x", "state", "open"),
    ],
}


@pytest.mark.parametrize("role", ROLES)
def test_what_a_role_has_no_need_of_is_refused(guarded: Guarded, role: str) -> None:
    with redis.Redis.from_url(guarded.url(role)) as client, redis.Redis.from_url(guarded.server.url) as admin:
        for command in [*FORBIDDEN, *OTHERS_AFFAIRS[role]]:
            # A script that is refused a key says so as an error of the script.
            with pytest.raises((redis.exceptions.NoPermissionError, redis.exceptions.ResponseError)) as told:
                client.execute_command(*command)
            assert "permission" in str(told.value) or "can't access" in str(told.value), command
        assert admin.exists("another:key") == 0
        admin.acl_log_reset()


def test_a_user_of_the_file_as_it_is_shipped_cannot_log_in(tmp_path: Path) -> None:
    with EmbeddedRedis(password="administrator", config=[f'include "{SHIPPED}"']) as server:
        for role in ROLES:
            for password in ("", role):
                once = Retry(NoBackoff(), 0)
                with (
                    redis.Redis(port=server.port, username=role, password=password, retry=once) as client,
                    pytest.raises(redis.exceptions.AuthenticationError),
                ):
                    client.ping()


def test_the_error_names_the_command_and_where_the_rights_are_written(guarded: Guarded) -> None:
    with (
        Ledger(guarded.url("polarq-proxy"), calls_for(guarded.stack.topology)) as ledger,
        pytest.raises(LedgerUnavailable, match=r"(?i)xrevrange.*configs/redis-acl\.conf"),
    ):
        ledger.do(ledger.calls.last_event_id())


def rights() -> dict[str, tuple[set[str], list[str]]]:
    """Per role what the shipped file gives it: commands, and patterns of keys."""
    lines = [line.split() for line in SHIPPED.read_text().splitlines() if line.startswith("user ")]
    return {
        name: ({w[1:].split("|")[0] for w in words if w[0] == "+"}, [w[1:] for w in words if w[0] == "~"])
        for _, name, *words in lines
    }


def test_the_worker_and_the_trainer_may_use_every_command_of_polarqs_own_scripts() -> None:
    root = SHIPPED.parents[1]
    sources = [*(root / "polarq").rglob("*.lua"), *(root / "polarq").rglob("*.py"), *(root / "workers").rglob("*.py")]
    text = "\n".join(path.read_text() for path in sources)
    used = {name.lower() for name in re.findall(r"""redis\.p?call\(['"]([A-Za-z]+)""", text)}
    # Commands outside of scripts are tuples that begin with their name; POST begins a request.
    used |= {name.lower() for name in re.findall(r"""\(\(?"([A-Z]{3,})",""", text)} - NOT_REDIS
    assert {"hset", "zadd", "unlink", "ltrim", "xread"} <= used
    for role in ("polarq-worker", "polarq-trainer"):
        assert used - rights()[role][0] == set()


NOT_REDIS = {"post", "delete", "head", "path", "lang", "home", "fatal", "broken", "haiku"}
WITHHELD_FROM_TRAINERS = {"grant", "reaper", "archiver", "sandboxes"}


def test_a_trainer_has_every_key_but_those_that_are_withheld_on_purpose() -> None:
    keys = Keys("polarq")
    ids: dict[str, Any] = {"rollout_id": "t.0", "attempt": 1, "token": 1, "process": 0}
    patterns = rights()["polarq-trainer"][1]
    withheld = set()
    for name, made in inspect.getmembers(Keys):
        if isinstance(made, property):
            found = made.fget(keys) if made.fget is not None else ""
        elif inspect.isfunction(made) and not name.startswith("_") and name != "queue_lists":
            found = made(keys, *(ids.get(p, "x") for p in list(inspect.signature(made).parameters)[1:]))
        else:
            continue
        if not any(fnmatchcase(found, pattern) for pattern in patterns):
            withheld.add(name)
    assert withheld == WITHHELD_FROM_TRAINERS
