"""The whole proxy from outside: requests as bytes over TCP, in front of the scripted engine."""

from __future__ import annotations

import asyncio
import random
import re
import secrets
import time
from collections import Counter
from contextlib import AsyncExitStack, suppress
from dataclasses import dataclass, field
from pathlib import Path

from polarq.ledger.keys import Keys
from polarq.testing.inference import Scenario, ScriptedInference
from polarq_proxy.serve import connect
from tests.proxy.rig import Rig, running, until
from tests.proxy.test_hostile import doors

from .mutation import mutated

HANG_S = 60.0
"""Without a byte of an answer, and without being closed, for so long: a hang."""
QUIET_S = 0.05
AT_ONCE = 8
MOST_MIB = 300.0
"""How much the process, which engine and fuzzer live in too, may grow."""


@dataclass
class Outcome:
    """What came of it."""

    statuses: Counter[str] = field(default_factory=Counter)
    sent: int = 0
    grown_mib: float = 0.0
    errors: Counter[str] = field(default_factory=Counter)


def resident_mib() -> float:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * 4096 / 2**20


async def answered(address: tuple[str, int], data: bytes) -> bytes:
    """What comes back, until it is quiet for a moment or the proxy closes. Raises TimeoutError for a hang."""
    reader, writer = await asyncio.open_connection(*address)
    got = b""
    try:
        with suppress(ConnectionError):
            writer.write(data)
            async with asyncio.timeout(HANG_S):
                await writer.drain()
                got = await reader.read(65536)
            while got and (more := await asyncio.wait_for(reader.read(65536), QUIET_S)):
                got = got[:65536] + more
    except TimeoutError:
        if not got:
            raise
    finally:
        writer.close()
    return got


async def attacked(redis_url: str, seed: int, requests: int, seconds: float = 3600.0) -> Outcome:
    """Raises AssertionError with the request that did it."""
    outcome, dice, until_s = Outcome(), random.Random(seed), time.monotonic() + seconds
    async with AsyncExitStack() as stack:
        redis = await stack.enter_async_context(connect(redis_url))
        engine = await stack.enter_async_context(ScriptedInference(scenario=Scenario.of("one two three")))
        keys = Keys(f"fuzz-{secrets.token_hex(6)}")
        rig = await stack.enter_async_context(
            running(redis, keys, engine.base_url, body_idle_s=0.2, max_body_bytes=2 << 20, retry_grace_s=0.1)
        )
        address = await stack.enter_async_context(doors(rig, 0.5))
        await honest(rig, "before")
        began = resident_mib()
        while outcome.sent < requests and time.monotonic() < until_s:
            batch = [mutated(rig.secret, dice) for _ in range(AT_ONCE)]
            await asyncio.gather(*(attack(rig, address, data, outcome) for data in batch))
            outcome.sent += AT_ONCE
            outcome.grown_mib = resident_mib() - began
            assert outcome.grown_mib < MOST_MIB, f"grown by {outcome.grown_mib:.0f} MiB"
        await honest(rig, "after")
        await until(lambda: not rig.proxy.sessions.under_way() and rig.proxy.counters.in_flight == 0)
        outcome.errors += Counter(rig.proxy.counters.errors)
    return outcome


async def attack(rig: Rig, address: tuple[str, int], data: bytes, outcome: Outcome) -> None:
    try:
        got = await answered(address, data)
    except TimeoutError:
        raise AssertionError(f"no answer to {data!r}") from None
    statuses = re.findall(rb"HTTP/1\.[01] (\d{3}) ", got)
    outcome.statuses.update([status.decode() for status in statuses] or ["closed"])
    assert b"polarq's proxy failed" not in got, f"{data!r} -> {got!r}"
    assert rig.proxy.counters.errors.get("internal", 0) == 0, f"{data!r} -> {got!r}"
    assert b"Server got itself in trouble" not in got, f"{data!r} -> {got!r}"


async def honest(rig: Rig, when: str) -> None:
    answer = await rig.ask([{"role": "user", "content": f"honest {when}"}])
    assert answer["choices"][0]["message"]["content"] == "one two three"
