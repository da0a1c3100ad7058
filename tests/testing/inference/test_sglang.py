"""The scripted server in SGLang's clothes: fields of each release, late ids, refusals, and its own control routes."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from polarq.testing.inference import ToolCall, Turn, expected_logprobs, load_tokenizer
from polarq.testing.inference.faults import Abort, HttpStatus, Omit, StreamError
from tests.testing.inference.asking import HELLO, WEATHER_TOOL, Client, scripted
from tests.testing.inference.captures import events_of
from tests.testing.inference.conftest import Serve

THINKING_CALL = scripted(
    Turn(reasoning="look", content="I look.", tool_calls=(ToolCall(name="get_weather", arguments={"city": "Paris"}),))
)
END_OF_THINKING = load_tokenizer().encode("</think>")[0]
META = {"logprobs": True, "return_meta_info": True}
SGLEXT = {"logprobs": True, "return_input_ids_in_sglext": True, "return_output_ids_in_sglext": True}


async def ask(client: Client, **body: Any) -> Any:
    response = await client.post("/v1/chat/completions", {"model": "tiny", "messages": HELLO, **body})
    assert response.status_code == 200, response.text
    return response.json()


async def stream(client: Client, **body: Any) -> list[Any]:
    request = {"model": "tiny", "messages": HELLO, "stream": True, **body}
    response = await client.post("/v1/chat/completions", request)
    assert response.status_code == 200, response.text
    return events_of(response.text)


@pytest.mark.parametrize(
    ("version", "asked", "fields"),
    [
        ("0.5.12", {"return_prompt_token_ids": True}, set()),
        ("0.5.13", {"return_prompt_token_ids": True}, {"prompt_token_ids"}),
        ("0.5.16", {"return_token_ids": True}, set()),
        ("0.5.17", {"return_token_ids": True}, {"prompt_token_ids", "token_ids"}),
        ("0.5.18", {"return_token_ids": True}, {"prompt_token_ids", "response_token_ids"}),
        ("0.5.23", {"return_token_ids": True}, {"prompt_token_ids", "response_token_ids"}),
        ("0.5.23", {}, set()),
    ],
)
async def test_a_choice_has_the_fields_of_its_release(
    serve: Serve, version: str, asked: dict[str, bool], fields: set[str]
) -> None:
    client = await serve(engine="sglang", version=version)
    choice = (await ask(client, **asked))["choices"][0]
    plain = {"index", "message", "logprobs", "finish_reason", "matched_stop"}
    assert set(choice) - plain == fields
    [call] = client.ledger
    for name in fields:
        assert choice[name] == (list(call.prompt_ids) if name == "prompt_token_ids" else call.sampled_ids)


async def test_meta_info_pairs_log_probabilities_with_ids(serve: Serve) -> None:
    client = await serve(engine="sglang", version="0.5.23")
    answer = await ask(client, **META)
    [call] = client.ledger
    meta = answer["choices"][0]["meta_info"]
    assert [pair[1] for pair in meta["output_token_logprobs"]] == call.sampled_ids
    assert [pair[0] for pair in meta["output_token_logprobs"]] == expected_logprobs(call.prompt_ids, call.sampled_ids)
    assert meta["finish_reason"] == {"type": "stop", "matched": call.sampled_ids[-1]}
    assert meta["weight_versions"] == [{"version": "default", "start": 0, "end": len(call.sampled_ids)}]
    assert answer["metadata"] == {"weight_version": "default", "weight_versions": meta["weight_versions"]}
    assert (meta["prompt_tokens"], meta["completion_tokens"]) == (len(call.prompt_ids), len(call.sampled_ids))


async def test_an_earlier_release_names_only_the_last_policy_version(serve: Serve) -> None:
    client = await serve(engine="sglang", version="0.5.18")
    answer = await ask(client, **META)
    assert answer["metadata"] == {"weight_version": "default"}
    assert "weight_versions" not in answer["choices"][0]["meta_info"]


async def test_the_content_is_never_null_and_thinking_goes_by_sglangs_name(serve: Serve) -> None:
    silent = await ask(await serve(scripted(Turn(reasoning="hm")), engine="sglang"))
    assert silent["choices"][0]["message"]["content"] == ""
    client = await serve(THINKING_CALL, engine="sglang")
    answer = await ask(client, tools=[WEATHER_TOOL])
    [choice] = answer["choices"]
    assert (choice["message"]["content"], choice["message"]["reasoning_content"]) == ("I look.\n", "look")
    [call] = choice["message"]["tool_calls"]
    assert (call["index"], call["function"]["name"]) == (0, "get_weather")
    assert (choice["finish_reason"], choice["matched_stop"]) == ("tool_calls", None)
    assert answer["usage"]["reasoning_tokens"] == client.ledger[0].sampled_ids.index(END_OF_THINKING) + 1


@pytest.mark.parametrize("name", ["return_prompt_token_ids", "return_token_ids", "return_meta_info"])
async def test_a_stream_that_asks_for_ids_the_old_way_is_refused(serve: Serve, name: str) -> None:
    client = await serve(engine="sglang", version="0.5.19")
    response = await client.post("/v1/chat/completions", {"messages": HELLO, "stream": True, name: True})
    assert response.status_code == 400
    assert response.json()["object"] == "error"
    assert f"{name} is not supported with streaming" in response.json()["message"]
    assert len(client.ledger) == 0


async def test_ids_come_late_and_once_in_a_stream(serve: Serve) -> None:
    client = await serve(THINKING_CALL, engine="sglang", version="0.5.20")
    events = await stream(client, tools=[WEATHER_TOOL], stream_options={"include_usage": True}, n=2, **SGLEXT)
    first, second = client.ledger
    *_, finished, ids, usage, done = events
    assert ids["sglext"] == {
        "input_ids": list(first.prompt_ids),
        "output_ids": [first.sampled_ids, second.sampled_ids],
    }
    assert ids["choices"] == usage["choices"] == []
    assert usage["usage"]["completion_tokens"] == len(first.sampled_ids) + len(second.sampled_ids)
    assert (finished["choices"][0]["finish_reason"], done) == ("tool_calls", "[DONE]")
    assert finished["choices"][0]["matched_stop"] == second.sampled_ids[-1]  # which a whole answer no longer says
    assert sum("sglext" in event for event in events if event != "[DONE]") == 1


@pytest.mark.parametrize("interval", [1, 64])
async def test_log_probabilities_of_a_stream_ride_once_on_whatever_is_said(serve: Serve, interval: int) -> None:
    client = await serve(THINKING_CALL, engine="sglang")
    events = await stream(client, tools=[WEATHER_TOOL], stream_interval=interval, **SGLEXT)
    entries: list[float] = []
    for event in events[:-1]:
        for choice in event["choices"]:
            entries += [entry["logprob"] for entry in (choice["logprobs"] or {"content": []})["content"]]
    [call] = client.ledger
    assert entries == call.logprobs


async def test_an_earlier_release_ignores_the_wish_for_sglext(serve: Serve) -> None:
    client = await serve(engine="sglang", version="0.5.19")
    assert "sglext" not in await ask(client, **SGLEXT)
    assert not any("sglext" in event for event in await stream(client, **SGLEXT) if event != "[DONE]")


async def test_a_stream_that_breaks_off_has_no_ids(serve: Serve) -> None:
    fault = StreamError(kind="stream_error", after_tokens=2)
    client = await serve(scripted(Turn(content="one two three"), fault=fault), engine="sglang")
    *_, error, done = await stream(client, **SGLEXT)
    assert (error["error"]["object"], error["error"]["code"], done) == ("error", 500, "[DONE]")


async def test_an_abort_by_the_engine_keeps_the_ids(serve: Serve) -> None:
    fault = Abort(kind="abort", after_tokens=2)
    client = await serve(scripted(Turn(content="one two three"), fault=fault), engine="sglang")
    answer = await ask(client, **META)
    assert answer["choices"][0]["finish_reason"] == "abort"
    assert answer["choices"][0]["meta_info"]["finish_reason"]["type"] == "abort"
    *_, finished, ids, _ = await stream(client, **SGLEXT)
    assert finished["choices"][0]["finish_reason"] == "abort"
    assert len(ids["sglext"]["output_ids"][0]) == 2


async def test_ids_sent_in_are_the_prompt(serve: Serve) -> None:
    new, old = await serve(engine="sglang"), await serve(engine="sglang", version="0.5.12")
    for client in (new, old):
        await ask(client, input_ids=[5, 6, 7])
    assert new.ledger[0].prompt_ids == (5, 6, 7)
    assert old.ledger[0].prompt_ids != (5, 6, 7)


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ({"messages": [{"role": "user", "content": "word " * 300}]}, "is longer than the model's context length (256"),
        ({"messages": HELLO, "max_tokens": 256}, "maximum context length of 256 tokens. You requested a total of"),
    ],
)
@pytest.mark.parametrize("streamed", [False, True])
async def test_a_context_that_is_too_long_is_told_in_sglangs_words(
    serve: Serve, body: dict[str, Any], words: str, streamed: bool
) -> None:
    client = await serve(engine="sglang", max_model_len=256)
    response = await client.post("/v1/chat/completions", {**body, "stream": streamed})
    assert response.status_code == 400
    assert words in response.json()["message"]


async def test_every_error_has_sglangs_shape(serve: Serve) -> None:
    fault = HttpStatus(kind="http_status", status=503, retry_after_s=2)
    client = await serve(scripted(Turn(content="x"), fault=fault), engine="sglang", api_key="k")
    refused = await client.post("/v1/chat/completions", {"messages": HELLO}, Authorization="Bearer k")
    assert (refused.status_code, refused.json()["code"], refused.headers["Retry-After"]) == (503, 503, "2")
    assert (await client.post("/tokenize", {"prompt": "a"})).json() == {"error": "Unauthorized"}
    assert (await client.http.get("/health")).status_code == 200
    missing = await client.http.get("/version", headers={"Authorization": "Bearer k"})
    assert (missing.status_code, missing.json()["object"]) == (404, "error")


async def test_a_server_too_old_for_ids_and_one_that_omits_them_give_none(serve: Serve) -> None:
    bare = await ask(await serve(engine="sglang", token_ids=False), return_token_ids=True, **{**META, **SGLEXT})
    assert "sglext" not in bare
    assert set(bare["choices"][0]) & {"meta_info", "response_token_ids"} == set()
    fault = Omit(kind="omit")
    client = await serve(scripted(Turn(content="x"), fault=fault), engine="sglang")
    answer = await ask(client, return_token_ids=True, **{**META, **SGLEXT})
    assert answer["sglext"] == {}
    assert "output_token_logprobs" not in answer["choices"][0]["meta_info"]


async def test_bare_prompts_stream_their_ids(serve: Serve) -> None:
    client = await serve(engine="sglang", version="0.5.17")
    body = {"prompt": "Once", "max_tokens": 5, "stream": True, "return_token_ids": True, "logprobs": 0}
    response = await client.post("/v1/completions", body)
    choices = [choice for event in events_of(response.text) if event != "[DONE]" for choice in event["choices"]]
    [call] = client.ledger
    assert [token_id for choice in choices for token_id in choice["token_ids"]] == call.sampled_ids
    assert [choice["prompt_token_ids"] for choice in choices if "prompt_token_ids" in choice] == [list(call.prompt_ids)]


@pytest.mark.parametrize("incremental", [False, True])
async def test_the_native_route_streams_all_so_far_or_only_what_is_new(serve: Serve, incremental: bool) -> None:
    client = await serve(engine="sglang", incremental_streaming=incremental)
    body = {"text": "Once", "sampling_params": {"max_new_tokens": 4}, "return_logprob": True}
    whole = (await client.post("/generate", body)).json()
    *chunks, done = events_of((await client.post("/generate", {**body, "stream": True})).text)
    lengths = [len(chunk["output_ids"]) for chunk in chunks]
    assert lengths == ([1, 1, 1, 1] if incremental else [1, 2, 3, 4])
    assert whole["output_ids"] == client.ledger[0].sampled_ids
    assert whole["meta_info"]["finish_reason"] == {"type": "length", "length": 4}
    assert done == "[DONE]"


async def test_tokenize_knows_chats_and_does_not_know_the_context(serve: Serve) -> None:
    client = await serve(engine="sglang", max_model_len=64)
    await ask(client)
    told = (await client.post("/tokenize", {"messages": HELLO})).json()
    assert told["tokens"] == list(client.ledger[0].prompt_ids)
    assert told["count"] == len(told["tokens"])
    assert told["max_model_len"] > 64
    text = (await client.post("/detokenize", {"tokens": told["tokens"]})).json()["text"]
    assert "weather in Paris?" in text


async def test_what_the_server_is_and_which_policy_samples(serve: Serve) -> None:
    client = await serve(engine="sglang", version="0.5.21", max_model_len=512)
    assert (await client.get("/server_info"))["version"] == "0.5.21"
    assert (await client.get("/get_server_info"))["version"] == "0.5.21"
    assert (await client.get("/v1/models"))["data"][0]["max_model_len"] == 512
    assert (await client.http.get("/get_weight_version")).status_code == 404
    assert (await client.post("/update_weight_version", {"new_version": "7"})).json()["success"]
    assert (await client.get("/model_info"))["weight_version"] == "7"


async def begun(client: Client, tokens: int = 1) -> None:
    await client.ledger.wait_until(lambda ledger: len(ledger) > 0 and len(ledger[-1].sampled_ids) >= tokens)


SLOW = scripted(Turn(content="one two three four five six seven eight nine ten", tokens_per_s=40))


@pytest.mark.parametrize("told", [True, False])
async def test_a_new_version_aborts_what_runs_unless_told_not_to(serve: Serve, told: bool) -> None:
    client = await serve(SLOW, engine="sglang")
    call = asyncio.create_task(ask(client))
    await begun(client)
    await client.post("/update_weight_version", {"new_version": "2", **({} if told else {"abort_all_requests": False})})
    answer = await call
    assert answer["choices"][0]["finish_reason"] == ("abort" if told else "stop")


@pytest.mark.parametrize("mode", ["abort", "retract", "in_place"])
async def test_a_pause_ends_or_freezes_what_runs_and_new_calls_wait(serve: Serve, mode: str) -> None:
    client = await serve(SLOW, engine="sglang")
    running = asyncio.create_task(ask(client))
    await begun(client)
    assert (await client.post("/pause_generation", {"mode": mode})).json()["status"] == "ok"
    waiting = asyncio.create_task(ask(client))
    if mode == "abort":
        assert (await running)["choices"][0]["finish_reason"] == "abort"
    for _ in range(5):
        await client.get("/model_info")  # by now the new call is there as well
    assert not waiting.done()
    assert len(client.ledger) == 1
    assert (await client.post("/continue_generation", {})).json()["status"] == "ok"
    assert (await waiting)["choices"][0]["finish_reason"] == "stop"
    assert (await running)["choices"][0]["finish_reason"] == ("abort" if mode == "abort" else "stop")


async def test_one_call_is_aborted_by_its_id_and_a_busy_cache_is_not_flushed(serve: Serve) -> None:
    client = await serve(SLOW, engine="sglang")
    body = {"model": "tiny", "messages": HELLO}
    call = asyncio.create_task(client.post("/v1/chat/completions", body, X_Request_Id="r1"))
    await begun(client)
    assert (await client.post("/flush_cache", {})).status_code == 400
    await client.post("/abort_request", {"rid": "another"})
    await client.post("/abort_request", {"rid": "r1"})
    assert (await call).json()["choices"][0]["finish_reason"] == "abort"
    assert (await client.post("/flush_cache", {})).status_code == 200
    assert 'sglang:num_running_reqs{model_name="tiny"} 0.0' in (await client.http.get("/metrics")).text


async def test_a_health_check_that_samples_is_no_call(serve: Serve) -> None:
    client = await serve(engine="sglang")
    assert (await client.http.get("/health_generate")).status_code == 200
    assert len(client.ledger) == 0
