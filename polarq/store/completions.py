"""Captured completions of an attempt: appended while its grant is open, read back whole and in order.

Each record is one element of a Redis list. Its prompt is (base, shared, new ids): the first `shared` of the prompt and
sampled ids of the call with the id `base`, then the new ids; messages and tools likewise. So a session
takes space for its tokens, not for the square of its turns. A base always stands earlier in the same list.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Self, cast

import msgspec
from pydantic import ValidationError
from redis.asyncio import Redis

from polarq.contracts.completion import Completion
from polarq.errors import GrantRefused, PayloadCorrupt
from polarq.ledger.keys import Keys
from polarq.store.atomic import Script, ledger_errors
from polarq.store.codec import pack, unpack
from polarq.store.grants import GrantSpec, digest_of
from polarq.store.prefixes import Ids, Prefixes, as_ids

KEEP_S = timedelta(days=7).total_seconds()
MAX_SESSIONS = 4096
_SPLIT = {"prompt_ids", "messages", "tools"}

_APPEND = Script("""
-- KEYS grant, completions; ARGV next_seq, keep_ms, record...
local state = redis.call('HGET', KEYS[1], 'state')
if state ~= 'open' then return state or 'unknown' end
for i = 3, #ARGV do redis.call('RPUSH', KEYS[2], ARGV[i]) end
redis.call('PEXPIRE', KEYS[2], ARGV[2])
if tonumber(redis.call('HGET', KEYS[1], 'next_seq') or 0) < tonumber(ARGV[1]) then
  redis.call('HSET', KEYS[1], 'next_seq', ARGV[1])
