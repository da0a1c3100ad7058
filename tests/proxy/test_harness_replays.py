"""Captured runs of unmodified harnesses, in both stream modes: every request gets a well-formed native answer, and what
goes on from an earlier turn is joined to it, id for id."""

from __future__ import annotations

import pytest
from redis.asyncio import Redis

from polarq.ledger.keys import Keys
from polarq.testing.inference import Scenario, ScriptedInference
from polarq.trajectory.prefix_merging import PrefixMergingBuilder

from .harness_replay import HARNESSES, Replay, captured, script
from .rig import running
from .test_exact import exact_now

HISTORIES = {
    "aider": (3, 1),
    "aider-anthropic": (3, 1),
    "claude-code-compact": (2, 1),
    "codex-compaction": (3, 2),
    "opencode": (2, 1),
    "opencode-compaction": (2, 1),
    "smolagents-toolcalling": (2, 2),
}
"""Traces, and those to train on, where a run is not one history: commit messages, titles and compaction stand beside
it; Codex goes on from a summary; smolagents tells its calls as text, which is not what was sampled."""


@pytest.mark.parametrize("stream", [True, False], ids=["streamed", "whole"])
@pytest.mark.parametrize("harness", HARNESSES)
async def test_a_run_is_answered_and_joined(redis_client: Redis, keys: Keys, harness: str, stream: bool) -> None:
    scenario = Scenario(name="replay", drift_seed=7, scripts=(script(harness),))
    async with (
        ScriptedInference(scenario=scenario, max_model_len=262_144) as inference,
        running(redis_client, keys, inference.base_url, context="exact") as rig,
    ):
        await exact_now(rig)
        await Replay(rig, harness, stream).play()
        records = await rig.records()
    assert len(records) == len(captured(harness))
    trajectory = PrefixMergingBuilder({}).build(records)
    traces, kept = trajectory.traces, trajectory.fidelity
    print(f"{harness}: {len(records)} calls, {len(traces)} traces, {kept.trainable_tokens} tokens to train on")
    assert (len(traces), sum(trace.untrainable is None for trace in traces)) == HISTORIES.get(harness, (1, 1))
    assert kept.trainable_tokens == sum(len(record.sampled_ids) for record in records if record.trainable)
