"""Session secrets: what lets a harness's model calls into one rollout's record.

A secret is shown once, to whoever opens the grant; Redis holds only its SHA-256. Closing is atomic with recording:
`CompletionLog` appends only while the grant is open, so that a harness that outlives its rollout cannot change what
was built from it.
"""

from __future__ import annotations

import hashlib
import secrets
from dataclasses import dataclass
from functools import lru_cache

from pydantic import Field, ValidationError
from redis.asyncio import Redis

from polarq.contracts.base import Contract
from polarq.contracts.specs import ModelRules
from polarq.errors import GrantRefused
from polarq.ledger.keys import Keys
from polarq.store.atomic import Script, ScriptLine

SECRET_PREFIX = "pq-"
CLOSED_KEEP_S = 3600

_NOW = "local t = redis.call('TIME') local now = t[1] * 1000 + math.floor(t[2] / 1000)\n"

_OPEN = Script(
    _NOW
    + """
local token = redis.call('HGET', KEYS[2], 'token')
if token and token ~= ARGV[5] then return 0 end
redis.call('HSET', KEYS[1], 'state', 'open', 'spec', ARGV[1], 'next_seq', 0)
if ARGV[3] ~= '' then redis.call('HSET', KEYS[1], 'ends_ms', string.format('%d', now + tonumber(ARGV[3]))) end
redis.call('PEXPIRE', KEYS[1], ARGV[2])
-- Whoever takes the rollout back closes it.
if token then redis.call('HSET', KEYS[2], 'grant', ARGV[4]) end
return 1
"""
)

_READ = Script(
    _NOW
    + """
local found = redis.call('HMGET', KEYS[1], 'state', 'spec', 'next_seq', 'ends_ms')
if found[4] then found[4] = tonumber(found[4]) - now end
return found
"""
)

_CLOSE = Script("""
if redis.call('EXISTS', KEYS[1]) == 0 then return {} end
redis.call('HSET', KEYS[1], 'state', 'closed')
local left = redis.call('PTTL', KEYS[1])
local keep = tonumber(ARGV[1])
if left < 0 or left > keep then redis.call('PEXPIRE', KEYS[1], keep) end
return redis.call('HMGET', KEYS[1], 'next_seq', 'faults', 'last_fault', 'replays', 'problem', 'problem_seq')
""")

_REPLAY = Script("""
if redis.call('HGET', KEYS[1], 'state') ~= 'open' then return 0 end
return redis.call('HINCRBY', KEYS[1], 'replays', 1)
""")

_FAULT = Script("""
if redis.call('HGET', KEYS[1], 'state') ~= 'open' then return 0 end
if tonumber(ARGV[2]) >= tonumber(redis.call('HGET', KEYS[1], 'problem_seq') or -1) then
  redis.call('HSET', KEYS[1], 'problem', ARGV[1], 'problem_seq', ARGV[2])
end
if ARGV[3] == '' then return 0 end
redis.call('HSET', KEYS[1], 'last_fault', ARGV[1])
return redis.call('HINCRBY', KEYS[1], 'faults', 1)
""")


class SessionRules(ModelRules):
    """The task's rules, and what only the node knows."""

    time_s: float | None = None
    """How long after the grant was opened the rollout ends, by the server's clock: no call runs longer."""
    harness: str = ""
    """Name of the harness, for the rules that tell its side traffic."""


class GrantSpec(Contract):
    """What a secret opens: one attempt of one rollout on one node."""

    rollout_id: str
    task_id: str
    attempt: int = Field(ge=1)
    token: int
    """Fencing token of the claim."""
    node_id: str
    model: str = ""
    """Model name to ask the engine for; blank: the node's."""
    run_id: str = ""
    """The task's: its calls can be held back by themselves."""
    rules: SessionRules = SessionRules()


@dataclass(frozen=True, slots=True)
class GrantUse:
    """What was done under a grant."""

    calls: int = 0
    """Sequence numbers given out to recorded calls (the highest one, plus one)."""
    faults: int = 0
    """Calls the engine failed to answer."""
    last_fault: str = ""
    """The last one's kind and text, in one line."""
    replays: int = 0
    """Calls that repeated an earlier one and were answered without sampling."""
    known: bool = True
    """False: there is no such grant (any more)."""
    last_problem: str = ""
    """What the newest call that had no answer was told instead, the engine's failures included: kind and text."""
    last_problem_seq: int = -1
    """The number that its record would have had."""


