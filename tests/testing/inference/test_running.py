"""What happens while tokens are on their way: pace, disconnects, pause and resume, weight updates, aborts."""

from __future__ import annotations

import asyncio

import httpx
import pytest

from polarq.testing.inference import Turn, expected_logprobs
from tests.testing.inference.asking import HELLO, TOKENS, Client, Streamed, scripted
from tests.testing.inference.captures import events_of
from tests.testing.inference.conftest import Serve

LONG = Turn(content="and so on ", repeat=400, tokens_per_s=200)
BODY = {"model": "tiny", "messages": HELLO, **TOKENS, "return_weight_versions": True}


async def after_tokens(client: Client, count: int) -> None:
    """Until the newest call has so many tokens."""
    await client.ledger.wait_until(lambda calls: bool(calls) and len(calls[-1].sampled_ids) >= count)


async def test_a_client_that_leaves_aborts_a_unary_answer(serve: Serve) -> None:
    client = await serve(scripted(LONG))
    request = asyncio.create_task(client.chat())
    await after_tokens(client, 3)

    request.cancel()

    await client.ledger.wait_until(lambda calls: calls[0].finished_at is not None)
    call = client.ledger[0]
    assert (call.aborted, call.delivered, call.finish_reason) == (True, False, None)
    assert 3 <= len(call.sampled_ids) < 100
    assert call.logprobs == expected_logprobs(call.prompt_ids, call.sampled_ids)


async def test_a_client_that_leaves_aborts_a_stream(serve: Serve) -> None:
    client = await serve(scripted(LONG))

    async with client.http.stream("POST", "/v1/chat/completions", json={**BODY, "stream": True}) as answer:
        async for line in answer.aiter_lines():
            if '"token_ids"' in line:
                break

    await client.ledger.wait_until(lambda calls: calls[0].finished_at is not None)
    assert client.ledger[0].aborted and 1 <= len(client.ledger[0].sampled_ids) < 100
    assert (await client.get("/is_paused")) == {"is_paused": False}


async def test_an_answer_that_nobody_disturbs_is_delivered_and_not_aborted(serve: Serve) -> None:
    client = await serve("echo")

    await client.chat()
    await client.stream()

    assert [(call.aborted, call.delivered, call.finish_reason) for call in client.ledger] == [(False, True, "stop")] * 2


async def test_what_a_request_asks_of_sampling_stands_in_the_ledger(serve: Serve) -> None:
    client = await serve("echo")
    asked = {"temperature": 0.25, "top_p": 0.75, "top_k": 3, "seed": 11}

    await client.post("/v1/chat/completions", {**BODY, **asked})
    await client.chat()

    assert [call["sampling"] for call in (await client.get("/scripted/ledger"))["calls"]] == [asked, {}]


async def test_pause_abort_ends_what_runs_with_its_partial_ids(serve: Serve) -> None:
    client = await serve(scripted(LONG))
    request = asyncio.create_task(client.chat())
    await after_tokens(client, 3)

    assert (await client.post("/pause?mode=abort", {})).json() == {"status": "paused"}

    answer = await request
    choice = answer["choices"][0]
    assert choice["finish_reason"] == "abort"
    assert choice["token_ids"] == client.ledger[0].sampled_ids and len(choice["token_ids"]) < 100
    assert len(choice["logprobs"]["content"]) == len(choice["token_ids"])


@pytest.mark.parametrize("mode", ["abort", "wait"])
async def test_a_paused_engine_refuses_new_requests_until_it_is_resumed(serve: Serve, mode: str) -> None:
    client = await serve("echo")
    await client.post(f"/pause?mode={mode}", {})

    refused = await client.post("/v1/chat/completions", BODY)
    await client.post("/resume", {})

    assert refused.status_code == 503
    assert (await client.chat())["choices"][0]["finish_reason"] == "stop"


async def test_pause_wait_returns_when_the_running_answers_have_ended(serve: Serve) -> None:
    client = await serve(scripted(Turn(content="a few words", tokens_per_s=50)))
    request = asyncio.create_task(client.chat())
    await after_tokens(client, 1)

    await client.post("/pause?mode=wait", {})

    assert client.ledger[0].finish_reason == "stop"
    assert (await request)["choices"][0]["finish_reason"] == "stop"


