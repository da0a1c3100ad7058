"""What a task allows its rollouts at the model, and what is made of what a harness asks for instead."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from redis.asyncio import Redis

from polarq.contracts.specs import ModelRules
from polarq.contracts.task import Task
from polarq.errors import InvalidTask
from polarq.ledger.keys import Keys
from polarq.testing.inference import Scenario, Script, ScriptedInference, Turn

from .raw_engine import RawCall, answer, raw_engine
from .rig import HELLO, running

WORDS = Scenario.of("one two three four five six seven eight")
SLOW = Scenario(
    name="slow", scripts=(Script(name="a", turns=(Turn(content="one two three four " * 20, tokens_per_s=4.0),)),)
)


async def test_sampling_parameters_of_the_task_replace_the_harnesss_and_both_are_recorded(
    redis_client: Redis, keys: Keys
) -> None:
    async def act(call: RawCall) -> None:
        await call.whole(answer())

    rules = {"sampling": {"temperature": 0.7, "top_p": 1.0, "top_k": 5}}
    async with raw_engine(act) as engine, running(redis_client, keys, engine.url, grant={"rules": rules}) as rig:
        await rig.ask(temperature=0, top_p=1.0, seed=3)
        [call], [record] = engine.calls, await rig.records()
        assert {key: call.body.get(key) for key in ("temperature", "top_p", "top_k", "seed")} == {
            "temperature": 0.7,
            "top_p": 1.0,
            "top_k": 5,
            "seed": 3,
        }
        assert record.sampling["temperature"] == 0.7
        assert record.overridden == {"temperature": 0, "top_k": None}


@pytest.mark.parametrize(
    ("asked", "sent", "overridden"),
    [
        ({"max_tokens": 64}, 10, {"max_tokens": 64}),
        ({"max_completion_tokens": 64}, 10, {"max_tokens": 64}),
        ({}, 10, {"max_tokens": None}),
        ({"max_tokens": 10}, 10, {}),
        ({"max_tokens": 4}, 4, {}),
    ],
)
async def test_answers_are_as_long_as_the_task_allows(
    redis_client: Redis, keys: Keys, asked: dict[str, Any], sent: int, overridden: dict[str, Any]
) -> None:
    async def act(call: RawCall) -> None:
        await call.whole(answer())

    grant = {"rules": {"max_tokens": 10}}
    async with raw_engine(act) as engine, running(redis_client, keys, engine.url, grant=grant) as rig:
        await rig.ask(**asked)
        [call], [record] = engine.calls, await rig.records()
        assert call.body["max_tokens"] == sent
        assert "max_completion_tokens" not in call.body or overridden == {}
        assert record.overridden == overridden


async def test_the_last_answer_ends_where_the_rollouts_tokens_do(redis_client: Redis, keys: Keys) -> None:
    rules = {"max_sampled_tokens": 20}
    async with (
        ScriptedInference(scenario=WORDS) as inference,
        running(redis_client, keys, inference.base_url, grant={"rules": rules}) as rig,
    ):
        first = await rig.ask()
        count = first["usage"]["completion_tokens"]
        assert 8 < count < 20
        second = await rig.ask([*HELLO, {"role": "user", "content": "more"}])
        assert second["usage"]["completion_tokens"] == 20 - count
        assert second["choices"][0]["finish_reason"] == "length"
        status, refused = await rig.post({"messages": [{"role": "user", "content": "and more"}]})
        assert (status, refused["error"]["code"]) == (404, "too_many_calls")
        assert "may sample 20 tokens" in refused["error"]["message"]
        assert sum(len(record.sampled_ids) for record in await rig.records()) == 20


async def test_an_answer_longer_than_what_is_left_of_the_context_is_cut_to_it(redis_client: Redis, keys: Keys) -> None:
    async with (
        ScriptedInference(scenario=WORDS, max_model_len=64) as inference,
        running(redis_client, keys, inference.base_url) as rig,
    ):
        for limit in (32_000, 60):
            said = await rig.ask(max_tokens=limit)
            assert said["choices"][0]["finish_reason"] == "stop"
        for record, asked in zip(await rig.records(), (32_000, 60), strict=True):
            assert record.overridden == {"max_tokens": asked}
            assert record.sampling.get("max_tokens") in {None, 64 - len(record.prompt_ids)}
        # A prompt that leaves no room is an overflow, however little is asked for.
        long = [{"role": "user", "content": "word " * 200}]
        status, refused = await rig.post({"messages": long, "max_tokens": 5})
        assert (status, refused["error"]["code"]) == (400, "context_length_exceeded")


async def test_calls_beyond_the_rate_wait_and_none_is_lost(redis_client: Redis, keys: Keys) -> None:
    async with (
        ScriptedInference(scenario=WORDS) as inference,
        running(redis_client, keys, inference.base_url, grant={"rules": {"max_calls_per_minute": 2}}) as rig,
    ):
        await asyncio.gather(rig.ask(), rig.ask())
        session = next(iter(rig.proxy.sessions._known.values()))
        # The third would have to wait for most of a minute: longer than a harness can be left waiting.
        status, headers, _ = await rig.raw({"messages": HELLO})
        assert status == 429
        assert 50 < int(headers["retry-after"]) <= 60
        session.begun[0] -= 59.5
        await rig.ask()
        assert len(session.begun) == 3
        assert session.begun[-1] >= session.begun[0] + 60


async def test_no_call_runs_beyond_its_rollouts_deadline(redis_client: Redis, keys: Keys) -> None:
    async with (
        ScriptedInference(scenario=SLOW) as inference,
        running(redis_client, keys, inference.base_url) as one,
    ):
        await one.proxy.fleet.endpoints[0].met()
        rig = await one.session(4, rules={"time_s": 2})
        sse = await rig.stream([{"role": "user", "content": "x"}])
        assert sse.finish_reasons == []
        assert sse.errors[0]["code"] == "no_session"
        await inference.ledger.wait_until(lambda calls: any(call.aborted for call in calls))
        [record] = await rig.records()
        assert record.incomplete
        assert record.sampled_ids
        status, refused = await rig.post({"messages": HELLO})
        assert (status, refused["error"]["code"]) == (404, "no_session")
        assert "time is over" in refused["error"]["message"]


@pytest.mark.parametrize("stream", [True, False])
async def test_the_task_says_whether_the_engine_streams(redis_client: Redis, keys: Keys, stream: bool) -> None:
    async def act(call: RawCall) -> None:
        await call.whole(answer())

    grant = {"rules": {"stream": stream}}
    async with (
        raw_engine(act) as engine,
        running(redis_client, keys, engine.url, grant=grant, stream_upstream=not stream) as rig,
    ):
        assert (await rig.stream()).finish_reasons == ["stop"]
        assert engine.calls[0].body["stream"] is stream


def test_a_task_may_set_what_decides_about_tokens_and_nothing_else() -> None:
    task = {"instruction": "x", "agent": {"harness": "shell", "custom_shell": {"command": "true"}}}
    rules = {"max_calls": 5, "sampling": {"temperature": 0.5}}
    assert Task.load({**task, "model": rules}).model == ModelRules(max_calls=5, sampling={"temperature": 0.5})
    with pytest.raises(InvalidTask, match="'logprobs' is no sampling parameter that a task may set"):
        Task.load({**task, "model": {"sampling": {"logprobs": False}}})
