"""Committed results, out of the ledger's way: compressed, in chunks, with a checksum.

Write the payload first, then commit its reference. A payload whose commit lost is never referenced and expires.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from typing import Any

from pydantic import ValidationError

from polarq.contracts.rollout import PayloadRef, RolloutResult
from polarq.errors import PayloadCorrupt, PayloadMissing
from polarq.ledger.calls import Call
from polarq.ledger.keys import Keys
from polarq.store.codec import pack, unpack

CHUNK_BYTES = 1024 * 1024
_CHUNKS_PER_CALL = 8


def encode_result(result: RolloutResult) -> tuple[bytes, int]:
    """(stored bytes, raw size estimate in bytes) of a result."""
    body = result.model_dump(mode="json", exclude={"payload"})
    data = pack(body)
    return data, sum(_weight(part) for part in body.values())


def _weight(value: Any) -> int:
    if isinstance(value, dict):
        return sum(_weight(v) for v in value.values())
    if isinstance(value, list):
        if value and isinstance(value[0], (int, float)):
            return 4 * len(value)
        return sum(_weight(v) for v in value)
    return len(value) if isinstance(value, str) else 8


def put_payload(
    keys: Keys, rollout_id: str, attempt: int, token: int, data: bytes, *, raw_bytes: int, keep_s: int
) -> tuple[PayloadRef, list[Call[None]]]:
    """The reference, and the calls that write the chunks (each expires by itself after `keep_s` seconds)."""
    stem = keys.payload(rollout_id, attempt, token)
    chunks = list(_chunks(data))
    ref = PayloadRef(
        key=stem,
        chunks=len(chunks),
        stored_bytes=len(data),
        raw_bytes=raw_bytes,
        sha256=hashlib.sha256(data).hexdigest(),
    )
    commands = [("SET", f"{stem}:{n}", chunk, "EX", keep_s) for n, chunk in enumerate(chunks)]
    calls: list[Call[None]] = [
        Call(lambda _: None, commands=tuple(commands[i : i + _CHUNKS_PER_CALL]), at="payloads")
        for i in range(0, len(commands), _CHUNKS_PER_CALL)
    ]
    return ref, calls


def get_payload(ref: PayloadRef) -> Call[RolloutResult]:
    """Reads and checks a committed result. Raises `PayloadMissing` or `PayloadCorrupt`."""
    commands = tuple(("GET", f"{ref.key}:{n}") for n in range(ref.chunks))

    def read(replies: list[bytes | None]) -> RolloutResult:
        parts = []
        for n, part in enumerate(replies):
            if part is None:
                raise PayloadMissing(f"payload {ref.key} chunk {n} is not in the store; it has expired or was deleted")
            parts.append(part)
        data = b"".join(parts)
        if hashlib.sha256(data).hexdigest() != ref.sha256:
            raise PayloadCorrupt(f"payload {ref.key} does not match its checksum; its bytes were damaged in the store")
        try:
            result = RolloutResult.stored(unpack(data))
        except ValidationError as exc:
            raise PayloadCorrupt(
                f"payload {ref.key} is no result that this polarq reads: {exc.errors()[0]['msg']}"
            ) from exc
        return result.model_copy(update={"payload": ref})

    return Call(read, commands=commands, at="payloads")


def read_raw(commands: Sequence[tuple[Any, ...]]) -> Call[list[bytes | None]]:
    """The replies to the commands of one or more `get_payload`, to be read elsewhere than where they are awaited."""
    return Call(list, commands=tuple(commands), at="payloads")


def is_stored(ref: PayloadRef) -> Call[bool]:
    """Whether all chunks are there."""
    names = [f"{ref.key}:{n}" for n in range(ref.chunks)]
    return Call(lambda replies: int(replies[0]) == len(names), commands=(("EXISTS", *names),), at="payloads")


def drop_payload(ref: PayloadRef) -> Call[None]:
    """Deletes one whose commit was refused."""
    return Call(lambda _: None, commands=(("DEL", *(f"{ref.key}:{n}" for n in range(ref.chunks))),), at="payloads")


def _chunks(data: bytes) -> Iterator[bytes]:
    for start in range(0, max(len(data), 1), CHUNK_BYTES):
        yield data[start : start + CHUNK_BYTES]
