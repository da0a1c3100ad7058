"""A call's way there and back: what the engine sampled is what is recorded, and the harness sees its own dialect."""

from __future__ import annotations

import json
from typing import Any

import pytest
from redis.asyncio import Redis

from polarq.contracts.completion import CompletionLabel
from polarq.ledger.keys import Keys
from polarq.testing.inference import Scenario, Script, ScriptedInference, ToolCall, Turn, expected_logprobs

from .raw_engine import RawCall, answer, raw_engine
from .rig import HELLO, running

TURNS = (
    Turn(reasoning="the user says hello", content="go 🧪 ह"),
    Turn(content="I look.", tool_calls=(ToolCall(name="bash", arguments={"command": "ls 'é'"}),)),
    Turn(content="done"),
)
SCENARIO = Scenario(name="calls", scripts=(Script(name="a", turns=TURNS), Script(name="b", turns=TURNS[2:])))
TOOLS = [{"type": "function", "function": {"name": "bash", "parameters": {"type": "object"}}}]


@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize("stream_upstream", [False, True])
async def test_the_record_is_what_the_engine_sampled(
    redis_client: Redis, keys: Keys, streamed: bool, stream_upstream: bool
) -> None:
    async with (
        ScriptedInference(scenario=SCENARIO, drift_seed=3) as inference,
        running(redis_client, keys, inference.base_url, stream_upstream=stream_upstream) as rig,
    ):
        messages: list[dict[str, Any]] = list(HELLO)
        for _ in range(3):
            if streamed:
                sse = await rig.stream(messages, tools=TOOLS)
                assert sse.ended
                messages.append({"role": "assistant", "content": sse.text()})
            else:
                said = (await rig.ask(messages, tools=TOOLS))["choices"][0]["message"]
                messages.append({"role": "assistant", "content": said["content"]})
            messages.append({"role": "user", "content": "go on"})
        sampled = [call for call in inference.ledger if call.session_id == "task.0"]
        records = await rig.records()
        assert len(records) == len(sampled) == 3
        for seq, (record, call) in enumerate(zip(records, sampled, strict=True)):
            assert record.seq == seq
            assert record.completion_id == call.request_id.removeprefix("chatcmpl-")
            assert record.prompt_ids == list(call.prompt_ids)
            assert record.sampled_ids == call.sampled_ids
            assert record.logprobs == call.logprobs == expected_logprobs(call.prompt_ids, call.sampled_ids)
            assert record.finish_reason == ("tool_calls" if seq == 1 else "stop")
            assert record.usage.completion_tokens == len(call.sampled_ids)
            assert record.streamed is streamed
            assert (record.label, record.untrainable, record.incomplete) == (CompletionLabel.TRAIN, None, False)
            assert record.trainable
            assert record.tools == TOOLS
            assert call.delivered


@pytest.mark.parametrize("streamed", [False, True])
async def test_thinking_and_tool_calls_come_back_and_return(redis_client: Redis, keys: Keys, streamed: bool) -> None:
    async with (
        ScriptedInference(scenario=SCENARIO) as inference,
        running(redis_client, keys, inference.base_url) as rig,
    ):

        async def said(messages: list[dict[str, Any]]) -> dict[str, Any]:
            if not streamed:
                message: dict[str, Any] = (await rig.ask(messages, tools=TOOLS))["choices"][0]["message"]
                return message
            sse = await rig.stream(messages, tools=TOOLS)
            parts = [part for choice in sse.choices for part in choice["delta"].get("tool_calls", [])]
            together: dict[str, Any] = {"role": "assistant", "content": sse.text()}
            if thinking := sse.text("reasoning_content"):
                together["reasoning_content"] = thinking
            if parts:
                arguments = "".join(part["function"].get("arguments") or "" for part in parts)
                name = "".join(part["function"].get("name") or "" for part in parts)
                function = {"name": name, "arguments": arguments}
                together["tool_calls"] = [{"id": parts[0]["id"], "type": "function", "function": function}]
            return together

        first = await said(HELLO)
        assert first["content"] == "go 🧪 ह"
        assert first["reasoning_content"].strip() == "the user says hello"
        assert "reasoning" not in first
        second = await said([*HELLO, first, {"role": "user", "content": "look"}])
        [call] = second["tool_calls"]
        assert json.loads(call["function"]["arguments"]) == {"command": "ls 'é'"}
        result = {"role": "tool", "tool_call_id": call["id"], "content": "a.txt"}
        await said([*HELLO, first, {"role": "user", "content": "look"}, second, result])
        records = await rig.records()
        assert records[1].messages[1]["reasoning_content"] == first["reasoning_content"]
        # The template renders what came back exactly as it was sampled: each call extends the one before.
        assert [record.parent for record in records] == [None, 0, 1]
        assert records[0].reply["reasoning_content"] == first["reasoning_content"]
        assert records[1].reply["tool_calls"][0]["function"] == call["function"]
        assert [record.finish_reason for record in records] == ["stop", "tool_calls", "stop"]


