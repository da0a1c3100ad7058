"""What polarq relies on in vLLM's answers is really there, and means what polarq takes it for.

Every fact here is one that the proxy's vLLM engine builds on; when a new vLLM release breaks one, this file says which.
"""

from __future__ import annotations

import asyncio
from statistics import median
from typing import Any

import httpx
import pytest

from polarq.testing.inference import load_tokenizer

from .chat import ASK_FOR_TOKENS, TOOL_CALL_TEXT, WEATHER_TOOL, Answer, a_word_in, ask, forced_tool_call, says
from .conftest import Note
from .reference import ReferenceModel, largest_difference
from .server import TOLERANCE, Server


def way(streamed: bool) -> str:
    return "streamed" if streamed else "unary"


@pytest.fixture(autouse=True)
def vllm_alone(engine: Server) -> None:
    if engine.engine != "vllm":
        pytest.skip("these are vLLM's fields")


both_ways = pytest.mark.parametrize("streamed", [False, True], ids=["unary", "streamed"])


async def ask_vllm(engine: Server, body: dict[str, Any], streamed: bool = False) -> Answer:
    return await ask(engine.chat_url, {"model": engine.model, **ASK_FOR_TOKENS, **body}, streamed=streamed)


@both_ways
async def test_counts_of_ids_log_probabilities_and_usage_agree(engine: Server, streamed: bool) -> None:
    answer = await ask_vllm(
        engine, says("Fix the parser.", max_tokens=48, temperature=1.0, seed=1, ignore_eos=True), streamed
    )
    assert len(answer.sampled_ids) == len(answer.logprobs) == answer.usage["completion_tokens"] == 48
    assert len(answer.prompt_ids) == answer.usage["prompt_tokens"] > 0
    assert answer.finish_reason == "length"
    assert answer.stop_reason is None


@both_ways
@pytest.mark.parametrize("temperature", [0.0, 0.7, 1.0])
async def test_log_probabilities_equal_a_reference_forward_pass(
    engine: Server, reference: ReferenceModel, streamed: bool, temperature: float, note: Note
) -> None:
    """Raw log-probabilities: before temperature, so one forward pass at temperature 1 explains them all."""
    body = says("Run the tests.", max_tokens=96, temperature=temperature, seed=2)
    answer = await ask_vllm(engine, body, streamed)
    expected = reference.log_probs(answer.prompt_ids, answer.sampled_ids)
    difference = largest_difference(answer.logprobs, expected)
    note(
        f"vLLM {way(streamed)}, temperature {temperature}: {len(expected)} tokens, largest difference {difference:.1e}"
    )
    assert difference < TOLERANCE


async def test_a_log_probability_of_the_wrong_position_or_context_would_be_noticed(
    engine: Server, reference: ReferenceModel, note: Note
) -> None:
    """The check above can fail: one position off, or one token of the prompt missing, is far outside the tolerance."""
    answer = await ask_vllm(engine, says("Run the tests.", max_tokens=64, temperature=1.0, seed=3))
    expected = reference.log_probs(answer.prompt_ids, answer.sampled_ids)
    shifted = median(abs(a - b) for a, b in zip(answer.logprobs[1:], expected[:-1], strict=True))
    assert shifted > 1000 * TOLERANCE
    shortened = reference.log_probs(answer.prompt_ids[1:], answer.sampled_ids)
    moved = largest_difference(answer.logprobs, shortened)
    note(
        f"the check can fail: one position off differs by {shifted:.2f} (median), one prompt token less by {moved:.2f}"
    )
    assert moved > 1000 * TOLERANCE


async def test_ids_of_a_stream_equal_the_unary_ones_at_temperature_zero(engine: Server) -> None:
    body = says("Look at the code first.", max_tokens=96, temperature=0.0)
    unary, streamed = await ask_vllm(engine, body), await ask_vllm(engine, body, streamed=True)
    assert streamed.sampled_ids == unary.sampled_ids
    assert streamed.prompt_ids == unary.prompt_ids
    assert streamed.text == unary.text
    assert largest_difference(streamed.logprobs, unary.logprobs) < TOLERANCE
    assert streamed.finish_reason == unary.finish_reason
    assert {key: streamed.usage[key] for key in ("prompt_tokens", "completion_tokens")} == {
        key: unary.usage[key] for key in ("prompt_tokens", "completion_tokens")
    }


async def test_concurrent_requests_do_not_move_each_others_log_probabilities(
    engine: Server, reference: ReferenceModel, note: Note
) -> None:
    bodies = [says(f"Task {n}: " + "do it. " * n, max_tokens=32, temperature=1.0, seed=n) for n in range(12)]
    answers = await asyncio.gather(*(ask_vllm(engine, body, n % 2 == 0) for n, body in enumerate(bodies)))
    differences = [largest_difference(a.logprobs, reference.log_probs(a.prompt_ids, a.sampled_ids)) for a in answers]
    note(f"vLLM, {len(answers)} calls at once, largest difference {max(differences):.1e}")
    assert max(differences) < TOLERANCE


