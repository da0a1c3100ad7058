"""Each fault does to a client what its description says."""

from __future__ import annotations

import asyncio
import math
from typing import Any

import httpx
import pytest

from polarq.testing.inference import Turn
from polarq.testing.inference.faults import (
    Abort,
    BadLogprob,
    CloseAfterSampling,
    CloseBefore,
    CutAtByte,
    Fault,
    Hang,
    HttpStatus,
    LogprobCount,
    NotJson,
    Omit,
    OtherModel,
    StreamError,
    WrongEcho,
    WrongUsage,
)
from tests.testing.inference.asking import HELLO, TOKENS, Client, logprobs_of, scripted
from tests.testing.inference.captures import events_of
from tests.testing.inference.conftest import Serve

TEXT = "The quick brown fox jumps over the lazy dog."
BODY: dict[str, Any] = {"model": "tiny", "messages": HELLO, **TOKENS}
STREAM = {**BODY, "stream": True, "stream_options": {"include_usage": True}}


async def faulty(serve: Serve, fault: Fault, **options: Any) -> Client:
    return await serve(scripted(Turn(content=TEXT, fault=fault)), **options)


@pytest.mark.parametrize("body", [BODY, STREAM], ids=["unary", "streamed"])
async def test_a_status_comes_with_an_error_body_and_its_retry_after(serve: Serve, body: dict[str, Any]) -> None:
    client = await faulty(serve, HttpStatus(kind="http_status", status=429, retry_after_s=2.5, message="slow down"))

    answer = await client.post("/v1/chat/completions", body)

    assert (answer.status_code, answer.headers["retry-after"]) == (429, "2.5")
    assert answer.json()["error"] == {"message": "slow down", "type": "RateLimitError", "param": None, "code": 429}
    assert len(client.ledger) == 0


@pytest.mark.parametrize("body", [BODY, STREAM], ids=["unary", "streamed"])
async def test_a_connection_closed_before_the_answer_gives_no_byte(serve: Serve, body: dict[str, Any]) -> None:
    client = await faulty(serve, CloseBefore(kind="close_before"))

    with pytest.raises(httpx.RemoteProtocolError, match="without sending a response"):
        await client.post("/v1/chat/completions", body)

    assert len(client.ledger) == 0


async def test_a_connection_closed_after_sampling_leaves_the_sample_undelivered(serve: Serve) -> None:
    client = await faulty(serve, CloseAfterSampling(kind="close_after_sampling"))

    with pytest.raises(httpx.RemoteProtocolError):
        await client.post("/v1/chat/completions", BODY)

    call = client.ledger[0]
    assert (call.finish_reason, call.aborted, call.delivered) == ("stop", False, False)


@pytest.mark.parametrize("body", [BODY, STREAM], ids=["unary", "streamed"])
@pytest.mark.parametrize("byte", [1, 100, 700])
async def test_an_answer_is_cut_at_the_byte(serve: Serve, body: dict[str, Any], byte: int) -> None:
    client = await faulty(serve, CutAtByte(kind="cut_at_byte", byte=byte))

    received = b""
    with pytest.raises(httpx.RemoteProtocolError):
        async with client.http.stream("POST", "/v1/chat/completions", json=body) as answer:
            assert answer.status_code == 200
            async for part in answer.aiter_raw():
                received += part

    assert len(received) == byte


async def test_a_server_that_hangs_before_the_headers_says_nothing(serve: Serve) -> None:
    client = await faulty(serve, Hang(kind="hang"))

    with pytest.raises(httpx.ReadTimeout):
        await client.http.post("/v1/chat/completions", json=BODY, timeout=0.2)


