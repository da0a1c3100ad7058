"""What is told of a task whose rollouts end together: once for all of them, and the last word is true."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from polarq.celery import make_app
from polarq.client import Client
from polarq.client.states import PROGRESS
from polarq.contracts import RolloutState
from polarq.ledger import AsyncLedger, Keys, calls_for
from polarq.settings import Settings
from polarq.testing.redis import EmbeddedRedis
from polarq_worker.telling import Telling
from tests.durable.hand import Hand
from tests.http.rig import settings_for, topology_for

pytestmark = pytest.mark.filterwarnings("ignore:Call to deprecated:DeprecationWarning")
"""Celery's own calls."""

SAMPLES = 20


@pytest.fixture
def loop() -> Iterator[asyncio.AbstractEventLoop]:
    made = asyncio.new_event_loop()
    thread = threading.Thread(target=made.run_forever)
    thread.start()
    yield made
    made.call_soon_threadsafe(made.stop)
    thread.join(60)
    made.close()


class Worker:
    """Its telling, and the trainer who asks Celery."""

    def __init__(self, url: str, keys: Keys, loop: asyncio.AbstractEventLoop) -> None:
        settings: Settings = settings_for(url)
        topology = topology_for(keys)
        self.app = make_app(topology, settings)
        self.client = Client(topology, settings, self.app)
        self.ledger = AsyncLedger(url, calls_for(topology))
        self.telling = Telling(self.app, self.client, self.ledger, topology, None, loop)
        self.hand = Hand(self.client.ledger)
        self._loop = loop

    def written(self) -> int:
        """How often a Celery result was written."""
        stats = self.client.ledger.redis.info("commandstats")
        return int(stats.get("cmdstat_setex", {"calls": 0})["calls"])

    def told(self, task_id: str) -> tuple[str, int]:
        """What Celery says: the state, and how many rollouts have completed."""
        result = self.app.AsyncResult(task_id)
        info: dict[str, Any] = dict(result.info)
        return result.state, info.get("counts", info)["completed"]

    def close(self) -> None:
        for closing in (self.telling.aclose(), self.ledger.aclose()):
            asyncio.run_coroutine_threadsafe(closing, self._loop).result(60)
        self.client.close()


@pytest.fixture
def worker(keys: Keys, loop: asyncio.AbstractEventLoop) -> Iterator[Worker]:
    with EmbeddedRedis() as server:
        made = Worker(server.url, keys, loop)
        yield made
        made.close()


def test_of_rollouts_that_end_together_one_tells_for_all_and_once_more_for_those_that_came_late(
    worker: Worker,
) -> None:
    worker.hand.submit("t", SAMPLES)
    worker.hand.end("t.0")
    worker.telling.tell("t")
    assert worker.written() == 1
    assert worker.told("t") == (PROGRESS, 1)
    for index in range(1, SAMPLES - 1):
        worker.hand.end(f"t.{index}")
    with ThreadPoolExecutor(SAMPLES) as ended:
        # Nobody gets an answer of Redis for a second: they find the first one at it.
        worker.client.ledger.redis.client_pause(1000)
        telling = [ended.submit(worker.telling.tell, "t") for _ in range(1, SAMPLES - 1)]
        for done in telling:
            done.result(60)
    assert worker.told("t") == (PROGRESS, SAMPLES - 1)
    assert worker.written() == 3
    assert worker.telling._publishing == {}


def test_what_ends_while_the_state_is_written_is_told_too(worker: Worker) -> None:
    worker.hand.submit("t", SAMPLES)
    with ThreadPoolExecutor(SAMPLES) as ended:

        def end(index: int) -> None:
            worker.hand.end(f"t.{index}")
            worker.telling.tell("t")

        for done in [ended.submit(end, index) for index in range(SAMPLES)]:
            done.result(60)
    assert worker.told("t") == ("SUCCESS", SAMPLES)


def test_a_result_that_cannot_be_written_keeps_nobody_from_the_next_try(
    worker: Worker, caplog: pytest.LogCaptureFixture
) -> None:
    worker.telling.tell("unknown")
    assert "task unknown: its Celery result could not be written" in caplog.text
    worker.hand.submit("unknown")
    worker.hand.end("unknown.0", state=RolloutState.FAILED)
    worker.telling.tell("unknown")
    assert worker.told("unknown") == ("SUCCESS", 0)
