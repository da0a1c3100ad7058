"""Every dialect over a real vLLM, whole and streamed: what the harness reads is what was sampled and recorded."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest
from redis.asyncio import Redis

from polarq.ledger.keys import Keys

from .chat import TOOL_CALL_TEXT
from .conftest import Note
from .forcing import EASILY_ENDED, END_OF_THINKING, Vocabulary, difference, forced
from .proxied import ProxyOnEngine, proxy_on
from .reference import ReferenceModel
from .server import TOLERANCE, Server
from .test_proxy_records import read
from .tongues import TALKING, TONGUES, Tongue

both_ways = pytest.mark.parametrize("streamed", [False, True], ids=["whole", "streamed"])
all_tongues = pytest.mark.parametrize("tongue", TONGUES, ids=lambda tongue: tongue.name)
talking = pytest.mark.parametrize("tongue", TALKING, ids=lambda tongue: tongue.name)
QUESTION = "What is the weather in Paris?"


@pytest.fixture(autouse=True)
def vllm_alone(engine: Server) -> None:
    if engine.engine != "vllm" or engine.checkpoint is None:
        engine.lacks("answers are forced by vLLM's own grammar field, in the tiny model's vocabulary")


@pytest.fixture(scope="module")
def words(engine: Server) -> Vocabulary:
    assert engine.checkpoint is not None
    return Vocabulary(engine.checkpoint)


@pytest.fixture
async def proxy(engine: Server, redis_client: Redis, keys: Keys) -> AsyncIterator[ProxyOnEngine]:
    async with proxy_on(engine, redis_client, keys) as running:
        yield running


@all_tongues
@both_ways
async def test_an_answer_cut_off_by_its_limit_is_told_and_recorded_whole(
    proxy: ProxyOnEngine, reference: ReferenceModel, words: Vocabulary, tongue: Tongue, streamed: bool
) -> None:
    """The random model does not end within 24 tokens, but by chance."""
    session = await proxy.session()
    for _ in range(8):
        said = await tongue.ask(session, QUESTION, most=24, stream=streamed)
        if said.tokens[1] == 24:
            break
    *_, completion = await session.recorded()
    assert said.end == tongue.ends[0]
    assert said.tokens == (len(completion.prompt_ids), 24)
    assert said.text + said.reasoning
    assert completion.trainable, completion.untrainable
    assert completion.streamed is streamed
    assert completion.usage.prompt_tokens == len(completion.prompt_ids)
    assert len(completion.sampled_ids) == len(completion.logprobs) == completion.usage.completion_tokens == 24
    rows = reference.distributions(completion.prompt_ids, completion.sampled_ids)
    found = difference(reference, words, rows, completion.sampled_ids, completion.logprobs)
    assert found.largest < TOLERANCE


@talking
@both_ways
async def test_a_call_of_a_tool_after_thinking_is_told_in_the_dialects_form(
    engine: Server, redis_client: Redis, keys: Keys, reference: ReferenceModel, words: Vocabulary, tongue: Tongue,
    streamed: bool, note: Note,
) -> None:  # fmt: skip
    bias: dict[str, Any] = {str(words.id_of(END_OF_THINKING)): EASILY_ENDED, "0": -100.0, "2": -100.0}
    fields = {"structured_outputs": {"choice": [TOOL_CALL_TEXT]}, "logit_bias": bias, "seed": 5}
    async with forced(engine, **fields) as (server, _), proxy_on(server, redis_client, keys) as proxy:
        session = await proxy.session()
        said = await tongue.ask(session, QUESTION, most=500, tool=True, stream=streamed)
        [completion] = await session.recorded()
    assert said.calls == [("get_weather", {"city": "Paris"})]
    assert said.text.strip() == "ok"
    assert said.reasoning
    assert said.end == tongue.ends[1]
    assert said.tokens == (len(completion.prompt_ids), len(completion.sampled_ids))
    text = words.text(completion.sampled_ids)
    thought, _, rest = text.partition(END_OF_THINKING)
    assert said.reasoning.strip() == thought.strip()
    assert rest.startswith(TOOL_CALL_TEXT)
    assert completion.trainable, completion.untrainable
    rows = reference.distributions(completion.prompt_ids, completion.sampled_ids)
    found = difference(
        reference, words, rows, completion.sampled_ids, completion.logprobs, [TOOL_CALL_TEXT], thinks=True
    )
    note(f"{tongue.name} {'streamed' if streamed else 'whole'}, thinking and a tool call: {found}")
    assert found.largest < TOLERANCE


@all_tongues
@both_ways
async def test_a_context_that_is_too_long_is_told_in_the_dialects_own_words(
    engine: Server, proxy: ProxyOnEngine, tongue: Tongue, streamed: bool
) -> None:
    session = await proxy.session()
    before = await read(engine.sampled_tokens)
    with pytest.raises(httpx.HTTPStatusError) as refused:
        await tongue.ask(session, "word " * engine.context, stream=streamed)
    assert refused.value.response.status_code == 400
    assert tongue.overflow in refused.value.response.text
    assert await session.recorded() == []
    assert await read(engine.sampled_tokens) == before


@pytest.mark.parametrize("tongue", [tongue for tongue in TONGUES if tongue.count], ids=lambda tongue: tongue.name)
@pytest.mark.parametrize("tool", [False, True], ids=["plain", "with a tool"])
async def test_counted_tokens_are_those_of_the_prompt_that_the_engine_then_uses(
    proxy: ProxyOnEngine, tongue: Tongue, tool: bool
) -> None:
    session = await proxy.session()
    counted = await tongue.counted(session, QUESTION, tool=tool)
    assert await session.recorded() == []
    said = await tongue.ask(session, QUESTION, most=1, tool=tool, stream=False)
    [completion], [exchange] = await session.recorded(), session.exchanges
    assert counted == len(completion.prompt_ids) == exchange.answer.usage["prompt_tokens"] == said.tokens[0]
