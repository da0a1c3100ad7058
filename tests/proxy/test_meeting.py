"""What a proxy finds out about an inference server when it meets it."""

from __future__ import annotations

import pytest
from redis.asyncio import Redis

from polarq.ledger.keys import Keys
from polarq.testing.inference import Scenario, ScriptedInference

from .raw_engine import RawCall, answer, raw_engine
from .rig import running, until


@pytest.mark.parametrize(
    ("value", "mode", "trainable"),
    [
        (-7.5, "raw_logprobs", True),
        (-0.0004, "processed_logprobs", True),
        (103.2, "logits", False),
        (None, "unknown", True),
    ],
)
async def test_what_its_log_probabilities_are_is_found_out_at_start(
    redis_client: Redis, keys: Keys, value: float | None, mode: str, trainable: bool
) -> None:
    async def act(call: RawCall) -> None:
        await call.whole(answer())

    async with raw_engine(act) as engine:
        engine.forced_logprob = value
        async with running(redis_client, keys, engine.url) as rig:
            await rig.ask()
            [record] = await rig.records()
            assert (record.logprobs_mode, record.trainable) == (mode, trainable)
            [health] = rig.proxy.health()["inference"]
            assert f"log-probabilities: {mode}" in health["said"]
            assert ("--logprobs-mode" in health["problem"]) is not trainable


async def test_a_server_that_gave_no_ids_once_is_looked_at_again(redis_client: Redis, keys: Keys) -> None:
    async with (
        ScriptedInference(scenario=Scenario.of("one", "two")) as inference,
        running(redis_client, keys, inference.base_url) as rig,
    ):
        [endpoint] = rig.proxy.fleet.endpoints
        await until(lambda: endpoint.state.gives_ids is True)
        endpoint.note_ids(False)
        assert rig.proxy.health()["ids"] is False
        await until(lambda: endpoint.state.gives_ids is True)
        assert rig.proxy.health()["ids"] is True
