"""What a proxy finds out about an inference server when it meets it."""

from __future__ import annotations

import pytest
from redis.asyncio import Redis

from polarq.ledger.keys import Keys

from .raw_engine import RawCall, answer, raw_engine
from .rig import running


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
