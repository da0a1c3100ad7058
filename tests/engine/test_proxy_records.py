"""What polarq's proxy records of a real server's answers is what the server said, and is true.

The same for vLLM and for SGLang. Where they differ, the difference is named.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, TypeVar

import httpx
import pytest
from redis.asyncio import Redis

from polarq.contracts.completion import Completion, CompletionLabel
from polarq.ledger.keys import Keys
from polarq.trajectory.breaks import find_breaks

from .chat import ASK_FOR_TOKENS, WEATHER_TOOL, a_word_in, forced_tool_call, says
from .conftest import Note
from .proxied import ProxyOnEngine, proxy_on
from .reference import Forward, ReferenceModel, largest_difference
from .server import Server
from .tap import Exchange

both_ways = pytest.mark.parametrize("streamed", [False, True], ids=["unary", "streamed"])
T = TypeVar("T")
EVENTUALLY_S = 120.0
GRAMMAR = {"vllm": "structured_outputs", "sglang": "regex"}
"""The field that forces an answer, and what is recorded of it."""
TOKEN_FIELDS = frozenset({"token_ids", "prompt_token_ids", "logprobs", "weight_versions"})


@pytest.fixture
async def proxy(engine: Server, redis_client: Redis, keys: Keys) -> AsyncIterator[ProxyOnEngine]:
    async with proxy_on(engine, redis_client, keys) as running:
        yield running


def way(streamed: bool) -> str:
    return "streamed" if streamed else "unary"


def assert_recorded_as_said(completion: Completion, exchange: Exchange) -> None:
    """Every number of the record is the server's own, and they agree with each other."""
    said = exchange.answer
    assert completion.prompt_ids == said.prompt_ids
    assert completion.sampled_ids == said.sampled_ids
    assert completion.logprobs == said.logprobs
    assert completion.finish_reason == said.finish_reason
    assert completion.stop_reason == said.stop_reason
    assert completion.usage.prompt_tokens == said.usage["prompt_tokens"] == len(completion.prompt_ids)
    assert completion.usage.completion_tokens == said.usage["completion_tokens"] == len(completion.sampled_ids)
    assert len(completion.logprobs) == len(completion.sampled_ids)
    names = (completion.engine, completion.model_served, completion.model_requested)
    assert names == (exchange.engine, exchange.request["model"], "gpt-whatever")


def difference_from(forward: Forward, completion: Completion) -> float:
    return forward.difference(completion.prompt_ids, completion.sampled_ids, completion.logprobs)


async def read(metric: Callable[[], T]) -> T:
    """One of the server's own figures, without holding up the proxy that runs in this loop."""
    return await asyncio.to_thread(metric)


async def until(found: Callable[[], Awaitable[T | None]]) -> T:
    """What `found` gives as soon as it gives something: for facts of other processes that nothing announces."""
    async with asyncio.timeout(EVENTUALLY_S):
        while True:
            if value := await found():
                return value
            await asyncio.sleep(0.05)


def keys_of(value: Any) -> set[str]:
    """Every key anywhere in a JSON value whose value is not null."""
    if isinstance(value, dict):
        return {key for key, item in value.items() if item is not None}.union(
            *(keys_of(item) for item in value.values())
        )
    if isinstance(value, list):
        return set().union(*(keys_of(item) for item in value))
    return set()


@both_ways
@pytest.mark.parametrize("temperature", [0.0, 1.0])
async def test_a_call_is_recorded_with_the_servers_ids_counts_and_log_probabilities(
    proxy: ProxyOnEngine, forward: Forward, streamed: bool, temperature: float, note: Note
) -> None:
    session = await proxy.session()
    body = says("Fix the parser.", max_tokens=96, temperature=temperature, seed=11)
    got = await session.ask(body, streamed=streamed)
    [completion], [exchange] = await session.recorded(), session.exchanges
    assert_recorded_as_said(completion, exchange)
    assert completion.trainable, completion.untrainable
    assert completion.streamed is streamed
    assert completion.sampling["temperature"] == temperature
    assert got.text == exchange.answer.text
    assert got.usage["completion_tokens"] == len(completion.sampled_ids)
    difference = difference_from(forward, completion)
    note(
        f"proxy {way(streamed)}, temperature {temperature}: {len(completion.prompt_ids)} prompt and "
        f"{len(completion.sampled_ids)} sampled ids as the server said, largest difference {difference:.1e}"
    )
    assert difference < forward.tolerance


@both_ways
async def test_a_harness_that_does_not_ask_for_tokens_never_sees_any(proxy: ProxyOnEngine, streamed: bool) -> None:
    session = await proxy.session()
    for body in (says("Hello.", max_tokens=16), forced_tool_call(session.engine)):
        got = await session.ask(body, streamed=streamed)
        assert not keys_of(got.frames) & TOKEN_FIELDS
    assert all(completion.sampled_ids for completion in await session.recorded())


