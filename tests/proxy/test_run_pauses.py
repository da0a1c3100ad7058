"""A pause of one run's calls holds those back, and no others."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest
from redis.asyncio import Redis

from polarq.client.pausing import InferenceState, state_of
from polarq.client.steps import outcome_async
from polarq.contracts.completion import CompletionLabel
from polarq.contracts.node import NodeRecord
from polarq.ledger import AsyncLedger, Calls
from polarq.ledger.keys import Keys
from polarq.store.pauses import PauseMode, read_pauses
from polarq.testing.inference import Scenario, Script, ScriptedInference, Turn
from tests.pauses import clear_pause, read_acks, read_pause, set_pause

from .rig import HELLO, Rig, Sse, running, until

WORDS = "one two three four five six seven eight nine ten"
SLOW = Scenario(name="slow", scripts=(Script(name="a", turns=(Turn(content=WORDS, tokens_per_s=4.0),)),))
QUICK = Scenario.of(WORDS)


@pytest.fixture
async def ledger(redis_url: str, keys: Keys) -> AsyncIterator[AsyncLedger]:
    async with AsyncLedger(redis_url, Calls(keys)) as made:
        yield made


async def state(ledger: AsyncLedger, run_id: str = "") -> InferenceState:
    nodes = [NodeRecord(node_id="node0", alive=True)]
    return await outcome_async(ledger, state_of(ledger.calls, nodes, run_id))


async def pause(
    rig: Rig, run_id: str, mode: PauseMode = "drain", lease_s: float = 60.0, in_flight: int | None = 0
) -> None:
    """Returns when the proxy says that it holds, with so many of the run's calls in flight."""
    made = await set_pause(rig.redis, rig.keys, lease_s=lease_s, mode=mode, run_id=run_id)

    async def said() -> bool:
        acks = [ack.of_run(run_id) for ack in await read_acks(rig.redis, rig.keys)]
        return any(ack.pause_id == made.pause_id and in_flight in (None, ack.in_flight) for ack in acks)

    await until(said)


async def text(rig: Rig) -> str:
    made: str = (await rig.ask())["choices"][0]["message"]["content"]
    return made


async def test_calls_of_other_runs_pass_while_one_is_paused(
    redis_client: Redis, keys: Keys, ledger: AsyncLedger
) -> None:
    async with (
        ScriptedInference(scenario=QUICK) as inference,
        running(redis_client, keys, inference.base_url, grant={"run_id": "r"}) as rig,
    ):
        other, nameless = await rig.session(1, run_id="other"), await rig.session(2)
        await pause(rig, "r")
        held = asyncio.create_task(text(rig))
        await until(lambda: rig.proxy.gate.waiting == 1)
        assert await text(other) == await text(nameless) == WORDS

        async def told() -> bool:
            return (await state(ledger, "r")).nodes[0].waiting == 1

        await until(told)
        assert (await state(ledger, "r")).drained
        for of in ("", "other"):
            assert not (await state(ledger, of)).paused
        assert not held.done()
        assert await clear_pause(redis_client, keys, "r")
        assert await held == WORDS


async def test_only_the_runs_own_calls_are_counted_as_in_flight(
    redis_client: Redis, keys: Keys, ledger: AsyncLedger
) -> None:
    async with (
        ScriptedInference(scenario=SLOW) as inference,
        running(redis_client, keys, inference.base_url, grant={"run_id": "r"}) as rig,
    ):
        asking = [asyncio.create_task(text(one)) for one in (rig, await rig.session(1, run_id="other"))]
        await until(lambda: rig.proxy.gate.in_flight == 2)
        await pause(rig, "r", in_flight=1)
        await pause(rig, "idle", in_flight=0)
        assert (await state(ledger, "idle")).drained
        assert not any(one.done() for one in asking)
        assert await asyncio.gather(*asking) == [WORDS, WORDS]

        async def drained() -> bool:
            return (await state(ledger, "r")).drained

        await until(drained)


async def test_an_abort_cuts_the_runs_calls_and_no_others(redis_client: Redis, keys: Keys) -> None:
    async with (
        ScriptedInference(scenario=SLOW) as inference,
        running(redis_client, keys, inference.base_url, grant={"run_id": "r"}) as rig,
    ):
        other = await rig.session(1, run_id="other")
        passing = asyncio.create_task(text(other))
        body = {"model": "m", "messages": HELLO, "stream": True}
        async with rig.http.post(rig.base_url + "/v1/chat/completions", json=body) as answer:
            seen = await answer.content.readuntil(b"one")
            await set_pause(redis_client, keys, lease_s=60, mode="abort", run_id="r")
            rest = await answer.read()
        assert Sse.of(200, {}, seen + rest).errors[0]["code"] == "aborted"
        assert [record.label for record in await rig.records()] == [CompletionLabel.ABORTED]
        assert await passing == WORDS
        assert [record.label for record in await other.records()] == [CompletionLabel.TRAIN]
        # One that was cut before its harness saw anything would have been sampled anew, and look the same.
        assert [call.aborted for call in inference.ledger if call.session_id == "task.1"] == [False]


async def test_a_run_is_held_until_both_pauses_that_hold_it_are_over(redis_client: Redis, keys: Keys) -> None:
    async with (
        ScriptedInference(scenario=QUICK) as inference,
        running(redis_client, keys, inference.base_url, grant={"run_id": "r"}) as rig,
    ):
        await pause(rig, "r")
        await set_pause(redis_client, keys, lease_s=60)
        await until(lambda: set(rig.proxy.gate.pauses) == {"", "r"})
        held = asyncio.create_task(text(rig))
        passing = asyncio.create_task(text(await rig.session(1, run_id="other")))
        await until(lambda: rig.proxy.gate.waiting == 2)
        assert await clear_pause(redis_client, keys)
        assert await passing == WORDS
        assert not held.done()
        assert await clear_pause(redis_client, keys, "r")
        assert await held == WORDS


async def test_a_forgotten_pause_of_a_run_ends_with_its_lease_and_leaves_nothing(
    redis_client: Redis, keys: Keys
) -> None:
    async with (
        ScriptedInference(scenario=QUICK) as inference,
        running(redis_client, keys, inference.base_url, grant={"run_id": "r"}) as rig,
    ):
        await set_pause(redis_client, keys, lease_s=60, run_id="long")
        await pause(rig, "r", lease_s=1.0)
        assert await text(rig) == WORDS
        assert await read_pause(redis_client, keys, "r") is None
        assert set(await redis_client.hkeys(keys.run_pauses)) == {b"long"}
        assert 0 < await redis_client.pttl(keys.run_pauses) <= 60_000
        assert not await clear_pause(redis_client, keys, "r")


async def test_a_proxy_that_starts_during_a_runs_pause_holds_it(
    redis_client: Redis, keys: Keys, ledger: AsyncLedger
) -> None:
    made = await set_pause(redis_client, keys, lease_s=60, run_id="r")
    async with (
        ScriptedInference(scenario=QUICK) as inference,
        running(redis_client, keys, inference.base_url) as rig,
    ):
        assert await read_pauses(redis_client, keys) == rig.proxy.gate.pauses == {"r": made}

        async def drained() -> bool:
            return (await state(ledger, "r")).drained

        await until(drained)


async def test_a_renewed_pause_of_a_run_holds_for_the_new_lease(redis_client: Redis, keys: Keys) -> None:
    await set_pause(redis_client, keys, lease_s=0.001, run_id="r")
    renewed = await set_pause(redis_client, keys, lease_s=60, run_id="r")
    assert await read_pauses(redis_client, keys) == {"r": renewed}