async def test_a_stream_that_hangs_has_sent_its_first_tokens_and_is_aborted_by_the_clients_leaving(
    serve: Serve,
) -> None:
    client = await faulty(serve, Hang(kind="hang", after_tokens=3))

    chunks = []
    with pytest.raises(httpx.ReadTimeout):
        async with client.http.stream("POST", "/v1/chat/completions", json=STREAM, timeout=0.3) as answer:
            async for line in answer.aiter_lines():
                chunks += events_of(line)

    await client.ledger.wait_until(lambda calls: calls[0].finished_at is not None)
    call = client.ledger[0]
    assert [token_id for chunk in chunks for token_id in chunk["choices"][0].get("token_ids", [])] == call.sampled_ids
    assert (len(call.sampled_ids), call.aborted, call.delivered) == (3, True, False)


@pytest.mark.parametrize(
    ("engine", "path", "body"),
    [
        ("vllm", "/v1/chat/completions", BODY),
        ("vllm", "/v1/completions", {"model": "tiny", "prompt": "hi", "max_tokens": 99}),
        ("sglang", "/v1/chat/completions", BODY),
        ("sglang", "/v1/completions", {"model": "tiny", "prompt": "hi", "max_tokens": 99}),
        ("sglang", "/generate", {"text": "hi"}),
    ],
)
async def test_a_unary_answer_hangs_after_its_first_tokens(
    serve: Serve, engine: str, path: str, body: dict[str, Any]
) -> None:
    client = await faulty(serve, Hang(kind="hang", after_tokens=2), engine=engine)
    request = asyncio.create_task(client.post(path, body))
    await client.ledger.wait_until(lambda calls: len(calls) == 1 and len(calls[0].sampled_ids) == 2)
    request.cancel()

    await client.ledger.wait_until(lambda calls: calls[0].aborted)
    assert len(client.ledger[0].sampled_ids) == 2


async def test_a_hanging_server_still_stops(serve: Serve) -> None:
    client = await faulty(serve, Hang(kind="hang", after_tokens=0))
    request = asyncio.create_task(client.post("/v1/chat/completions", BODY))
    await client.ledger.wait_until(lambda calls: len(calls) == 1)

    async with asyncio.timeout(10):
        await client.server.stop()
        with pytest.raises(httpx.HTTPError):
            await request


async def test_an_old_server_gives_no_ids_at_all(serve: Serve) -> None:
    client = await faulty(serve, Omit(kind="omit"))

    answer, stream = await client.chat(), await client.stream()

    assert "prompt_token_ids" not in answer and "token_ids" not in answer["choices"][0]
    assert answer["choices"][0]["message"]["content"] == stream.message["content"] == TEXT
    assert stream.prompt_ids is None and stream.ids == []


async def test_a_server_option_makes_all_answers_those_of_an_old_server(serve: Serve) -> None:
    client = await serve("echo", token_ids=False)

    answer = await client.chat()

    assert answer["prompt_token_ids"] is None and answer["choices"][0]["token_ids"] is None


async def test_usage_may_be_missing(serve: Serve) -> None:
    client = await faulty(serve, Omit(kind="omit", fields=("usage",)))

    answer = await client.chat()
    stream = await client.stream(stream_options={"include_usage": True})

    assert "usage" not in answer
    assert (stream.usage, stream.finish_reason, stream.done) == (None, "stop", True)


@pytest.mark.parametrize("delta", [-1, 1])
async def test_logprobs_may_be_one_too_few_or_too_many(serve: Serve, delta: Any) -> None:
    client = await faulty(serve, LogprobCount(kind="logprob_count", delta=delta))

    answer, stream = await client.chat(), await client.stream()

    choice = answer["choices"][0]
    assert len(choice["logprobs"]["content"]) == len(choice["token_ids"]) + delta
    assert len(stream.logprobs) == len(stream.ids) + delta


@pytest.mark.parametrize("position", [0, 3])
@pytest.mark.parametrize("value", ["NaN", "-Infinity", "null", "-9999.0"])
async def test_a_logprob_may_be_no_usable_number(serve: Serve, value: Any, position: int) -> None:
    client = await faulty(serve, BadLogprob(kind="bad_logprob", value=value, position=position))

    unary = logprobs_of((await client.chat())["choices"][0]["logprobs"]["content"])
    streamed = logprobs_of((await client.stream()).logprobs)

    wanted = {"NaN": "nan", "-Infinity": "-inf", "null": "None", "-9999.0": "-9999.0"}[value]
    for values in (unary, streamed):
        bad = [at for at, found in enumerate(values) if found is None or not math.isfinite(found) or found < -100]
        assert bad == [position] and str(values[position]) == wanted


