"""Sessions: what a harness's secret opens, remembered while its rollout runs.

Redis decides whether a secret is good; a yes is believed for `RECHECK_S`, so that a closed session costs the engine
little, and the record itself is refused by Redis from the first moment on.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

from redis.asyncio import Redis

from polarq.errors import GrantRefused, LedgerUnavailable
from polarq.ledger.keys import Keys
from polarq.store.completions import CompletionLog
from polarq.store.grants import GrantSpec, digest_of, read_grant
from polarq_proxy.endpoints import Endpoint
from polarq_proxy.faults import CallFault, FaultKind

RECHECK_S = 2.0
IDLE_S = 3600.0
SWEEP_S = 60.0
MAX_FAILURES = 3
"""How often one and the same request may make the engine fail before it is answered as one that never works."""
_REMEMBERED = 64


@dataclass(slots=True)
class Session:
    """One attempt of one rollout, as this proxy sees it."""

    spec: GrantSpec
    secret: str = field(repr=False)
    next_seq: int
    checked_at: float
    endpoint: Endpoint | None = None
    failures: dict[str, int] = field(default_factory=dict)
    """Request digest -> how often the engine failed at it."""

    def reserve(self, calls: int) -> int:
        """The first of `calls` sequence numbers. Raises `CallFault` beyond the rollout's limit."""
        limit = self.spec.max_calls
        if limit is not None and self.next_seq + calls > limit:
            raise CallFault(FaultKind.TOO_MANY_CALLS, f"this rollout may make {limit} model calls, and made them")
        first, self.next_seq = self.next_seq, self.next_seq + calls
        return first

    def failed(self, digest: str) -> int:
        """Counts a failure of the engine at a request; returns how many there were."""
        count = self.failures.pop(digest, 0) + 1
        self.failures[digest] = count
        while len(self.failures) > _REMEMBERED:
            del self.failures[next(iter(self.failures))]
        return count

    def stale(self) -> None:
        """Its next call asks Redis again whether it is open."""
        self.checked_at = float("-inf")

    def use(self, endpoint: Endpoint) -> None:
        """From now on its calls go to `endpoint`."""
        if self.endpoint is not endpoint:
            self.leave()
            self.endpoint = endpoint
            endpoint.sessions += 1

    def leave(self) -> None:
        if self.endpoint is not None:
            self.endpoint.sessions -= 1
            self.endpoint = None


class Sessions:
    """Finds sessions by secret."""

    def __init__(self, redis: Redis, keys: Keys, completions: CompletionLog) -> None:
        self._redis = redis
        self._keys = keys
        self._completions = completions
        self._known: dict[str, Session] = {}
        self._swept_at = float("-inf")

    def __len__(self) -> int:
        return len(self._known)

    async def find(self, secret: str | None) -> Session:
        """The open session of that secret. Raises `CallFault`."""
        if not secret:
            text = "no session: use the base URL that was given to you (…/s/<session>/v1), or the session as API key"
            raise CallFault(FaultKind.NO_SESSION, text)
        name = digest_of(secret)
        now = asyncio.get_running_loop().time()
        session = self._known.get(name)
        if session is not None and now - session.checked_at < RECHECK_S:
            return session
        try:
            grant = await read_grant(self._redis, self._keys, secret)
        except GrantRefused as exc:
            self.drop(secret)
            raise CallFault(FaultKind.NO_SESSION, f"{exc}; nothing more will be answered here") from None
        except LedgerUnavailable as exc:
            raise CallFault(FaultKind.STORE_DOWN, f"the session cannot be looked up now: {exc}") from exc
        # Another call of the same session may have been faster while this one waited for Redis.
        session = self._known.setdefault(name, Session(grant.spec, secret, grant.next_seq, now))
        session.next_seq = max(session.next_seq, grant.next_seq)
        session.checked_at = now
        self._sweep(now)
        return session

    def drop(self, secret: str) -> None:
        """The session is over."""
        session = self._known.pop(digest_of(secret), None)
        if session is not None:
            session.leave()
            self._completions.forget(session.spec)

    def _sweep(self, now: float) -> None:
        if now - self._swept_at < SWEEP_S:
            return
        self._swept_at = now
        for session in [known for known in self._known.values() if now - known.checked_at > IDLE_S]:
            self.drop(session.secret)
