"""How an attempt's result becomes the visible one: payload first, then the compare-and-set."""

from __future__ import annotations

import logging
from dataclasses import dataclass

from polarq.contracts.rollout import RolloutResult, RolloutSummary
from polarq.ledger import AsyncLedger, Claim, Committed
from polarq.ledger.calls import Call
from polarq.store.payloads import encode_result, put_payload
from polarq_worker.patience import Patience

log = logging.getLogger("polarq.worker.commit")


@dataclass(frozen=True, slots=True)
class Finished:
    """An attempt that has ended, encoded: all that its commit needs."""

    rollout_id: str
    task_id: str
    attempt: int
    token: int
    summary: RolloutSummary
    """Without the payload's reference, which the commit adds."""
    data: bytes
    raw_bytes: int

    @classmethod
    def encode(cls, claim: Claim, result: RolloutResult) -> Finished:
        """Takes as long as compressing takes; to be called in a thread."""
        data, raw_bytes = encode_result(result)
        summary = summary_of(result)
        return cls(claim.rollout_id, claim.task.task_id, claim.attempt, claim.token, summary, data, raw_bytes)


async def commit(finished: Finished, ledger: AsyncLedger, patience: Patience) -> Committed:
    """Each step until the ledger answers. A refused result's payload is removed again.

    Raises `LedgerUnavailable` only when patience is over.
    """
    keys, keep_s = ledger.calls.keys, ledger.calls.keep_s
    rollout_id, attempt, token = finished.rollout_id, finished.attempt, finished.token
    # Twice the retention: the task's own clock starts only when its last rollout ends.
    ref, writes = put_payload(
        keys, rollout_id, attempt, token, finished.data, raw_bytes=finished.raw_bytes, keep_s=2 * keep_s
    )
    for write in writes:
        await patience.insist(ledger, write)
    summary = finished.summary.model_copy(update={"payload": ref})
    done: Committed = await patience.insist(ledger, ledger.calls.commit(rollout_id, token, summary))
    if not done.won:
        log.warning("rollout %s: a late commit was refused (%s)", rollout_id, done.detail)
        await patience.insist(ledger, _drop(keys.payload(rollout_id, attempt, token), ref.chunks))
    return done


def summary_of(result: RolloutResult) -> RolloutSummary:
    """What the ledger itself keeps of a result."""
    trajectory = result.trajectory
    fidelity = trajectory.fidelity if trajectory is not None else None
    return RolloutSummary(
        outcome=result.outcome,
        reward=result.reward.outcome if result.reward is not None else None,
        calls=fidelity.calls if fidelity else 0,
        traces=fidelity.traces if fidelity else 0,
        sampled_tokens=fidelity.sampled_tokens if fidelity else 0,
        trainable_tokens=fidelity.trainable_tokens if fidelity else 0,
        versions=result.versions,
        timing=result.timing,
    )


def _drop(stem: str, chunks: int) -> Call[None]:
    return Call(lambda _: None, commands=(("DEL", *(f"{stem}:{n}" for n in range(chunks))),))