end
return 'ok'
""")


class CompletionLog:
    """Writes the records of many sessions. Remembers, per session, what is stored, to store only what is new.

    The memory is a saving, not a truth: a restarted process writes its next record in full. Records are kept
    `keep_s` seconds after the last one.
    """

    def __init__(self, redis: Redis, keys: Keys, keep_s: float = KEEP_S) -> None:
        self._redis = redis
        self._keys = keys
        self._keep_ms = int(keep_s * 1000)
        self._sessions: OrderedDict[tuple[str, int, int], _Stored] = OrderedDict()

    async def append(self, completion: Completion, spec: GrantSpec, secret: str) -> None:
        """Records one call. Raises `GrantRefused` when the grant is not open, `LedgerUnavailable`."""
        await self.extend([completion], spec, secret)

    async def extend(self, completions: Sequence[Completion], spec: GrantSpec, secret: str) -> None:
        """Records several calls (the choices of one answer) in one step: all or none.

        Fills in `parent` of a record that has none, from what the session recorded before.
        """
        stored = self._stored(spec)
        entries = [_Entry.of(completion) for completion in completions]
        records = [pack(stored.record(entry)) for entry in entries]
        answer = await _APPEND.run(
            self._redis,
            [self._keys.grant(digest_of(secret)), self._keys.completions(spec.rollout_id, spec.attempt, spec.token)],
            [max(completion.seq for completion in completions) + 1, self._keep_ms, *records],
        )
        if answer != b"ok":
            self.forget(spec)
            raise GrantRefused("this session is closed" if answer == b"closed" else "this session has expired")
        for entry in entries:
            stored.add(entry)

    def forget(self, spec: GrantSpec) -> None:
        """Frees what is remembered of a session."""
        self._sessions.pop((spec.rollout_id, spec.attempt, spec.token), None)

    def _stored(self, spec: GrantSpec) -> _Stored:
        key = (spec.rollout_id, spec.attempt, spec.token)
        stored = self._sessions.setdefault(key, _Stored())
        self._sessions.move_to_end(key)
        while len(self._sessions) > MAX_SESSIONS:
            self._sessions.popitem(last=False)
        return stored


async def read_completions(redis: Redis, keys: Keys, rollout_id: str, attempt: int, token: int) -> list[Completion]:
    """The calls of an attempt, whole, in order of arrival.

    Raises `PayloadCorrupt` for a damaged record, `LedgerUnavailable`.
    """
    with ledger_errors():
        records = cast("list[bytes]", await redis.lrange(keys.completions(rollout_id, attempt, token), 0, -1))
    found: dict[str, Completion] = {}
    for record in records:
        completion = _whole(unpack(record), found)
        # Redis may have taken a record whose confirmation was lost, so that it was sent again.
        found.setdefault(completion.completion_id, completion)
    return _numbered(list(found.values()))


def _numbered(completions: list[Completion]) -> list[Completion]:
    """In order of arrival, each with a sequence number of its own.

    Two proxies that served one session one after the other (the first was still ending calls when the second began)
    may have given out the same number; then the record that came later moves to the end.
    """
    ordered: dict[int, Completion] = {}
    late = []
    for completion in completions:
        if completion.seq in ordered:
            late.append(completion)
        else:
            ordered[completion.seq] = completion
    for completion in late:
        seq = max(ordered) + 1
        ordered[seq] = completion.model_copy(update={"seq": seq})
    return [ordered[seq] for seq in sorted(ordered)]


@dataclass(frozen=True, slots=True)
class _Entry:
    """A completion and what is compared of it."""

    completion: Completion
    prompt: Ids
    sampled: Ids
    messages: list[bytes]
    tools: bytes | None

    @classmethod
    def of(cls, completion: Completion) -> Self:
        return cls(
            completion,
            as_ids(completion.prompt_ids),
            as_ids(completion.sampled_ids),
            [_digest(message) for message in completion.messages],
            _digest(completion.tools) if completion.tools else None,
        )


class _Stored:
    """What the records of one session already hold."""

    def __init__(self) -> None:
        self._prefixes = Prefixes()
        self._tools: dict[bytes, str] = {}

    def record(self, entry: _Entry) -> dict[str, Any]:
        completion = entry.completion
        ids = self._prefixes.shared_ids(entry.prompt)
        messages = self._prefixes.shared_messages(entry.messages)
        tools_base = self._tools.get(entry.tools) if entry.tools else None
        fields = completion.model_dump(mode="json", exclude=_SPLIT)
        if completion.parent is None:
            fields["parent"] = self._prefixes.parent(entry.prompt)
        return {
            "completion": fields,
            "prompt": {"base": ids.base, "shared": ids.length, "new_ids": completion.prompt_ids[ids.length :]},
            "messages": {
                "base": messages.base,
                "shared": messages.length,
                "new": completion.messages[messages.length :],
            },
            "tools": {"base": tools_base, "new": completion.tools if tools_base is None else None},
        }

    def add(self, entry: _Entry) -> None:
        call = entry.completion.completion_id
        self._prefixes.add(call, entry.completion.seq, entry.prompt, entry.sampled, entry.messages)
        if entry.tools is not None:
            self._tools.setdefault(entry.tools, call)


def _digest(value: Any) -> bytes:
    return hashlib.blake2b(msgspec.json.encode(value), digest_size=16).digest()


def _whole(record: Any, earlier: dict[str, Completion]) -> Completion:
    try:
        prompt, messages, tools = record["prompt"], record["messages"], record["tools"]
        prompt_ids, old_messages, old_tools = [], [], None
        if prompt["base"] is not None:
            base = earlier[prompt["base"]]
            prompt_ids = (base.prompt_ids + base.sampled_ids)[: prompt["shared"]]
        if messages["base"] is not None:
            old_messages = earlier[messages["base"]].messages[: messages["shared"]]
        if tools["base"] is not None:
            old_tools = earlier[tools["base"]].tools
        return Completion.model_validate(
            {
                **record["completion"],
                "prompt_ids": [*prompt_ids, *prompt["new_ids"]],
                "messages": [*old_messages, *messages["new"]],
                "tools": tools["new"] if tools["base"] is None else old_tools,
            }
        )
    except ValidationError as exc:
        raise PayloadCorrupt(f"a captured call is not valid: {exc.errors()[0]['msg']}") from exc
    except (KeyError, TypeError) as exc:
        raise PayloadCorrupt(f"a captured call is incomplete: {exc!r}") from exc
