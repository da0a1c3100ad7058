"""Rollouts walked to their ends by hand, as a worker would, so that the command line has something to show."""

from __future__ import annotations

import threading
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from polarq.client import Client
from polarq.contracts.artifacts import Artifact
from polarq.contracts.node import NodeRecord
from polarq.contracts.rollout import (
    Boundary,
    ExecKind,
    HarnessReport,
    Outcome,
    Reward,
    RolloutResult,
    RolloutState,
    RolloutSummary,
    StepReport,
    Timing,
)
from polarq.contracts.sandbox import SandboxReport
from polarq.contracts.task import Task
from polarq.contracts.trajectory import Fidelity, Trace, Trajectory, Turn
from polarq.ledger import Claim
from polarq.settings import Settings
from polarq.store.payloads import encode_result, put_payload
from polarq.topology import load_topology

LEASE_S = 60.0
OK = Outcome(state=RolloutState.COMPLETED, trainable=True)
TIMING = Timing(queue_s=0.01, prepare_s=0.2, agent_s=3.5, build_s=0.02, evaluate_s=0.4, total_s=4.2)


def task(task_id: str, num_samples: int = 1, instruction: str = "Do it.", **more: Any) -> Task:
    return Task.load(
        {
            "task_id": task_id,
            "instruction": instruction,
            "num_samples": num_samples,
            "agent": {"harness": "shell", "custom_shell": {"command": "true"}},
            "runtime": {"backend": "local"},
            **more,
        }
    )


def record(client: Client, wanted: Task) -> None:
    """Into the ledger, without any doorbell."""
    client.ledger.do(client.ledger.calls.submit(wanted, wanted.task_id))


def claim(client: Client, rollout_id: str, node_id: str = "node0") -> Claim:
    granted = client.ledger.do(client.ledger.calls.claim(rollout_id, node_id, LEASE_S, "job"))
    assert isinstance(granted, Claim)
    return granted


def advance(client: Client, granted: Claim, *states: RolloutState) -> None:
    for state in states:
        assert client.ledger.do(client.ledger.calls.advance(granted.rollout_id, granted.token, state)) == "ok"


def finish(
    client: Client,
    rollout_id: str,
    outcome: Outcome = OK,
    reward: float | None = 1.0,
    *,
    text: str = "Hello.",
    report: dict[str, Any] | None = None,
    steps: list[StepReport] | None = None,
    artifacts: list[Artifact] | None = None,
    sandbox: SandboxReport | None = None,
) -> RolloutResult:
    """Claims a rollout and commits a whole result for it."""
    granted = claim(client, rollout_id)
    result = made_result(
        granted, outcome, reward, text, report or {}, steps or [StepReport(kind=ExecKind.EXITED, exit_code=0)]
    )
    result = result.model_copy(update={"artifacts": artifacts or [], "sandbox": sandbox})
    data, raw = encode_result(result)
    ref, writes = put_payload(
        client.ledger.calls.keys, rollout_id, granted.attempt, granted.token, data, raw_bytes=raw, keep_s=600
    )
    for write in writes:
        client.ledger.do(write)
    summary = RolloutSummary(
        outcome=outcome,
        reward=reward,
        calls=1,
        traces=1,
        sampled_tokens=3,
        trainable_tokens=3,
        timing=TIMING,
        payload=ref,
    )
    assert client.ledger.do(client.ledger.calls.commit(rollout_id, granted.token, summary)).won
    return result


def made_result(
    granted: Claim, outcome: Outcome, reward: float | None, text: str, report: dict[str, Any], steps: list[StepReport]
) -> RolloutResult:
    trace = Trace(
        index=0,
        prompt_ids=[1, 2],
        response_ids=[3, 4, 5],
        loss_mask=[1, 1, 1],
        logprobs=[-0.5, -0.25, -0.125],
        prompt_messages=[{"role": "user", "content": granted.task.instruction}],
        response_messages=[{"role": "assistant", "content": text}],
        finish_reason="stop",
        reward=reward,
        completion_seqs=[0],
        turns=[Turn(seq=0, start=0, end=3, finish_reason="stop")],
    )
    return RolloutResult(
        rollout_id=granted.rollout_id,
        task_id=granted.task.task_id,
        run_id=granted.task.run_id,
        index=int(granted.rollout_id.rpartition(".")[2]),
        attempt=granted.attempt,
        node_id="node0",
        outcome=outcome,
        reward=None if reward is None else Reward(outcome=reward, evaluator="test_on_output", report=report),
        trajectory=Trajectory(
            builder="per_request",
            traces=[trace],
            fidelity=Fidelity(calls=1, traces=1, sampled_tokens=3, trainable_tokens=3),
        ),
        harness=HarnessReport(name="shell", ok=True, steps=steps),
        timing=TIMING,
        started_at=datetime(2026, 1, 1, 12, 0, tzinfo=UTC),
        ended_at=datetime(2026, 1, 1, 12, 1, tzinfo=UTC),
    )


def failed(message: str, boundary: Boundary = Boundary.HARNESS) -> Outcome:
    return Outcome(state=RolloutState.FAILED, boundary=boundary, reason="exit_code", message=message)


def announce(client: Client, node_id: str = "node0", **more: Any) -> None:
    """A node that says it is alive."""
    body = NodeRecord(node_id=node_id, max_init_workers=4, max_run_workers=2, max_postrun_workers=4, **more)
    client.ledger.do(client.ledger.calls.announce(body, 60.0))


def when_submitted(topology: Path, task_id: str, work: Callable[[Client], None]) -> threading.Thread:
    """Runs something against the ledger, in a thread, as soon as the task is in it."""

    def run() -> None:
        with Client(load_topology(topology), Settings.from_env()) as client:
            last = "0"
            while True:
                events = client.ledger.wait_events(last, 30)
                assert events, "the task was never submitted"
                last = events[-1].event_id
                if any(event.data.get("task_id") == task_id for event in events):
                    return work(client)

    thread = threading.Thread(target=run)
    thread.start()
    return thread
