"""Every answer has the fields of a real vLLM server's, in the same order and of the same kinds."""

from __future__ import annotations

import json
from typing import Any

import pytest

from polarq.testing.inference import Scenario, ToolCall, Turn
from polarq.testing.inference.scenario import Script
from tests.testing.inference.asking import scripted
from tests.testing.inference.captures import capture, events_of, shape
from tests.testing.inference.conftest import Serve

THINKS = Turn(reasoning="I should look at the weather of Paris before I answer anything at all here.")
SAYS = Turn(content="final answer text and some more words after it")
CALLS = Turn(content="ok", tool_calls=(ToolCall(name="get_weather", arguments={"city": "Paris"}),))
CALLS_TWICE = Turn(content="ok", tool_calls=CALLS.tool_calls * 2)
SILENT = Turn(content="")

UNARY = {
    "vllm_chat_nonstream_tokenids_logprobs.json": THINKS,
    "vllm_chat_n2.json": THINKS,
    "vllm_chat_no_logprobs.json": THINKS,
    "vllm_chat_include_reasoning_false.json": THINKS,
    "vllm_chat_tokens_as_token_ids.json": THINKS,
    "vllm_chat_top_logprobs2.json": SAYS,
    "vllm_chat_return_prompt_text.json": SAYS,
    "vllm_chat_prompt_logprobs.json": SAYS,
    "vllm_chat_eos.json": SILENT,
    "vllm_chat_stop_string.json": SAYS,
    "vllm_chat_toolcall_nonstream.json": CALLS,
    "vllm_chat_toolcall_parallel_false.json": CALLS_TWICE,
    "vllm_chat_maxtokens_overflow.json": SAYS,
    "vllm_err_bad_body.json": SAYS,
    "vllm_err_unknown_model.json": SAYS,
    "vllm_err_context_overflow.json": SAYS,
    "vllm_completions_token_prompt.json": SAYS,
    "vllm_completions_token_prompt_logprobs1.json": SAYS,
    "vllm_models.json": SAYS,
    "vllm_tokenize_chat.json": SAYS,
    "vllm_tokenize_prompt.json": SAYS,
    "vllm_detokenize.json": SAYS,
    "vllm_version.json": SAYS,
    "vllm_health.json": SAYS,
    "vllm_weight_info_default.json": SAYS,
    "vllm_update_version_v2.json": SAYS,
    "vllm_pause_abort.json": SAYS,
    "vllm_resume.json": SAYS,
    "vllm_is_paused.json": SAYS,
    "vllm_abort_requests.json": SAYS,
}


def scenario_of(turn: Turn) -> Scenario:
    return scripted(turn)


@pytest.mark.parametrize("name", UNARY)
async def test_an_answer_has_the_shape_of_the_captured_one(serve: Serve, name: str) -> None:
    real = capture(name)
    client = await serve(scenario_of(UNARY[name]), max_model_len=2048)

    answer = await client.http.request(real.method, real.path, json=real.body, headers=real.headers)

    assert answer.status_code == real.status
    if real.response == "":
        assert answer.content == b""
    else:
        assert shape(answer.json()) == shape(real.response)
        assert answer.headers["content-type"] == real.content_type


@pytest.mark.parametrize(
    "name",
    [
        "vllm_err_unknown_model.json",
        "vllm_err_bad_body.json",
        "vllm_err_context_overflow.json",
        "vllm_chat_maxtokens_overflow.json",
    ],
)
async def test_an_error_body_is_the_real_one_word_for_word(serve: Serve, name: str) -> None:
    real = capture(name)
    client = await serve("echo", max_model_len=2048)

    answer = await client.post(real.path, real.body)

    assert answer.json() == real.response


async def test_an_overflow_of_a_streamed_request_is_plain_json(serve: Serve) -> None:
    real = capture("vllm_err_context_overflow.json")
    client = await serve("echo", max_model_len=2048)

    answer = await client.post(real.path, {**real.body, "stream": True})

    assert (answer.status_code, answer.json()) == (400, real.response)


async def test_a_prompt_that_leaves_too_little_room_is_refused_and_not_clamped(serve: Serve) -> None:
    client = await serve("echo", max_model_len=64)
    body = {"model": "tiny", "messages": [{"role": "user", "content": "hello " * 8}], "max_tokens": 60}

    answer = await client.post("/v1/chat/completions", body)

    error = answer.json()["error"]
    assert (answer.status_code, error["type"], error["param"]) == (400, "BadRequestError", "input_tokens")


async def test_the_request_id_becomes_the_answers_id_and_is_echoed(serve: Serve) -> None:
    real = capture("vllm_chat_nonstream_tokenids_logprobs.json")
    client = await serve(scenario_of(THINKS))

    answer = await client.post(real.path, real.body, X_Request_Id="polarq-req-1")

    assert answer.json()["id"] == real.response["id"] == "chatcmpl-polarq-req-1"
    assert answer.headers["x-request-id"] == "polarq-req-1"


