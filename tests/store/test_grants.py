"""Session secrets: opened, read, closed, counted."""

from __future__ import annotations

import pytest
from redis.asyncio import Redis

from polarq.errors import GrantRefused, LedgerUnavailable
from polarq.ledger.keys import Keys
from polarq.store.grants import GrantUse, close_grant, digest_of, note_problem, open_grant, read_grant

from .samples import SPEC


async def test_a_secret_opens_what_it_was_made_for(redis_client: Redis, keys: Keys) -> None:
    secret = await open_grant(redis_client, keys, SPEC, ttl_s=60)
    opened = await read_grant(redis_client, keys, secret)
    assert opened.spec == SPEC
    assert opened.next_seq == 0


async def test_redis_never_holds_a_secret(redis_client: Redis, keys: Keys) -> None:
    secret = await open_grant(redis_client, keys, SPEC, ttl_s=60)
    assert len(secret) > 40
    assert secret.startswith("pq-")
    names = [key async for key in redis_client.scan_iter(f"{keys.prefix}*")]
    assert names
    for name in names:
        assert secret not in repr((name, await redis_client.hgetall(name)))


async def test_secrets_differ(redis_client: Redis, keys: Keys) -> None:
    assert len({await open_grant(redis_client, keys, SPEC, ttl_s=60) for _ in range(8)}) == 8


async def test_an_unknown_secret_is_refused(redis_client: Redis, keys: Keys) -> None:
    for secret in ("pq-guess", "", "\udcff", "x" * 10_000):
        with pytest.raises(GrantRefused, match="unknown"):
            await read_grant(redis_client, keys, secret)


async def test_a_closed_grant_is_refused_and_can_be_closed_again(redis_client: Redis, keys: Keys) -> None:
    secret = await open_grant(redis_client, keys, SPEC, ttl_s=60)
    await close_grant(redis_client, keys, secret)
    with pytest.raises(GrantRefused, match="closed"):
        await read_grant(redis_client, keys, secret)
    await close_grant(redis_client, keys, secret)


async def test_closing_an_unknown_grant_leaves_nothing_behind(redis_client: Redis, keys: Keys) -> None:
    assert await close_grant(redis_client, keys, "pq-nobody") == GrantUse(known=False)
    assert [key async for key in redis_client.scan_iter(f"{keys.prefix}*")] == []


async def test_a_grant_expires(redis_client: Redis, keys: Keys) -> None:
    secret = await open_grant(redis_client, keys, SPEC, ttl_s=60)
    [name] = await redis_client.keys(f"{keys.prefix}*")
    assert 0 < await redis_client.ttl(name) <= 60
    await redis_client.pexpire(name, 0)
    with pytest.raises(GrantRefused, match="expired"):
        await read_grant(redis_client, keys, secret)


async def test_a_closed_grant_does_not_stay_for_ever(redis_client: Redis, keys: Keys) -> None:
    secret = await open_grant(redis_client, keys, SPEC, ttl_s=1e6)
    await close_grant(redis_client, keys, secret)
    [name] = await redis_client.keys(f"{keys.prefix}*")
    assert 0 < await redis_client.ttl(name) <= 3600


async def test_closing_tells_what_the_model_failed_at(redis_client: Redis, keys: Keys) -> None:
    secret = await open_grant(redis_client, keys, SPEC, ttl_s=60)
    await note_problem(redis_client, keys, secret, "engine_fault: out of memory", 3, of_engine=True)
    await note_problem(redis_client, keys, secret, "context_overflow: 12 of 8 tokens", 5, of_engine=False)
    await note_problem(redis_client, keys, secret, "engine_down: refused", 4, of_engine=True)
    assert await close_grant(redis_client, keys, secret) == GrantUse(
        faults=2,
        last_fault="engine_down: refused",
        last_problem="context_overflow: 12 of 8 tokens",
        last_problem_seq=5,
    )


async def test_a_redis_that_is_not_there_is_named(keys: Keys) -> None:
    async with Redis.from_url("redis://127.0.0.1:1/0", retry=None) as nobody:
        with pytest.raises(LedgerUnavailable, match="Redis"):
            await open_grant(nobody, keys, SPEC, ttl_s=60)


async def test_a_grant_that_cannot_be_read_is_refused(redis_client: Redis, keys: Keys) -> None:
    for field in ("spec", "next_seq"):
        secret = await open_grant(redis_client, keys, SPEC, ttl_s=60)
        await redis_client.hset(keys.grant(digest_of(secret)), field, "?")
        with pytest.raises(GrantRefused, match="cannot be read"):
            await read_grant(redis_client, keys, secret)
