"""vLLM's tokens in, tokens out; what older servers ignore; start tokens; and what the ledger tells about calls."""

from __future__ import annotations

import asyncio
import hashlib
import json
from typing import Any

import httpx
import pytest

from polarq.testing.inference import ServerOptions, ToolCall, Turn, expected_logprobs
from polarq.testing.inference.engine import Engine
from polarq.testing.inference.requests import ChatRequest
from tests.testing.inference.asking import HELLO, TOKENS, WEATHER_TOOL, Client, scripted
from tests.testing.inference.captures import events_of
from tests.testing.inference.conftest import Serve

CALLS = scripted(
    Turn(reasoning="look", content="I look.", tool_calls=(ToolCall(name="get_weather", arguments={"city": "Paris"}),))
)
CHAT = {"model": "tiny", "messages": HELLO, "tools": [WEATHER_TOOL], **TOKENS}


async def rendered(client: Client, **fields: Any) -> Any:
    response = await client.post("/v1/chat/completions/render", {**CHAT, **fields})
    assert response.status_code == 200, response.text
    return {**response.json(), "return_token_ids": True}


@pytest.mark.parametrize("path", ["/inference/v1/generate", "/v1/chat/completions/render"])
async def test_without_scale_out_the_routes_are_closed(serve: Serve, path: str) -> None:
    client = await serve()
    response = await client.post(path, {"token_ids": [5], "messages": HELLO})
    assert (response.status_code, response.json()["error"]["code"]) == (403, 403)
    older = await serve(version="0.29.0")
    assert (await older.post(path, {"token_ids": [5], "messages": HELLO})).status_code == 200


async def test_a_rendered_chat_generates_what_the_chat_samples(serve: Serve) -> None:
    client = await serve(CALLS, scale_out=True)
    asked = await rendered(client)
    answer = (await client.post("/inference/v1/generate", asked)).json()
    await client.chat(tools=[WEATHER_TOOL])
    tokens, chat = client.ledger
    assert (tokens.prompt_ids, tokens.sampled_ids) == (chat.prompt_ids, chat.sampled_ids)
    [choice] = answer["choices"]
    assert answer["prompt_token_ids"] == asked["token_ids"] == list(chat.prompt_ids)
    assert choice["token_ids"] == chat.sampled_ids
    entries = choice["logprobs"]["content"]
    assert [entry["token_id"] for entry in entries] == chat.sampled_ids
    assert [entry["logprob"] for entry in entries] == expected_logprobs(chat.prompt_ids, chat.sampled_ids)
    assert [entry["top_logprobs"][0]["token_id"] for entry in entries] == chat.sampled_ids
    assert choice["weight_versions"] == [{"version": "default", "start": 0, "end": len(chat.sampled_ids)}]
    assert answer["request_id"].startswith("generate-tokens-")
    assert answer["usage"]["completion_tokens"] == len(chat.sampled_ids)


async def test_a_generate_stream_is_deltas_of_the_whole_answer(serve: Serve) -> None:
    client = await serve(CALLS, scale_out=True)
    asked = {**await rendered(client), "stream": True, "stream_options": {"include_usage": True}}
    *events, usage, done = events_of((await client.post("/inference/v1/generate", asked)).text)
    [call] = client.ledger
    choices = [event["choices"][0] for event in events]
    assert [token_id for choice in choices for token_id in choice["token_ids"]] == call.sampled_ids
    assert [event["prompt_token_ids"] is not None for event in events] == [True] + [False] * (len(events) - 1)
    assert [choice["weight_versions"] is not None for choice in choices] == [False] * (len(choices) - 1) + [True]
    assert choices[-1]["finish_reason"] == "stop"
    assert (usage["usage"]["completion_tokens"], done) == (len(call.sampled_ids), "[DONE]")


@pytest.mark.parametrize("count", [1, 5])
async def test_generate_goes_on_with_a_turn_that_has_begun(serve: Serve, count: int) -> None:
    client = await serve(CALLS, scale_out=True)
    asked = await rendered(client)
    whole = (await client.post("/inference/v1/generate", asked)).json()["choices"][0]
    left = {**asked["sampling_params"], "max_tokens": asked["sampling_params"]["max_tokens"] - count}
    begun = {**asked, "token_ids": asked["token_ids"] + whole["token_ids"][:count], "sampling_params": left}
    rest = (await client.post("/inference/v1/generate", begun)).json()["choices"][0]
    assert rest["token_ids"] == whole["token_ids"][count:]
    assert rest["logprobs"]["content"] == whole["logprobs"]["content"][count:]
    assert rest["finish_reason"] == whole["finish_reason"]


