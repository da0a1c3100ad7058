"""A call that was cut goes on from the ids that are there: one record, nothing sampled twice, versions to the token."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from itertools import pairwise
from typing import Any

import aiohttp
import pytest
from redis.asyncio import Redis

from polarq.contracts.completion import Completion, CompletionLabel
from polarq.ledger.keys import Keys
from polarq.store.grants import close_grant
from polarq.testing.inference import Scenario, Script, ScriptedInference, ToolCall, Turn
from polarq.testing.inference.calls import SampledCall
from polarq_proxy.engines.vllm import VllmEngine
from tests.pauses import clear_pause, set_pause

from .rig import HELLO, Rig, Sse, running, until

WORDS = "one two three four five six seven eight nine ten"
THOUGHT = "first I look at it and then I know it"
TOOL: dict[str, Any] = {"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}
CALL = ToolCall(name="look", arguments={"where": "behind the blue door", "how": "closely"})
ABORTED_ONCE: dict[str, Any] = {"kind": "abort", "after_tokens": 4, "times": 1}


def saying(**turn: Any) -> Scenario:
    return Scenario(name="said", scripts=(Script(name="a", turns=(Turn(**turn),)),))


def slowly(**turn: Any) -> ScriptedInference:
    return ScriptedInference(scenario=saying(tokens_per_s=6.0, **turn), scale_out=True)


def sampled(inference: ScriptedInference) -> list[SampledCall]:
    return [call for call in inference.ledger if call.session_id == "task.0"]


def joined(calls: list[SampledCall]) -> tuple[list[int], list[float], list[str]]:
    """(ids, log-probabilities, versions) of an answer's parts as the engine sampled them. What came after the last id
    that the proxy read, between engine and proxy, was sampled for nobody."""
    prompt = len(calls[0].prompt_ids)
    ids: list[int] = []
    logprobs: list[float] = []
    versions: list[str] = []
    for call in calls:
        done = len(call.prompt_ids) - prompt
        assert list(call.prompt_ids[:prompt]) == list(calls[0].prompt_ids)
        ids, logprobs, versions = ids[:done], logprobs[:done], versions[:done]
        assert list(call.prompt_ids[prompt:]) == ids, "it went on from something else"
        ids, logprobs = ids + call.sampled_ids, logprobs + call.logprobs
        versions = versions + call.weight_versions
    return ids, logprobs, versions


def versions_of(record: Completion) -> list[str]:
    """One per sampled id."""
    return [span.version for span in record.weight_versions for _ in range(span.start, span.end)]


def assert_whole(record: Completion, inference: ScriptedInference, continued: int) -> None:
    assert (record.untrainable, record.label, record.incomplete) == (None, CompletionLabel.TRAIN, False)
    assert record.trainable
    assert record.continued == continued
    calls = sampled(inference)
    assert len(calls) == continued + 1
    ids, logprobs, versions = joined(calls)
    assert record.prompt_ids == list(calls[0].prompt_ids)
    assert record.sampled_ids == ids
    assert record.logprobs == pytest.approx(logprobs, abs=0)
    assert versions_of(record) == versions
    assert (record.usage.prompt_tokens, record.usage.completion_tokens) == (len(record.prompt_ids), len(ids))


async def engine_says(inference: ScriptedInference, path: str, **body: Any) -> None:
    async with aiohttp.ClientSession() as http, http.post(inference.base_url + path, json=body) as answer:
        assert answer.status == 200


async def met(rig: Rig, continues: bool = True) -> None:
    """The proxy knows its engine."""
    [endpoint] = rig.proxy.fleet.endpoints
    await endpoint.met()
    assert endpoint.report()["continues"] is continues


async def cut(rig: Rig, between: Callable[[], Awaitable[None]] | None = None) -> None:
    """A pause that cuts what is in flight; ends when the call that was cut waits."""
    await set_pause(rig.redis, rig.keys, lease_s=60, mode="abort")
    await until(lambda: rig.proxy.gate.waiting == 1)
    if between is not None:
        await between()
    await clear_pause(rig.redis, rig.keys)


async def until_sampled(inference: ScriptedInference, parts: int, count: int = 3) -> None:
    def there(_: Any) -> bool:
        calls = sampled(inference)
        return len(calls) == parts and len(calls[-1].sampled_ids) >= count

    await inference.ledger.wait_until(there)


def streaming(rig: Rig, **fields: Any) -> Any:
    body = {"model": "m", "messages": HELLO, "stream": True, **fields}
    return rig.http.post(rig.base_url + "/v1/chat/completions", json=body)


async def test_a_whole_answer_that_the_engine_aborts_goes_on_from_its_ids(redis_client: Redis, keys: Keys) -> None:
    async with (
        ScriptedInference(scenario=saying(content=WORDS, fault=ABORTED_ONCE), scale_out=True) as inference,
        running(redis_client, keys, inference.base_url) as rig,
    ):
        await met(rig)
        answer = await rig.ask()
        assert answer["choices"][0]["message"]["content"] == WORDS
        assert answer["choices"][0]["finish_reason"] == "stop"
        [record] = await rig.records()
        assert_whole(record, inference, continued=1)
        assert answer["usage"]["completion_tokens"] == len(record.sampled_ids)
        # An engine that aborts has handed over everything: nothing at all was sampled twice.
        assert [i for call in sampled(inference) for i in call.sampled_ids] == record.sampled_ids


@pytest.mark.parametrize("stream", [False, True])
async def test_it_goes_on_after_every_cut(redis_client: Redis, keys: Keys, stream: bool) -> None:
    twice = {**ABORTED_ONCE, "after_tokens": 3, "times": 2}
    async with (
        ScriptedInference(scenario=saying(content=WORDS, fault=twice), scale_out=True) as inference,
        running(redis_client, keys, inference.base_url) as rig,
    ):
        await met(rig)
        if stream:
            sse = await rig.stream()
            assert (sse.text(), sse.finish_reasons, sse.errors, sse.ended) == (WORDS, ["stop"], [], True)
        else:
            assert (await rig.ask())["choices"][0]["message"]["content"] == WORDS
        [record] = await rig.records()
        assert_whole(record, inference, continued=2)
        assert [len(call.sampled_ids) for call in sampled(inference)][:2] == [3, 3]


async def test_a_call_that_went_on_is_counted_once_however_often_it_was_cut(redis_client: Redis, keys: Keys) -> None:
    twice = {**ABORTED_ONCE, "after_tokens": 3, "times": 2}
    async with (
        ScriptedInference(scenario=saying(content=WORDS, fault=twice), scale_out=True) as inference,
        running(redis_client, keys, inference.base_url) as rig,
    ):
        await met(rig)
        await rig.ask()
        await rig.ask([*HELLO, {"role": "user", "content": "again"}])
        assert sorted(record.continued for record in await rig.records()) == [0, 2]
        assert rig.proxy.health()["continued"] == 1
        assert b"polarq_proxy_continued_total 1.0\n" in rig.proxy.metrics.page()


async def test_a_stream_that_a_pause_cuts_twice_ends_as_if_nothing_had_been(redis_client: Redis, keys: Keys) -> None:
    async with slowly(content=WORDS) as inference, running(redis_client, keys, inference.base_url) as rig:
        await met(rig)
        async with streaming(rig, return_token_ids=True) as answer:
            seen = await answer.content.readuntil(b"one")
            await cut(rig)
            await until_sampled(inference, 2)
            await cut(rig)
            rest = await answer.read()
        sse = Sse.of(200, {}, seen + rest)
        assert (sse.text(), sse.finish_reasons, sse.errors, sse.ended) == (WORDS, ["stop"], [], True)
        [record] = await rig.records()
        assert_whole(record, inference, continued=2)
        assert record.reply["content"] == WORDS
        # The harness too was given every id once.
        assert [i for choice in sse.choices for i in choice.get("token_ids") or []] == record.sampled_ids


async def test_versions_are_exact_to_the_token_when_the_weights_change_at_the_cut(
    redis_client: Redis, keys: Keys
) -> None:
    async with slowly(content=WORDS) as inference, running(redis_client, keys, inference.base_url) as rig:
        await met(rig)
        async with streaming(rig) as answer:
            await answer.content.readuntil(b"one")

            async def update() -> None:
                await engine_says(inference, "/update_weight_version", new_version="step-2")

            await cut(rig, update)
            await answer.read()
        [record] = await rig.records()
        assert_whole(record, inference, continued=1)
        first, second = record.weight_versions
        assert (first.version, second.version) == ("default", "step-2")
        assert first.end == second.start == len(sampled(inference)[1].prompt_ids) - len(record.prompt_ids)


async def test_a_version_that_changed_before_the_cut_makes_the_call_untrainable(
    redis_client: Redis, keys: Keys
) -> None:
    async with slowly(content=WORDS) as inference, running(redis_client, keys, inference.base_url) as rig:
        await met(rig)
        async with streaming(rig) as answer:
            await answer.content.readuntil(b"one")
            await engine_says(inference, "/update_weight_version", new_version="step-2")
            await cut(rig)
            assert Sse.of(200, {}, await answer.read()).ended
        [record] = await rig.records()
        assert record.continued == 1
        assert record.untrainable == "the policy version changed during the call (from default to step-2)"


async def test_an_engine_that_stays_paused_a_little_longer_is_waited_for(redis_client: Redis, keys: Keys) -> None:
    async with slowly(content=WORDS) as inference, running(redis_client, keys, inference.base_url) as rig:
        await met(rig)
        asking = asyncio.create_task(rig.ask())
        await until_sampled(inference, 1)
        await engine_says(inference, "/pause?mode=abort")
        endpoint = rig.proxy.fleet.endpoints[0]
        await until(lambda: rig.proxy.gate.in_flight == 0 and endpoint.in_flight == 0)  # it was refused meanwhile
        assert not asking.done()
        await engine_says(inference, "/resume")
        assert (await asking)["choices"][0]["message"]["content"] == WORDS
        [record] = await rig.records()
        assert_whole(record, inference, continued=1)


async def test_thinking_that_is_cut_in_the_middle_goes_on_as_thinking(redis_client: Redis, keys: Keys) -> None:
    async with (
        slowly(reasoning=THOUGHT, content="Yes.") as inference,
        running(redis_client, keys, inference.base_url) as rig,
    ):
        await met(rig)
        async with streaming(rig) as answer:
            seen = await answer.content.readuntil(b"look")
            await cut(rig)
            rest = await answer.read()
        sse = Sse.of(200, {}, seen + rest)
        assert (sse.text("reasoning_content"), sse.text(), sse.finish_reasons) == (THOUGHT, "Yes.", ["stop"])
        [record] = await rig.records()
        assert_whole(record, inference, continued=1)
        assert record.reply["reasoning_content"] == THOUGHT


async def test_a_tool_call_that_is_cut_in_its_arguments_keeps_its_id_and_is_completed(
    redis_client: Redis, keys: Keys
) -> None:
    async with (
        slowly(content="Let me see.", tool_calls=(CALL,)) as inference,
        running(redis_client, keys, inference.base_url) as rig,
    ):
        await met(rig)
        async with streaming(rig, tools=[TOOL]) as answer:
            seen = await answer.content.readuntil(b'"be"')
            await cut(rig)
            rest = await answer.read()
        sse = Sse.of(200, {}, seen + rest)
        parts = [part for choice in sse.choices for part in choice["delta"].get("tool_calls") or []]
        assert json.loads("".join(part["function"].get("arguments") or "" for part in parts)) == CALL.arguments
        assert [part["function"]["name"] for part in parts if part["function"].get("name")] == ["look"]
        [call_id] = {part["id"] for part in parts if part.get("id")}
        assert (sse.text().strip(), sse.finish_reasons) == ("Let me see.", ["tool_calls"])
        [record] = await rig.records()
        assert_whole(record, inference, continued=1)
        assert record.reply["tool_calls"][0]["id"] == call_id


NEVER_CLOSED = '<tool_call>\n{"name": "look", "arguments": {"where": "behind the blue door", "how": "closely"'
OTHERWISE_SPACED = (
    '<tool_call>\n{"name": "look", "arguments": {"where":"behind the blue door","how":"closely"}}\n</tool_call>'
)


@pytest.mark.parametrize("text", [NEVER_CLOSED, OTHERWISE_SPACED])
async def test_what_was_shown_and_is_no_beginning_of_the_whole_ends_in_an_error(
    redis_client: Redis, keys: Keys, text: str
) -> None:
    # Shown as a call while it came; who parses the whole finds plain text, or spells the arguments anew.
    async with slowly(raw=text) as inference, running(redis_client, keys, inference.base_url) as rig:
        await met(rig)
        async with streaming(rig, tools=[TOOL]) as answer:
            seen = await answer.content.readuntil(b'"be"')
            await cut(rig)
            rest = await answer.read()
        sse = Sse.of(200, {}, seen + rest)
        assert (sse.errors[0]["code"], sse.finish_reasons) == ("aborted", [])
        [record] = await rig.records()
        assert (record.label, record.incomplete) == (CompletionLabel.ABORTED, True)
        assert record.sampled_ids == joined(sampled(inference))[0]


async def test_text_that_the_engine_let_go_of_only_because_it_was_cut_is_shown_once(
    redis_client: Redis, keys: Keys
) -> None:
    # "<" may begin a tool call: it is held back, comes with the abort, and again in the whole.
    scenario = saying(content="a < b and more", fault={**ABORTED_ONCE, "after_tokens": 2})
    async with (
        ScriptedInference(scenario=scenario, scale_out=True) as inference,
        running(redis_client, keys, inference.base_url) as rig,
    ):
        await met(rig)
        sse = await rig.stream(tools=[TOOL], return_token_ids=True)
        assert (sse.text(), sse.finish_reasons, sse.errors) == ("a < b and more", ["stop"], [])
        [record] = await rig.records()
        assert_whole(record, inference, continued=1)
        assert [i for choice in sse.choices for i in choice.get("token_ids") or []] == record.sampled_ids


@pytest.mark.parametrize("stream", [False, True])
async def test_the_limit_of_the_harness_holds_for_all_parts_together(
    redis_client: Redis, keys: Keys, stream: bool
) -> None:
    async with (
        ScriptedInference(scenario=saying(content=WORDS, fault=ABORTED_ONCE), scale_out=True) as inference,
        running(redis_client, keys, inference.base_url) as rig,
    ):
        await met(rig)
        body = {"messages": HELLO, "max_tokens": 7, "stream": stream}
        status, _, data = await rig.raw(body)
        assert status == 200
        assert b'"length"' in data
        [record] = await rig.records()
        assert len(record.sampled_ids) == 7
        assert record.finish_reason == "length"
        assert_whole(record, inference, continued=1)


async def test_an_engine_whose_doors_are_closed_samples_anew(redis_client: Redis, keys: Keys) -> None:
    async with (
        ScriptedInference(scenario=saying(content=WORDS, fault=ABORTED_ONCE)) as inference,
        running(redis_client, keys, inference.base_url) as rig,
    ):
        await met(rig, continues=False)
        assert "goes on with cut calls: no" in rig.proxy.fleet.endpoints[0].in_words()
        assert (await rig.ask())["choices"][0]["message"]["content"] == WORDS
        first, second = await rig.records()
        assert (first.label, first.incomplete, len(first.sampled_ids)) == (CompletionLabel.ABORTED, True, 4)
        assert second.trainable
        assert (second.retry_of, second.continued) == (0, 0)


async def test_doors_that_were_closed_meanwhile_are_remembered(redis_client: Redis, keys: Keys) -> None:
    closed = ScriptedInference(scenario=saying(content=WORDS, fault=ABORTED_ONCE))
    async with closed as inference, running(redis_client, keys, inference.base_url) as rig:
        await met(rig, continues=False)
        endpoint = rig.proxy.fleet.endpoints[0]
        endpoint.tokens_in = VllmEngine().tokens_in()  # as it looked when the proxy came
        assert (await rig.ask())["choices"][0]["message"]["content"] == WORDS
        first, second = await rig.records()
        assert (first.label, len(first.sampled_ids)) == (CompletionLabel.ABORTED, 4)
        assert second.trainable
        assert endpoint.report()["continues"] is False


async def test_a_call_under_a_grammar_is_sampled_anew(redis_client: Redis, keys: Keys) -> None:
    async with (
        ScriptedInference(scenario=saying(content=WORDS, fault=ABORTED_ONCE), scale_out=True) as inference,
        running(redis_client, keys, inference.base_url) as rig,
    ):
        await met(rig)
        await rig.ask(response_format={"type": "json_object"})
        assert [record.label for record in await rig.records()] == [CompletionLabel.ABORTED, CompletionLabel.TRAIN]


async def test_what_a_harness_that_left_had_sampled_in_parts_is_kept(redis_client: Redis, keys: Keys) -> None:
    async with (
        slowly(content=WORDS) as inference,
        running(redis_client, keys, inference.base_url, retry_grace_s=0.05) as rig,
    ):
        await met(rig)
        async with streaming(rig) as answer:
            await answer.content.readuntil(b"one")
            await cut(rig)
            await until_sampled(inference, 2)
            answer.close()

        async def kept() -> bool:
            return bool(await rig.records())

        await until(kept)
        [record] = await rig.records()
        assert (record.label, record.incomplete, record.trainable) == (CompletionLabel.ABORTED, True, False)
        ids = joined(sampled(inference))[0]
        assert record.sampled_ids == ids[: len(record.sampled_ids)]
        assert record.continued == 1
        await inference.ledger.wait_until(lambda _: sampled(inference)[-1].aborted)  # the engine is free


async def test_nothing_more_is_sampled_for_a_session_that_was_closed_meanwhile(redis_client: Redis, keys: Keys) -> None:
    async with slowly(content=WORDS) as inference, running(redis_client, keys, inference.base_url) as rig:
        await met(rig)
        async with streaming(rig) as answer:
            seen = await answer.content.readuntil(b"one")

            async def close() -> None:
                await close_grant(redis_client, keys, rig.secret)

            await cut(rig, close)
            sse = Sse.of(200, {}, seen + await answer.read())
        assert sse.errors[0]["code"] == "no_session"
        assert sse.finish_reasons == []
        assert len(sampled(inference)) == 1


async def test_who_comes_while_a_cut_call_goes_on_is_shown_all_of_it(redis_client: Redis, keys: Keys) -> None:
    async with slowly(content=WORDS) as inference, running(redis_client, keys, inference.base_url) as rig:
        await met(rig)
        async with streaming(rig) as answer:
            await answer.content.readuntil(b"one")
            await cut(rig)
            await until_sampled(inference, 2)
            answer.close()
        again = await rig.stream(model="m")
        assert (again.text(), again.finish_reasons, again.ended) == (WORDS, ["stop"], True)
        [record] = await rig.records()
        assert_whole(record, inference, continued=1)


async def test_all_that_was_sampled_is_kept_when_no_message_can_be_made_of_it(redis_client: Redis, keys: Keys) -> None:
    # This release samples on from ids, and has no parsers for them yet.
    old = ScriptedInference(scenario=saying(content=WORDS, fault=ABORTED_ONCE), version="0.23.0")
    async with old as inference, running(redis_client, keys, inference.base_url) as rig:
        await met(rig, continues=False)
        endpoint = rig.proxy.fleet.endpoints[0]
        endpoint.tokens_in = VllmEngine().tokens_in()
        assert (await rig.ask())["choices"][0]["message"]["content"] == WORDS
        first, second = await rig.records()
        assert (first.label, first.continued, second.continued) == (CompletionLabel.ABORTED, 1, 0)
        assert first.sampled_ids == joined(sampled(inference)[:2])[0] == second.sampled_ids
        assert endpoint.report()["continues"] is False


async def test_in_exact_mode_the_next_prompt_goes_on_from_all_parts(redis_client: Redis, keys: Keys) -> None:
    turns = tuple(Turn(content=f"{at} {WORDS}", fault=ABORTED_ONCE) for at in range(3))
    drifting = Scenario(name="said", drift_seed=7, scripts=(Script(name="a", turns=turns),))
    async with (
        ScriptedInference(scenario=drifting, scale_out=True) as inference,
        running(redis_client, keys, inference.base_url, context="exact") as rig,
    ):
        await until(lambda: rig.proxy.fleet.endpoints[0].suffixes is not None)
        messages = [*HELLO]
        for _ in turns:
            answer = await rig.ask(messages)
            messages += [answer["choices"][0]["message"], {"role": "user", "content": "go on"}]
        records = await rig.records()
        assert [record.continued for record in records] == [1, 1, 1]
        assert [record.untrainable for record in records] == [None, None, None]
        for before, after in pairwise(records):
            so_far = before.prompt_ids + before.sampled_ids
            assert after.prompt_ids[: len(so_far)] == so_far
            assert after.exact


async def test_another_dialects_stream_ends_as_if_nothing_had_been(redis_client: Redis, keys: Keys) -> None:
    async with slowly(content=WORDS) as inference, running(redis_client, keys, inference.base_url) as rig:
        await met(rig)
        body = {"model": "m", "messages": HELLO, "max_tokens": 1000, "stream": True}
        async with rig.http.post(rig.base_url + "/v1/messages", json=body) as answer:
            seen = await answer.content.readuntil(b"one")
            await cut(rig)
            rest = await answer.read()
        events = [json.loads(line[6:]) for line in (seen + rest).split(b"\n") if line.startswith(b"data: ")]
        deltas = [event["delta"] for event in events if event["type"] == "content_block_delta"]
        assert "".join(delta["text"] for delta in deltas) == WORDS
        assert [event["type"] for event in events].count("content_block_start") == 1
        assert events[-1]["type"] == "message_stop"
        [record] = await rig.records()
        assert_whole(record, inference, continued=1)


def _going_on(limit: int | None = 20, **params: Any) -> Any:
    tokens_in = VllmEngine().tokens_in()
    assert tokens_in is not None
    rendered = {"request_id": "x", "token_ids": [9], "sampling_params": params, "reasoning_ended": False}
    return tokens_in.going_on(json.dumps(rendered).encode(), [1, 2], [3, 4, 5], limit)


def test_it_is_sampled_as_the_engine_itself_would_with_what_is_left_of_the_limits() -> None:
    request = _going_on(temperature=0.7, top_p=0.9, seed=5, min_tokens=4, max_tokens=1, stop=[])
    assert request.path == "/inference/v1/generate"
    assert request.body["token_ids"] == [1, 2, 3, 4, 5]
    expected = {"temperature": 0.7, "top_p": 0.9, "seed": 8, "min_tokens": 1, "max_tokens": 17, "stop": []}
    assert request.body["sampling_params"] == {**expected, "logprobs": 0}
    assert "max_tokens" not in _going_on(limit=None, max_tokens=1).body["sampling_params"]


@pytest.mark.parametrize("params", [{"stop": ["END"]}, {"presence_penalty": 0.5}, {"frequency_penalty": -0.5}])
def test_a_call_that_counts_its_own_answer_cannot_go_on(params: dict[str, Any]) -> None:
    assert _going_on(**params) is None