async def test_the_engine_gets_the_nodes_model_and_the_calls_names(redis_client: Redis, keys: Keys) -> None:
    async def act(call: RawCall) -> None:
        await call.whole(answer())

    async with raw_engine(act) as engine, running(redis_client, keys, engine.url) as rig:
        body = json.dumps(
            {"model": "gpt-x", "messages": HELLO, "temperature": 0.7, "stop": ["x"], "user": "u"}
        ).encode()
        status, reply = await rig.post(body)
        [call], [record] = engine.calls, await rig.records()
        assert status == 200
        assert reply["model"] == record.model_requested == "gpt-x"
        assert call.body["model"] == record.model_served == "raw"
        assert call.headers["x-session-id"] == "task.0"
        assert call.headers["x-request-id"] == record.completion_id
        assert "authorization" not in call.headers
        assert reply["id"] == f"chatcmpl-{record.completion_id}"
        assert record.sampling == {"temperature": 0.7, "stop": ["x"]}
        assert (record.engine, record.dialect, record.grammar) == ("vllm", "openai_chat", None)
        assert 0 <= record.latency_s < 60
        assert record.answered_at >= record.requested_at


async def test_the_engines_key_is_sent_to_it_alone(redis_client: Redis, keys: Keys) -> None:
    from polarq.topology import InferenceEndpoint
    from polarq_proxy.endpoints import Endpoint
    from polarq_proxy.engines.vllm import VllmEngine

    async with ScriptedInference(scenario=SCENARIO, api_key="k") as inference:
        for key, model in (("k", "scripted"), (None, "")):
            spec = InferenceEndpoint(engine="vllm", base_url=inference.base_url)
            endpoint = Endpoint(spec, VllmEngine(), key, "")
            await endpoint.upstream.start()
            try:
                assert (await endpoint._ask_facts()).models.keys() == ({model} if model else set())
            finally:
                await endpoint.close()


@pytest.mark.parametrize("streamed", [False, True])
async def test_ids_and_logprobs_go_only_to_who_asked(redis_client: Redis, keys: Keys, streamed: bool) -> None:
    async with (
        ScriptedInference(scenario=SCENARIO) as inference,
        running(redis_client, keys, inference.base_url) as rig,
    ):
        if streamed:
            plain = await rig.stream()
            assert not any("token_ids" in choice or "logprobs" in choice for choice in plain.choices)
            assert not any("prompt_token_ids" in event for event in plain.events)
            asked = await rig.stream(return_token_ids=True, logprobs=True, top_logprobs=2)
            ids = [token for choice in asked.choices for token in choice.get("token_ids", [])]
            entries = [entry for choice in asked.choices for entry in choice.get("logprobs", {}).get("content", [])]
            [prompt_ids] = [event["prompt_token_ids"] for event in asked.events if "prompt_token_ids" in event]
        else:
            plain_answer = await rig.ask()
            assert plain_answer["choices"][0]["logprobs"] is None
            assert not {"prompt_token_ids"} & plain_answer.keys()
            assert "token_ids" not in plain_answer["choices"][0]
            answered = await rig.ask(return_token_ids=True, logprobs=True, top_logprobs=2)
            ids = answered["choices"][0]["token_ids"]
            entries = answered["choices"][0]["logprobs"]["content"]
            prompt_ids = answered["prompt_token_ids"]
        record = (await rig.records())[1]
        assert (ids, prompt_ids) == (record.sampled_ids, record.prompt_ids)
        assert [entry["logprob"] for entry in entries] == record.logprobs
        assert all(len(entry["top_logprobs"]) == 2 for entry in entries)


