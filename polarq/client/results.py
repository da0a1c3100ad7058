"""From the ledger's picture and the store's payloads to what a trainer gets."""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from typing import Any

from polarq.contracts.rollout import Outcome, PayloadRef, Reward, RolloutResult, TaskResult
from polarq.ledger.records import RolloutRecord, TaskRecord


class Trajectories(StrEnum):
    """How much of each rollout to fetch: nothing but the ledger's summary, its payload's reference, or all of it."""

    NONE = "none"
    REFS = "refs"
    FULL = "full"


def payload_refs(record: TaskRecord) -> dict[str, PayloadRef]:
    """rollout_id -> reference of every ended rollout that has a payload in the store."""
    return {
        r.rollout_id: r.summary.payload
        for r in record.rollouts
        if r.summary and r.summary.payload and r.acknowledged_at is None
    }


def assemble(
    record: TaskRecord,
    payloads: Mapping[str, RolloutResult],
    trajectories: Trajectories,
    metadata: Mapping[str, Any],
) -> TaskResult:
    """The task's result in sample order, with the ended rollouts."""
    results = [
        payloads.get(rollout.rollout_id) or from_summary(record.task_id, record.run_id, rollout, trajectories, metadata)
        for rollout in record.rollouts
        if rollout.state.terminal
    ]
    return TaskResult(
        task_id=record.task_id,
        run_id=record.run_id,
        state=record.state,
        counts=record.counts,
        results=results,
        created_at=record.created_at,
        updated_at=record.updated_at,
        metadata=dict(metadata),
    )


def from_summary(
    task_id: str, run_id: str, rollout: RolloutRecord, trajectories: Trajectories, metadata: Mapping[str, Any]
) -> RolloutResult:
    """An ended rollout without its trajectory: what the ledger itself holds of it."""
    summary = rollout.summary
    outcome = summary.outcome if summary else Outcome(state=rollout.state)
    reward = None
    if summary is not None and summary.reward is not None:
        reward = Reward(outcome=summary.reward, evaluator="")
    stored = summary.payload if summary is not None and rollout.acknowledged_at is None else None
    return RolloutResult(
        rollout_id=rollout.rollout_id,
        task_id=task_id,
        run_id=run_id,
        index=rollout.index,
        attempt=rollout.attempt,
        node_id=rollout.owner,
        policy_version=rollout.policy_version,
        versions=summary.versions if summary else [],
        losses=list(rollout.losses),
        outcome=outcome,
        reward=reward,
        payload=stored if trajectories is not Trajectories.NONE else None,
        timing=summary.timing if summary else RolloutResult.model_fields["timing"].default,
        started_at=rollout.claimed_at,
        ended_at=rollout.ended_at,
        metadata={**metadata, **(summary.early_stop.metadata() if summary and summary.early_stop else {})},
    )
