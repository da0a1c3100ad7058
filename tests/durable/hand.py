"""A trainer's and a worker's hand: submits to the ledger and ends rollouts there, without Celery."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from threading import Thread
from typing import Any

from polarq.client import Client
from polarq.contracts.rollout import RolloutResult, RolloutState, RolloutSummary
from polarq.contracts.task import Task
from polarq.ledger import Calls, Claim, Ledger
from polarq.settings import Settings
from polarq.store.payloads import encode_result, put_payload
from polarq.topology import Topology
from tests.http.rig import a_result, a_task


class Hand:
    """Works on one ledger."""

    def __init__(self, ledger: Ledger) -> None:
        self.ledger = ledger

    @property
    def calls(self) -> Calls:
        return self.ledger.calls

    def submit(self, task_id: str, samples: int = 1, **more: Any) -> None:
        self.ledger.do(self.calls.submit(Task.load(a_task(task_id, samples, **more)), task_id))

    def claim(self, rollout_id: str) -> Claim:
        claim = self.ledger.do(self.calls.claim(rollout_id, "node0", 60, "job"))
        assert isinstance(claim, Claim), claim
        return claim

    def end(
        self,
        rollout_id: str,
        *,
        state: RolloutState = RolloutState.COMPLETED,
        size: int = 3,
        claim: Claim | None = None,
    ) -> RolloutResult:
        """Claims a rollout and commits a result with one trace of `size` tokens, payload first."""
        claim = claim or self.claim(rollout_id)
        reward = 1.0 if state is RolloutState.COMPLETED else None
        result = a_result(claim, state, reward, random.Random(size).choices(range(150_000), k=size))
        data, raw = encode_result(result)
        keep_s = 2 * self.calls.keep_s
        ref, writes = put_payload(
            self.calls.keys, rollout_id, claim.attempt, claim.token, data, raw_bytes=raw, keep_s=keep_s
        )
        for write in writes:
            self.ledger.do(write)
        summary = RolloutSummary(outcome=result.outcome, reward=reward, calls=1, traces=1, payload=ref)
        assert self.ledger.do(self.calls.commit(rollout_id, claim.token, summary)).won
        return result

    def all_keys(self) -> set[str]:
        """Every key under the ledger's prefix."""
        return {key.decode() for key in self.ledger.redis.scan_iter(f"{self.calls.keys.prefix}:*", count=1000)}


def a_client(redis_url: str, topology: Topology) -> Client:
    return Client(topology, Settings.from_env({"POLARQ_REDIS_URL": redis_url}))


@contextmanager
def beside(work: Callable[[], None]) -> Iterator[None]:
    """Runs `work` in a thread; its failure fails the test."""
    failures: list[BaseException] = []

    def run() -> None:
        try:
            work()
        except BaseException as exc:
            failures.append(exc)

    thread = Thread(target=run, daemon=True)
    thread.start()
    yield
    thread.join(60)
    assert not thread.is_alive()
    if failures:
        raise failures[0]


def ids(results: Sequence[RolloutResult]) -> list[str]:
    return [result.rollout_id for result in results]
