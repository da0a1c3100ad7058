"""Workers of one node id, one after another: what the dead left is taken back at once, the living are let be."""

from __future__ import annotations

import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from polarq.contracts import RolloutState, Task
from polarq.errors import GrantRefused, PolarqError
from polarq.ledger import AsyncLedger, Calls, Claim, Keys
from polarq.ledger.incarnations import enter
from polarq.ledger.reaping import reap_lost
from polarq.store.grants import GrantSpec, digest_of, open_grant, read_grant
from polarq.testing.program import Program
from polarq.testing.redis import EmbeddedRedis
from polarq.testing.stack import LocalStack
from polarq_worker.boot import EX_CONFIG
from polarq_worker.incarnation import Incarnation, Others
from tests.durable.evaluated import stack_of
from tests.durable.gates import PATIENCE_S, Gates
from tests.http.rig import a_task
from tests.worker.conftest import wait_until

S = RolloutState
LEASE_S = 3600
"""Nothing here is taken back because of time."""


@pytest.fixture
def server() -> Iterator[EmbeddedRedis]:
    with EmbeddedRedis(appendonly=True) as made:
        yield made


@pytest.fixture
def stack(tmp_path: Path, server: EmbeddedRedis) -> Iterator[LocalStack]:
    with stack_of(tmp_path, server, lease_s=LEASE_S) as made:
        yield made


@pytest.fixture
def gates(tmp_path: Path) -> Gates:
    return Gates(tmp_path / "gates")


def second_worker(stack: LocalStack, **env: str) -> Program:
    """Another worker of node0, as somebody starts it by mistake."""
    celery = str(Path(sys.executable).parent / "celery")
    command = [celery, "-A", "polarq", "worker", "-Q", "node0"]
    log = stack.home / "logs" / "second.log"
    return Program("second", command, log, {**stack.env, **env}, cwd=stack.home).start()


def grants(stack: LocalStack) -> list[Any]:
    redis: Any = stack.client.ledger.redis
    found = redis.scan_iter(f"{stack.client.ledger.calls.keys.prefix}:grant:*")
    return sorted(redis.hget(key, "state") for key in found)


def test_what_a_killed_worker_held_is_run_again_as_soon_as_its_node_is_started_again(
    stack: LocalStack, gates: Gates
) -> None:
    stack.client.submit(gates.task("killed", 2))
    gates.wait_started("killed.0", "killed.1")
    wait_until(lambda: grants(stack) == [b"open", b"open"], PATIENCE_S)
    first = stack.client.record("killed")
    stack.workers["node0"].signal(signal.SIGKILL)
    stack.workers["node0"].wait(PATIENCE_S)
    stack.start_worker()
    wait_until(lambda: gates.starts() == {"killed.0": 2, "killed.1": 2}, PATIENCE_S)
    assert grants(stack).count(b"open") <= 2, "the dead attempts' secrets open nothing any more"
    gates.open("killed.0", "killed.1")
    result = stack.client.wait("killed", PATIENCE_S)
    assert [(r.outcome.state, r.attempt) for r in result.results] == [(S.COMPLETED, 2)] * 2
    again = stack.client.record("killed")
    assert all(new.token > old.token + 1 for old, new in zip(first.rollouts, again.rollouts, strict=True))
    ledger = stack.client.ledger
    reaped = [e.data for e in ledger.do(ledger.calls.events("0", 1000)) if e.type == "session.reaped"]
    assert [(e["node_id"], e["cause"], e["status"]) for e in reaped] == [("node0", "worker_gone", "queued")] * 2
    assert not ledger.redis.zcard(ledger.calls.keys.leases)


def test_a_worker_of_another_redis_is_refused_the_folder_of_a_living_one(stack: LocalStack, gates: Gates) -> None:
    stack.client.submit(gates.task("kept"))
    gates.wait_started("kept.0")
    with EmbeddedRedis(appendonly=True) as another:
        second = second_worker(stack, POLARQ_REDIS_URL=another.url)
        assert second.wait(PATIENCE_S) == EX_CONFIG
    assert "polarq worker: a worker of another Redis (or another key prefix) lives in" in second.log.read_text()
    gates.open("kept.0")
    rollout = stack.client.wait("kept", PATIENCE_S).results[0]
    assert (rollout.outcome.state, rollout.attempt) == (S.COMPLETED, 1)


