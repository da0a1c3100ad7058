"""Captured completions of an attempt: appended while its grant is open, read back whole and in order.

Each record is one element of a Redis list. Its prompt is (base, shared, new ids): the first `shared` of the prompt and
sampled ids of the call with the id `base`, then the new ids; messages and tools likewise, and of the other fields
those that last are those of the call `like`. So a session takes space for its tokens, not for the square of its turns.
A base always stands earlier in the same list.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, NamedTuple, cast

import msgspec
from pydantic import ValidationError
from redis.asyncio import Redis

from polarq.contracts.completion import Completion
from polarq.errors import GrantRefused, PayloadCorrupt
from polarq.ledger.calls import Call
from polarq.ledger.keys import Keys
from polarq.store.atomic import Script, ScriptLine, ledger_errors
from polarq.store.beginnings import Beginnings
from polarq.store.codec import pack_ready, packed_floats, packed_ids, unpack
from polarq.store.grants import GrantSpec, digest_of
from polarq.store.prefixes import NO_HISTORY, History, Message, Prefixes, Prompt
from polarq.store.token_text import text_of

KEEP_S = timedelta(days=7).total_seconds()
MAX_SESSIONS = 4096
MAX_REMEMBERED = 192 * 1024 * 1024
"""Bytes, over all sessions: the least recently used one is forgotten beyond that."""
LASTING = {
    "rollout_id", "dialect", "path", "streamed", "logprobs_mode", "grammar", "engine", "model_served",
    "model_requested", "exact", "exact_missed", "label", "side_kind", "incomplete", "untrainable", "finish_reason",
}  # fmt: skip
_SPLIT = {"prompt_ids", "sampled_ids", "logprobs", "messages", "tools", "parent"}

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


@dataclass(slots=True)
class Draft:
    """A call about to be recorded: a `Completion` whose long parts are already taken apart."""

    seq: int
    completion_id: str
    lasting: dict[str, str | bool | None]
    """Those fields of `Completion` that mostly stay the same from call to call."""
    fields: dict[str, Any]
    """Every other field that has no place of its own here (`seq` and `completion_id` too), JSON-able."""
    prompt: Prompt
    """As `CompletionLog.prompt` read it, with nothing recorded in between."""
    sampled_ids: Sequence[int]
    logprobs: Sequence[float | None]
    messages: list[Message]
    tools: list[dict[str, Any]] | None = None
    parent: int | None = None
    """None: what the prompt says."""


class CompletionLog:
    """Writes the records of many sessions. Remembers, per session, what is stored, to store only what is new.

    The memory is a saving, not a truth: a restarted process writes its next record in full. Records are kept
    `keep_s` seconds after the last one.
    """

    def __init__(self, redis: Redis, keys: Keys, keep_s: float = KEEP_S, *, replicas: int = 0) -> None:
        """`replicas`: how many must have a record before it counts as kept."""
        self._keys = keys
        self._keep_ms = b"%d" % int(keep_s * 1000)
        self._append = ScriptLine(redis, _APPEND, replicas=replicas)
        self._sessions: OrderedDict[tuple[str, int, int], _Stored] = OrderedDict()
        self._beginnings = Beginnings()
        self._size = 0

    async def append(self, completion: Completion, spec: GrantSpec, secret: str) -> None:
        """Records one call. Raises `GrantRefused` when the grant is not open, `LedgerUnavailable`."""
        await self.extend([completion], spec, secret)

    async def extend(self, completions: Sequence[Completion], spec: GrantSpec, secret: str) -> None:
        """Records several calls (the choices of one answer) in one step: all or none.

        Fills in `parent` of a record that has none, from what the session recorded before.
        """
        drafts = [
            Draft(
                seq=completion.seq,
                completion_id=completion.completion_id,
                lasting=completion.model_dump(mode="json", include=LASTING),
                fields=completion.model_dump(mode="json", exclude={*_SPLIT, *LASTING}),
                prompt=self.prompt(spec, text := text_of(completion.prompt_ids), 0, len(text)),
                sampled_ids=completion.sampled_ids,
                logprobs=completion.logprobs,
                messages=completion.messages,
                tools=completion.tools,
                parent=completion.parent,
            )
            for completion in completions
        ]
        await self.write(drafts, spec, secret)

    def prompt(self, spec: GrantSpec, data: bytes, begin: int, end: int) -> Prompt:
        """Reads the prompt's ids in `data[begin:end]`, JSON without its brackets. Raises `NotIds`."""
        prompt = self._stored(spec).prefixes.read(data, begin, end)
        if prompt.shared.length:
            return prompt
        # A session's first call, or that of an agent beside its first one.
        return msgspec.structs.replace(prompt, line=self._beginnings.line(prompt.line))

    def shared_messages(self, spec: GrantSpec, messages: list[Message]) -> list[Message]:
        """The same messages; those that are remembered, of this session or at the beginning of another one, are the
        remembered ones themselves."""
        stored = self._sessions.get(_name(spec))
        branch, shared = stored.prefixes.shared_messages(messages) if stored is not None else (None, 0)
        if branch is None:
            return self._beginnings.messages(messages)
        return [*branch.history.messages[:shared], *messages[shared:]]

    async def write(self, drafts: Sequence[Draft], spec: GrantSpec, secret: str) -> int:
        """Records calls in one step: all or none. Returns how many of them break: by their messages they go on from
        an earlier call, and their prompt does not start with its ids. Raises `GrantRefused` when the grant is not
        open, `LedgerUnavailable`."""
        stored = self._stored(spec)
        written = [stored.record(draft) for draft in drafts]
        next_seq = max(draft.seq for draft in drafts) + 1
        answer = await self._append.run(
            [self._keys.grant(digest_of(secret)), self._keys.completions(spec.rollout_id, spec.attempt, spec.token)],
            [b"%d" % next_seq, self._keep_ms, *(entry.record for entry in written)],
        )
        if answer != b"ok":
            self.forget(spec)
            raise GrantRefused("this session is closed" if answer == b"closed" else "this session has expired")
        for draft, entry in zip(drafts, written, strict=True):
            stored.add(draft, entry)
        self._weigh(spec, stored)
        return sum(entry.breaks for entry in written)

    def forget(self, spec: GrantSpec) -> None:
        """Frees what is remembered of a session."""
        stored = self._sessions.pop(_name(spec), None)
        if stored is not None:
            self._size -= stored.size

    def _stored(self, spec: GrantSpec) -> _Stored:
        name = _name(spec)
        stored = self._sessions.get(name)
        if stored is None:
            stored = self._sessions[name] = _Stored()
        self._sessions.move_to_end(name)
        while len(self._sessions) > MAX_SESSIONS:
            self._drop_oldest()
        return stored

    def _weigh(self, spec: GrantSpec, stored: _Stored) -> None:
        if self._sessions.get(_name(spec)) is not stored:
            return  # it was forgotten meanwhile
        size = stored.prefixes.size
        self._size += size - stored.size
        stored.size = size
        while self._size > MAX_REMEMBERED and len(self._sessions) > 1:
            self._drop_oldest()

    def _drop_oldest(self) -> None:
        _, stored = self._sessions.popitem(last=False)
        self._size -= stored.size