async def test_usage_may_disagree_with_the_ids(serve: Serve) -> None:
    client = await faulty(serve, WrongUsage(kind="wrong_usage", delta=2))

    answer = await client.chat()
    stream = await client.stream(stream_options={"include_usage": True})

    assert answer["usage"]["completion_tokens"] == len(answer["choices"][0]["token_ids"]) + 2
    assert stream.usage is not None and stream.usage["completion_tokens"] == len(stream.ids) + 2


async def test_an_engine_that_dies_in_a_stream_sends_an_error_event(serve: Serve) -> None:
    client = await faulty(serve, StreamError(kind="stream_error", after_tokens=2))

    stream = await client.stream()
    unary = await client.post("/v1/chat/completions", BODY)

    assert len(stream.ids) == 2 and stream.finish_reason is None
    assert stream.events[-2]["error"]["code"] == 500 and stream.events[-1] == "[DONE]"
    assert (unary.status_code, unary.json()["error"]["type"]) == (500, "InternalServerError")
    assert client.ledger[0].aborted and not client.ledger[0].delivered


async def test_an_engine_abort_is_a_200_with_the_ids_so_far(serve: Serve) -> None:
    client = await faulty(serve, Abort(kind="abort", after_tokens=4))

    answer, stream = await client.chat(), await client.stream()

    choice = answer["choices"][0]
    assert (choice["finish_reason"], len(choice["token_ids"])) == ("abort", 4)
    assert len(choice["logprobs"]["content"]) == answer["usage"]["completion_tokens"] == 4
    assert (stream.finish_reason, stream.ids, stream.done) == ("abort", choice["token_ids"], True)
    assert client.ledger[0].aborted and client.ledger[0].finish_reason == "abort"


async def test_an_abort_before_the_first_token_has_no_ids(serve: Serve) -> None:
    client = await faulty(serve, Abort(kind="abort", after_tokens=0))

    answer, stream = await client.chat(), await client.stream()

    assert (answer["choices"][0]["finish_reason"], answer["choices"][0]["token_ids"]) == ("abort", [])
    assert (stream.finish_reason, stream.ids) == ("abort", [])


async def test_a_wrong_address_answers_with_a_page(serve: Serve) -> None:
    client = await faulty(serve, NotJson(kind="not_json"))

    answer = await client.post("/v1/chat/completions", BODY)

    assert answer.status_code == 200 and answer.headers["content-type"].startswith("text/html")


async def test_another_model_may_answer(serve: Serve) -> None:
    client = await faulty(serve, OtherModel(kind="other_model", model="impostor"))

    assert (await client.chat())["model"] == "impostor"
    assert (await client.stream()).events[0]["model"] == "impostor"


async def test_the_echo_of_the_prompt_may_be_wrong(serve: Serve) -> None:
    client = await faulty(serve, WrongEcho(kind="wrong_echo"))

    answer, stream = await client.chat(), await client.stream()

    assert answer["prompt_token_ids"] == stream.prompt_ids == list(client.ledger[0].prompt_ids)[:-1]


async def test_faults_reach_completions_too(serve: Serve) -> None:
    body = {"model": "tiny", "prompt": [1, 5], "logprobs": 0, "return_token_ids": True}
    short = await faulty(serve, LogprobCount(kind="logprob_count"))
    bad = await faulty(serve, BadLogprob(kind="bad_logprob", value="null", position=1))

    miscounted = (await short.post("/v1/completions", body)).json()["choices"][0]
    misvalued = (await bad.post("/v1/completions", body)).json()["choices"][0]

    assert {len(column) for column in miscounted["logprobs"].values()} == {len(miscounted["token_ids"]) - 1}
    assert misvalued["logprobs"]["token_logprobs"][1] is None
