"""Admits rollouts and walks them: claim, walk, payload, commit. One engine per worker, on one asyncio loop."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Any, TypeVar

from polarq.contracts.rollout import Boundary, Outcome, RolloutResult, RolloutState, RolloutSummary
from polarq.contracts.task import Task, split_rollout_id
from polarq.errors import ArtifactsUnavailable
from polarq.ledger import Claim, Refused, Released
from polarq.ledger.calls import Call
from polarq.ledger.control import early_stop_of
from polarq.ledger.records import UnreadableClaim
from polarq_worker.access import RecordLost
from polarq_worker.collected import settle
from polarq_worker.commit import Finished, commit, summary_of
from polarq_worker.early_stop import stopped_early, was_told_to_stop
from polarq_worker.lease import Lease, steady_s
from polarq_worker.outcomes import one_line, worth_replacing
from polarq_worker.services import Services
from polarq_worker.walk import LeaseLost, Walk

log = logging.getLogger("polarq.worker.engine")

T = TypeVar("T")

_CANCEL_AGAIN_S = 0.5


class Stop(StrEnum):
    """Why a running rollout is stopped from outside."""

    CANCEL = "cancel"
    """Somebody asked: commit it as cancelled."""
    LOST = "lost"
    """Its lease went to somebody else: discard everything."""
    RELEASE = "release"
    """This worker is leaving: give it back to the queue, uncounted."""


class Held:
    """A rollout this worker has claimed, and its walk."""

    def __init__(self, claim: Claim, lease: Lease, walk: Walk) -> None:
        self.claim = claim
        self.lease = lease
        self.stopped: Stop | None = None
        self.walk = walk
        self.task = asyncio.create_task(walk.run(), name=f"rollout {claim.rollout_id}")

    def stop(self, why: Stop) -> None:
        """Stops it once; a second reason changes nothing."""
        if self.stopped is None:
            self.stopped = why
            self._cancel()

    def _cancel(self) -> None:
        # Again until it is heard: on Python 3.11 `asyncio.wait_for`, which redis-py sends through, loses a cancellation
        # that comes in the moment its work ends.
        if not self.task.done() and not self.walk.ending:
            self.task.cancel()
            asyncio.get_running_loop().call_later(_CANCEL_AGAIN_S, self._cancel)


@dataclass(frozen=True, slots=True)
class Ended:
    """A rollout that this worker brought to its visible end."""

    result: RolloutSummary
    rollout_id: str
    task_id: str
    finished: bool
    """It was the last one of its task."""


class Engine:
    """See the module."""

    def __init__(self, services: Services) -> None:
        self.services = services
        self.held: dict[str, Held] = {}
        self.stopping = False
        self.idle = asyncio.Event()
        self.idle.set()

    @property
    def leases(self) -> list[tuple[str, int]]:
        """(rollout_id, token) of everything held."""
        return [(held.claim.rollout_id, held.claim.token) for held in self.held.values()]

    async def run(self, rollout_id: str, job_id: str) -> Ended | None:
        """Runs what one doorbell is for to its end: the rollout that stands first in line here, which need not be the
        one it names. None: there was nothing to do, or the rollout is no longer ours.

        Cancelling this cancels the rollout (or gives it back, when the worker is stopping).
        """
        services = self.services
        calls = services.ledger.calls
        lease_s = services.topology.gateway.lease_s
        call = calls.claim(rollout_id, services.node.id, lease_s, job_id, services.place)
        # The first of what may be several tries: the one whose answer was lost may be the one that was granted.
        lease = Lease(lease_s, steady_s())
        try:
            claim, unwanted = await to_its_end(self.insist(call))
        except UnreadableClaim as exc:
            return (await to_its_end(self._refuse(exc)))[0]
        if isinstance(claim, Refused):
            log.info("rollout %s: nothing to do (%s %s)", rollout_id, claim.reason, claim.detail)
            return None
        rollout_id = claim.rollout_id
        if (forgotten := self.held.get(rollout_id)) is not None:
            # Redis lost the claim of an attempt that still runs here, in a failover.
            forgotten.stop(Stop.LOST)
        held = Held(claim, lease, Walk(claim, services, lease))
        self.held[rollout_id] = held
        self.idle.clear()
        if unwanted:
            held.stop(Stop.RELEASE if self.stopping else Stop.CANCEL)
        try:
            result = await self._walked(held)
            if result is None or isinstance(result, Ended):
                await to_its_end(self._settle(claim, taken=False))
                return result
            # An end is committed, whoever wants this job gone now.
            ended = (await to_its_end(self._commit(claim, result)))[0]
            await to_its_end(self._settle(claim, taken=ended is not None))
            return ended
        finally:
            if self.held.get(rollout_id) is held:
                del self.held[rollout_id]
            if not self.held:
                self.idle.set()

    async def _settle(self, claim: Claim, *, taken: bool) -> None:
        """Files of its sandbox are its result's, or nobody's."""
        services = self.services
        scratch = services.collecting(claim.rollout_id, claim.token)
        try:
            await asyncio.to_thread(settle, scratch, services.artifacts, claim.rollout_id, claim.token, taken=taken)
        except ArtifactsUnavailable as exc:
            log.warning("rollout %s: files of a result that was not taken stay: %s", claim.rollout_id, exc)

    async def _refuse(self, unreadable: UnreadableClaim) -> Ended | None:
        """A task that nobody here can read ends with that, once, and is not tried until its attempts are over."""
        rollout_id, why = unreadable.rollout_id, one_line(str(unreadable))
        log.error("rollout %s: %s", rollout_id, why)
        outcome = Outcome(state=RolloutState.FAILED, boundary=Boundary.TASK, reason="unreadable_task", message=why)
        summary = RolloutSummary(outcome=outcome)
        done = await self.insist(self.services.ledger.calls.commit(rollout_id, unreadable.token, summary))
        task_id = split_rollout_id(rollout_id)[0]
        return Ended(summary, rollout_id, task_id, done.finished) if done.won else None

    async def _walked(self, held: Held) -> RolloutResult | Ended | None:
        """The walk's result; None when it must not be committed, and `Ended` when the ledger has ended it already."""
        claim = held.claim
        while True:
            try:
                result = await asyncio.shield(held.task)
                break
            except asyncio.CancelledError:
                # Either this job was cancelled (revoke, cold stop), or the walk was, which it turns into a result.
                if held.task.done() and held.task.cancelled():
                    result = _never_began(claim)
                    break
                held.stop(Stop.RELEASE if self.stopping else Stop.CANCEL)
            except LeaseLost:
                log.warning("rollout %s: its lease went to another worker; this attempt is discarded", claim.rollout_id)
                return None
            except RecordLost as exc:
                log.warning("rollout %s: %s; it is run again", claim.rollout_id, exc)
                again = self._give_back(claim, _never_began(claim), counted=True, reason="record lost")
                return (await to_its_end(again))[0]
        if held.stopped is Stop.LOST:
            log.warning("rollout %s: its lease went to another worker; this attempt is discarded", claim.rollout_id)
            return None
        if held.stopped is Stop.RELEASE and result.outcome.state is RolloutState.CANCELLED:
            return (await to_its_end(self._give_back(claim, result)))[0]
        if held.stopped is None and worth_replacing(claim, result.outcome):
            why = f"replaced: {result.outcome.ending.value} ({result.outcome.message})"
            log.warning("rollout %s: attempt %d is %s", claim.rollout_id, claim.attempt, why)
            return (await to_its_end(self._give_back(claim, result, counted=True, reason=why)))[0]
        return result

    async def _give_back(
        self, claim: Claim, result: RolloutResult, *, counted: bool = False, reason: str = "worker stopping"
    ) -> Ended | None:
        """One that was told to stop meanwhile has ended with that."""
        calls = self.services.ledger.calls
        release = calls.release(claim.rollout_id, claim.token, counted=counted, reason=reason)
        released = await self.insist(release)
        log.info("rollout %s: given back: %s", claim.rollout_id, released or "it was not ours any more")
        if released is Released.CANCELLED:
            return Ended(summary_of(result), claim.rollout_id, claim.task.task_id, finished=False)
        await self.services.ring(claim.task, claim.rollout_id)
        return None

    async def _commit(self, claim: Claim, result: RolloutResult) -> Ended | None:
        """Kept on this disk until the ledger has answered, so that a worker that dies here has still finished."""
        services = self.services
        stop = None
        if was_told_to_stop(result):
            stop = await self.insist(early_stop_of(services.ledger.calls.keys, claim.rollout_id))
        if stop is not None:
            result = stopped_early(result, stop)
        finished = await asyncio.to_thread(Finished.encode, claim, result)
        if stop is not None:
            finished = replace(finished, summary=finished.summary.model_copy(update={"early_stop": stop}))
        kept = await asyncio.to_thread(services.spool.keep, finished)
        done = await commit(finished, services.ledger, services.patience)
        if kept is not None:
            await asyncio.to_thread(services.spool.drop, kept)
        if not done.won:
            return None
        if done.stopping:
            services.tell(done.stopping)
        log.info("rollout %s: %s", claim.rollout_id, _line(finished.summary))
        return Ended(
            result=finished.summary,
            rollout_id=claim.rollout_id,
            task_id=claim.task.task_id,
            finished=done.finished,
        )

    def without_sandbox(self) -> list[Task]:
        """Tasks of rollouts that wait to be prepared, in order."""
        return [held.claim.task for held in self.held.values() if held.walk.waits_for_sandbox]

    async def insist(self, call: Call[T]) -> T:
        """Carries out a call, again and again while the ledger does not answer."""
        return await self.services.patience.insist(self.services.ledger, call)

    def stop_all(self, why: Stop) -> None:
        for held in list(self.held.values()):
            held.stop(why)


