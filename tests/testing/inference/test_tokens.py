"""The ids: really rendered, really encoded, with log-probabilities that can be recomputed."""

from __future__ import annotations

import math
import struct
from collections.abc import AsyncIterator
from importlib.resources import files
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from polarq.testing.inference import ToolCall, Turn, expected_logprob, expected_logprobs, load_tokenizer
from polarq.testing.inference.make_tokenizer import train, write
from polarq.testing.inference.rendering import render
from tests.testing.inference.asking import HELLO, WEATHER_TOOL, Client, Messages, logprobs_of, scripted
from tests.testing.inference.conftest import Serve

TOKENIZER = load_tokenizer()
TALKATIVE = scripted(
    Turn(
        reasoning="Paris? I have a tool\nfor that.",
        content="Let me look it up.",
        tool_calls=(ToolCall(name="get_weather", arguments={"city": "Paris", "note": 'é "日本" <b>'}),),
    ),
    Turn(content="Twice, to be sure.", tool_calls=(ToolCall(name="get_weather", arguments={"city": "Paris"}),) * 2),
    Turn(tool_calls=(ToolCall(name="get_weather"),)),
    Turn(content="It is sunny. 🌞"),
)


def test_the_shipped_tokenizer_is_small() -> None:
    packed = files("polarq.testing.inference").joinpath("tokenizer.json.gz").read_bytes()

    assert len(packed) < 150_000
    assert TOKENIZER.vocabulary_size <= 4096


def test_special_tokens_and_tags_are_single_ids() -> None:
    for text in (
        "<|endoftext|>",
        "<|im_start|>",
        "<|im_end|>",
        "<think>",
        "</think>",
        "<tool_call>",
        "</tool_call>",
        "<tool_response>",
        "</tool_response>",
    ):
        assert len(TOKENIZER.encode(text)) == 1


@given(st.text())
def test_text_survives_encoding_and_decoding(text: str) -> None:
    ids = TOKENIZER.encode(text)

    assert TOKENIZER.decode(ids) == text
    assert "".join(TOKENIZER.pieces(ids)) == text


@given(st.text(min_size=1), st.integers(0, 5))
def test_drifted_ids_decode_to_the_same_text(text: str, seed: int) -> None:
    assert TOKENIZER.decode(TOKENIZER.encode_drifted(text, seed)) == text


def test_drifted_ids_differ_from_the_canonical_ones_and_are_the_same_for_the_same_seed() -> None:
    text = "Let me look"

    drifted = [TOKENIZER.encode_drifted(text, seed) for seed in range(30)]

    assert all(ids != TOKENIZER.encode(text) for ids in drifted)
    assert drifted == [TOKENIZER.encode_drifted(text, seed) for seed in range(30)]
    assert len({tuple(ids) for ids in drifted}) > 5


def test_a_long_text_drifts_in_many_places() -> None:
    text = "Let me look at the code before I change it. " * 20

    assert len(TOKENIZER.encode_drifted(text, 1)) > len(TOKENIZER.encode(text)) + 10


@given(st.lists(st.integers(0, 4005), min_size=1, max_size=20), st.integers(0, 4005))
def test_a_logprob_is_a_negative_float32_that_depends_on_all_ids_before(ids: list[int], token_id: int) -> None:
    value = expected_logprob(ids, len(ids), token_id)

    assert value < 0 and math.isfinite(value)
    assert struct.unpack("<f", struct.pack("<f", value))[0] == value
    assert value == expected_logprob([*ids, 7, 8], len(ids), token_id)
    assert value != expected_logprob([*ids[:-1], (ids[-1] + 1) % TOKENIZER.vocabulary_size], len(ids), token_id)


def test_logprobs_of_a_sample_are_those_of_its_tokens_one_by_one() -> None:
    prompt, sampled = [1, 2, 3], [10, 20, 30]
    whole = prompt + sampled

    values = expected_logprobs(prompt, sampled)

    assert values == [expected_logprob(whole, 3 + at, token_id) for at, token_id in enumerate(sampled)]