@both_ways
async def test_a_harness_that_asks_for_tokens_gets_the_recorded_ones(proxy: ProxyOnEngine, streamed: bool) -> None:
    session = await proxy.session()
    got = await session.ask(says("Hello.", max_tokens=24, temperature=1.0, **ASK_FOR_TOKENS), streamed=streamed)
    [completion] = await session.recorded()
    assert got.prompt_ids == completion.prompt_ids
    assert got.sampled_ids == completion.sampled_ids
    assert got.logprobs == completion.logprobs


async def test_streamed_and_unary_records_of_the_same_call_are_equal(proxy: ProxyOnEngine, forward: Forward) -> None:
    session = await proxy.session()
    body = says("Look at the code first.", max_tokens=96, temperature=0.0)
    await session.ask(body)
    await session.ask(body, streamed=True)
    unary, streamed = await session.recorded()
    assert streamed.sampled_ids == unary.sampled_ids
    assert streamed.prompt_ids == unary.prompt_ids
    assert streamed.reply == unary.reply
    told = [value for value in unary.logprobs if value is not None]
    assert largest_difference(streamed.logprobs, told) < forward.tolerance


@both_ways
async def test_a_tool_call_is_recorded_with_every_id_and_with_its_grammar(
    proxy: ProxyOnEngine, forward: Forward, streamed: bool, note: Note
) -> None:
    session = await proxy.session()
    got = await session.ask(forced_tool_call(session.engine, temperature=1.0, seed=12), streamed=streamed)
    [completion], [exchange] = await session.recorded(), session.exchanges
    assert got.tool_calls == [("get_weather", '{"city": "Paris"}')]
    assert got.finish_reason == "tool_calls"
    assert_recorded_as_said(completion, exchange)
    assert forward.end_ids is None or completion.sampled_ids[-1] in forward.end_ids
    assert completion.grammar == GRAMMAR[session.engine]
    assert completion.reply["tool_calls"][0]["function"] == {"name": "get_weather", "arguments": '{"city": "Paris"}'}
    note(
        f"proxy {way(streamed)}, tool call: {len(completion.sampled_ids)} ids and log-probabilities as the server said"
    )


@both_ways
async def test_a_tool_call_without_a_grammar_passes_the_forward_check(
    proxy: ProxyOnEngine, forward: Forward, streamed: bool
) -> None:
    """Tools in the prompt and the parser at work, but the model speaks freely: no grammar, plain log-probabilities."""
    session = await proxy.session()
    forced = forced_tool_call(session.engine, temperature=1.0)
    free = {key: value for key, value in forced.items() if key != GRAMMAR[session.engine]}
    await session.ask({**free, "max_tokens": 64}, streamed=streamed)
    [completion] = await session.recorded()
    assert completion.grammar is None
    assert completion.tools == free["tools"]
    assert difference_from(forward, completion) < forward.tolerance


@both_ways
@pytest.mark.parametrize("end", [0, 1], ids=["end of turn", "end of text"])
async def test_the_end_token_is_recorded_whichever_it_is(
    proxy: ProxyOnEngine, reference: ReferenceModel, forward: Forward, streamed: bool, end: int
) -> None:
    """SGLang names every end as what stopped it, and its log-probabilities see the bias."""
    session = await proxy.session()
    end_id = reference.end_ids[end]
    await session.ask(says("Done?", max_tokens=8, logit_bias={str(end_id): 100}), streamed=streamed)
    [completion] = await session.recorded()
    assert completion.sampled_ids == [end_id]
    assert completion.finish_reason == "stop"
    if session.engine == "sglang":
        assert completion.stop_reason == end_id
    else:
        assert completion.stop_reason == (None if end == 0 else end_id)
        assert difference_from(forward, completion) < forward.tolerance


@both_ways
async def test_a_stop_string_is_missing_from_the_reply_and_there_in_the_record(
    proxy: ProxyOnEngine, streamed: bool
) -> None:
    session = await proxy.session()
    body = says("Look at the code first.", max_tokens=64, temperature=0.0)
    whole = await session.ask(body)
    middle = a_word_in(whole.text)
    stopped = await session.ask({**body, "stop": [middle]}, streamed=streamed)
    first, second = await session.recorded()
    assert middle not in stopped.text
    assert second.stop_reason == middle
    assert second.sampled_ids == first.sampled_ids[: len(second.sampled_ids)]
    assert len(second.sampled_ids) == second.usage.completion_tokens