async def to_its_end(work: Coroutine[Any, Any, T]) -> tuple[T, bool]:
    """The result of `work`, which no cancellation of the caller interrupts, and whether there was one."""
    task = asyncio.ensure_future(work)
    cancelled = False
    while True:
        try:
            return await asyncio.shield(task), cancelled
        except asyncio.CancelledError:
            if task.done():
                return task.result(), True
            cancelled = True


def _never_began(claim: Claim) -> RolloutResult:
    return RolloutResult(
        rollout_id=claim.rollout_id,
        task_id=claim.task.task_id,
        run_id=claim.task.run_id,
        index=int(claim.rollout_id.rpartition(".")[2]),
        attempt=claim.attempt,
        policy_version=claim.policy_version,
        losses=list(claim.losses),
        outcome=Outcome(
            state=RolloutState.CANCELLED,
            boundary=Boundary.CONTROL,
            reason="cancelled",
            message="cancelled before its first stage",
        ),
        metadata=claim.task.metadata,
    )


def _line(summary: RolloutSummary) -> str:
    outcome = summary.outcome
    reward = "no reward" if summary.reward is None else f"reward {summary.reward:g}"
    why = "" if not outcome.message else f" ({outcome.boundary.value}: {outcome.message})"
    return f"{outcome.state.value}, {reward}, {summary.calls} calls, {summary.sampled_tokens} sampled tokens{why}"


def as_job_result(ended: Ended) -> dict[str, Any]:
    """What Celery and Flower show of a finished job: no tokens, no texts of the task."""
    return {
        "rollout_id": ended.rollout_id,
        "state": ended.result.outcome.state.value,
        "boundary": ended.result.outcome.boundary.value,
        "reward": ended.result.reward,
    }


__all__ = ["Ended", "Engine", "Held", "Stop", "as_job_result"]