@pytest.mark.parametrize("where", ["the same folder", "another folder"])
def test_a_second_worker_of_a_node_is_refused_and_the_first_one_keeps_what_it_has(
    stack: LocalStack, gates: Gates, tmp_path: Path, where: str
) -> None:
    stack.client.submit(gates.task("kept"))
    gates.wait_started("kept.0")
    env = {} if where == "the same folder" else {"POLARQ_STATE_DIR": str(tmp_path / "elsewhere")}
    second = second_worker(stack, **env)
    assert second.wait(PATIENCE_S) == EX_CONFIG
    said = second.log.read_text()
    assert f"polarq worker: another worker of node 'node0' lives (host {socket.gethostname()}, process " in said
    assert str(stack.workers["node0"].pid) in said
    gates.open("kept.0")
    rollout = stack.client.wait("kept", PATIENCE_S).results[0]
    assert (rollout.outcome.state, rollout.attempt) == (S.COMPLETED, 1)
    assert gates.starts() == {"kept.0": 1}
    assert stack.workers["node0"].exit_code is None


def test_a_worker_whose_place_was_taken_finishes_what_it_has_and_stops(stack: LocalStack, gates: Gates) -> None:
    ledger = stack.client.ledger
    stack.client.submit(gates.task("last"))
    gates.wait_started("last.0")
    mine = ledger.redis.get(ledger.calls.keys.node_alive("node0"))
    assert isinstance(mine, bytes)
    assert ledger.do(enter(ledger.calls, "node0", "another", 600, dead=[mine.decode()])) is None
    events = ledger.calls.events("0", 1000)
    wait_until(lambda: any(e.type == "node.superseded" for e in ledger.do(events)), PATIENCE_S)
    stack.client.submit(gates.task("later"))
    gates.open("last.0", "later.0")
    assert stack.workers["node0"].wait(PATIENCE_S) == EX_CONFIG
    assert stack.client.wait("last", PATIENCE_S).results[0].attempt == 1
    assert stack.client.record("later").rollouts[0].state is S.QUEUED
    assert ledger.redis.get(ledger.calls.keys.node_alive("node0")) == b"another", "the place is still the other's"


def test_the_kernel_says_which_workers_of_a_node_are_dead(tmp_path: Path) -> None:
    code = "import sys; from pathlib import Path; from polarq_worker.incarnation import Incarnation\n"
    code += "mine = Incarnation(Path(sys.argv[1]), 'here'); mine.begin(); print(mine.id, flush=True); sys.stdin.read()"
    command = [sys.executable, "-c", code, str(tmp_path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        other = process.stdout.readline().strip()
        mine, later = Incarnation(tmp_path, "here"), Incarnation(tmp_path, "here")
        seen = mine.begin()
        assert (seen.dead, seen.living) == ((), (other,))
        process.kill()
        process.wait()
        (tmp_path / "incarnations" / "before-the-reboot").write_text("another kernel")
        seen = later.begin()
        assert [one.incarnation for one in seen.dead] == [other]
        assert seen.living == (mine.id,), "of what ran under another kernel nothing is known"
        later.forget(seen.dead)
        mine.end()
        later.end()
        last = Incarnation(tmp_path, "here")
        assert last.begin() == Others()
        elsewhere = Incarnation(tmp_path, "elsewhere")
        with pytest.raises(PolarqError, match=r"a worker of another Redis .* lives in .*: stop that one, or give"):
            elsewhere.begin()
        assert [path.name for path in (tmp_path / "incarnations").glob("*") if path.name != "lock"] == [last.id]
        last.end()
        assert elsewhere.begin() == Others()
        elsewhere.end()


async def test_a_secret_of_an_attempt_that_was_taken_back_opens_nothing(redis_url: str, keys: Keys) -> None:
    async with AsyncLedger(redis_url, Calls(keys)) as ledger:
        calls, redis = ledger.calls, ledger.redis
        await ledger.do(calls.submit(Task.load(a_task("t", 2)), "t"))
        specs = []
        for index in range(2):
            claim = await ledger.do(calls.claim(f"t.{index}", "node0", LEASE_S, "job", incarnation="first"))
            assert isinstance(claim, Claim)
            specs.append(GrantSpec(rollout_id=f"t.{index}", task_id="t", attempt=1, token=claim.token, node_id="node0"))
        reaped, released = [await open_grant(redis, keys, spec, 600) for spec in specs]
        assert (await ledger.do(reap_lost(calls, "t.0", 3, dead="first"))).action == "queued"
        await ledger.do(calls.release("t.1", specs[1].token, counted=False, reason="drain"))
        for secret, spec in zip((reaped, released), specs, strict=True):
            with pytest.raises(GrantRefused, match="closed"):
                await read_grant(redis, keys, secret)
            with pytest.raises(GrantRefused, match=r"this attempt of rollout 't\.\d' is over"):
                await open_grant(redis, keys, spec, 600)
            assert await redis.pttl(keys.grant(digest_of(secret))) > 0
