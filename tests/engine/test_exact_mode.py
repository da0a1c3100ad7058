"""Exact mode on a real vLLM: a conversation's prompt is its own ids from the second turn on, bit for bit.

The random model's samples almost never survive being written as text and tokenised again, so that the same
conversation breaks at nearly every turn where the engine renders it.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from redis.asyncio import Redis

from polarq.contracts.completion import Completion
from polarq.contracts.trajectory import Trace
from polarq.ledger.keys import Keys
from polarq.trajectory.breaks import find_breaks

from .chat import WEATHER_TOOL
from .conftest import Note
from .forcing import EASILY_ENDED, END_OF_THINKING, Difference, Vocabulary, call_text, difference
from .proxied import ProxyOnEngine, Session, proxy_on
from .reference import ReferenceModel
from .server import TOLERANCE, Server
from .tap import tapped
from .test_rollout import EngineStack, calculator_task, run, trajectory_of

TURNS = 24
CITIES = ("Paris", "Reykjavik", "Ouagadougou", "S\u00e3o Paulo")
CALLS = tuple(call_text("get_weather", json.dumps({"city": city}, ensure_ascii=False)) for city in CITIES)
MINI_TURNS = 22
COMMANDS = tuple(
    call_text("bash", json.dumps({"command": command}), before)
    for before in ("I look. ", "Next: ")
    for command in ("ls", "cat calculator.py", "git status --short", "echo hello; pwd")
)


@pytest.fixture(autouse=True)
def vllm_alone(engine: Server) -> None:
    if engine.engine != "vllm":
        engine.lacks("answers are forced by vLLM's own grammar field, and log-probabilities are taken behind it")


@pytest.fixture(scope="module")
def words(engine: Server) -> Vocabulary:
    if engine.checkpoint is None:
        engine.lacks("no checkpoint: what ids spell is not known")
    return Vocabulary(engine.checkpoint)


def is_forced(turn: int) -> bool:
    return turn % 4 != 3


async def converse(session: Session, words: Vocabulary) -> None:
    """A harness with the habits that break prompts: it drops thinking, spells arguments anew and strips blanks.

    Three turns of four are tool calls, the others are free; every second one is streamed. The model thinks before
    each."""
    messages: list[dict[str, Any]] = [
        {"role": "system", "content": "You know the weather."},
        {"role": "user", "content": "Where does it rain?"},
    ]
    ends_thinking = {str(words.id_of(END_OF_THINKING)): EASILY_ENDED}
    for turn in range(TURNS):
        body: dict[str, Any] = {"messages": messages, "tools": [WEATHER_TOOL], "temperature": 1.0, "seed": turn}
        body |= {"max_tokens": 48, "logit_bias": ends_thinking}
        if is_forced(turn):
            # No end of turn before the call; of the two that the grammar leaves at its end, either may come.
            never = {str(number): -100.0 for number in (0, 2)}
            body |= {"max_tokens": 400, "logit_bias": ends_thinking | never, "structured_outputs": {"choice": CALLS}}
        got = await session.ask(body, streamed=turn % 2 == 1)
        said: dict[str, Any] = {"role": "assistant", "content": got.content.strip() or None}
        if is_forced(turn):
            [(name, arguments)] = got.tool_calls
            spelt = json.dumps(json.loads(arguments), indent=2, ensure_ascii=turn % 3 == 0)
            call = {"id": f"call_{turn}", "type": "function", "function": {"name": name, "arguments": spelt}}
            said["tool_calls"] = [call]
            answer = {"role": "tool", "tool_call_id": f"call_{turn}", "content": f"{turn} degrees, <b>rain</b>\n"}
        else:
            answer = {"role": "user", "content": f"Go on, {turn}."}
        messages = [*messages, said, answer]


def whole(completion: Completion | Trace) -> list[int]:
    sampled = completion.sampled_ids if isinstance(completion, Completion) else completion.response_ids
    return [*completion.prompt_ids, *sampled]


def broken(turns: Sequence[Completion | Trace]) -> int:
    """Turns whose prompt does not begin with all of the turn before."""
    return sum(later.prompt_ids[: len(whole(before))] != whole(before) for before, later in pairwise(turns))


def held_against_one_forward_pass(
    reference: ReferenceModel, words: Vocabulary, turns: Sequence[Completion | Trace], texts: Sequence[Sequence[str]],
    *, thinks: bool,
) -> Difference:  # fmt: skip
    """The conversation as a trainer merges it: its last turn's ids hold all of it, so one pass checks every sample."""
    first = len(turns[0].prompt_ids)
    merged = whole(turns[-1])
    rows = reference.distributions(merged[:first], merged[first:])
    found = Difference()
    for turn, forced in zip(turns, texts, strict=True):
        sampled = whole(turn)[len(turn.prompt_ids) :]
        at = len(turn.prompt_ids) - first
        assert merged[at + first : at + first + len(sampled)] == sampled
        own = rows[at : at + len(sampled)]
        found |= difference(reference, words, own, sampled, turn.logprobs, forced, thinks=thinks)
    return found


async def exact_now(proxy: ProxyOnEngine) -> dict[str, Any]:
    """The node's health once it has decided about exact mode."""
    async with asyncio.timeout(120):
        while True:
            [inference] = proxy.proxy.health()["inference"]
            if inference["context"] == "exact" or inference["exact_off"]:
                return dict(inference)
            await asyncio.sleep(0.02)  # nothing announces it


