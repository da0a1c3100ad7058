"""Events as they happen, for a program: of one task until it ends, over outages, each once."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest

from polarq.client import AsyncClient, Client
from polarq.contracts.event import Event
from polarq.errors import LedgerUnavailable, TaskNotFound
from polarq.ledger import Calls, Keys, Ledger
from polarq.testing.redis import EmbeddedRedis
from tests.durable.hand import Hand, a_client, beside
from tests.http.rig import settings_for, topology_for


@pytest.fixture
def client(redis_url: str, keys: Keys) -> Iterator[Client]:
    with a_client(redis_url, topology_for(keys)) as made:
        yield made


@pytest.fixture
def hand(client: Client) -> Hand:
    return Hand(client.ledger)


@pytest.fixture
def lasting_redis() -> Iterator[EmbeddedRedis]:
    """A server that keeps its data when it is killed."""
    with EmbeddedRedis(appendonly=True) as server:
        yield server


def ends(events: list[Event]) -> list[str]:
    return [str(e.data["session_id"]) for e in events if e.data.get("status") == "completed" and "session_id" in e.data]


def test_it_ends_with_its_task_and_waits_for_nobody_else(client: Client, hand: Hand) -> None:
    hand.submit("t", 2)
    hand.submit("endless")
    came = client.follow("t", after="0", wait_s=600)
    assert next(came).type == "task.created"
    hand.end("t.1")
    hand.end("t.0")
    seen = list(came)
    assert ends(seen) == ["t.1", "t.0"]
    assert seen[-1].type == "task.completed"
    assert {event.data["task_id"] for event in seen} == {"t"}
    assert ends(list(client.follow("t", after="0"))) == ["t.1", "t.0"], "of one that has ended, at once"
    assert list(client.follow("t", after=seen[-1].event_id)) == []


def test_an_unknown_task_is_told_at_once(client: Client) -> None:
    with pytest.raises(TaskNotFound, match="no task 'nope'"):
        next(client.follow("nope", wait_s=600))


def test_it_goes_on_where_it_was_after_the_server_was_killed(lasting_redis: EmbeddedRedis, keys: Keys) -> None:
    with a_client(lasting_redis.url, topology_for(keys)) as client, Ledger(lasting_redis.url, Calls(keys)) as ledger:
        hand = Hand(ledger)
        hand.submit("t", 4)
        came = client.follow("t", after="0")
        seen = [next(came)]
        for first in (0, 2):

            def outage(index: int = first) -> None:
                hand.end(f"t.{index}")
                lasting_redis.kill()
                lasting_redis.start()
                hand.end(f"t.{index + 1}")

            with beside(outage):
                while len(ends(seen)) < first + 2:
                    seen.append(next(came))
        seen += came
    assert ends(seen) == [f"t.{index}" for index in range(4)]
    assert len({event.event_id for event in seen}) == len(seen)


def test_a_server_that_stays_away_is_given_up(keys: Keys) -> None:
    with EmbeddedRedis() as server, a_client(server.url, topology_for(keys)) as client:
        Hand(client.ledger).submit("t")
        came = client.follow("t", after="0", outage_s=0.5)
        assert next(came).type == "task.created"
        server.kill()
        with pytest.raises(LedgerUnavailable, match="does not answer"):
            next(came)


async def test_on_an_event_loop_a_reader_of_everything_can_be_stopped(redis_url: str, keys: Keys) -> None:
    async with AsyncClient(topology_for(keys), settings_for(redis_url)) as client:
        with Ledger(redis_url, Calls(keys)) as ledger:
            hand = Hand(ledger)
            hand.submit("t")
            came = client.follow(after="0")
            assert (await anext(came)).type == "task.created"
            reading = asyncio.ensure_future(anext(came))
            hand.end("t.0")
            assert (await reading).type == "session.state_changed"
            reading = asyncio.ensure_future(anext(client.follow()))
            await asyncio.sleep(0)
            reading.cancel()
            with pytest.raises(asyncio.CancelledError):
                await reading
