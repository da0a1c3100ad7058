"""Many sessions at once on a real vLLM, and calls that are asked twice: all is recorded, and nothing sampled twice."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator

import httpx
import pytest
from redis.asyncio import Redis

from polarq.ledger.keys import Keys

from .chat import Answer, says
from .conftest import Note
from .forcing import Difference, Vocabulary, difference
from .proxied import ProxyOnEngine, Session, proxy_on
from .reference import ReferenceModel
from .server import TOLERANCE, Server
from .test_proxy_records import read, until
from .tongues import TALKING, Said, Tongue

SESSIONS = 32
MOST = 40
LONG = 400
RETRY = {"X-Stainless-Retry-Count": "1"}


@pytest.fixture(autouse=True)
def vllm_alone(engine: Server) -> None:
    if engine.engine != "vllm" or engine.checkpoint is None:
        engine.lacks("the server's counters are vLLM's, and ids are the tiny model's")


@pytest.fixture
async def proxy(engine: Server, redis_client: Redis, keys: Keys) -> AsyncIterator[ProxyOnEngine]:
    async with proxy_on(engine, redis_client, keys, retry_grace_s=600.0) as running:
        yield running


async def both_ways(session: Session, tongue: Tongue, number: int) -> list[Said]:
    """One call after the other, the second with another prompt."""
    first = await tongue.ask(session, f"Session {number} asks.", most=MOST, stream=number % 8 < 4)
    second = await tongue.ask(session, f"Session {number} asks again.", most=MOST, tool=True, stream=number % 8 >= 4)
    return [first, second]


async def test_sessions_of_all_dialects_at_once_are_recorded_each_with_its_own(
    engine: Server, proxy: ProxyOnEngine, reference: ReferenceModel, note: Note
) -> None:
    assert engine.checkpoint is not None
    words = Vocabulary(engine.checkpoint)
    sessions = [await proxy.session() for _ in range(SESSIONS)]
    sampled, answered = await read(engine.sampled_tokens), await read(engine.answered_requests)
    began = time.monotonic()
    heard = await asyncio.gather(
        *(both_ways(session, TALKING[number % len(TALKING)], number) for number, session in enumerate(sessions))
    )
    took_s = time.monotonic() - began
    total, found = 0, Difference()
    for number, (session, said) in enumerate(zip(sessions, heard, strict=True)):
        completions, exchanges = await session.recorded(), session.exchanges
        assert [completion.seq for completion in completions] == [0, 1]
        assert [completion.streamed for completion in completions] == [number % 8 < 4, number % 8 >= 4]
        for completion, exchange, words_said in zip(completions, exchanges, said, strict=True):
            assert completion.trainable, completion.untrainable
            assert f"Session {number} asks" in words.text(completion.prompt_ids)
            engines_own = exchange.answer
            assert completion.prompt_ids == engines_own.prompt_ids
            assert completion.sampled_ids == engines_own.sampled_ids
            assert completion.logprobs == engines_own.logprobs
            assert words_said.tokens == (len(completion.prompt_ids), len(completion.sampled_ids))
            total += len(completion.sampled_ids)
            rows = reference.distributions(completion.prompt_ids, completion.sampled_ids)
            found |= difference(reference, words, rows, completion.sampled_ids, completion.logprobs)
    assert await read(engine.answered_requests) - answered == 2 * SESSIONS
    assert await read(engine.sampled_tokens) - sampled == total
    note(f"{SESSIONS} sessions of {len(TALKING)} dialects at once: {2 * SESSIONS} calls in {took_s:.1f} s, {found}")
    assert found.largest < TOLERANCE


@pytest.mark.parametrize("streamed", [False, True], ids=["cut whole", "cut streamed"])
@pytest.mark.parametrize("again", [False, True], ids=["again whole", "again streamed"])
async def test_a_cut_call_that_is_asked_again_is_joined_and_sampled_once(
    engine: Server, proxy: ProxyOnEngine, reference: ReferenceModel, streamed: bool, again: bool, note: Note
) -> None:
    session = await proxy.session()
    sampled, answered = await read(engine.sampled_tokens), await read(engine.answered_requests)
    body = says("Go on.", max_tokens=LONG, temperature=1.0, ignore_eos=True)
    asking = asyncio.create_task(session.ask(body, streamed=streamed))
    await until(lambda: under_way(session))
    asking.cancel()
    await asyncio.wait({asking})
    got = await session.ask(body, streamed=again)
    more = await retried(session, {**body, "model": "gpt-whatever"})
    [completion], [exchange] = await session.recorded(), session.exchanges
    assert completion.trainable, completion.untrainable
    assert completion.sampled_ids == exchange.answer.sampled_ids
    assert len(completion.sampled_ids) == LONG
    assert got.text == exchange.answer.text == more
    assert got.usage["completion_tokens"] == LONG
    assert await read(engine.answered_requests) - answered == 1
    assert await read(engine.sampled_tokens) - sampled == LONG
    values = reference.log_probs(completion.prompt_ids, completion.sampled_ids)
    assert max(abs(a - b) for a, b in zip(completion.logprobs, values, strict=True) if a is not None) < TOLERANCE
    note(f"cut {'streamed' if streamed else 'whole'}, asked again {'streamed' if again else 'whole'}: one sample")


async def under_way(session: Session) -> bool | None:
    """The engine has been asked."""
    return bool(session.exchanges) or None


async def retried(session: Session, body: dict[str, object]) -> str:
    """What a retry by an SDK of an answer that it has is told: the same, from the record."""
    async with httpx.AsyncClient(timeout=300) as client:
        response = await client.post(f"{session.base_url}/chat/completions", json=body, headers=RETRY)
    message = response.raise_for_status().json()["choices"][0]["message"]
    return Answer(content=message.get("content") or "", reasoning=message.get("reasoning_content") or "").text
