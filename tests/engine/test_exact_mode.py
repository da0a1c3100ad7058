"""Exact mode on a real vLLM: a conversation's prompt is its own ids from the second turn on, bit for bit.

The random model's samples almost never survive being written as text and tokenised again, so that the same
conversation breaks at nearly every turn where the engine renders it.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from redis.asyncio import Redis

from polarq.contracts.completion import Completion
from polarq.contracts.trajectory import Trace
from polarq.ledger.keys import Keys
from polarq.trajectory.breaks import find_breaks
from polarq.trajectory.prefix_merging import PrefixMergingBuilder

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


@dataclass(frozen=True)
class Step:
    """A call, as the merged trace that it is in tells it."""

    prompt_ids: list[int]
    sampled_ids: list[int]


def steps(traces: Sequence[Trace]) -> list[Step]:
    """In the order of the calls."""
    found = {
        turn.seq: Step(
            [*trace.prompt_ids, *trace.response_ids[: turn.start]], trace.response_ids[turn.start : turn.end]
        )
        for trace in traces
        for turn in trace.turns
    }
    return [found[seq] for seq in sorted(found)]


def whole(call: Completion | Step) -> list[int]:
    return [*call.prompt_ids, *call.sampled_ids]


def broken(calls: Sequence[Completion | Step]) -> list[int]:
    """Places of the calls whose prompt does not begin with all of the call before."""
    return [
        place
        for place, (before, later) in enumerate(pairwise(calls), 1)
        if later.prompt_ids[: len(whole(before))] != whole(before)
    ]


def held_against_forward_passes(
    reference: ReferenceModel, words: Vocabulary, traces: Sequence[Trace], forced: Callable[[int], Sequence[str]],
    *, thinks: bool,
) -> Difference:  # fmt: skip
    """One pass over each trace as a trainer gets it checks every sample in it. `forced`: the texts that the call of
    that number had to choose from."""
    found = Difference()
    for trace in traces:
        rows = reference.distributions(trace.prompt_ids, trace.response_ids)
        for turn in trace.turns:
            own = slice(turn.start, turn.end)
            sampled, logprobs = trace.response_ids[own], trace.logprobs[own]
            found |= difference(reference, words, rows[own], sampled, logprobs, forced(turn.seq), thinks=thinks)
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
    assert broken(completions) == []
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
    (trace,) = PrefixMergingBuilder({}).build(completions).traces
    found = held_against_forward_passes(
        reference, words, [trace], lambda seq: CALLS if is_forced(seq) else (), thinks=True
    )
    note(f"exact mode, {TURNS} turns: 0 breaks, {len(whole(completions[-1]))} ids merged, {found}")
    assert found.free_tokens + found.forced_tokens == trace.trainable_tokens
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
    note(f"observe mode, the same {TURNS} turns: {len(breaks)} breaks")
    assert broken(completions) == [one.seq for one in breaks]
    assert len(breaks) > TURNS // 2


class StackThroughTap(EngineStack):
    """Its node is in exact mode, or not, and infers through a tap."""

    def __init__(self, home: Path, engine: Server, base_url: str, context: str) -> None:
        super().__init__(home, engine)
        inference = {"engine": engine.engine, "base_url": base_url}
        self._nodes = {"node0": {**self._nodes["node0"], "inference": inference, "proxy": {"context": context}}}


@pytest.mark.parametrize("context", ["exact", "observe"])
async def test_merged_traces_of_the_unmodified_mini_swe_agent_pass_one_forward_pass_each(
    engine: Server, tmp_path: Path, reference: ReferenceModel, words: Vocabulary, note: Note, context: str
) -> None:
    """It makes a tool call a turn because the grammar that its own settings ask for leaves nothing else. In exact mode
    the session is one trace; where the engine renders it, each place at which it is not is told as a break."""
    forced = {"chat_template_kwargs": {"enable_thinking": False}, "structured_outputs": {"choice": COMMANDS}}
    asked = {"max_tokens": 400, "temperature": 1.0, "extra_body": forced}
    agent = {"harness": "mini_swe_agent", "settings": {"step_limit": MINI_TURNS, "model_kwargs": asked}}
    task = calculator_task(f"mini-{context}", agent, num_samples=1, builder={"strategy": "prefix_merging"})
    async with tapped(engine) as tap:
        with StackThroughTap(tmp_path, engine, tap.base_url, context) as stack:
            result = await asyncio.to_thread(run, stack, task)
        [rollout] = result.results
        asked_of_engine = [exchange.request for exchange in tap.of(rollout.rollout_id)]
    trajectory = trajectory_of(rollout)
    traces, kept = trajectory.traces, trajectory.fidelity
    calls = steps(traces)
    assert len(calls) == len(asked_of_engine) == MINI_TURNS
    assert broken(calls) == [one.seq for one in kept.breaks]
    assert kept.trainable_tokens == kept.sampled_tokens
    found = held_against_forward_passes(reference, words, traces, lambda _: COMMANDS, thinks=False)
    note(
        f"mini-swe-agent, {MINI_TURNS} turns in {context} mode: {len(kept.breaks)} breaks, {len(traces)} traces, "
        f"{len(whole(calls[-1]))} ids at the end, {found}"
    )
    assert found.free_tokens + found.forced_tokens == kept.trainable_tokens
    assert found.largest < TOLERANCE
    sent = [(body.get("kv_transfer_params") or {}).get("prompt_token_ids") for body in asked_of_engine]
    if context == "observe":
        assert sent == [None] * MINI_TURNS
        assert len(kept.breaks) > MINI_TURNS // 2
        return
    assert len(traces) == 1
    assert sent == [None, *(call.prompt_ids for call in calls[1:])]
    assert all(message["tool_calls"] for message in traces[0].response_messages if message["role"] == "assistant")
