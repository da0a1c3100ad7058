"""Results as they come: each once, over one connection, whatever happens to events, connections and the server."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Iterator
from typing import Any

import pytest
from redis import Redis

from polarq.client import AsyncClient, Client
from polarq.client.steps import Work
from polarq.client.streaming import COMPARE_S, Stream
from polarq.contracts.rollout import RolloutResult, RolloutState, TaskState
from polarq.errors import InvalidInput, LedgerUnavailable, PayloadMissing, ResultTimeout, TaskNotFound
from polarq.ledger import Call, Calls, Keys, Ledger
from polarq.ledger.following import News
from polarq.testing.redis import EmbeddedRedis
from tests.durable.hand import Hand, a_client, beside, ids
from tests.http.rig import settings_for, topology_for
from tests.worker.conftest import wait_until


@pytest.fixture
def client(redis_url: str, keys: Keys) -> Iterator[Client]:
    with a_client(redis_url, topology_for(keys)) as made:
        yield made


@pytest.fixture
def hand(client: Client) -> Hand:
    return Hand(client.ledger)


@pytest.fixture
def own_redis() -> Iterator[EmbeddedRedis]:
    """A server that nobody else is connected to."""
    with EmbeddedRedis() as server:
        yield server


@pytest.fixture
def lasting_redis() -> Iterator[EmbeddedRedis]:
    """A server that keeps its data when it is killed."""
    with EmbeddedRedis(appendonly=True) as server:
        yield server


def test_a_result_comes_while_its_group_still_runs(client: Client, hand: Hand) -> None:
    hand.submit("t", 3)
    hand.submit("u")
    hand.end("t.2")
    came = client.results(["t", "u"], timeout_s=60)
    assert next(came).rollout_id == "t.2"
    hand.end("u.0", state=RolloutState.FAILED)
    result = next(came)
    assert (result.rollout_id, result.outcome.state) == ("u.0", RolloutState.FAILED)
    expected = hand.end("t.0")
    result = next(came)
    assert result.trajectory == expected.trajectory
    assert result.reward == expected.reward
    hand.end("t.1")
    assert ids(list(came)) == ["t.1"]


def test_what_ended_before_comes_in_the_order_of_its_commits(client: Client, hand: Hand) -> None:
    hand.submit("t", 4)
    for index in (2, 0, 3, 1):
        hand.end(f"t.{index}")
    results = list(client.results("t"))
    # The ledger's times, in whole milliseconds: what was committed within the same one has no order.
    committed = {rollout.rollout_id: rollout.ended_at for rollout in client.record("t").rollouts}
    times = [committed[rollout_id] for rollout_id in ids(results)]
    assert times == sorted(time for time in times if time)
    assert sorted(ids(results)) == ["t.0", "t.1", "t.2", "t.3"]
    assert ids(list(client.results("t", seen={"t.0", "t.1", "t.3"}))) == ["t.2"]


def test_a_rollout_without_a_payload_comes_from_the_ledger(client: Client, hand: Hand) -> None:
    hand.submit("t", metadata={"question": 7})
    came = client.results("t", timeout_s=60)
    hand.ledger.do(hand.calls.cancel("t"))
    (result,) = came
    assert (result.outcome.state, result.trajectory) == (RolloutState.CANCELLED, None)
    assert result.metadata == {"question": 7}
    hand.submit("u")
    hand.end("u.0")
    (light,) = client.results("u", trajectories="none")
    assert light.reward is not None
    assert (light.reward.outcome, light.trajectory, light.payload) == (1.0, None, None)


def test_whole_groups_come_as_each_ends(client: Client, hand: Hand) -> None:
    for task_id in ("a", "b", "c"):
        hand.submit(task_id, 2)
    came = client.groups(["a", "b", "c"], timeout_s=60)
    for rollout_id in ("a.0", "b.0", "b.1", "c.1"):
        hand.end(rollout_id)
    group = next(came)
    assert (group.task_id, group.state, ids(group.results)) == ("b", TaskState.COMPLETED, ["b.0", "b.1"])
    assert all(result.trajectory is not None for result in group.results)
    hand.end("c.0")
    assert next(came).task_id == "c"
    hand.end("a.1")
    assert [group.task_id for group in came] == ["a"]


def test_a_run_is_followed_with_what_is_submitted_to_it_meanwhile(client: Client, hand: Hand) -> None:
    hand.submit("a", run_id="r1")
    hand.submit("b", run_id="r1")
    hand.submit("x", run_id="other")
    hand.end("x.0")
    hand.end("a.0")
    came = client.results(run_id="r1", timeout_s=60)
    assert next(came).rollout_id == "a.0"
    hand.submit("c", run_id="r1")
    hand.end("c.0")
    assert next(came).rollout_id == "c.0"
    hand.end("b.0")
    assert ids(list(came)) == ["b.0"]


def test_waiting_too_long_for_an_unknown_task_and_for_nothing_are_told_apart(client: Client, hand: Hand) -> None:
    hand.submit("t", 2)
    hand.end("t.0")
    came = client.results("t", timeout_s=0.2)
    assert next(came).rollout_id == "t.0"
    with pytest.raises(ResultTimeout, match="1 rollouts of 1 tasks"):
        next(came)
    with pytest.raises(TaskNotFound, match="nope"):
        list(client.results(["t", "nope"]))
    with pytest.raises(TaskNotFound, match="no task of run"):
        list(client.results(run_id="nope"))
    with pytest.raises(InvalidInput, match="name the tasks"):
        client.results()


def test_a_payload_that_is_lost_is_told_after_everything_else_has_come(client: Client, hand: Hand) -> None:
    hand.submit("t", 3)
    for index in range(3):
        claim = hand.claim(f"t.{index}")
        hand.end(f"t.{index}", claim=claim)
        if index == 1:
            lost = f"{client.ledger.calls.keys.payload('t.1', claim.attempt, claim.token)}:0"
    client.ledger.redis.delete(lost)
    came = client.results("t")
    assert {next(came).rollout_id, next(came).rollout_id} == {"t.0", "t.2"}
    with pytest.raises(PayloadMissing, match=r"1 rollouts ended.*t\.1"):
        next(came)


def test_no_result_is_missed_when_events_are_trimmed_away(client: Client, hand: Hand) -> None:
    hand.submit("t", 6)
    # Shorter than the time after which the ledger is looked at without a reason.
    came = client.results("t", timeout_s=COMPARE_S - 5)
    hand.end("t.0")
    got = [next(came).rollout_id]
    for index in (1, 2, 3):
        hand.end(f"t.{index}")
        # Whoever reads now finds no trace of it in the stream: the events are gone.
        client.ledger.redis.xtrim(client.ledger.calls.keys.events, maxlen=0, approximate=False)
    hand.end("t.4")
    got += [next(came).rollout_id for _ in range(4)]
    hand.end("t.5")
    got += ids(list(came))
    assert sorted(got) == [f"t.{index}" for index in range(6)]


def test_each_result_comes_once_while_the_server_is_killed_and_restarted(
    lasting_redis: EmbeddedRedis, keys: Keys
) -> None:
    topology = topology_for(keys, retention={"events": 5})
    with (
        a_client(lasting_redis.url, topology) as client,
        Ledger(lasting_redis.url, client.ledger.calls) as ledger,
    ):
        hand = Hand(ledger)
        hand.submit("t", 12)
        came = client.results("t", timeout_s=120)
        got = []
        for index in range(0, 12, 3):
            hand.end(f"t.{index}")
            got.append(next(came).rollout_id)

            def outage(first: int = index + 1) -> None:
                lasting_redis.kill()
                lasting_redis.start()
                hand.end(f"t.{first}")
                hand.end(f"t.{first + 1}")

            with beside(outage):
                got += [next(came).rollout_id, next(came).rollout_id]
        assert list(came) == []
        assert sorted(got) == sorted(f"t.{index}" for index in range(12))


def test_after_an_outage_the_ledger_itself_is_read_even_if_no_event_seems_to_be_missing(
    client: Client, hand: Hand
) -> None:
    """A failover may bring other events under ids that the cursor has passed already."""
    hand.submit("t")
    steps = Stream(client.ledger.calls, ["t"]).steps()
    step: Any = next(steps)
    waits = 0
    for _ in range(50):
        if isinstance(step, RolloutResult):
            assert step.rollout_id == "t.0"
            break
        if isinstance(step, Call) and step.commands and step.commands[0][0] == "XREAD":
            waits += 1
            if waits == 1:
                hand.end("t.0")
                step = steps.throw(LedgerUnavailable("Redis is away"))
            else:
                step = steps.send(News([], "0-0", gap=False))
        elif isinstance(step, Call):
            step = steps.send(client.ledger.do(step))
        else:
            step = steps.send(step.make() if isinstance(step, Work) else None)
    else:
        pytest.fail("the result did not come")


def test_a_server_that_comes_back_without_its_data_is_an_error_and_no_endless_wait(
    own_redis: EmbeddedRedis, keys: Keys
) -> None:
    with a_client(own_redis.url, topology_for(keys)) as client:
        hand = Hand(client.ledger)
        hand.submit("t", 2)
        hand.end("t.0")
        came = client.results("t", timeout_s=120)
        assert next(came).rollout_id == "t.0"
        own_redis.kill()
        own_redis.start()
        with pytest.raises(TaskNotFound, match="no task 't'"):
            next(came)


def test_a_server_that_stays_away_is_given_up(own_redis: EmbeddedRedis, keys: Keys) -> None:
    with a_client(own_redis.url, topology_for(keys)) as client:
        hand = Hand(client.ledger)
        hand.submit("t", 2)
        hand.end("t.0")
        came = client.results("t", outage_s=0.5)
        assert next(came).rollout_id == "t.0"
        own_redis.kill()
        with pytest.raises(LedgerUnavailable, match="does not answer"):
            next(came)


async def test_on_an_event_loop_an_outage_costs_no_result_and_a_cancelled_reader_ends_at_once(
    lasting_redis: EmbeddedRedis, keys: Keys
) -> None:
    async with AsyncClient(topology_for(keys), settings_for(lasting_redis.url)) as client:
        with Ledger(lasting_redis.url, Calls(keys)) as ledger:
            hand = Hand(ledger)
            hand.submit("t", 3)
            hand.submit("u", 2)
            hand.end("t.0")
            came = client.results("t", timeout_s=120)
            assert (await anext(came)).rollout_id == "t.0"
            reading = asyncio.ensure_future(anext(came))
            groups = asyncio.ensure_future(anext(client.groups("u", timeout_s=120)))
            await asyncio.to_thread(lasting_redis.kill)
            await asyncio.to_thread(lasting_redis.start)
            hand.end("t.1")
            hand.end("u.1")
            hand.end("u.0")
            assert (await reading).rollout_id == "t.1"
            assert ids((await groups).results) == ["u.0", "u.1"]
            reading = asyncio.ensure_future(anext(came))
            waits = lambda: any(row["cmd"] == "xread" for row in ledger.redis.client_list())  # noqa: E731
            await asyncio.to_thread(wait_until, waits)
            reading.cancel()
            with pytest.raises(asyncio.CancelledError):
                await reading


async def test_thousands_of_rollouts_are_awaited_over_one_connection_that_is_cut_again_and_again(
    own_redis: EmbeddedRedis, keys: Keys
) -> None:
    """2,000 pending rollouts of 125 tasks; all client connections are killed every 200 ends."""
    topology = topology_for(keys)
    calls = Calls(keys)
    rollouts = [f"t{task}.{index}" for task in range(125) for index in range(16)]
    random.Random(7).shuffle(rollouts)
    with Ledger(own_redis.url, calls) as ledger, Redis.from_url(own_redis.url) as looking:
        hand = Hand(ledger)
        for task in range(125):
            hand.submit(f"t{task}", 16)

        def end_all() -> None:
            for number, rollout_id in enumerate(rollouts):
                hand.end(rollout_id)
                if number % 200 == 199:
                    looking.execute_command("CLIENT", "KILL", "TYPE", "normal", "SKIPME", "yes")

        async with AsyncClient(topology, settings_for(own_redis.url)) as client:
            got: list[str] = []
            most = 0
            ending = asyncio.create_task(asyncio.to_thread(end_all))
            async for result in client.results([f"t{task}" for task in range(125)], timeout_s=150):
                got.append(result.rollout_id)
                if len(got) % 100 == 0:
                    most = max(most, len(looking.client_list()))
            await ending
    assert sorted(got) == sorted(rollouts)
    assert most <= 6  # whoever ends them, whoever looks, and the stream: each with one that was just killed beside it