async def test_an_answers_ids_counts_and_logprobs_agree(serve: Serve) -> None:
    client = await serve(TALKATIVE)

    answer = await client.chat(tools=[WEATHER_TOOL])
    choice, usage = answer["choices"][0], answer["usage"]
    prompt_ids, ids = answer["prompt_token_ids"], choice["token_ids"]

    assert prompt_ids == TOKENIZER.encode(render(HELLO, tools=[WEATHER_TOOL]))
    assert ids[-1] == TOKENIZER.turn_end_id
    assert logprobs_of(choice["logprobs"]["content"]) == expected_logprobs(prompt_ids, ids)
    assert (usage["prompt_tokens"], usage["completion_tokens"]) == (len(prompt_ids), len(ids))
    assert usage["total_tokens"] == len(prompt_ids) + len(ids)
    assert usage["completion_tokens_details"]["reasoning_tokens"] == ids.index(TOKENIZER.encode("</think>")[0]) + 1


async def test_a_token_that_is_part_of_a_character_shows_no_text_until_the_last_part(serve: Serve) -> None:
    client = await serve(scripted(Turn(content="🌞")))

    entries = (await client.chat())["choices"][0]["logprobs"]["content"]

    assert [entry["token"] for entry in entries] == ["", "", "", "🌞", "<|im_end|>"]
    assert entries[0]["bytes"] == [] and bytes(entries[3]["bytes"]).decode() == "🌞"


async def test_a_rerendered_history_continues_the_sampled_ids_exactly(serve: Serve) -> None:
    client = await serve(TALKATIVE)

    async for before, answer in _turns(client, tools=[WEATHER_TOOL]):
        assert answer["prompt_token_ids"][: len(before)] == before


async def test_drift_breaks_the_prefix_though_the_text_is_the_same(serve: Serve) -> None:
    plain, drifting = await serve(TALKATIVE), await serve(TALKATIVE, drift_seed=3)

    first = (await plain.chat(tools=[WEATHER_TOOL]))["choices"][0]
    broken = 0
    async for before, answer in _turns(drifting, tools=[WEATHER_TOOL]):
        if before:
            broken += answer["prompt_token_ids"][: len(before)] != before
        else:
            assert answer["choices"][0]["message"] == first["message"]
            assert answer["choices"][0]["token_ids"] != first["token_ids"]
            assert TOKENIZER.decode(answer["choices"][0]["token_ids"]) == TOKENIZER.decode(first["token_ids"])

    assert broken == 3


async def test_a_template_that_drops_earlier_thinking_breaks_the_prefix(serve: Serve) -> None:
    client = await serve(TALKATIVE, keep_thinking=False)

    pairs = [pair async for pair in _turns(client, tools=[WEATHER_TOOL])]

    before, answer = pairs[1]
    assert answer["prompt_token_ids"][: len(before)] != before


async def _turns(client: Client, **body: Any) -> AsyncIterator[tuple[list[int], Any]]:
    """Plays all turns, sending answers back as a harness does: (ids up to the last turn's end, answer) of each."""
    messages: Messages = list(HELLO)
    before: list[int] = []
    for _ in TALKATIVE.scripts[0].turns:
        answer = await client.chat(messages, **body)
        yield before, answer
        choice = answer["choices"][0]
        before = answer["prompt_token_ids"] + choice["token_ids"]
        said = {key: value for key, value in choice["message"].items() if value is not None}
        calls = said.get("tool_calls", [])
        results = [{"role": "tool", "tool_call_id": call["id"], "content": "sunny"} for call in calls]
        messages += [said, *results]


@pytest.mark.parametrize("streamed", [False, True])
async def test_token_in_skips_the_template_and_is_echoed(serve: Serve, streamed: bool) -> None:
    client = await serve(TALKATIVE)
    sent = [1, 5, 7, 2, 201, 1]

    if streamed:
        echoed = (await client.stream(kv_transfer_params={"prompt_token_ids": sent})).prompt_ids
    else:
        echoed = (await client.chat(kv_transfer_params={"prompt_token_ids": sent}))["prompt_token_ids"]

    assert echoed == sent == list(client.ledger[0].prompt_ids)


async def test_token_in_keeps_the_servers_own_parsing(serve: Serve) -> None:
    client = await serve(TALKATIVE)

    answer = await client.chat(tools=[WEATHER_TOOL], kv_transfer_params={"prompt_token_ids": [1, 5]})

    assert answer["choices"][0]["message"]["tool_calls"][0]["function"]["name"] == "get_weather"