async def test_derender_gives_the_chat_completion(serve: Serve) -> None:
    client = await serve(CALLS, scale_out=True)
    generated = (await client.post("/inference/v1/generate", await rendered(client))).json()
    body = {"generate_response": generated, "chat_request": CHAT}
    told = (await client.post("/v1/chat/completions/derender", body)).json()
    chat = await client.chat(tools=[WEATHER_TOOL])
    ids = [[call.pop("id") for call in answer["choices"][0]["message"]["tool_calls"]] for answer in (told, chat)]
    assert set(ids[0]).isdisjoint(ids[1])  # made anew
    assert told["choices"][0]["message"] == chat["choices"][0]["message"]
    assert told["choices"][0]["finish_reason"] == chat["choices"][0]["finish_reason"] == "tool_calls"
    assert told["choices"][0]["logprobs"] == chat["choices"][0]["logprobs"]
    assert told["usage"]["completion_tokens"] == chat["usage"]["completion_tokens"]


async def test_a_stop_string_is_cut_by_derender_too(serve: Serve) -> None:
    client = await serve(scripted(Turn(content="one two three")), scale_out=True)
    generated = (await client.post("/inference/v1/generate", await rendered(client, stop=["two"]))).json()
    body = {"generate_response": generated, "chat_request": CHAT}
    told = (await client.post("/v1/chat/completions/derender", body)).json()
    assert generated["choices"][0]["stop_reason"] == "two"
    assert told["choices"][0]["message"]["content"] == "one "


@pytest.mark.parametrize("ids", [[], [-1], [10**9], ["a"]])
async def test_ids_that_are_none_are_refused(serve: Serve, ids: list[Any]) -> None:
    client = await serve(scale_out=True)
    response = await client.post("/inference/v1/generate", {"token_ids": ids})
    assert (response.status_code, len(client.ledger)) == (400, 0)


@pytest.mark.parametrize(("version", "taken"), [("0.26.0", False), ("0.27.0", True)])
async def test_the_side_door_for_ids_opens_with_its_release(serve: Serve, version: str, taken: bool) -> None:
    client = await serve(version=version)
    await client.chat(kv_transfer_params={"prompt_token_ids": [5, 6]})
    assert (client.ledger[0].prompt_ids == (5, 6)) is taken


@pytest.mark.parametrize(("version", "told"), [("0.32.0", False), ("0.33.0", True)])
async def test_chat_answers_name_policy_versions_since_their_release(serve: Serve, version: str, told: bool) -> None:
    client = await serve(version=version)
    answer = await client.chat(return_weight_versions=True)
    assert ("weight_versions" in answer["choices"][0]) is told


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
async def test_a_chat_has_one_start_token_and_plain_text_one_more_than_it_holds(serve: Serve, engine: str) -> None:
    client = await serve(engine=engine, start_token=True)
    start = client.server.ledger  # the ledger of this server alone
    await client.post("/v1/chat/completions", {"model": "tiny", "messages": HELLO})
    ids = list(start[0].prompt_ids)
    assert ids.count(ids[0]) == 1
    assert (await client.post("/tokenize", {"messages": HELLO})).json()["tokens"] == ids
    key = "prompt" if engine == "vllm" else "text"
    text = (await client.post("/detokenize", {"tokens": ids})).json()[key]
    plain = (await client.post("/tokenize", {"prompt": text})).json()["tokens"]
    assert plain == [ids[0], *ids]
    bare = {"prompt": text, "add_special_tokens": False}
    assert (await client.post("/tokenize", bare)).json()["tokens"] == ids


async def test_without_the_option_nothing_has_a_start_token(serve: Serve) -> None:
    client = await serve()
    await client.chat()
    ids = list(client.ledger[0].prompt_ids)
    text = (await client.post("/detokenize", {"tokens": ids})).json()["prompt"]
    assert (await client.post("/tokenize", {"prompt": text})).json()["tokens"] == ids


