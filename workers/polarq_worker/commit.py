"""How an attempt's result becomes the visible one: payload first, then the compare-and-set."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import dataclass

from polarq.contracts.rollout import Boundary, Outcome, RolloutResult, RolloutState, RolloutSummary
from polarq.errors import PayloadMissing
from polarq.ledger import AsyncLedger, Claim, Committed
from polarq.store.payloads import drop_payload, encode_result, is_stored, put_payload
from polarq_worker.outcomes import what
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
        """Takes as long as compressing takes; to be called in a thread.

        A plug-in may have put in what cannot be written down. Then the rollout has failed with that and keeps the rest.
        """
        try:
            return cls._encoded(claim, result)
        except Exception as exc:
            log.exception("rollout %s: its result cannot be written down", claim.rollout_id)
            text = what(exc).encode("ascii", "backslashreplace").decode()
        for left in _unwritable(result, text):
            try:
                return cls._encoded(claim, left)
            except Exception:
                log.warning("rollout %s: nor without its reward and its harness's report", claim.rollout_id)
        raise AssertionError("a bare result can be written down")

    @classmethod
    def _encoded(cls, claim: Claim, result: RolloutResult) -> Finished:
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
    summary = finished.summary.model_copy(update={"payload": ref})
    call = ledger.calls.commit(rollout_id, token, summary)

    async def committed() -> Committed:
        """One try. What the last one wrote may be gone: a failover of Redis forgets its last moments."""
        while True:
            if not await ledger.do(is_stored(ref)):
                for write in writes:
                    await ledger.do(write)
            try:
                return await ledger.do(call)
            except PayloadMissing:
                log.warning("rollout %s: its payload went before it was committed; it is written again", rollout_id)

    done = await patience.until_answered(committed)
    if not done.won:
        log.warning("rollout %s: a late commit was refused (%s)", rollout_id, done.detail)
        await patience.insist(ledger, drop_payload(ref))
    return done


def _unwritable(result: RolloutResult, why: str) -> Iterator[RolloutResult]:
    """What may be left of a result that cannot be written down: first with what was sampled, then without."""
    outcome = Outcome(state=RolloutState.FAILED, boundary=Boundary.STORE, reason="result_not_storable", message=why)
    left = result.model_copy(update={"outcome": outcome, "reward": None, "harness": None})
    yield left
    yield left.model_copy(update={"trajectory": None, "versions": [], "metadata": {}})


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
        fidelity=fidelity.counts() if fidelity else {},
        versions=result.versions,
        timing=result.timing,
    )
