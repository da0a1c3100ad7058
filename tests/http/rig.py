"""A real shim on a free port over a real Redis, and a driver that ends rollouts as a worker does."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import httpx
from aiohttp import web

from polarq.client import AsyncClient
from polarq.contracts.node import NodeRecord, StageMetrics
from polarq.contracts.rollout import (
    Boundary,
    Outcome,
    Reward,
    RolloutResult,
    RolloutState,
    RolloutSummary,
    Timing,
)
from polarq.contracts.trajectory import Fidelity, Trace, Trajectory
from polarq.http.access import Access
from polarq.http.app import build_app
from polarq.ledger import Claim, Keys
from polarq.settings import Settings
from polarq.store.payloads import encode_result, put_payload
from polarq.topology import Topology

OPEN = Access(None)


def settings_for(redis_url: str, **more: Any) -> Settings:
    env = {"POLARQ_REDIS_URL": redis_url, **more}
    return Settings.from_env(env)


def topology_for(keys: Keys, **more: Any) -> Topology:
    return Topology.model_validate({"redis": {"prefix": keys.prefix}, **more})


def a_task(task_id: str = "t", samples: int = 1, **more: Any) -> dict[str, Any]:
    return {
        "task_id": task_id,
        "instruction": "do it",
        "num_samples": samples,
        "agent": {"harness": "mini_swe_agent", "model_name": "tiny"},
        "runtime": {"backend": "local"},
        **more,
    }


@dataclass(slots=True)
class Rig:
    """A running shim: its client, its ledger, and a worker's hand."""

    url: str
    http: httpx.AsyncClient
    client: AsyncClient

    async def submit(self, task: dict[str, Any]) -> None:
        response = await self.http.post("/rollout/task/submit", json=task)
        assert response.status_code == 200, response.text

    async def claim(self, rollout_id: str, node_id: str = "node0") -> Claim:
        ledger = self.client.ledger
        claim = await ledger.do(ledger.calls.claim(rollout_id, node_id, 30, "job"))
        assert isinstance(claim, Claim)
        return claim

    async def advance(self, claim: Claim, state: RolloutState) -> None:
        ledger = self.client.ledger
        assert await ledger.do(ledger.calls.advance(claim.rollout_id, claim.token, state)) == "ok"

    async def end(
        self,
        rollout_id: str,
        *,
        state: RolloutState = RolloutState.COMPLETED,
        reward: float | None = 1.0,
        response_ids: list[int] | None = None,
        claim: Claim | None = None,
    ) -> RolloutResult:
        """Claims a rollout and commits a result with one trace, payload first."""
        claim = claim or await self.claim(rollout_id)
        ledger = self.client.ledger
        result = a_result(claim, state, reward, response_ids or [7, 8, 9])
        data, raw = encode_result(result)
        ref, writes = put_payload(
            ledger.calls.keys, rollout_id, claim.attempt, claim.token, data, raw_bytes=raw, keep_s=3600
        )
        for write in writes:
            await ledger.do(write)
        summary = RolloutSummary(
            outcome=result.outcome, reward=reward, calls=1, traces=1, timing=result.timing, payload=ref
        )
        committed = await ledger.do(ledger.calls.commit(rollout_id, claim.token, summary))
        assert committed.won
        return result

    async def announce(self, node_id: str, **more: Any) -> None:
        record = NodeRecord(
            node_id=node_id,
            max_init_workers=2,
            max_run_workers=3,
            max_postrun_workers=4,
            metrics=StageMetrics(run_inflight=2),
            proxy_url="http://127.0.0.1:8081",
            last_seen_at=datetime.now(UTC),
            **more,
        )
        await self.client.ledger.do(self.client.ledger.calls.announce(record, 60.0))


def a_result(claim: Claim, state: RolloutState, reward: float | None, response_ids: list[int]) -> RolloutResult:
    outcome = Outcome(state=state, trainable=state is RolloutState.COMPLETED)
    if state is not RolloutState.COMPLETED:
        message = "the harness exited with 3"
        outcome = Outcome(state=state, boundary=Boundary.HARNESS, reason="exit_code", message=message)
    count = len(response_ids)
    trace = Trace(
        index=0,
        prompt_ids=[1, 2, 3],
        response_ids=response_ids,
        loss_mask=[1] * count,
        logprobs=[-0.5] * count,
        prompt_messages=[{"role": "user", "content": "do it"}],
        response_messages=[{"role": "assistant", "content": "done"}],
        finish_reason="stop",
        reward=reward,
        completion_seqs=[0],
    )
    return RolloutResult(
        rollout_id=claim.rollout_id,
        task_id=claim.task.task_id,
        run_id=claim.task.run_id,
        index=int(claim.rollout_id.rpartition(".")[2]),
        attempt=claim.attempt,
        node_id="node0",
        outcome=outcome,
        reward=None if reward is None else Reward(outcome=reward, evaluator="test_on_output", report={"passed": 2}),
        trajectory=Trajectory(builder="per_request", traces=[trace], fidelity=Fidelity(calls=1, traces=1)),
        timing=Timing(queue_s=0.25, prepare_s=0.5, agent_s=2.0, build_s=0.1, evaluate_s=0.3, teardown_s=0.1),
        started_at=claim.claimed_at,
        ended_at=datetime.now(UTC),
        metadata=claim.task.metadata,
    )


@asynccontextmanager
async def running_shim(
    redis_url: str,
    keys: Keys,
    *,
    rule: Access = OPEN,
    save_dir: Path | None = None,
    headers: dict[str, str] | None = None,
    topology: dict[str, Any] | None = None,
    secret: str | None = None,
) -> AsyncIterator[Rig]:
    """A shim in this process, listening on loopback, and an HTTP client for it."""
    sections = dict(topology or {})
    if save_dir is not None:
        sections["rollout"] = {"save_dir": str(save_dir)}
    made = topology_for(keys, **sections)
    settings = settings_for(redis_url, **({"POLARQ_CALLBACK_SECRET": secret} if secret else {}))
    async with AsyncClient(made, settings) as client:
        runner = web.AppRunner(build_app(client, made, settings, rule=rule), access_log=None, shutdown_timeout=5)
        await runner.setup()
        try:
            await web.TCPSite(runner, "127.0.0.1", 0).start()
            url = f"http://127.0.0.1:{runner.addresses[0][1]}"
            async with httpx.AsyncClient(base_url=url, headers=headers, trust_env=False, timeout=60) as http:
                yield Rig(url, http, client)
        finally:
            await runner.cleanup()


@contextmanager
def said(logger: str, text: str) -> Iterator[asyncio.Event]:
    """An event that is set when the logger says something with `text` in it."""
    heard = asyncio.Event()

    class Listening(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            if text in record.getMessage():
                heard.set()

    handler = Listening()
    logging.getLogger(logger).addHandler(handler)
    try:
        yield heard
    finally:
        logging.getLogger(logger).removeHandler(handler)