@pytest.mark.parametrize("ids", [[TOKENIZER.vocabulary_size], [-1], [], ["1"], [1.5]])
async def test_ids_outside_the_vocabulary_are_refused(serve: Serve, ids: list[object]) -> None:
    client = await serve(TALKATIVE)
    body = {"model": "tiny", "messages": HELLO, "kv_transfer_params": {"prompt_token_ids": ids}}

    answer = await client.post("/v1/chat/completions", body)

    assert answer.status_code == 400


async def test_an_old_server_ignores_token_in_and_the_echo_shows_it(serve: Serve) -> None:
    client = await serve(TALKATIVE, token_in=False)

    answer = await client.chat(kv_transfer_params={"prompt_token_ids": [1, 5, 7]})

    assert answer["prompt_token_ids"] == TOKENIZER.encode(render(HELLO))


async def test_tokenize_and_chat_agree_about_the_prompt(serve: Serve) -> None:
    client = await serve(TALKATIVE)

    counted = (await client.post("/tokenize", {"messages": HELLO, "tools": [WEATHER_TOOL]})).json()
    answer = await client.chat(tools=[WEATHER_TOOL])
    text = (await client.post("/detokenize", {"tokens": counted["tokens"]})).json()["prompt"]

    assert counted["tokens"] == answer["prompt_token_ids"] and counted["count"] == len(counted["tokens"])
    assert text == render(HELLO, tools=[WEATHER_TOOL])


async def test_a_limit_on_tokens_ends_the_answer_with_length(serve: Serve) -> None:
    client = await serve("echo")

    choice = (await client.chat(max_tokens=3))["choices"][0]

    assert (choice["finish_reason"], choice["stop_reason"], len(choice["token_ids"])) == ("length", None, 3)


async def test_a_stop_string_cuts_the_text_and_keeps_the_ids_that_spelled_it(serve: Serve) -> None:
    client = await serve("echo")

    choice = (await client.chat(stop=[" jump", "lazy"]))["choices"][0]

    assert choice["message"]["content"] == "The quick brown fox"
    assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", " jump")
    assert TOKENIZER.decode(choice["token_ids"]).startswith("The quick brown fox jump")


async def test_a_stop_token_is_kept_in_the_ids_and_named_as_the_reason(serve: Serve) -> None:
    client = await serve("echo")
    stop = TOKENIZER.encode("The quick brown fox")[-1]

    choice = (await client.chat(stop_token_ids=[stop]))["choices"][0]

    assert (choice["finish_reason"], choice["stop_reason"], choice["token_ids"][-1]) == ("stop", stop, stop)


async def test_each_choice_has_its_own_ids_and_the_prompt_is_shared(serve: Serve) -> None:
    client = await serve("calculator")

    answer = await client.chat(model="tiny:rewrites", n=2)
    choices = answer["choices"]

    assert [choice["index"] for choice in choices] == [0, 1]
    assert choices[0]["token_ids"] != choices[1]["token_ids"]
    assert answer["usage"]["completion_tokens"] == sum(len(choice["token_ids"]) for choice in choices)
    for choice in choices:
        wanted = expected_logprobs(answer["prompt_token_ids"], choice["token_ids"])
        assert logprobs_of(choice["logprobs"]["content"]) == wanted


async def test_wanting_no_reasoning_costs_the_ids_as_in_vllm(serve: Serve) -> None:
    client = await serve(TALKATIVE)

    choice = (await client.chat(include_reasoning=False))["choices"][0]

    assert (choice["token_ids"], choice["logprobs"], choice["message"]["reasoning"]) == (None, None, None)


async def test_a_model_that_shall_not_think_gets_an_empty_thinking_block_and_does_not_think(serve: Serve) -> None:
    client = await serve(TALKATIVE)

    answer = await client.chat(chat_template_kwargs={"enable_thinking": False})

    assert TOKENIZER.decode(answer["prompt_token_ids"]).endswith("<think>\n\n</think>\n\n")
    assert answer["choices"][0]["message"]["reasoning"] is None


def test_training_the_tokenizer_is_reproducible(tmp_path: Path) -> None:
    for name in ("first", "second"):
        write(train(), tmp_path / name)

    assert (tmp_path / "first").read_bytes() == (tmp_path / "second").read_bytes()