@both_ways
async def test_reasoning_switched_off_by_the_harness_does_not_take_the_ids_away(
    proxy: ProxyOnEngine, forward: Forward, streamed: bool
) -> None:
    session = await proxy.session()
    await session.ask(says("Hello.", max_tokens=16, include_reasoning=False, ignore_eos=True), streamed=streamed)
    [completion] = await session.recorded()
    assert len(completion.sampled_ids) == 16
    assert difference_from(forward, completion) < forward.tolerance


@both_ways
async def test_two_choices_are_two_records_with_the_same_prompt(
    proxy: ProxyOnEngine, forward: Forward, streamed: bool
) -> None:
    session = await proxy.session()
    body = says("Hello.", max_tokens=24, temperature=1.0, seed=5, n=2, ignore_eos=True)
    await session.ask(body, streamed=streamed)
    first, second = await session.recorded()
    assert first.prompt_ids == second.prompt_ids
    assert first.sampled_ids != second.sampled_ids
    assert [len(first.sampled_ids), len(second.sampled_ids)] == [24, 24]
    assert first.trainable, first.untrainable
    assert second.trainable, second.untrainable
    assert max(difference_from(forward, completion) for completion in (first, second)) < forward.tolerance


async def test_a_conversation_is_recorded_turn_by_turn_with_what_the_engine_really_conditioned_on(
    proxy: ProxyOnEngine, forward: Forward, note: Note
) -> None:
    """Histories go back as text, so the engine sees other ids than it sampled; the record says what it saw."""
    session = await proxy.session()
    messages: list[dict[str, Any]] = [{"role": "user", "content": "Fix it."}]
    for turn in range(8):
        body = {"messages": messages, "max_tokens": 40, "temperature": 1.0, "seed": turn}
        got = await session.ask({**body, "chat_template_kwargs": {"enable_thinking": False}}, streamed=turn % 2 == 0)
        messages = [
            *messages,
            {"role": "assistant", "content": got.content},
            {"role": "user", "content": f"Go on {turn}."},
        ]
    completions, exchanges = await session.recorded(), session.exchanges
    assert len(completions) == len(exchanges) == 8
    for completion, exchange in zip(completions, exchanges, strict=True):
        assert_recorded_as_said(completion, exchange)
        assert completion.trainable, completion.untrainable
    difference = max(difference_from(forward, completion) for completion in completions)
    note(
        f"proxy, 8 turns of one conversation: {sum(len(c.sampled_ids) for c in completions)} sampled ids, largest "
        f"difference {difference:.1e}, {len(find_breaks(completions))} of 7 later prompts do not continue the ids"
    )
    assert difference < forward.tolerance


async def test_many_calls_at_once_are_each_sampled_and_recorded_once(
    engine: Server, proxy: ProxyOnEngine, forward: Forward, note: Note
) -> None:
    sessions = [await proxy.session() for _ in range(4)]
    before = await read(engine.sampled_tokens)
    await asyncio.gather(
        *(
            session.ask(says(f"Call {n}.", max_tokens=32, temperature=1.0, seed=n), streamed=n % 2 == 0)
            for session in sessions
            for n in range(6)
        )
    )
    records = [await session.recorded() for session in sessions]
    assert [[completion.seq for completion in record] for record in records] == [list(range(6))] * 4
    completions = [completion for record in records for completion in record]
    sampled = sum(len(completion.sampled_ids) for completion in completions)
    assert await read(engine.sampled_tokens) - before == sampled
    difference = max(difference_from(forward, completion) for completion in completions)
    note(
        f"proxy, 24 calls of 4 rollouts at once: {sampled} ids recorded, as many as the server's own counter says, "
        f"largest difference {difference:.1e}"
    )
    assert difference < forward.tolerance


@both_ways
async def test_a_context_that_is_too_long_is_told_in_the_words_that_harnesses_compact_on(
    engine: Server, proxy: ProxyOnEngine, streamed: bool
) -> None:
    session = await proxy.session()
    with pytest.raises(httpx.HTTPStatusError) as refused:
        await session.ask(says("word " * engine.context, max_tokens=8), streamed=streamed)
    error = refused.value.response.json()["error"]
    assert (refused.value.response.status_code, error["code"]) == (400, "context_length_exceeded")
    assert f"maximum context length is {engine.context} tokens" in error["message"]
    assert await session.recorded() == []


