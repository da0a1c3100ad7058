"""Ledger, queues and payloads in three Redis: each holds what is its own, and what goes with a task goes everywhere."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import redis

from polarq.cli.checks.base import Deployment
from polarq.cli.checks.ledger import check_redis
from polarq.client import Client
from polarq.contracts.rollout import RolloutState
from polarq.errors import LedgerUnavailable, QueueFull
from polarq.ledger import AsyncLedger, calls_for
from polarq.ledger.memory import MemoryLevel, memory_use
from polarq.settings import Settings
from polarq.testing.redis import EmbeddedRedis
from polarq.testing.stack import LocalStack
from polarq.topology import Topology
from polarq_worker.upkeep import Upkeep
from tests.durable.gates import PATIENCE_S, Gates, ids
from tests.durable.hand import Hand
from tests.worker.conftest import ask, shell_task, wait_until, write_scenario

MIB = 2**20


@dataclass(frozen=True)
class Three:
    ledger: EmbeddedRedis
    queues: EmbeddedRedis
    payloads: EmbeddedRedis

    @property
    def section(self) -> dict[str, Any]:
        return {"prefix": "polarq", "broker_url": self.queues.url, "payload_url": self.payloads.url}

    def client(self, **more: Any) -> Client:
        topology = Topology.model_validate({"redis": {**self.section, **more.pop("redis", {})}, **more})
        return Client(topology, Settings.from_env({"POLARQ_REDIS_URL": self.ledger.url}))


def keys_of(server: EmbeddedRedis) -> list[str]:
    with redis.Redis.from_url(server.url, decode_responses=True) as client:
        return sorted(client.scan_iter())


def payloads_of(server: EmbeddedRedis) -> list[str]:
    return [key for key in keys_of(server) if ":payload:" in key]


@pytest.fixture
def three() -> Iterator[Three]:
    with EmbeddedRedis() as ledger, EmbeddedRedis(password="queues") as queues, EmbeddedRedis(password="big") as big:
        yield Three(ledger, queues, big)


def test_a_rollout_goes_from_submit_to_archive_and_acknowledge_over_three_servers(three: Three, tmp_path: Path) -> None:
    archive = tmp_path / "archive"
    stack = LocalStack(
        tmp_path,
        scenario=str(write_scenario(tmp_path)),
        redis_url=three.ledger.url,
        sections={"redis": three.section, "retention": {"archive": str(archive)}},
    )
    with stack:
        stack.client.submit(shell_task("apart", ask(2), num_samples=2))
        results = list(stack.client.results(["apart"]))
        assert [r.outcome.state for r in results] == [RolloutState.COMPLETED] * 2
        assert all(r.trajectory is not None and r.trajectory.traces for r in results)
        assert stack.client.rollout("apart.0").trajectory == stack.client.get("apart").results[0].trajectory
        assert len(payloads_of(three.payloads)) == 2
        assert [payloads_of(three.ledger), payloads_of(three.queues)] == [[], []]
        assert stack.client.acknowledge("apart") == 2
        assert keys_of(three.payloads) == []
        assert [key for key in keys_of(three.ledger) if ":completions:" in key] == []
        assert json.loads((archive / "apart" / "1.json").read_text())["trajectory"]["traces"]
        assert stack.client.get("apart").results[0].trajectory is None
        assert [key for key in keys_of(three.queues) if not key.startswith("polarq:celery:")] == []


def test_what_waits_in_the_queues_is_told_wherever_they_are(three: Three, tmp_path: Path) -> None:
    gates = Gates(tmp_path / "gates")
    node = {"max_init_workers": 1, "max_run_workers": 1, "max_postrun_workers": 1}
    stack = LocalStack(
        tmp_path, scenario=str(write_scenario(tmp_path)), redis_url=three.ledger.url, nodes={"node0": node},
        sections={"redis": three.section},
    )  # fmt: skip
    with stack:
        stack.client.submit(gates.task("many", 9))
        wait_until(lambda: stack.client.nodes()[0].queue_depth > 0, PATIENCE_S)
        three.queues.kill()
        # What cannot be told is not told, and all else is.
        assert stack.client.nodes()[0].queue_depth == 0
        three.queues.start()
        gates.open(*ids("many", 9))
        assert stack.client.wait("many", PATIENCE_S).counts.completed == 9


def test_a_trainer_that_dies_between_ledger_and_payloads_leaves_nothing_when_it_acknowledges_again(
    three: Three,
) -> None:
    with three.client() as client:
        hand = Hand(client.ledger)
        hand.submit("t", 2)
        released = hand.claim("t.0")
        assert client.ledger.do(hand.calls.release("t.0", released.token, counted=False, reason="drain"))
        for index in range(2):
            hand.end(f"t.{index}", size=600_000)
        assert len(payloads_of(three.payloads)) == 4
        with redis.Redis.from_url(three.payloads.url) as payloads:
            assert all(0 < payloads.ttl(key) <= 2 * hand.calls.keep_s for key in payloads.scan_iter())
        # Killed while the payloads' server lets it wait, so that it never sent what it wanted deleted.
        code = (
            "import sys; from polarq.client import Client; from polarq.settings import Settings\n"
            "from polarq.topology import Topology\n"
            f"Client(Topology.model_validate({{'redis': {three.section!r}}}), "
            f"Settings.from_env({{'POLARQ_REDIS_URL': {three.ledger.url!r}}})).acknowledge('t')"
        )
        assert three.payloads.pid is not None
        os.kill(three.payloads.pid, signal.SIGSTOP)
        try:
            trainer = subprocess.Popen([sys.executable, "-c", code])
            wait_until(lambda: all(r.acknowledged_at is not None for r in client.record("t").rollouts), PATIENCE_S)
            trainer.kill()
            trainer.wait()
        finally:
            os.kill(three.payloads.pid, signal.SIGCONT)
        assert len(payloads_of(three.payloads)) == 4
        assert client.get("t").results[0].trajectory is None
        assert client.acknowledge("t") == 0
        assert keys_of(three.payloads) == []


def test_a_payload_server_that_is_away_is_told_and_the_acknowledgement_can_be_repeated(three: Three) -> None:
    with three.client() as client:
        hand = Hand(client.ledger)
        hand.submit("t")
        hand.end("t.0")
        three.payloads.kill()
        with pytest.raises(LedgerUnavailable, match=f"127.0.0.1:{three.payloads.port}"):
            client.acknowledge("t")
        three.payloads.start()
        hand.submit("u")
        hand.end("u.0")
        assert client.acknowledge("t") == 0
        assert client.acknowledge("u") == 1
        assert keys_of(three.payloads) == []


async def test_the_memory_of_each_server_counts(three: Three) -> None:
    topology = Topology.model_validate({"redis": {**three.section, "memory_budget": 30 * MIB}})
    async with AsyncLedger(three.ledger.url, calls_for(topology)) as ledger:
        upkeep, calls = Upkeep(ledger, topology), ledger.calls
        await upkeep.memory_step()
        assert (await ledger.do(memory_use(calls))).level is MemoryLevel.OK
        with redis.Redis.from_url(three.payloads.url) as payloads, three.client() as client:
            hand = Hand(client.ledger)
            payloads.setrange("ballast", 29 * MIB, b"x")
            await upkeep.memory_step()
            seen = await ledger.do(memory_use(calls))
            assert (seen.level, seen.budget_bytes) == (MemoryLevel.FULL, 30 * MIB)
            assert seen.used_bytes > 29 * MIB
            with pytest.raises(QueueFull, match="of the 30 MiB"):
                hand.submit("more")
            events = await ledger.do(calls.events("0"))
            assert [e.data["level"] for e in events if e.type == "redis.memory"] == ["full"]
            payloads.delete("ballast")
            await upkeep.memory_step()
            hand.submit("more")


def test_the_doctor_looks_at_all_three(three: Three) -> None:
    with three.client() as client:
        findings = list(check_redis(Deployment(client.topology, client.settings)))
    answering = [f.part for f in findings if "answers" in f.fact]
    assert answering == ["redis", "broker", "payloads"]
