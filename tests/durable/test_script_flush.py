"""A server that forgets its scripts, again and again, under a node that is busy."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from threading import Event

import pytest
import redis

from polarq.contracts import RolloutState
from polarq.testing.redis import EmbeddedRedis
from polarq.testing.stack import LocalStack
from tests.durable.gates import PATIENCE_S, Gates, ids
from tests.durable.hand import beside
from tests.worker.conftest import ask, wait_until, write_scenario

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

ROLLOUTS = 20
EVERY_S = 0.2
FLUSHES = 50


@pytest.fixture
def server() -> Iterator[EmbeddedRedis]:
    with EmbeddedRedis(appendonly=True) as made:
        yield made


@pytest.fixture
def stack(tmp_path: Path, server: EmbeddedRedis) -> Iterator[LocalStack]:
    node = {"max_init_workers": 4, "max_run_workers": ROLLOUTS, "max_postrun_workers": 4}
    with LocalStack(
        tmp_path,
        scenario=str(write_scenario(tmp_path)),
        redis=server,
        nodes={"node0": node},
        sections={"gateway": {"lease_s": 60.0, "reap_interval_s": 0.5}},
    ) as made:
        yield made


def test_scripts_that_are_forgotten_all_the_time_cost_nothing_and_are_not_worth_a_word(
    stack: LocalStack, server: EmbeddedRedis, tmp_path: Path
) -> None:
    gates = Gates(tmp_path / "gates")
    flushed = Event()

    def forget() -> None:
        with redis.Redis.from_url(server.url) as operator:
            for _ in range(FLUSHES):
                operator.execute_command("SCRIPT", "FLUSH")
                operator.execute_command("FUNCTION", "FLUSH")
                flushed.wait(EVERY_S)

    rollout_ids = ids("flush", ROLLOUTS)
    with beside(forget):
        stack.client.submit(gates.task("flush", ROLLOUTS, first=ask(2)))
        gates.wait_started(*rollout_ids)
        gates.open(*rollout_ids[: ROLLOUTS // 2])
        half = ROLLOUTS // 2
        wait_until(lambda: stack.client.record("flush").counts.completed >= half, PATIENCE_S)
    said = stack.workers["node0"].log.read_text(errors="replace")
    # kombu has scripts of its own, and a warning where one is forgotten between its loading and its use.
    assert [line for line in said.splitlines() if "ERROR" in line or "CRITICAL" in line] == []
    server.kill()
    server.start()
    gates.open(*rollout_ids)
    result = stack.client.wait("flush", PATIENCE_S)
    assert result.counts.completed == result.counts.ended == result.counts.total == ROLLOUTS
    assert [(r.outcome.state, r.attempt) for r in result.results] == [(RolloutState.COMPLETED, 1)] * ROLLOUTS
    assert [r.trajectory and r.trajectory.fidelity.calls for r in result.results] == [2] * ROLLOUTS
    assert gates.starts() == dict.fromkeys(rollout_ids, 1)