async def test_a_harness_that_hangs_up_stops_the_engine_and_leaves_a_partial_record(
    engine: Server, proxy: ProxyOnEngine, forward: Forward, note: Note
) -> None:
    """`ignore_eos` and a whole context: only an abort ends this call within the test's time.

    SGLang gives ids only at a stream's end, so that a partial sample has its text and its log-probabilities.
    """
    session = await proxy.session()
    asked_for = engine.context - 500
    body = {
        **says("Go on for ever.", max_tokens=asked_for, temperature=1.0, ignore_eos=True),
        "model": "m",
        "stream": True,
    }
    before = await read(engine.sampled_tokens)
    async with (
        httpx.AsyncClient(timeout=120) as client,
        client.stream("POST", f"{session.base_url}/chat/completions", json=body) as response,
    ):
        lines = response.aiter_lines()
        for _ in range(40):
            await anext(lines)
    await until(session.recorded)
    await until(lambda: read(lambda: engine.running_requests() == 0))
    [completion] = await session.recorded()
    sampled = await read(engine.sampled_tokens) - before
    assert (completion.label, completion.incomplete, completion.trainable) == (CompletionLabel.ABORTED, True, False)
    assert sampled < asked_for
    if session.engine == "sglang":
        assert completion.sampled_ids == []
        assert completion.reply.get("content") or completion.reply.get("reasoning_content")
    else:
        assert 0 < len(completion.sampled_ids) <= sampled
        assert difference_from(forward, completion) < forward.tolerance
    kept = len(completion.sampled_ids)
    note(f"proxy, harness hung up: {kept} ids kept of {sampled:.0f} sampled of {asked_for} asked for")


async def test_the_engines_policy_version_is_recorded_over_all_sampled_ids(
    engine: Server, proxy: ProxyOnEngine
) -> None:
    session = await proxy.session()
    await session.ask(says("Hello.", max_tokens=8))
    [completion] = await session.recorded()
    served = await read(engine.weight_version)
    assert [(span.version, span.start, span.end) for span in completion.weight_versions] == [
        (served, 0, len(completion.sampled_ids))
    ]


async def test_a_policy_version_that_changes_during_a_call_makes_the_call_untrainable(
    engine: Server, proxy: ProxyOnEngine
) -> None:
    """No stream of this vLLM or of SGLang names versions in its answer, so a call that saw two belongs to neither."""
    before = await read(engine.weight_version)
    session = await proxy.session()

    async def asked() -> bool | None:
        return len(session.exchanges) == 1 or None

    try:
        async with engine.standing_still():
            asking = asyncio.create_task(session.ask(says("Go on.", max_tokens=64, ignore_eos=True), streamed=True))
            await until(asked)
            await asyncio.to_thread(engine.set_weight_version, "step-2")
        await asking
    finally:
        await asyncio.to_thread(engine.set_weight_version, before)
    [completion] = await session.recorded()
    assert len(completion.sampled_ids) == 64
    assert completion.untrainable == f"the policy version changed during the call (from {before} to step-2)"


async def test_the_proxys_health_tells_that_the_engine_gives_ids(engine: Server, proxy: ProxyOnEngine) -> None:
    async def ready() -> dict[str, Any] | None:
        async with httpx.AsyncClient(timeout=120) as client:
            health: dict[str, Any] = (await client.get(f"{proxy.url}/health")).json()
        return health if health["status"] == "ok" else None

    health = await until(ready)
    [inference] = health["inference"]
    assert (inference["reachable"], inference["ids"], inference["model"]) == (True, True, engine.model)
    assert inference["max_model_len"] == engine.context


async def test_an_engine_asked_unary_still_gives_the_harness_its_stream(
    engine: Server, redis_client: Redis, keys: Keys, forward: Forward
) -> None:
    """`stream_upstream: false`: the mode in which every engine version gives ids."""
    async with proxy_on(engine, redis_client, keys, stream_upstream=False) as proxy:
        session = await proxy.session()
        got = await session.ask(forced_tool_call(session.engine), streamed=True)
        await session.ask(says("Hello.", max_tokens=16), streamed=True)
    assert [exchange.request["stream"] for exchange in session.exchanges] == [False, False]
    assert got.tool_calls == [("get_weather", '{"city": "Paris"}')]
    forced, plain = await session.recorded()
    assert_recorded_as_said(forced, session.exchanges[0])
    assert difference_from(forward, plain) < forward.tolerance


BROKEN_CALL: dict[str, Any] = {
    "messages": [
        {"role": "user", "content": "weather?"},
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [
                {"id": "call_1", "type": "function", "function": {"name": "get_weather", "arguments": '{"city": "Par'}}
            ],
        },
        {"role": "tool", "tool_call_id": "call_1", "content": "these are no arguments"},
    ],
    "tools": [WEATHER_TOOL],
    "max_tokens": 8,
    "ignore_eos": True,
}
"""A model's own bad call, and what its harness said to it."""


async def test_arguments_that_are_no_json_do_not_end_a_conversation(proxy: ProxyOnEngine) -> None:
    """Some servers refuse such a history, and no vLLM shows it to the model: it is sent in a readable form."""
    session = await proxy.session()
    await session.ask(BROKEN_CALL)
    [completion] = await session.recorded()
    assert completion.trainable, completion.untrainable
    assert completion.messages[1] == BROKEN_CALL["messages"][1]  # the record keeps the model's own
