"""Captured calls in Redis: whole, in order, once, small, and only while the grant is open."""

from __future__ import annotations

import random

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from redis.asyncio import Redis

from polarq.contracts.completion import Completion, CompletionLabel
from polarq.errors import GrantRefused, LedgerUnavailable, PayloadCorrupt
from polarq.ledger.keys import Keys
from polarq.store.completions import CompletionLog, read_completions
from polarq.store.grants import close_grant, open_grant, read_grant
from polarq.testing.redis import EmbeddedRedis

from .samples import SPEC, completion


async def stored(redis: Redis, keys: Keys) -> list[Completion]:
    return await read_completions(redis, keys, SPEC.rollout_id, SPEC.attempt, SPEC.token)


def list_key(keys: Keys) -> str:
    return keys.completions(SPEC.rollout_id, SPEC.attempt, SPEC.token)


async def test_calls_come_back_whole_and_in_order_of_arrival(redis_client: Redis, keys: Keys) -> None:
    log = CompletionLog(redis_client, keys)
    secret = await open_grant(redis_client, keys, SPEC, ttl_s=60)
    tools = [{"type": "function", "function": {"name": "bash"}}]
    calls = [
        completion(0, [1, 2, 3], [4, 5], tools=tools),
        completion(1, [1, 2, 3, 4, 5, 6], [7], tools=tools),
        completion(2, [1, 2, 9], [8, 8], logprobs=[-0.5, None], untrainable="why", label=CompletionLabel.ABORTED),
    ]
    for index in (0, 2, 1):
        await log.append(calls[index], SPEC, secret)
    back = await stored(redis_client, keys)
    assert back == [calls[0], calls[1].model_copy(update={"parent": 0}), calls[2]]
    assert (await read_grant(redis_client, keys, secret)).next_seq == 3


async def test_a_long_session_takes_space_for_its_tokens_not_for_their_square(redis_client: Redis, keys: Keys) -> None:
    log = CompletionLog(redis_client, keys)
    secret = await open_grant(redis_client, keys, SPEC, ttl_s=60)
    generator = random.Random(7)
    history: list[int] = []
    messages: list[dict[str, str]] = []
    for seq in range(40):
        history += [generator.randrange(100_000) for _ in range(600)]
        messages.append({"role": "user", "content": generator.randbytes(500).hex()})
        sampled = [generator.randrange(100_000) for _ in range(200)]
        await log.append(completion(seq, list(history), sampled, messages=list(messages)), SPEC, secret)
        history += sampled
    size = await redis_client.memory_usage(list_key(keys))
    tokens = len(history)
    assert size is not None
    assert size < 8 * tokens + 40 * 3000
    back = await stored(redis_client, keys)
    assert back[-1].prompt_ids == history[:-200]
    assert [call.parent for call in back] == [None, *range(39)]
    assert back[-1].messages == messages


@settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.lists(
        st.tuples(st.lists(st.integers(0, 2), max_size=8), st.lists(st.integers(0, 2), max_size=4)),
        max_size=12,
    )
)
async def test_whatever_branches_a_session_has_every_prompt_comes_back(
    redis_client: Redis, keys: Keys, turns: list[tuple[list[int], list[int]]]
) -> None:
    await redis_client.delete(list_key(keys))
    log = CompletionLog(redis_client, keys)
    secret = await open_grant(redis_client, keys, SPEC, ttl_s=60)
    calls = [completion(seq, prompt, sampled) for seq, (prompt, sampled) in enumerate(turns)]
    for call in calls:
        await log.append(call, SPEC, secret)
    back = await stored(redis_client, keys)
    assert [call.model_copy(update={"parent": None}) for call in back] == calls
    for call in back:
        if call.parent is not None:
            parent = back[call.parent]
            context = parent.prompt_ids + parent.sampled_ids
            assert parent.sampled_ids
            assert call.prompt_ids[: len(context)] == context


async def test_a_fork_names_the_call_it_left_from(redis_client: Redis, keys: Keys) -> None:
    log = CompletionLog(redis_client, keys)
    secret = await open_grant(redis_client, keys, SPEC, ttl_s=60)
    for call in (
        completion(0, [1], [2]),
        completion(1, [1, 2, 3], [4]),
        completion(2, [1, 2, 3, 4, 5], [6]),
        completion(3, [1, 2, 9], [7]),  # leaves after call 0
        completion(4, [1, 2, 3], [8]),  # call 1 again
        completion(5, [1, 2, 3, 4], []),  # exactly what call 1 left
    ):
        await log.append(call, SPEC, secret)
    assert [call.parent for call in await stored(redis_client, keys)] == [None, 0, 1, 0, 0, 1]


async def test_choices_of_one_answer_are_recorded_together(redis_client: Redis, keys: Keys) -> None:
    log = CompletionLog(redis_client, keys)
    secret = await open_grant(redis_client, keys, SPEC, ttl_s=60)
    calls = [completion(0, [1, 2], [3]), completion(1, [1, 2], [4])]
    await log.extend(calls, SPEC, secret)
    assert await stored(redis_client, keys) == calls


