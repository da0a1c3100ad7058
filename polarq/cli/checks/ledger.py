"""Redis: reachable, new enough, keeps what it is told, forgets nothing, asks for a password; and its clock."""

from __future__ import annotations

import ipaddress
import time
from collections.abc import Iterator
from typing import Any
from urllib.parse import parse_qs, urlsplit

from polarq.cli.checks.base import Deployment, Finding, fail, ok, warn
from polarq.errors import LedgerUnavailable
from polarq.ledger import Call, Ledger, calls_for, without_password
from polarq.ledger.admission import FULL_SHARE
from polarq.ledger.limits import published
from polarq.ledger.memory import MEMORY_ADVICE, MemoryLevel, MemoryUse, memory_use
from polarq.ledger.server import ServerFacts, server_facts
from polarq.topology import Topology, broker_url, redis_url
from polarq.topology.redis_address import Sentinels

OLDEST = (6, 2)
"""Streams with exclusive ranges (`XRANGE (id`) came with 6.2."""
SKEW_S = 2.0

_ADVICE = "set requirepass (or an ACL user) and put it into POLARQ_REDIS_URL: who reaches Redis can run commands"
PERSISTENCE = "redis-cli CONFIG SET appendonly yes, and `appendonly yes` in redis.conf"
EVICTION = "redis-cli CONFIG SET maxmemory-policy noeviction, and the same in redis.conf"


def check_redis(deployment: Deployment) -> Iterator[Finding]:
    """The ledger's Redis, and those of queues and payloads where they are others."""
    topology, settings = deployment.topology, deployment.settings
    addresses = {"redis": redis_url(topology, settings)}
    if broker_url(topology, settings) != addresses["redis"]:
        addresses["broker"] = broker_url(topology, settings)
    if (payloads := calls_for(topology).elsewhere.get("payloads")) is not None:
        addresses["payloads"] = payloads
    for part, url in addresses.items():
        try:
            with Ledger(url, calls_for(topology)) as ledger:
                yield from _server(part, url, ledger)
                if part == "redis":
                    yield _limits(ledger, topology)
        except LedgerUnavailable as exc:
            yield fail(part, str(exc), "to get one: docker compose up -d redis, or install valkey or redis")


def _server(part: str, url: str, ledger: Ledger) -> Iterator[Finding]:
    facts = ledger.do(server_facts())
    yield ok(part, f"{facts.name} {facts.version} at {without_password(url)} answers")
    # Valkey began at 7.2, so its own version says as much.
    if _numbers(facts.version) < OLDEST:
        yield fail(part, f"version {facts.version} is too old", "use Redis 6.2 or newer, or Valkey")
    yield _persistence(part, facts)
    yield _eviction(part, facts)
    yield _password(part, url)
    if part == "redis":
        yield _memory(part, ledger.do(memory_use(ledger.calls)))
        yield _clock(ledger)


def _persistence(part: str, facts: ServerFacts) -> Finding:
    if facts.appendonly is None:
        return warn(part, "does not say whether it keeps its data over a restart", "see that its provider persists it")
    if facts.appendonly:
        return ok(part, "appends every change to disk (AOF)")
    return warn(part, "keeps nothing over a restart (appendonly is off): tasks and results would be lost", PERSISTENCE)


def _eviction(part: str, facts: ServerFacts) -> Finding:
    if facts.evicts:
        return fail(part, f"evicts keys when full ({facts.policy}): rollouts and results would vanish", EVICTION)
    if facts.policy is None:
        return warn(part, "does not say what it does when it is full", "see that its eviction policy is noeviction")
    if facts.policy != "noeviction":
        return warn(part, f"would evict keys if it had a maxmemory ({facts.policy})", EVICTION)
    return ok(part, "evicts nothing (noeviction)")


def _memory(part: str, memory: MemoryUse) -> Finding:
    if memory.level is MemoryLevel.FULL:
        return fail(part, f"{memory.line}: new tasks are refused", MEMORY_ADVICE)
    if memory.level is MemoryLevel.HIGH:
        return warn(part, f"{memory.line}; at {FULL_SHARE:.0%} new tasks are refused", MEMORY_ADVICE)
    return ok(part, memory.line)


def _limits(ledger: Ledger, topology: Topology) -> Finding:
    now = ledger.do(published(ledger.calls.keys, topology.limits))
    if now.version == 0:
        return ok("limits", "are not published yet; a worker does it when it starts")
    if now.agrees(topology.limits):
        return ok("limits", f"version {now.version}, by {now.by}, are those of this file")
    return warn("limits", now.mismatch.partition(";")[0], "polarq limits show; polarq limits set publishes a file's")


def _password(part: str, url: str) -> Finding:
    sentinels = Sentinels.parse(url)
    if sentinels is not None:
        if "password" in sentinels.login:
            return ok(part, "asks for a password")
        if all(is_loopback(host) for host, _ in sentinels.hosts):
            return ok(part, "has no password, and is reached over loopback")
        return warn(part, "has no password, and is reached over the network", _ADVICE)
    parts = urlsplit(url)
    if parts.password or "password" in parse_qs(parts.query):
        return ok(part, "asks for a password")
    if parts.scheme == "unix" or is_loopback(parts.hostname or "localhost"):
        return ok(part, "has no password, and is reached over loopback")
    return warn(part, "has no password, and is reached over the network", _ADVICE)


def _clock(ledger: Ledger) -> Finding:
    before = time.time()
    server = ledger.do(_TIME)
    after = time.time()
    # The server read its clock somewhere between: what lies outside of that is skew.
    skew_s = max(before - server, server - after, 0.0)
    if skew_s > SKEW_S:
        fact = f"this machine's clock and Redis' differ by {skew_s:.1f} s"
        return warn("clock", fact, "synchronise both by NTP; leases are safe (Redis' clock decides), logs are not")
    return ok("clock", "agrees with Redis'")


_TIME: Call[float] = Call(lambda replies: _moment(replies[0]), commands=(("TIME",),))


def _moment(reply: Any) -> float:
    seconds, micros = reply
    return int(seconds) + int(micros) / 1e6


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.split(".")[:2] if part.isdecimal())


def is_loopback(host: str) -> bool:
    """Whether an address stays on this machine."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