async def test_the_engine_passes_the_check_that_exact_mode_begins_with(
    engine: Server, redis_client: Redis, keys: Keys
) -> None:
    async with proxy_on(engine, redis_client, keys, context="exact") as proxy:
        health = await exact_now(proxy)
        assert (health["context"], health["exact_off"], health["token_in"]) == ("exact", "", True)
        [endpoint] = proxy.proxy.fleet.endpoints
        assert "exact mode: on" in endpoint.in_words()
        assert "takes prompts as ids: yes" in endpoint.in_words()


async def test_a_long_conversation_goes_on_from_what_was_sampled_and_passes_one_forward_pass(
    engine: Server, redis_client: Redis, keys: Keys, reference: ReferenceModel, words: Vocabulary, note: Note
) -> None:
    async with proxy_on(engine, redis_client, keys, context="exact") as proxy:
        await exact_now(proxy)
        session = await proxy.session()
        await converse(session, words)
        completions = await session.recorded()
        exchanges = session.exchanges
        counters = dict(proxy.proxy.counters.exact)
    assert len(completions) == len(exchanges) == TURNS
    assert broken(completions) == 0
    assert find_breaks(completions) == []
    assert [completion.exact for completion in completions] == [False] + [True] * (TURNS - 1)
    assert [completion.exact_missed for completion in completions] == [None] * TURNS
    assert counters == {"first turn": 1, "continued": TURNS - 1}
    for completion, exchange in zip(completions, exchanges, strict=True):
        assert completion.trainable, completion.untrainable
        said = exchange.answer
        assert completion.prompt_ids == said.prompt_ids
        assert completion.sampled_ids == said.sampled_ids
        assert completion.logprobs == said.logprobs
        assert (completion.grammar is not None) == is_forced(completion.seq)
    forced = [CALLS if is_forced(completion.seq) else () for completion in completions]
    found = held_against_one_forward_pass(reference, words, completions, forced, thinks=True)
    note(f"exact mode, {TURNS} turns: 0 breaks, {len(whole(completions[-1]))} ids merged, {found}")
    assert found.largest < TOLERANCE


async def test_the_same_conversation_breaks_where_the_engine_renders_it(
    engine: Server, redis_client: Redis, keys: Keys, words: Vocabulary, note: Note
) -> None:
    async with proxy_on(engine, redis_client, keys, context="observe") as proxy:
        session = await proxy.session()
        await converse(session, words)
        completions = await session.recorded()
    assert not any(completion.exact for completion in completions)
    breaks = find_breaks(completions)
    note(f"observe mode, the same {TURNS} turns: {broken(completions)} breaks")
    assert broken(completions) == len(breaks) > TURNS // 2


class StackThroughTap(EngineStack):
    """Its node is in exact mode, or not, and infers through a tap."""

    def __init__(self, home: Path, engine: Server, base_url: str, context: str) -> None:
        super().__init__(home, engine)
        inference = {"engine": engine.engine, "base_url": base_url}
        self._nodes = {"node0": {**self._nodes["node0"], "inference": inference, "proxy": {"context": context}}}


@pytest.mark.parametrize("context", ["exact", "observe"])
async def test_the_unmodified_mini_swe_agent_works_without_a_break_in_exact_mode_alone(
    engine: Server, tmp_path: Path, reference: ReferenceModel, words: Vocabulary, note: Note, context: str
) -> None:
    """It makes a tool call a turn because the grammar that its own settings ask for leaves nothing else."""
    forced = {"chat_template_kwargs": {"enable_thinking": False}, "structured_outputs": {"choice": COMMANDS}}
    asked = {"max_tokens": 400, "temperature": 1.0, "extra_body": forced}
    agent = {"harness": "mini_swe_agent", "settings": {"step_limit": MINI_TURNS, "model_kwargs": asked}}
    async with tapped(engine) as tap:
        with StackThroughTap(tmp_path, engine, tap.base_url, context) as stack:
            result = await asyncio.to_thread(run, stack, calculator_task(f"mini-{context}", agent, num_samples=1))
        [rollout] = result.results
        asked_of_engine = [exchange.request for exchange in tap.of(rollout.rollout_id)]
    trajectory = trajectory_of(rollout)
    traces = trajectory.traces
    assert len(traces) == len(asked_of_engine) == MINI_TURNS
    sent = [(body.get("kv_transfer_params") or {}).get("prompt_token_ids") for body in asked_of_engine]
    breaks = broken(traces)
    assert len(trajectory.fidelity.breaks) == breaks
    if context == "observe":
        note(f"mini-swe-agent, {MINI_TURNS} turns in observe mode: {breaks} breaks")
        assert sent == [None] * MINI_TURNS
        assert breaks > MINI_TURNS // 2
        return
    assert breaks == 0
    assert sent == [None, *(trace.prompt_ids for trace in traces[1:])]
    assert all(trace.untrainable is None for trace in traces)
    assert all(trace.response_messages[0]["tool_calls"] for trace in traces)
    found = held_against_one_forward_pass(reference, words, traces, [COMMANDS] * MINI_TURNS, thinks=False)
    note(f"mini-swe-agent, {MINI_TURNS} turns in exact mode: 0 breaks, {len(whole(traces[-1]))} ids merged, {found}")
    assert found.largest < TOLERANCE
