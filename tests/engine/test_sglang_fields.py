"""What polarq relies on in SGLang's answers is really there, and means what polarq takes it for.

Every fact here is one that the proxy's SGLang engine builds on; when a new release breaks one, this file says which.
"""

from __future__ import annotations

from typing import Any

import httpx
import pytest

from .chat import WITHOUT_THINKING, Answer, forced_tool_call, says
from .reference import ReferenceModel, largest_difference
from .server import Server, Target
from .sglang_chat import ASK_STREAM, ASK_UNARY, read_sglang_stream, read_sglang_unary

REQUEST_DEADLINE_S = 120.0
both_ways = pytest.mark.parametrize("streamed", [False, True], ids=["unary", "streamed"])


@pytest.fixture(autouse=True)
def sglang_alone(engine: Server) -> None:
    if engine.engine != "sglang":
        pytest.skip("these are SGLang's fields")


async def post(engine: Server, path: str, body: dict[str, Any]) -> httpx.Response:
    async with httpx.AsyncClient(timeout=REQUEST_DEADLINE_S) as client:
        return await client.post(f"{engine.base_url}{path}", json={"model": engine.model, **body})


async def ask_sglang(engine: Server, body: dict[str, Any], streamed: bool = False) -> Answer:
    asked = {**(ASK_STREAM if streamed else ASK_UNARY), **body}
    if streamed:
        asked |= {"stream": True, "stream_options": {"include_usage": True}}
    response = (await post(engine, "/v1/chat/completions", asked)).raise_for_status()
    return read_sglang_stream(response.text.splitlines()) if streamed else read_sglang_unary(response.json())


@both_ways
async def test_counts_of_ids_log_probabilities_and_usage_agree(engine: Server, streamed: bool) -> None:
    answer = await ask_sglang(engine, says("Fix the parser.", max_tokens=8, temperature=1.0), streamed)
    assert len(answer.sampled_ids) == len(answer.logprobs) == answer.usage["completion_tokens"] > 0
    assert len(answer.prompt_ids) == answer.usage["prompt_tokens"] > 0


async def test_every_place_gives_the_same_ids(engine: Server) -> None:
    body = {**says("Hello.", max_tokens=8), **ASK_UNARY, "return_token_ids": True, "return_prompt_token_ids": True}
    told = (await post(engine, "/v1/chat/completions", body)).raise_for_status().json()
    [choice] = told["choices"]
    ids = [pair[1] for pair in choice["meta_info"]["output_token_logprobs"]]
    assert choice["response_token_ids"] == told["sglext"]["output_ids"][0] == ids
    assert choice["prompt_token_ids"] == told["sglext"]["input_ids"]
    values = [pair[0] for pair in choice["meta_info"]["output_token_logprobs"]]
    assert [entry["logprob"] for entry in choice["logprobs"]["content"]] == values


async def test_ids_come_once_and_late_in_a_stream(engine: Server) -> None:
    answer = await ask_sglang(engine, says("Hello.", max_tokens=8), streamed=True)
    carrying = [n for n, frame in enumerate(answer.frames) if frame.get("sglext")]
    assert carrying == [len(answer.frames) - 2]
    assert answer.frames[carrying[0]]["choices"] == []
    assert answer.frames[-1]["usage"]["completion_tokens"] == len(answer.sampled_ids)


@pytest.mark.parametrize("name", ["return_token_ids", "return_prompt_token_ids", "return_meta_info"])
async def test_the_older_fields_are_refused_in_streams(engine: Server, name: str) -> None:
    refused = await post(engine, "/v1/chat/completions", {**says("Hello."), "stream": True, name: True})
    assert refused.status_code == 400
    assert refused.json()["object"] == "error"


@both_ways
async def test_ids_sent_in_are_what_the_engine_conditions_on(engine: Server, streamed: bool) -> None:
    body = says("Hello.", max_tokens=8)
    ids = (await ask_sglang(engine, body)).prompt_ids
    sent = [*ids, *ids]
    answer = await ask_sglang(engine, {**body, "input_ids": sent}, streamed)
    assert answer.prompt_ids == sent
    assert answer.usage["prompt_tokens"] == len(sent)


async def test_tokenize_renders_a_chat_to_the_ids_that_it_is_sampled_after(engine: Server) -> None:
    body = says("Hello, wörld.")
    rendered = (await post(engine, "/tokenize", body)).raise_for_status().json()
    assert rendered["tokens"] == (await ask_sglang(engine, {**body, "max_tokens": 1})).prompt_ids


@both_ways
async def test_what_ends_an_answer_is_its_last_id(engine: Server, streamed: bool) -> None:
    """An end of turn is a matched stop here; vLLM names none."""
    answer = await ask_sglang(engine, says("Say yes.", regex="yes", max_tokens=64, **WITHOUT_THINKING), streamed)
    assert (answer.finish_reason, answer.content) == ("stop", "yes")
    assert answer.stop_reason == answer.sampled_ids[-1]


async def test_a_whole_answer_with_a_call_does_not_say_what_ended_it(engine: Server) -> None:
    whole, streamed = [await ask_sglang(engine, forced_tool_call("sglang"), way) for way in (False, True)]
    assert whole.tool_calls == streamed.tool_calls == [("get_weather", '{"city": "Paris"}')]
    assert (whole.finish_reason, whole.stop_reason) == ("tool_calls", None)
    assert (streamed.finish_reason, streamed.stop_reason) == ("tool_calls", streamed.sampled_ids[-1])


@both_ways
async def test_a_context_that_is_too_long_is_a_plain_json_400(engine: Server, streamed: bool) -> None:
    body = {**says("Hello.", max_tokens=engine.context + 1), "stream": streamed}
    refused = await post(engine, "/v1/chat/completions", body)
    assert (refused.status_code, refused.json()["code"]) == (400, 400)
    assert f"maximum context length of {engine.context} tokens" in refused.json()["message"]


async def test_an_unknown_field_is_ignored_without_a_word(engine: Server) -> None:
    """So an older server answers 200 without ids, and presence must be checked."""
    answer = await ask_sglang(engine, says("Hello.", max_tokens=4, return_tokens_of_the_future=True))
    assert answer.sampled_ids


async def test_a_whole_answer_names_its_policy_versions(engine: Server) -> None:
    answer = await ask_sglang(engine, says("Hello.", max_tokens=4))
    meta = answer.frames[0]["choices"][0]["meta_info"]
    span = {"version": engine.weight_version(), "start": 0, "end": len(answer.sampled_ids)}
    assert meta["weight_versions"] == [span]
    assert answer.frames[0]["metadata"]["weight_version"] == span["version"]


async def test_nothing_about_tokens_comes_unless_asked_for(engine: Server) -> None:
    told = (await post(engine, "/v1/chat/completions", says("Hello.", max_tokens=4))).raise_for_status().json()
    assert "sglext" not in told
    assert told["choices"][0]["logprobs"] is None


@both_ways
@pytest.mark.parametrize("temperature", [0.5, 1.0])
async def test_log_probabilities_are_those_of_logits_divided_by_the_temperature(
    engine: Server, reference: ReferenceModel, target: Target, streamed: bool, temperature: float
) -> None:
    body = says("Run the tests.", max_tokens=96, temperature=temperature, top_p=1.0)
    answer = await ask_sglang(engine, body, streamed)
    rows = (reference.distributions(answer.prompt_ids, answer.sampled_ids) / temperature).log_softmax(-1)
    expected = [float(row[token_id]) for row, token_id in zip(rows, answer.sampled_ids, strict=True)]
    assert largest_difference(answer.logprobs, expected) < target.tolerance