def _name(spec: GrantSpec) -> tuple[str, int, int]:
    return spec.rollout_id, spec.attempt, spec.token


async def read_completions(redis: Redis, keys: Keys, rollout_id: str, attempt: int, token: int) -> list[Completion]:
    """The calls of an attempt, whole, in order of arrival.

    Raises `PayloadCorrupt` for a damaged record, `LedgerUnavailable`.
    """
    with ledger_errors():
        records = cast("list[bytes]", await redis.lrange(keys.completions(rollout_id, attempt, token), 0, -1))
    return _read(records)


def captured(keys: Keys, rollout_id: str, attempt: int, token: int) -> Call[list[Completion]]:
    """`read_completions` as a call of the ledger."""
    return Call(
        lambda replies: _read(replies[0]), commands=(("LRANGE", keys.completions(rollout_id, attempt, token), 0, -1),)
    )


def _read(records: Sequence[bytes]) -> list[Completion]:
    found: dict[str, Completion] = {}
    fields: dict[str, Mapping[str, Any]] = {}
    for record in records:
        completion, own = _whole(unpack(record), found, fields)
        # Redis may have taken a record whose confirmation was lost, so that it was sent again.
        if completion.completion_id not in found:
            found[completion.completion_id] = completion
            fields[completion.completion_id] = own
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


