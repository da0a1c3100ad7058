"""A run's policy version: published by its trainer, recorded by every claim, kept no longer than results are."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Iterator

import httpx
import pytest
from redis.asyncio import Redis

from polarq.cli.main import main
from polarq.client import AsyncClient, Client
from polarq.contracts import Task
from polarq.errors import InvalidInput
from polarq.ledger import Calls, Claim, Keys, Ledger
from polarq.ledger.control import run_state
from polarq.ledger.policy import MOST, set_policy_version
from polarq.ledger.records import RolloutRecord
from tests.http.rig import Rig, a_task, running_shim, settings_for, topology_for

KEEP_S = 500


@pytest.fixture
def ledger(redis_url: str, keys: Keys) -> Iterator[Ledger]:
    with Ledger(redis_url, Calls(keys, keep_s=KEEP_S)) as made:
        yield made


@pytest.fixture
async def shim(redis_url: str, keys: Keys) -> AsyncIterator[Rig]:
    async with running_shim(redis_url, keys) as rig:
        yield rig


def submit(ledger: Ledger, task_id: str, samples: int = 1, run_id: str = "r") -> None:
    ledger.do(ledger.calls.submit(Task.load(a_task(task_id, samples=samples, run_id=run_id)), "c"))


def claim(ledger: Ledger, rollout_id: str, lease_s: float = 30.0) -> Claim:
    got = ledger.do(ledger.calls.claim(rollout_id, "node0", lease_s, "job"))
    assert isinstance(got, Claim)
    return got


def rollout(ledger: Ledger, rollout_id: str) -> RolloutRecord:
    task_id, _, index = rollout_id.rpartition(".")
    record = ledger.do(ledger.calls.task(task_id))
    assert record is not None
    return record.rollouts[int(index)]


def publish(ledger: Ledger, version: int, run_id: str = "r") -> None:
    ledger.do(set_policy_version(ledger.calls, run_id, version))


def published(ledger: Ledger, run_id: str = "r") -> int | None:
    return ledger.do(run_state(ledger.calls.keys, run_id)).policy_version


def test_a_claim_records_the_version_of_its_own_run_at_that_time(ledger: Ledger) -> None:
    submit(ledger, "t", samples=3)
    submit(ledger, "other", run_id="other")
    claim(ledger, "t.0")
    publish(ledger, 7)
    claim(ledger, "t.1")
    claim(ledger, "other.0")
    publish(ledger, 9)
    claim(ledger, "t.2")
    assert [rollout(ledger, f"t.{i}").policy_version for i in range(3)] == [None, 7, 9]
    assert rollout(ledger, "other.0").policy_version is None
    now = published(ledger)
    at_claim = rollout(ledger, "t.1").policy_version
    assert (now, at_claim) == (9, 7)


def test_a_later_attempt_records_the_version_of_its_own_claim(ledger: Ledger) -> None:
    submit(ledger, "t")
    publish(ledger, 1)
    first = claim(ledger, "t.0")
    publish(ledger, 2)
    assert rollout(ledger, "t.0").policy_version == 1
    assert ledger.do(ledger.calls.release("t.0", first.token, counted=False, reason="drain"))
    second = claim(ledger, "t.0")
    assert rollout(ledger, "t.0").policy_version == 2
    # Nobody knows the version any more: no earlier attempt's stays in its place.
    assert ledger.do(ledger.calls.release("t.0", second.token, counted=False, reason="drain"))
    ledger.redis.delete(ledger.calls.keys.run("r"))
    claim(ledger, "t.0")
    assert rollout(ledger, "t.0").policy_version is None


def test_a_claim_repeated_after_a_lost_answer_keeps_the_version_of_the_first(ledger: Ledger) -> None:
    submit(ledger, "t")
    publish(ledger, 1)
    call = ledger.calls.claim("t.0", "node0", 30, "job")
    assert isinstance(ledger.do(call), Claim)
    publish(ledger, 2)
    assert isinstance(ledger.do(call), Claim)
    assert rollout(ledger, "t.0").policy_version == 1


def test_a_run_is_forgotten_with_its_results_and_a_claim_keeps_it_as_long_again(ledger: Ledger) -> None:
    key = ledger.calls.keys.run("r")
    submit(ledger, "t")
    publish(ledger, 3)
    assert 0 < ledger.redis.ttl(key) <= KEEP_S
    ledger.redis.expire(key, 30)
    claim(ledger, "t.0")
    assert 30 < ledger.redis.ttl(key) <= KEEP_S
    assert published(ledger) == 3


def test_only_a_change_is_an_event_and_a_trainer_may_go_back(ledger: Ledger) -> None:
    for version in (0, 0, MOST, 4):
        publish(ledger, version)
    told = [e.data for e in ledger.do(ledger.calls.events("0")) if e.type == "run.policy_version"]
    assert told == [
        {"run_id": "r", "policy_version": 0},
        {"run_id": "r", "policy_version": MOST, "before": 0},
        {"run_id": "r", "policy_version": 4, "before": MOST},
    ]


@pytest.mark.parametrize("version", [-1, MOST + 1])
def test_a_number_that_is_no_version_is_refused_and_changes_nothing(ledger: Ledger, version: int) -> None:
    publish(ledger, 5)
    with pytest.raises(InvalidInput, match=f"{version}; from 0 to"):
        publish(ledger, version)
    assert published(ledger) == 5


async def test_both_clients_publish_it_and_read_it_back(redis_url: str, keys: Keys, redis_client: Redis) -> None:
    topology, settings = topology_for(keys), settings_for(redis_url)
    with Client(topology, settings) as client:
        assert client.run("r").policy_version is None
        assert client.set_policy_version("r", 1).policy_version == 1
        assert client.run("r").policy_version == 1
    async with AsyncClient(topology, settings) as asynchronous:
        assert (await asynchronous.set_policy_version("r", 2)).policy_version == 2
        assert (await asynchronous.run("r")).policy_version == 2


async def test_it_is_published_and_shown_over_http(shim: Rig) -> None:
    http: httpx.AsyncClient = shim.http
    path = "/admin/runs/r/policy-version"
    assert (await http.post(path)).status_code == 422
    assert (await http.post(f"{path}?version=-1")).status_code == 422
    assert (await http.post("/admin/runs/a%20b/policy-version?version=1")).status_code == 422
    row = {"run_id": "r", "paused": False, "waiting": 0, "in_flight": 0}
    assert (await http.get("/runs/r")).json() == row
    assert (await http.post(f"{path}?version=12")).json() == {**row, "policy_version": 12}
    await shim.submit(a_task("t", samples=2, run_id="r"))
    await shim.claim("t.0")
    moved = {**row, "waiting": 1, "in_flight": 1, "policy_version": 12}
    assert (await http.get("/runs")).json() == {"runs": [moved]}
    sessions = (await http.get("/tasks/t/sessions")).json()["sessions"]
    assert [session.get("policy_version") for session in sessions] == [12, None]
    assert (await http.get("/sessions/t.0")).json()["policy_version"] == 12
    assert "policy_version" not in (await http.get("/sessions/t.1")).json()


async def test_polarq_runs_shows_it(shim: Rig, capsys: pytest.CaptureFixture[str]) -> None:
    await shim.client.set_policy_version("r", 12)
    await shim.submit(a_task("t", run_id="r"))
    await shim.submit(a_task("u", run_id="silent"))

    async def polarq(*arguments: str) -> str:
        assert await asyncio.to_thread(main, ["runs", "--url", shim.url, *arguments]) == 0
        return capsys.readouterr().out

    rows = json.loads(await polarq("--json"))
    assert [(row["run_id"], row.get("policy_version")) for row in rows] == [("r", 12), ("silent", None)]
    lines = (await polarq()).splitlines()
    assert [line.split()[-1] for line in lines if "active" in line] == ["12", "-"]