@dataclass(frozen=True, slots=True)
class OpenGrant:
    spec: GrantSpec
    next_seq: int
    """The first sequence number that no recorded call has."""
    left_s: float | None = None
    """Until its rollout ends; None: it has no end. Negative: it is past."""


def digest_of(secret: str) -> str:
    """What Redis knows a secret by."""
    return hashlib.sha256(secret.encode("utf-8", "surrogateescape")).hexdigest()


async def open_grant(redis: Redis, keys: Keys, spec: GrantSpec, ttl_s: float) -> str:
    """A new secret (URL-safe, 256 bits) that opens `spec` for `ttl_s` seconds, or until the ledger takes the attempt
    back. Raises `LedgerUnavailable`, and `GrantRefused` for an attempt that is over already."""
    secret = SECRET_PREFIX + secrets.token_urlsafe(32)
    digest = digest_of(secret)
    time_s = spec.rules.time_s
    ends_in: int | str = "" if time_s is None else int(time_s * 1000)
    arguments: list[str | bytes | int | float] = [spec.model_dump_json(), max(1, int(ttl_s * 1000)), ends_in]
    arguments += [digest, spec.token]
    if not await _OPEN.run(redis, [keys.grant(digest), keys.rollout(spec.rollout_id)], arguments):
        raise GrantRefused(f"this attempt of rollout '{spec.rollout_id}' is over")
    return secret


async def read_grant(redis: Redis, keys: Keys, secret: str) -> OpenGrant:
    """What an open secret opens. Raises `GrantRefused` when it is unknown, closed or expired, `LedgerUnavailable`."""
    return _opened(*await _READ.run(redis, [keys.grant(digest_of(secret))], []))


class GrantLookup:
    """`read_grant` for a process that looks after many sessions: those asked for at once share a round trip."""

    def __init__(self, redis: Redis, keys: Keys) -> None:
        self._line = ScriptLine(redis, _READ)
        self._keys = keys

    async def read(self, secret: str) -> OpenGrant:
        """Raises `GrantRefused`, `LedgerUnavailable`."""
        return _opened(*await self._line.run([self._keys.grant(digest_of(secret))], []))


def _opened(state: bytes | None, spec: bytes | None, next_seq: bytes | None, left_ms: int | None) -> OpenGrant:
    if state is None or spec is None:
        raise GrantRefused("this session is unknown or has expired")
    if state != b"open":
        raise GrantRefused("this session is closed")
    try:
        return OpenGrant(_spec(spec), int(next_seq or 0), None if left_ms is None else left_ms / 1000)
    except ValueError as exc:
        raise GrantRefused(f"this session's record cannot be read: {exc}") from exc


@lru_cache(maxsize=4096)
def _spec(data: bytes) -> GrantSpec:
    """A session is looked up every few seconds, and says the same each time."""
    try:
        return GrantSpec.model_validate_json(data)
    except ValidationError as exc:
        raise GrantRefused(f"this session's record cannot be read: {exc.errors()[0]['msg']}") from exc


async def close_grant(redis: Redis, keys: Keys, secret: str) -> GrantUse:
    """Closes it for good: no append succeeds after this returns. Closing twice, or an unknown one, is no error."""
    use = await _CLOSE.run(redis, [keys.grant(digest_of(secret))], [CLOSED_KEEP_S * 1000])
    if not use:
        return GrantUse(known=False)
    calls, faults, last_fault, replays, problem, problem_seq = use
    return GrantUse(
        int(calls or 0),
        int(faults or 0),
        (last_fault or b"").decode("utf-8", "replace"),
        int(replays or 0),
        last_problem=(problem or b"").decode("utf-8", "replace"),
        last_problem_seq=-1 if problem_seq is None else int(problem_seq),
    )


async def note_problem(redis: Redis, keys: Keys, secret: str, line: str, seq: int, *, of_engine: bool) -> None:
    """Remembers what a call was told in place of an answer. One that the engine failed to answer (`of_engine`) is
    counted, so that the rollout's outcome can name the model as its boundary."""
    await _FAULT.run(redis, [keys.grant(digest_of(secret))], [line[:500], seq, "1" if of_engine else ""])


async def note_replay(redis: Redis, keys: Keys, secret: str) -> None:
    """Counts a call that was answered without sampling, for the trajectory's fidelity record."""
    await _REPLAY.run(redis, [keys.grant(digest_of(secret))], [])