async def test_the_chunks_of_a_stream_have_the_captured_shapes(serve: Serve) -> None:
    real = capture("vllm_chat_stream_tokenids_logprobs.sse")
    client = await serve(scenario_of(Turn(content="many words that go on and on")))

    answer = await client.post(real.path, real.body)
    events = events_of(answer.text)

    assert answer.headers["content-type"] == real.content_type
    assert len(events) == len(real.events)
    assert events[-1] == real.events[-1] == "[DONE]"
    first, second, *_, last, usage, _done = events
    assert shape(first) == shape(real.events[0])
    assert shape(_as_reasoning(second)) == shape(real.events[1])
    assert shape(_without_delta(last)) == shape(_without_delta(real.events[-3]))
    assert shape(usage) == shape(real.events[-2])


def _as_reasoning(chunk: dict[str, object]) -> object:
    return json.loads(json.dumps(chunk).replace('"delta": {"content"', '"delta": {"reasoning"'))


def _without_delta(chunk: dict[str, list[dict[str, object]]]) -> object:
    """The captured last token was half a character and had no text; the position of the keys is what matters."""
    return {**chunk, "choices": [{**choice, "delta": {}, "logprobs": None} for choice in chunk["choices"]]}


async def test_the_chunks_of_a_streamed_tool_call_have_the_captured_shapes(serve: Serve) -> None:
    real = capture("vllm_chat_toolcall_stream.sse")
    client = await serve(scenario_of(CALLS))

    events = events_of((await client.post(real.path, real.body)).text)

    def kinds(found: list[Any]) -> set[str]:
        return {json.dumps(shape(event["choices"][0]["delta"])) for event in found if _has_choice(event)}

    assert kinds(events) == kinds(list(real.events))
    assert events[-3]["choices"][0]["finish_reason"] == real.events[-3]["choices"][0]["finish_reason"] == "tool_calls"


def _has_choice(event: object) -> bool:
    return isinstance(event, dict) and bool(event["choices"])


async def test_a_stream_interval_batches_ids_after_the_first_token(serve: Serve) -> None:
    real = capture("vllm_chat_stream_interval3.sse")
    client = await serve(scenario_of(Turn(content="many words that go on and on")))

    events = events_of((await client.post(real.path, real.body)).text)

    def sizes(found: list[Any]) -> list[int]:
        return [len(event["choices"][0].get("token_ids", [])) for event in found if isinstance(event, dict)]

    assert sizes(events) == sizes(list(real.events)) == [0, 1, 3, 2]
    assert "system_fingerprint" in events[-2]


async def test_the_chunks_of_a_streamed_completion_have_the_captured_shapes(serve: Serve) -> None:
    real = capture("vllm_completions_token_prompt_stream.sse")
    client = await serve(scenario_of(SAYS))

    events = events_of((await client.post(real.path, real.body)).text)

    assert [shape(event) for event in events] == [shape(event) for event in real.events]


async def test_unknown_fields_are_ignored_silently(serve: Serve) -> None:
    client = await serve("echo")

    answer = await client.chat(some_unknown_field=1, prompt_token_ids=[1, 2])

    assert answer["choices"][0]["message"]["content"] == "The quick brown fox jumps over the lazy dog."


async def test_ids_are_only_given_to_who_asks(serve: Serve) -> None:
    client = await serve("echo")

    answer = await client.chat(return_token_ids=False)
    stream = await client.stream(return_token_ids=False)

    assert answer["prompt_token_ids"] is None and answer["choices"][0]["token_ids"] is None
    assert stream.events[0]["prompt_token_ids"] is None and stream.events[1]["choices"][0]["token_ids"] is None


@pytest.mark.parametrize(
    ("body", "param"),
    [
        (b"{", "body.1"),
        (b'{"model": "tiny", "messages": "hi"}', "body.messages"),
        (b'{"model": "tiny", "messages": [], "n": 0}', "body.n"),
        (b'{"model": "tiny", "messages": [{"role": "user", "content": "x"}], "max_tokens": 0}', "body.max_tokens"),
        (b"[]", "body"),
    ],
)
async def test_a_bad_body_is_a_400_that_names_the_field(serve: Serve, body: bytes, param: str) -> None:
    client = await serve("echo")

    answer = await client.http.post("/v1/chat/completions", content=body)

    assert answer.status_code == 400
    assert answer.json()["error"] == {
        "message": answer.json()["error"]["message"],
        "type": "Bad Request",
        "param": param,
        "code": 400,
    }


async def test_an_unknown_path_is_a_404_in_the_error_shape(serve: Serve) -> None:
    client = await serve("echo")

    answer = await client.post("/v1/nothing", {})

    assert (answer.status_code, answer.json()["error"]["code"]) == (404, 404)


async def test_the_key_guards_v1_and_nothing_else(serve: Serve) -> None:
    client = await serve("echo", api_key="sesame")

    assert (await client.http.get("/v1/models")).status_code == 401
    assert (await client.http.get("/v1/models", headers={"Authorization": "Bearer sesame"})).status_code == 200
    assert (await client.http.get("/health")).status_code == 200


async def test_a_script_may_be_chosen_by_the_models_suffix_without_showing_in_the_answer(serve: Serve) -> None:
    scripts = (Script(name="one", turns=(Turn(content="1"),)), Script(name="two", turns=(Turn(content="2"),)))
    client = await serve(Scenario(name="both", scripts=scripts))

    answer = await client.chat(model="tiny:two")

    assert (answer["model"], answer["choices"][0]["message"]["content"]) == ("tiny", "2")