class _Written(NamedTuple):
    """A call's record, and what is remembered once it is stored."""

    record: bytes
    history: History
    tools: bytes | None
    """What its tools are known by."""
    breaks: bool
    """It goes on from an earlier answer by its messages, and its prompt does not start with its ids."""


@dataclass(slots=True)
class _Stored:
    """What the records of one session already hold."""

    prefixes: Prefixes = field(default_factory=Prefixes)
    tools: dict[bytes, str] = field(default_factory=dict)
    last: tuple[str | None, dict[str, str | bool | None]] = (None, {})
    """The call that was stored last: its id and its lasting fields."""
    size: int = 0

    def record(self, draft: Draft) -> _Written:
        prompt = draft.prompt
        branch, shared = self.prefixes.shared_messages(draft.messages)
        tools = _tools_of(draft) if draft.tools else None
        tools_base = self.tools.get(tools) if tools is not None else None
        like, lasting = self.last
        same = lasting == draft.lasting
        record = pack_ready(
            {
                "like": like if same else None,
                "lasting": None if same else draft.lasting,
                "fields": draft.fields,
                "parent": prompt.parent if draft.parent is None else draft.parent,
                "prompt": [prompt.shared.base, prompt.shared.length, packed_ids(prompt.new_ids)],
                "sampled": packed_ids(draft.sampled_ids),
                "logprobs": packed_floats(draft.logprobs),
                "messages": [branch.call if branch is not None else None, shared, draft.messages[shared:]],
                "tools": [tools_base, draft.tools if tools_base is None else None],
            }
        )
        history = (branch.history if branch is not None else NO_HISTORY).with_new(shared, draft.messages)
        breaks = branch is not None and self.prefixes.breaks(branch, shared, draft.messages, prompt.parent)
        return _Written(record, history, tools, breaks)

    def add(self, draft: Draft, written: _Written) -> None:
        call = draft.completion_id
        self.prefixes.add(call, draft.seq, draft.prompt, draft.sampled_ids, written.history)
        if written.tools is not None:
            self.tools.setdefault(written.tools, call)
        self.last = call, draft.lasting


def _tools_of(draft: Draft) -> bytes:
    return hashlib.sha256(msgspec.json.encode(draft.tools)).digest()


def _whole(
    record: Any, earlier: Mapping[str, Completion], fields: Mapping[str, Mapping[str, Any]]
) -> tuple[Completion, Mapping[str, Any]]:
    """The call and its lasting fields."""
    try:
        (prompt_base, shared, prompt_ids), (message_base, old, messages) = record["prompt"], record["messages"]
        tools_base, tools = record["tools"]
        own = record["lasting"] if record["like"] is None else fields[record["like"]]
        if prompt_base is not None:
            base = earlier[prompt_base]
            prompt_ids = (base.prompt_ids + base.sampled_ids)[:shared] + prompt_ids
        if message_base is not None:
            messages = earlier[message_base].messages[:old] + messages
        if tools_base is not None:
            tools = earlier[tools_base].tools
        completion = Completion.stored(
            {
                **own,
                **record["fields"],
                "parent": record["parent"],
                "prompt_ids": prompt_ids,
                "sampled_ids": record["sampled"],
                "logprobs": record["logprobs"],
                "messages": messages,
                "tools": tools,
            }
        )
    except ValidationError as exc:
        raise PayloadCorrupt(f"a captured call is not valid: {exc.errors()[0]['msg']}") from exc
    except (KeyError, TypeError, ValueError) as exc:
        raise PayloadCorrupt(f"a captured call is incomplete: {exc!r}") from exc
    return completion, own