async def test_prompt_ids_come_once_and_first_in_a_stream(engine: Server) -> None:
    answer = await ask_vllm(engine, says("Hello.", max_tokens=8), streamed=True)
    carrying = [n for n, frame in enumerate(answer.frames) if frame.get("prompt_token_ids")]
    assert carrying == [0]
    assert all(not choice.get("token_ids") for choice in answer.frames[0]["choices"])
    assert answer.frames[-1]["choices"] == []
    assert answer.frames[-1]["usage"]["completion_tokens"] == len(answer.sampled_ids)


@both_ways
async def test_the_end_of_turn_id_is_among_the_sampled_ids_and_has_its_log_probability(
    engine: Server, reference: ReferenceModel, streamed: bool
) -> None:
    """The end is forced by a bias of +100, which raw log-probabilities do not see."""
    bias = {str(reference.end_of_turn_id): 100}
    answer = await ask_vllm(engine, says("Are you done?", max_tokens=8, logit_bias=bias), streamed)
    assert answer.sampled_ids == [reference.end_of_turn_id]
    assert answer.finish_reason == "stop"
    assert answer.text == ""
    expected = reference.log_probs(answer.prompt_ids, answer.sampled_ids)
    assert expected[0] < -1
    assert largest_difference(answer.logprobs, expected) < TOLERANCE


@pytest.mark.usefixtures("tiny")
@both_ways
async def test_another_end_than_the_end_of_turn_is_named_as_stop_reason(engine: Server, streamed: bool) -> None:
    """And its id is 0 here: a reader that takes 0 for nothing loses it."""
    answer = await ask_vllm(engine, says("Are you done?", max_tokens=8, logit_bias={"0": 100}), streamed)
    assert answer.sampled_ids == [0]
    assert (answer.finish_reason, answer.stop_reason) == ("stop", 0)


@both_ways
async def test_a_tool_call_keeps_every_sampled_id(engine: Server, reference: ReferenceModel, streamed: bool) -> None:
    answer = await ask_vllm(engine, forced_tool_call(temperature=1.0, seed=4), streamed)
    assert answer.finish_reason == "tool_calls"
    assert answer.tool_calls == [("get_weather", '{"city": "Paris"}')]
    assert answer.sampled_ids[-1] in reference.end_ids
    assert len(answer.sampled_ids) == len(answer.logprobs) == answer.usage["completion_tokens"]
    assert len(answer.prompt_ids) == answer.usage["prompt_tokens"]
    assert await detokenize(engine, answer.sampled_ids[:-1]) == TOOL_CALL_TEXT


async def test_a_streamed_tool_call_has_ids_in_frames_without_any_text(engine: Server, note: Note) -> None:
    """A proxy that drops empty deltas would lose these tokens."""
    answer = await ask_vllm(engine, forced_tool_call(temperature=1.0, seed=5), streamed=True)
    choices = [choice for frame in answer.frames for choice in frame["choices"]]
    silent = [len(choice["token_ids"]) for choice in choices if choice.get("token_ids") and not choice["delta"]]
    note(f"{sum(silent)} of {len(answer.sampled_ids)} ids came in {len(silent)} frames with an empty delta")
    assert sum(silent) > 0


@pytest.mark.usefixtures("tiny")
async def test_log_probabilities_under_a_grammar_are_those_of_the_allowed_ids_only(
    engine: Server, reference: ReferenceModel, note: Note
) -> None:
    """Why a call under a grammar is recorded with `grammar`: a plain forward pass does not explain its values.

    One that is renormalised over the ids which the grammar allowed at each position does, to the same tolerance.
    """
    answer = await ask_vllm(engine, forced_tool_call(temperature=1.0, seed=6))
    raw = reference.distributions(answer.prompt_ids, answer.sampled_ids)
    plain = reference.log_probs(answer.prompt_ids, answer.sampled_ids)
    tokenizer = load_tokenizer()
    texts = {token_id: tokenizer.decode([token_id]) for token_id in range(tokenizer.vocabulary_size)}
    left, explained = TOOL_CALL_TEXT, []
    for row, told, token_id in zip(raw, plain, answer.sampled_ids, strict=True):
        allowed = [n for n, text in texts.items() if left.startswith(text)] if left else reference.end_ids
        explained.append(told - float(row[allowed].logsumexp(0)))
        left = left.removeprefix(texts[token_id])
    forced = sum(value == 0.0 for value in answer.logprobs)
    apart, close = largest_difference(answer.logprobs, plain), largest_difference(answer.logprobs, explained)
    note(f"grammar: {forced} of {len(plain)} ids had no alternative; {apart:.1f} from the plain values at most,")
    note(f"  {close:.1e} from those renormalised over the allowed ids")
    assert apart > 1
    assert close < TOLERANCE


