"""vLLM's chat answers in the shape that they nearly always have, read without making what nobody may need.

The prompt's ids and the log-probability entries stay JSON. Whatever is not quite of that shape gives None, and is then
read step by step by who tolerates anything: what both accept, they read alike.
"""

from __future__ import annotations

import math
import secrets
from collections.abc import Sequence
from typing import Annotated, Any

import msgspec

from polarq_proxy.tokens import LogprobEntries, PromptIds

TokenId = Annotated[int, msgspec.Meta(ge=0, lt=2**31)]
_NO_CHAT = "text_completion"
_NO_ENTRIES = frozenset({b"", b"null"})
_KEY = b'"prompt_token_ids":['
_ENTRIES = b'"logprobs":{"content":['
_AFTER_ENTRIES = b']},"finish_reason":'
_MARK = b'"' + secrets.token_hex(12).encode() + b'"'
"""Stands where something long was cut out. Nobody else can write it, so where it turns up is where that was."""


class ChatLogprobs(msgspec.Struct):
    content: msgspec.Raw = msgspec.Raw()


class ChatChoice(msgspec.Struct):
    index: int
    message: dict[str, Any] | None = None
    delta: dict[str, Any] | None = None
    token_ids: list[TokenId] | None = None
    logprobs: ChatLogprobs | None = None
    finish_reason: str | None = None
    stop_reason: str | int | None = None
    weight_versions: Any = None


class ChatAnswer(msgspec.Struct):
    """A whole answer or one event."""

    choices: list[ChatChoice]
    object: str = ""
    prompt_token_ids: msgspec.Raw = msgspec.Raw()
    usage: Any = None
    model: str = ""
    error: Any = None

    @property
    def prompt_ids(self) -> PromptIds | None:
        raw = bytes(self.prompt_token_ids)
        return PromptIds(raw, 0, len(raw)) if raw.startswith(b"[") else None


class _Entry(msgspec.Struct, gc=False):
    logprob: float


_decode = msgspec.json.Decoder(ChatAnswer).decode
_decode_entries = msgspec.json.Decoder(list[_Entry]).decode


def read_whole(data: bytes) -> tuple[ChatAnswer, PromptIds | None] | None:
    """`read_chat` for a whole answer. Of one with a single choice even the parser sees nothing of the two long lists;
    the log-probability entries are read once, by `entries_of`."""
    begin = data.find(_ENTRIES)
    end = data.find(_AFTER_ENTRIES, begin) if begin >= 0 else -1
    ids_begin = data.find(_KEY, end) if end >= 0 else -1
    ids_end = data.find(b"]", ids_begin + len(_KEY)) if ids_begin >= 0 else -1
    if ids_end >= 0:
        begin, end, ids_begin, ids_end = begin + len(_ENTRIES) - 1, end + 1, ids_begin + len(_KEY) - 1, ids_end + 1
        found = _read(b"".join((data[:begin], _MARK, data[end:ids_begin], _MARK, data[ids_end:])))
        if found is not None and bytes(found.prompt_token_ids) == _MARK and len(found.choices) == 1:
            logprobs = found.choices[0].logprobs
            if logprobs is not None and bytes(logprobs.content) == _MARK:
                logprobs.content = msgspec.Raw(data[begin:end])
                return found, PromptIds(data, ids_begin, ids_end)
    return read_chat(data)


def read_chat(data: bytes) -> tuple[ChatAnswer, PromptIds | None] | None:
    """The answer and the prompt's ids."""
    begin = data.find(_KEY)
    if begin >= 0:
        begin += len(_KEY)
        end = data.find(b"]", begin)
        found = _read(b"".join((data[: begin - 1], _MARK, data[end + 1 :]))) if end >= 0 else None
        if found is not None and bytes(found.prompt_token_ids) == _MARK:
            return found, PromptIds(data, begin - 1, end + 1)
        # They are not where they were looked for (in a key of the same name deeper inside, say).
    found = _read(data)
    return None if found is None else (found, found.prompt_ids)


def _read(data: bytes) -> ChatAnswer | None:
    try:
        found = _decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None
    return found if found.error is None and found.object != _NO_CHAT else None


def entries_of(logprobs: ChatLogprobs | None) -> LogprobEntries | msgspec.UnsetType | None:
    """None: it gave none. UNSET: they are not all numbers, so that they must be looked at one by one."""
    raw = bytes(logprobs.content) if logprobs is not None else b""
    return None if raw in _NO_ENTRIES else _checked(raw)


def joined_raw_entries(runs: Sequence[ChatLogprobs]) -> LogprobEntries | msgspec.UnsetType | None:
    """The same for what several events gave, one after the other."""
    given = [raw for raw in [bytes(logprobs.content) for logprobs in runs] if raw not in _NO_ENTRIES]
    if len(given) < 2:
        return _checked(given[0]) if given else None
    if not all(raw.startswith(b"[") for raw in given):
        return msgspec.UNSET
    return _checked(b"[%b]" % b",".join([raw[1:-1] for raw in given if raw != b"[]"]))


def _checked(raw: bytes) -> LogprobEntries | msgspec.UnsetType:
    try:
        numbers = [entry.logprob for entry in _decode_entries(raw)]
    except (msgspec.DecodeError, UnicodeDecodeError):
        return msgspec.UNSET
    # One of them that is not finite makes the sum so too.
    return LogprobEntries(raw, numbers) if math.isfinite(sum(numbers)) else msgspec.UNSET