@pytest.mark.parametrize("streamed", [False, True])
async def test_several_choices_are_several_records(redis_client: Redis, keys: Keys, streamed: bool) -> None:
    async with (
        ScriptedInference(scenario=SCENARIO) as inference,
        running(redis_client, keys, inference.base_url) as rig,
    ):
        if streamed:
            sse = await rig.stream(n=2)
            texts = [sse.text(index=0), sse.text(index=1)]
            assert len(sse.finish_reasons) == 2
        else:
            texts = [choice["message"]["content"] for choice in (await rig.ask(n=2))["choices"]]
        assert texts == ["go 🧪 ह", "done"]
        await rig.ask()
        records = await rig.records()
        assert [record.seq for record in records] == [0, 1, 2]
        assert len({record.completion_id for record in records}) == 3
        sampled = [call.sampled_ids for call in inference.ledger if call.session_id == "task.0"]
        assert [record.sampled_ids for record in records] == sampled
        assert [record.reply["content"] for record in records[:2]] == texts
        assert all(record.trainable for record in records)
        assert [record.usage.completion_tokens for record in records] == [len(ids) for ids in sampled]
        assert records[0].sampling["n"] == 2


async def test_a_stream_has_all_that_readers_need_and_nothing_they_did_not_ask_for(
    redis_client: Redis, keys: Keys
) -> None:
    async with (
        ScriptedInference(scenario=SCENARIO) as inference,
        running(redis_client, keys, inference.base_url) as rig,
    ):
        plain = await rig.stream()
        assert plain.headers["content-type"].startswith("text/event-stream")
        assert plain.ended
        assert plain.finish_reasons == ["stop"]
        assert plain.events[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
        assert sum("role" in choice["delta"] for choice in plain.choices) == 1
        assert not any("usage" in event for event in plain.events)
        assert {event["model"] for event in plain.events} == {"asked"}
        assert len({event["id"] for event in plain.events}) == 1
        counted = await rig.stream(stream_options={"include_usage": True})
        assert counted.events[-1]["choices"] == []
        record = (await rig.records())[1]
        usage = counted.events[-1]["usage"]
        assert usage["completion_tokens"] == len(record.sampled_ids)
        assert usage["completion_tokens_details"] == {"reasoning_tokens": record.usage.reasoning_tokens}


async def test_constrained_sampling_is_marked(redis_client: Redis, keys: Keys) -> None:
    async with (
        ScriptedInference(scenario=SCENARIO) as inference,
        running(redis_client, keys, inference.base_url) as rig,
    ):
        await rig.ask(response_format={"type": "json_object"})
        [record] = await rig.records()
        assert record.grammar == "response_format: json_object"


async def test_counters_tell_what_was_done(redis_client: Redis, keys: Keys) -> None:
    async with (
        ScriptedInference(scenario=SCENARIO) as inference,
        running(redis_client, keys, inference.base_url) as rig,
    ):
        await rig.ask()
        await rig.stream()
        await rig.post(b"{")
        async with rig.http.get(rig.url + "/health") as answered:
            health = await answered.json()
        records = await rig.records()
        assert health["status"] == "ok"
        assert health["calls"] == 2
        assert health["sampled_tokens"] == sum(len(record.sampled_ids) for record in records)
        assert health["in_flight"] == 0
        assert health["errors"] == {"bad_request": 1}
        assert health["sessions"] == 1