async def test_pause_keep_freezes_and_a_weight_update_is_attributed_to_the_token(serve: Serve) -> None:
    client = await serve(scripted(Turn(content="a b c d e f g h i j k l m n", tokens_per_s=100)))
    await client.post("/update_weight_version", {"new_version": "v1"})
    request = asyncio.create_task(client.chat(return_weight_versions=True))
    await after_tokens(client, 4)

    await client.post("/pause?mode=keep", {})
    frozen = len(client.ledger[0].sampled_ids)
    with pytest.raises(TimeoutError):
        await client.ledger.wait_until(lambda calls: len(calls[0].sampled_ids) > frozen, timeout_s=0.1)
    await client.post("/update_weight_version", {"new_version": "v2"})
    assert (await client.get("/is_paused")) == {"is_paused": True}
    await client.post("/resume", {})

    choice = (await request)["choices"][0]
    total = len(choice["token_ids"])
    spans = choice["weight_versions"]
    assert [(span["version"], span["start"], span["end"]) for span in spans] == [
        ("v1", 0, frozen),
        ("v2", frozen, total),
    ]


async def test_a_request_that_comes_during_pause_keep_waits_for_resume(serve: Serve) -> None:
    client = await serve("echo")
    await client.post("/pause?mode=keep", {})
    request = asyncio.create_task(client.chat())

    with pytest.raises(TimeoutError):
        await client.ledger.wait_until(lambda calls: len(calls) > 0, timeout_s=0.1)
    await client.post("/resume", {})

    assert (await request)["choices"][0]["finish_reason"] == "stop"


async def test_a_stream_names_its_weight_versions_in_its_last_chunk_only(serve: Serve) -> None:
    client = await serve("echo")

    chunks = (await client.stream(return_weight_versions=True)).events[:-1]

    assert [("weight_versions" in chunk["choices"][0]) for chunk in chunks] == [False] * (len(chunks) - 1) + [True]
    last = chunks[-1]["choices"][0]["weight_versions"]
    assert last == [{"version": "default", "start": 0, "end": len(client.ledger[0].sampled_ids)}]


async def test_one_request_can_be_aborted_by_its_id(serve: Serve) -> None:
    client = await serve(scripted(LONG))
    request = asyncio.create_task(client.chat(headers={"X-Request-Id": "mine"}))
    await after_tokens(client, 2)

    other = await client.post("/abort_requests", {"request_ids": ["chatcmpl-other"]})
    mine = await client.post("/abort_requests", {"request_ids": ["chatcmpl-mine"]})

    assert (other.json()["aborted"], mine.json()) == (0, {"status": "aborted", "aborted": 1})
    assert (await request)["choices"][0]["finish_reason"] == "abort"


async def test_an_aborted_stream_ends_with_its_finish_reason_and_done(serve: Serve) -> None:
    client = await serve(scripted(LONG))
    request = asyncio.create_task(client.post("/v1/chat/completions", {**BODY, "stream": True}))
    await after_tokens(client, 2)

    await client.post("/abort_requests", {})

    stream = Streamed.of(events_of((await request).text))
    assert (stream.finish_reason, stream.done, stream.ids) == ("abort", True, client.ledger[0].sampled_ids)


async def test_a_delay_comes_before_the_first_token(serve: Serve) -> None:
    client = await serve(scripted(Turn(content="hi", delay_s=30)))

    with pytest.raises(httpx.ReadTimeout):
        await client.http.post("/v1/chat/completions", json=BODY, timeout=0.2)

    await client.ledger.wait_until(lambda calls: calls[0].aborted)
    assert client.ledger[0].sampled_ids == []


async def test_the_most_specific_pace_counts(serve: Serve) -> None:
    client = await serve(scripted(Turn(content="hi there"), delay_s=0.0, tokens_per_s=1000), tokens_per_s=0.01)

    assert (await client.chat())["choices"][0]["finish_reason"] == "stop"


async def test_metrics_count_tokens_and_endings(serve: Serve) -> None:
    client = await serve("echo")

    answer = await client.chat()
    await client.chat(max_tokens=1)
    text = (await client.http.get("/metrics")).text

    label = 'engine="0",model_name="tiny"'
    assert f"vllm:num_requests_running{{{label}}} 0.0" in text
    assert f"vllm:generation_tokens_total{{{label}}} {answer['usage']['completion_tokens'] + 1}.0" in text
    assert f'vllm:request_success_total{{finished_reason="length",{label}}} 1.0' in text


async def test_the_ledger_can_be_read_over_http(serve: Serve) -> None:
    client = await serve("echo")
    await client.chat(headers={"X-Session-ID": "t.0"})
    await client.chat(headers={"X-Session-ID": "t.1"})

    calls = (await client.get("/scripted/ledger?session_id=t.1"))["calls"]

    assert [call["sampled_ids"] for call in calls] == [client.ledger[1].sampled_ids]
