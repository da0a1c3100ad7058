"""Sessions: what a harness's secret opens, remembered while its rollout runs.

Redis decides whether a secret is good; a yes is believed for `RECHECK_S`, so that a closed session costs the engine
little, and the record itself is refused by Redis from the first moment on.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from redis.asyncio import Redis

from polarq.contracts.completion import Completion
from polarq.errors import GrantRefused, LedgerUnavailable, PayloadCorrupt
from polarq.ledger.keys import Keys
from polarq.store.completions import CompletionLog, read_completions
from polarq.store.grants import GrantLookup, GrantSpec, digest_of
from polarq_proxy.endpoints import Endpoint
from polarq_proxy.exact.context import ExactContext
from polarq_proxy.faults import CallFault, FaultKind
from polarq_proxy.repeats import Repeats

if TYPE_CHECKING:
    from polarq_proxy.flight import Flight

RECHECK_S = 2.0
IDLE_S = 3600.0
SWEEP_S = 60.0
MAX_FAILURES = 3
"""How often one and the same request may make the engine fail before it is answered as one that never works."""
_REMEMBERED = 64
LONGEST_PACING_S = 30.0
"""How long a call is held back because its rollout asks too often; beyond that it is told to come again."""
_MINUTE_S = 60.0


@dataclass(slots=True)
class Session:
    """One attempt of one rollout, as this proxy sees it."""

    spec: GrantSpec
    secret: str = field(repr=False)
    next_seq: int
    checked_at: float
    ends_at: float | None = None
    """When its rollout ends, by this machine's monotonic clock; the server's clock decided. None: it has no end."""
    endpoint: Endpoint | None = None
    repeats: Repeats = field(default_factory=Repeats)
    exact: ExactContext = field(default_factory=ExactContext, repr=False)
    sampled_tokens: int = 0
    promised_tokens: int = 0
    """What calls under way may still sample, where the rollout's tokens are limited."""
    made_anew: int = 0
    """Calls that an abort made twice: they count once."""
    begun: deque[float] = field(default_factory=deque)
    """When its calls of the last minute began, or will begin."""
    earlier: list[Completion] = field(default_factory=list, repr=False)
    """What an earlier process recorded, until exact mode has read it."""
    restored: bool = True
    """What an earlier process recorded of it is known here."""
    restoring: asyncio.Lock = field(default_factory=asyncio.Lock, repr=False)
    failures: dict[str, int] = field(default_factory=dict)
    """Request digest -> how often the engine failed at it."""

    def reserve(self, calls: int) -> int:
        """The first of `calls` sequence numbers. Raises `CallFault` beyond the rollout's limit."""
        limit = self.spec.rules.max_calls
        if limit is not None and self.next_seq - self.made_anew + calls > limit:
            raise CallFault(FaultKind.TOO_MANY_CALLS, f"this rollout may make {limit} model calls, and made them")
        budget = self.spec.rules.max_sampled_tokens
        if budget is not None and self.sampled_tokens + self.promised_tokens >= budget:
            text = f"this rollout may sample {budget} tokens, and sampled them"
            raise CallFault(FaultKind.TOO_MANY_CALLS, text)
        first, self.next_seq = self.next_seq, self.next_seq + calls
        return first

    def reserve_again(self, calls: int) -> int:
        """Numbers for a call that must be made anew: what the rollout may ask is not made smaller by it."""
        first, self.next_seq = self.next_seq, self.next_seq + calls
        self.made_anew += calls
        return first

    def wait_s(self) -> float:
        """How long the next call must wait to keep the rollout's rate; it is counted. Raises `CallFault`."""
        rate = self.spec.rules.max_calls_per_minute
        if rate is None:
            return 0.0
        now, begun = time.monotonic(), self.begun
        while begun and begun[0] <= now - _MINUTE_S:
            begun.popleft()
        at = now if len(begun) < rate else max(now, begun[-rate] + _MINUTE_S)
        if at - now > LONGEST_PACING_S:
            text = f"this rollout may make {rate} model calls a minute"
            raise CallFault(FaultKind.TOO_FAST, text, retry_after_s=at - now)
        begun.append(at)
        return at - now

    def time_left_s(self) -> float | None:
        """Until its rollout's deadline; None: it has none. Raises `CallFault` when that is past."""
        if self.ends_at is None:
            return None
        left = self.ends_at - time.monotonic()
        if left <= 0:
            raise CallFault(FaultKind.NO_SESSION, "the rollout's time is over; nothing more will be answered here")
        return left

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
        self._lookup = GrantLookup(redis, keys)
        self._known: dict[str, Session] = {}
        self._swept_at = float("-inf")

    def under_way(self) -> list[Flight]:
        return [flight for session in self._known.values() for flight in session.repeats.under_way()]

    def report(self) -> list[dict[str, Any]]:
        """For an operator: no secret is in it."""
        return [
            {
                "rollout_id": session.spec.rollout_id,
                "attempt": session.spec.attempt,
                "calls": session.next_seq,
                "sampled_tokens": session.sampled_tokens,
                "under_way": len(session.repeats.under_way()),
                "engine": session.endpoint.spec.base_url if session.endpoint is not None else None,
            }
            for session in self._known.values()
        ]

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
            grant = await self._lookup.read(secret)
        except GrantRefused as exc:
            self.drop(secret)
            raise CallFault(FaultKind.NO_SESSION, f"{exc}; nothing more will be answered here") from None
        except LedgerUnavailable as exc:
            raise CallFault(FaultKind.STORE_DOWN, f"the session cannot be looked up now: {exc}") from exc
        # Another call of the same session may have been faster while this one waited for Redis.
        new = Session(grant.spec, secret, grant.next_seq, now, restored=grant.next_seq == 0)
        session = self._known.setdefault(name, new)
        session.next_seq = max(session.next_seq, grant.next_seq)
        session.checked_at = now
        session.ends_at = None if grant.left_s is None else time.monotonic() + grant.left_s
        self._sweep(now)
        if not session.restored:
            await self._restore(session)
        return session

    async def recorded(self, session: Session) -> list[Completion]:
        """Everything that is recorded of a session. Raises `CallFault`."""
        spec = session.spec
        try:
            return await read_completions(self._redis, self._keys, spec.rollout_id, spec.attempt, spec.token)
        except (LedgerUnavailable, PayloadCorrupt) as exc:
            raise CallFault(FaultKind.STORE_DOWN, f"the session's record cannot be read now: {exc}") from exc

    async def _restore(self, session: Session) -> None:
        async with session.restoring:
            if session.restored:
                return
            completions = await self.recorded(session)
            session.repeats.restore(completions)
            session.sampled_tokens = sum(len(completion.sampled_ids) for completion in completions)
            session.earlier = completions
            session.restored = True

    def drop(self, secret: str) -> None:
        """The session is over."""
        session = self._known.pop(digest_of(secret), None)
        if session is not None:
            for flight in session.repeats.under_way():
                flight.cancel()
            session.leave()
            self._completions.forget(session.spec)

    def _sweep(self, now: float) -> None:
        if now - self._swept_at < SWEEP_S:
            return
        self._swept_at = now
        for session in [known for known in self._known.values() if now - known.checked_at > IDLE_S]:
            self.drop(session.secret)