async def test_a_stop_string_is_cut_from_the_text_and_kept_in_the_ids(engine: Server) -> None:
    body = says("Look at the code first.", max_tokens=64, temperature=0.0)
    whole = await ask_vllm(engine, body)
    middle = a_word_in(whole.text)
    stopped = await ask_vllm(engine, {**body, "stop": [middle]})
    assert stopped.finish_reason == "stop"
    assert stopped.stop_reason == middle
    assert middle not in stopped.text
    assert stopped.sampled_ids == whole.sampled_ids[: len(stopped.sampled_ids)]
    assert middle in await detokenize(engine, stopped.sampled_ids)


@both_ways
async def test_nothing_about_tokens_comes_unless_asked_for(engine: Server, streamed: bool) -> None:
    answer = await ask(engine.chat_url, {"model": engine.model, **says("Hello.", max_tokens=8)}, streamed=streamed)
    assert (answer.prompt_ids, answer.sampled_ids, answer.logprobs) == ([], [], [])


async def test_an_unknown_field_is_ignored_without_a_word(engine: Server) -> None:
    """So an older server answers 200 without ids, and presence must be checked."""
    answer = await ask_vllm(engine, says("Hello.", max_tokens=4, return_tokens_of_the_future=True, ignore_eos=True))
    assert len(answer.sampled_ids) == 4


@both_ways
async def test_leaving_the_reasoning_out_takes_the_ids_away(engine: Server, streamed: bool) -> None:
    """So `include_reasoning: false` must never reach the engine."""
    answer = await ask_vllm(engine, says("Hello.", max_tokens=8, include_reasoning=False, ignore_eos=True), streamed)
    assert len(answer.sampled_ids) < answer.usage["completion_tokens"] == 8


@both_ways
async def test_a_context_that_is_too_long_is_a_plain_json_400(engine: Server, streamed: bool) -> None:
    body = says("Hello.", max_tokens=engine.context + 1)
    with pytest.raises(httpx.HTTPStatusError) as refused:
        await ask_vllm(engine, body, streamed)
    assert refused.value.response.status_code == 400
    assert refused.value.response.json()["error"]["code"] == 400


@pytest.mark.usefixtures("tiny")
async def test_ids_are_not_what_encoding_the_text_again_gives(engine: Server, note: Note) -> None:
    """Why ids are taken from the engine: the random model's samples almost never survive their own text."""
    answers = [await ask_vllm(engine, says("Hello.", max_tokens=64, temperature=1.0, seed=n)) for n in range(5)]
    again = [await tokenize(engine, await detokenize(engine, answer.sampled_ids)) for answer in answers]
    changed = sum(ids != answer.sampled_ids for ids, answer in zip(again, answers, strict=True))
    note(f"{changed} of {len(answers)} samples of 64 tokens change when their text is encoded again")
    assert changed == len(answers)


async def test_the_request_id_header_names_the_answer(engine: Server) -> None:
    async with httpx.AsyncClient(timeout=120) as client:
        body = {"model": engine.model, **says("Hello.", max_tokens=2)}
        response = await client.post(engine.chat_url, json=body, headers={"X-Request-Id": "r-17"})
    assert response.json()["id"] == "chatcmpl-r-17"


async def tokenize(engine: Server, text: str) -> list[int]:
    body = {"model": engine.model, "prompt": text, "add_special_tokens": False}
    async with httpx.AsyncClient(timeout=120) as client:
        response = await client.post(f"{engine.base_url}/tokenize", json=body)
    ids: list[int] = response.raise_for_status().json()["tokens"]
    return ids


async def detokenize(engine: Server, ids: list[int]) -> str:
    async with httpx.AsyncClient(timeout=120) as client:
        response = await client.post(f"{engine.base_url}/detokenize", json={"model": engine.model, "tokens": ids})
    return str(response.raise_for_status().json()["prompt"])


async def test_arguments_of_the_history_that_are_no_json_never_reach_the_template(engine: Server) -> None:
    """So the proxy puts them into an object. Some releases refuse them, others leave them out."""

    async def rendered(arguments: str) -> httpx.Response:
        function = {"name": "get_weather", "arguments": arguments}
        called = {"role": "assistant", "tool_calls": [{"id": "call_1", "type": "function", "function": function}]}
        history = [{"role": "user", "content": "weather?"}, called, {"role": "user", "content": "well?"}]
        body = {"model": engine.model, "messages": history, "tools": [WEATHER_TOOL]}
        async with httpx.AsyncClient(timeout=120) as client:
            return await client.post(f"{engine.base_url}/tokenize", json=body)

    plain, left_out = await rendered('{"city": "Paris"}'), await rendered("{}")
    assert plain.raise_for_status().json()["tokens"] != left_out.raise_for_status().json()["tokens"]
    for bad in ('{"city": "Par', "Paris", '["Paris"]'):
        answered = await rendered(bad)
        assert answered.status_code >= 400 or answered.json()["tokens"] == left_out.json()["tokens"]