async def test_the_ledger_tells_who_asked_and_which_requests_were_the_same(serve: Serve) -> None:
    client = await serve()
    body = json.dumps({"model": "tiny", "messages": HELLO, "user": "u1"}).encode()
    for _ in range(2):
        await client.http.post("/v1/chat/completions", content=body)
    await client.chat()
    first, again, other = client.ledger
    assert first.request_digest == again.request_digest == hashlib.sha256(body).hexdigest()
    assert other.request_digest != first.request_digest
    assert [call.user for call in client.ledger] == ["u1", "u1", None]


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
async def test_the_ledger_tells_a_client_that_left_from_an_abort_by_the_engine(serve: Serve, engine: str) -> None:
    slow = scripted(Turn(content="one two three four five six seven eight nine ten", tokens_per_s=40))
    client = await serve(slow, engine=engine)
    async with httpx.AsyncClient(base_url=client.server.base_url, trust_env=False) as leaving:
        body = {"model": "tiny", "messages": HELLO}
        call = asyncio.create_task(leaving.post("/v1/chat/completions", json=body))
        await client.ledger.wait_until(lambda ledger: len(ledger) > 0 and len(ledger[0].sampled_ids) > 0)
        call.cancel()
        await client.ledger.wait_until(lambda ledger: ledger[0].finished_at is not None)
    staying = asyncio.create_task(client.post("/v1/chat/completions", {"model": "tiny", "messages": HELLO}))
    await client.ledger.wait_until(lambda ledger: len(ledger) > 1 and len(ledger[1].sampled_ids) > 0)
    await client.post("/abort_requests" if engine == "vllm" else "/abort_request", {"abort_all": True})
    await staying
    left, aborted = client.ledger
    assert (left.aborted, left.hung_up, left.delivered) == (True, True, False)
    assert (aborted.aborted, aborted.hung_up, aborted.delivered) == (True, False, True)


async def test_a_large_message_is_encoded_while_the_loop_goes_on() -> None:
    """Turns of the loop are counted, not time: encoded in the loop, it would be done at the first of them."""
    engine = Engine(ServerOptions(max_model_len=10_000_000))
    body = ChatRequest(messages=[{"role": "user", "content": "word and word " * 50_000}])
    encoding = asyncio.create_task(engine.prompt_of(body))
    turns = 0
    while not encoding.done():
        await asyncio.sleep(0)
        turns += 1
    ids, text = await encoding
    assert turns > 10
    assert ids == engine.tokenizer.encode(text or "")


async def test_a_message_that_cannot_fit_is_refused_without_encoding_it(serve: Serve) -> None:
    client = await serve(max_model_len=1024)
    response = await client.post("/v1/chat/completions", {"messages": [{"role": "user", "content": "é" * 20_000_000}]})
    assert response.status_code == 400
    assert response.json()["error"]["param"] == "input_tokens"


@pytest.mark.parametrize(
    ("engine", "grammar"),
    [
        ("vllm", {"structured_outputs": {"choice": ["a (b)\n{c}"]}}),
        ("sglang", {"regex": r"a \(b\)\n\{c\}"}),
    ],
)
async def test_a_grammar_that_leaves_one_answer_forces_it(serve: Serve, engine: str, grammar: dict[str, Any]) -> None:
    client = await serve(engine=engine)
    body = {"model": "tiny", "messages": HELLO, **grammar}
    told = (await client.post("/v1/chat/completions", body)).json()
    assert told["choices"][0]["message"]["content"] == "a (b)\n{c}"


@pytest.mark.parametrize(
    ("engine", "grammar"),
    [
        ("vllm", {"structured_outputs": {"choice": ["a", "b"]}}),
        ("sglang", {"regex": "a|b"}),
        ("sglang", {"regex": "a+"}),
    ],
)
async def test_a_grammar_with_a_choice_left_is_ignored(serve: Serve, engine: str, grammar: dict[str, Any]) -> None:
    client = await serve(scripted(Turn(content="free")), engine=engine)
    told = (await client.post("/v1/chat/completions", {"model": "tiny", "messages": HELLO, **grammar})).json()
    assert told["choices"][0]["message"]["content"] == "free"