async def test_a_restarted_writer_goes_on_where_the_list_ends(redis_client: Redis, keys: Keys) -> None:
    secret = await open_grant(redis_client, keys, SPEC, ttl_s=60)
    first = completion(0, [1, 2], [3])
    await CompletionLog(redis_client, keys).append(first, SPEC, secret)
    second = completion((await read_grant(redis_client, keys, secret)).next_seq, [1, 2, 3, 4], [5])
    await CompletionLog(redis_client, keys).append(second, SPEC, secret)
    assert await stored(redis_client, keys) == [first, second]


async def test_nothing_is_appended_after_the_grant_is_closed(redis_client: Redis, keys: Keys) -> None:
    log = CompletionLog(redis_client, keys)
    secret = await open_grant(redis_client, keys, SPEC, ttl_s=60)
    await log.append(completion(0, [1], [2]), SPEC, secret)
    await close_grant(redis_client, keys, secret)
    with pytest.raises(GrantRefused, match="closed"):
        await log.append(completion(1, [1], [2]), SPEC, secret)
    with pytest.raises(GrantRefused, match="expired"):
        await log.append(completion(1, [1], [2]), SPEC, "pq-other")
    assert len(await stored(redis_client, keys)) == 1


async def test_a_record_sent_twice_counts_once(redis_client: Redis, keys: Keys) -> None:
    log = CompletionLog(redis_client, keys)
    secret = await open_grant(redis_client, keys, SPEC, ttl_s=60)
    call = completion(0, [1], [2])
    await log.append(call, SPEC, secret)
    await log.append(call, SPEC, secret)
    assert await stored(redis_client, keys) == [call]


async def test_two_writers_that_gave_out_one_number_lose_nothing(redis_client: Redis, keys: Keys) -> None:
    secret = await open_grant(redis_client, keys, SPEC, ttl_s=60)
    old, new = CompletionLog(redis_client, keys), CompletionLog(redis_client, keys)
    await old.append(completion(0, [1, 2], [3]), SPEC, secret)
    await new.append(completion(1, [1, 2, 3, 4], [5], completion_id="new"), SPEC, secret)
    await old.append(completion(1, [1, 2, 3, 8], [9], completion_id="old"), SPEC, secret)
    await new.append(completion(2, [1, 2, 3, 4, 5, 6], [7]), SPEC, secret)
    back = await stored(redis_client, keys)
    assert [(call.seq, call.completion_id) for call in back] == [(0, "c0"), (1, "new"), (2, "c2"), (3, "old")]
    assert back[3].prompt_ids == [1, 2, 3, 8]
    assert back[2].prompt_ids == [1, 2, 3, 4, 5, 6]


async def test_an_emptied_script_cache_is_not_noticed(redis_client: Redis, keys: Keys) -> None:
    log = CompletionLog(redis_client, keys)
    secret = await open_grant(redis_client, keys, SPEC, ttl_s=60)
    for seq in range(5):
        await redis_client.script_flush()
        await log.append(completion(seq, [seq], [2]), SPEC, secret)
    assert len(await stored(redis_client, keys)) == 5


async def test_records_expire_after_the_last_one(redis_client: Redis, keys: Keys) -> None:
    log = CompletionLog(redis_client, keys, keep_s=100)
    secret = await open_grant(redis_client, keys, SPEC, ttl_s=60)
    await log.append(completion(0, [1], [2]), SPEC, secret)
    assert 90 < await redis_client.ttl(list_key(keys)) <= 100


async def test_a_damaged_record_is_named(redis_client: Redis, keys: Keys) -> None:
    await redis_client.rpush(list_key(keys), b"PQ\x01garbage")
    with pytest.raises(PayloadCorrupt):
        await stored(redis_client, keys)


async def test_a_refused_record_is_not_referred_to_later(keys: Keys) -> None:
    with EmbeddedRedis(appendonly=True) as server:
        async with Redis.from_url(server.url, retry=None) as redis:
            log = CompletionLog(redis, keys)
            secret = await open_grant(redis, keys, SPEC, ttl_s=60)
            server.kill()
            lost = completion(0, [1, 2, 3], [4])
            with pytest.raises(LedgerUnavailable):
                await log.append(lost, SPEC, secret)
            server.start()
            kept = completion(1, [1, 2, 3, 4, 5], [6])
            await log.append(kept, SPEC, secret)
            assert await stored(redis, keys) == [kept]


async def test_a_redis_without_memory_refuses_the_record(keys: Keys) -> None:
    with EmbeddedRedis() as server:
        async with Redis.from_url(server.url) as redis:
            log = CompletionLog(redis, keys)
            secret = await open_grant(redis, keys, SPEC, ttl_s=60)
            await redis.config_set("maxmemory", 1)
            with pytest.raises(LedgerUnavailable, match="OutOfMemory"):
                await log.append(completion(0, [1], [2]), SPEC, secret)
