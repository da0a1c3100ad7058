"""Lua scripts that Redis runs as one step, and what an unusable Redis is called."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from redis.asyncio import Redis
from redis.exceptions import NoScriptError, RedisError

from polarq.errors import LedgerUnavailable


class Script:
    """Called by digest; sent in full when the server does not know it (a restart, a failover, SCRIPT FLUSH)."""

    def __init__(self, source: str) -> None:
        self.source = source
        self.sha1 = hashlib.sha1(source.encode(), usedforsecurity=False).hexdigest()

    async def run(self, redis: Redis, keys: Sequence[str], args: Sequence[str | bytes | int | float]) -> Any:
        with ledger_errors():
            try:
                return await redis.evalsha(self.sha1, len(keys), *keys, *args)
            except NoScriptError:
                return await redis.eval(self.source, len(keys), *keys, *args)


@contextmanager
def ledger_errors() -> Iterator[None]:
    """Whatever keeps Redis from answering becomes `LedgerUnavailable`."""
    try:
        yield
    except (RedisError, OSError) as exc:
        raise LedgerUnavailable(f"Redis did not do its part: {type(exc).__name__}: {exc}") from exc
