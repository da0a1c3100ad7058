"""A stream put together again equals the unary answer, in ids, log-probabilities, text and calls."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from polarq.testing.inference import Scenario, Script, ToolCall, Turn, load_tokenizer
from polarq.testing.inference.parsing import Delta, MessageParser, parse
from tests.testing.inference.asking import HELLO, TOKENS, WEATHER_TOOL, Streamed, logprobs_of, scripted
from tests.testing.inference.captures import events_of
from tests.testing.inference.conftest import Serve

TOKENIZER = load_tokenizer()
WEATHER = ToolCall(name="get_weather", arguments={"city": 'Saint-"Denis" \\ {', "days": [1, {"two": None}]})

text = st.text(st.characters(codec="utf-8", exclude_characters="<"), max_size=30)
arguments = st.dictionaries(text, st.none() | st.booleans() | st.integers() | text | st.lists(text), max_size=3)
calls = st.builds(ToolCall, name=st.text(st.characters(categories=["L"]), min_size=1), arguments=arguments)
turns = st.builds(Turn, content=text, reasoning=text, tool_calls=st.lists(calls, max_size=3).map(tuple))


def put_together(deltas: list[Delta]) -> tuple[str, str, list[list[str]]]:
    reasoning = "".join(delta.text for delta in deltas if delta.kind == "reasoning")
    content = "".join(delta.text for delta in deltas if delta.kind == "content")
    made: list[list[str]] = []
    for delta in deltas:
        if delta.kind == "tool_call":
            if delta.call_name is not None:
                made.append([delta.call_name, ""])
            made[delta.call_index][1] += delta.text
    return reasoning, content, made


@given(turns, st.booleans(), st.integers(1, 4))
def test_pieces_of_any_size_parse_to_the_same_message(turn: Turn, tools: bool, size: int) -> None:
    said = turn.text()
    parser = MessageParser(tools=tools)

    deltas = [delta for at in range(0, len(said), size) for delta in parser.feed(said[at : at + size])]
    reasoning, content, made = put_together([*deltas, *parser.finish()])

    whole = parse(said, tools=tools)
    assert (reasoning or None, made) == (whole.reasoning, [list(call) for call in whole.tool_calls])
    assert content == (whole.content or "")


@given(turns)
def test_a_parsed_message_says_what_the_script_says(turn: Turn) -> None:
    message = parse(turn.text(), tools=True)

    assert (message.reasoning or "") == turn.reasoning.strip()
    assert len(message.tool_calls) == len(turn.tool_calls)
    if not turn.tool_calls:
        assert (message.content or "") == turn.content


def test_a_tag_that_does_not_come_is_plain_text() -> None:
    for said in ("a <tool", "<thin", "<", "x <tool_cal> y", "<think> no newline"):
        parser = MessageParser(tools=True)
        deltas = [delta for char in said for delta in parser.feed(char)]
        assert put_together([*deltas, *parser.finish()]) == ("", said, [])


def test_a_call_that_is_no_json_stays_in_the_content() -> None:
    said = 'ok\n<tool_call>\n{"name": "f", "arguments": {"a": }}\n</tool_call>'

    message = parse(said, tools=True)

    assert (message.content, message.tool_calls) == (said, [])


def test_without_tools_in_the_request_a_call_is_text() -> None:
    turn = Turn(content="ok", tool_calls=(WEATHER,))

    assert parse(turn.text(), tools=False).content == turn.text()


SCENARIO = scripted(
    Turn(reasoning="Let me think: 日本, π.", content="I look it up.", tool_calls=(WEATHER, WEATHER)),
    Turn(content="It is 🌞 in Paris."),
)
ASKS: list[dict[str, Any]] = [
    {},
    {"tools": [WEATHER_TOOL]},
    {"tools": [WEATHER_TOOL], "tool_choice": "none"},
    {"tools": [WEATHER_TOOL], "tool_choice": {"type": "function", "function": {"name": "get_weather"}}},
    {"tools": [WEATHER_TOOL], "parallel_tool_calls": False},
    {"tools": [WEATHER_TOOL], "max_tokens": 7},
    {"stop": ["look"]},
    {"stop": ["look"], "include_stop_str_in_output": True},
    {"stop_token_ids": [TOKENIZER.encode("look")[0]]},
    {"stream_interval": 5, "tools": [WEATHER_TOOL]},
    {"top_logprobs": 3},
    {"logprobs": False},
    {"return_tokens_as_token_ids": True},
    {"chat_template_kwargs": {"enable_thinking": False}},
    {"include_reasoning": False},
]


@pytest.mark.parametrize("ask", ASKS, ids=str)
async def test_a_stream_put_together_equals_the_unary_answer(serve: Serve, ask: dict[str, Any]) -> None:
    client = await serve(SCENARIO)

    unary = await client.chat(**ask)
    streamed = await client.stream(**ask, stream_options={"include_usage": True})

    choice = unary["choices"][0]
    message = {key: value for key, value in choice["message"].items() if value and key != "role"}
    assert streamed.done
    assert streamed.prompt_ids == unary["prompt_token_ids"]
    assert streamed.ids == (choice["token_ids"] or [])
    assert streamed.logprobs == (choice["logprobs"] or {}).get("content", [])
    assert streamed.message == message
    assert (streamed.finish_reason, streamed.stop_reason) == (choice["finish_reason"], choice["stop_reason"])
    assert streamed.usage is not None
    assert streamed.usage["completion_tokens"] == unary["usage"]["completion_tokens"]
    assert streamed.usage["prompt_tokens"] == unary["usage"]["prompt_tokens"]


async def test_a_stream_of_several_choices_can_be_put_together_by_index(serve: Serve) -> None:
    scripts = (
        Script(name="one", turns=(Turn(content="first"),)),
        Script(name="two", turns=(Turn(content="the second"),)),
    )
    client = await serve(Scenario(name="both", scripts=scripts))

    unary = await client.chat(n=2)
    events = (await client.stream(n=2)).events

    for index, choice in enumerate(unary["choices"]):
        found = Streamed.of(events, index)
        assert found.ids == choice["token_ids"]
        assert found.message["content"] == choice["message"]["content"]
        assert logprobs_of(found.logprobs) == logprobs_of(choice["logprobs"]["content"])


async def test_a_call_of_a_tool_that_the_request_named_finishes_with_stop_as_in_vllm(serve: Serve) -> None:
    client = await serve(SCENARIO)
    named = {"type": "function", "function": {"name": "get_weather"}}

    auto = (await client.chat(tools=[WEATHER_TOOL]))["choices"][0]
    chosen = (await client.chat(tools=[WEATHER_TOOL], tool_choice=named))["choices"][0]

    assert (auto["finish_reason"], chosen["finish_reason"]) == ("tool_calls", "stop")
    assert auto["message"]["tool_calls"] == chosen["message"]["tool_calls"]


async def test_without_tool_choice_the_prompt_keeps_its_tools_and_a_call_stays_text(serve: Serve) -> None:
    client = await serve(SCENARIO)

    auto = await client.chat(tools=[WEATHER_TOOL])
    none = await client.chat(tools=[WEATHER_TOOL], tool_choice="none")

    assert none["prompt_token_ids"] == auto["prompt_token_ids"]
    assert "tool_calls" not in none["choices"][0]["message"]
    assert "<tool_call>" in none["choices"][0]["message"]["content"]


async def test_text_that_is_held_back_to_the_end_comes_with_the_last_chunk(serve: Serve) -> None:
    client = await serve(scripted(Turn(content="a < b or <tool_ca")))

    stream = await client.stream(tools=[WEATHER_TOOL])

    assert stream.message["content"] == "a < b or <tool_ca"
    assert stream.events[-2]["choices"][0]["delta"] == {"content": "<tool_ca"}


async def test_empty_deltas_carry_ids_while_a_call_is_held_back(serve: Serve) -> None:
    client = await serve(SCENARIO)

    stream = await client.stream(tools=[WEATHER_TOOL])

    silent = [event["choices"][0] for event in stream.events[:-1] if not event["choices"][0]["delta"]]
    assert len(silent) > 10
    assert all(choice["token_ids"] for choice in silent)


async def test_the_usage_chunk_comes_only_to_who_asks(serve: Serve) -> None:
    client = await serve("echo")

    assert (await client.stream()).usage is None
    assert (await client.stream(stream_options={"include_usage": True})).usage is not None


async def test_a_streamed_completion_equals_the_unary_one(serve: Serve) -> None:
    client = await serve("echo")
    body = {"model": "tiny", "prompt": "Say it:", "max_tokens": 50, "logprobs": 1, "return_token_ids": True}

    unary = (await client.post("/v1/completions", body)).json()["choices"][0]
    events = events_of((await client.post("/v1/completions", {**body, "stream": True})).text)

    chunks = [event["choices"][0] for event in events[:-1]]
    assert [token_id for chunk in chunks for token_id in chunk["token_ids"]] == unary["token_ids"]
    assert "".join(chunk["text"] for chunk in chunks) == unary["text"]
    assert chunks[0]["prompt_token_ids"] == unary["prompt_token_ids"] == TOKENIZER.encode("Say it:")
    for column, values in unary["logprobs"].items():
        assert [value for chunk in chunks for value in chunk["logprobs"][column]] == values


async def test_the_same_request_gets_the_same_answer_again(serve: Serve) -> None:
    client = await serve("calculator")
    body = {"model": "tiny", "messages": HELLO, **TOKENS, "tools": [WEATHER_TOOL]}

    first, second = [(await client.post("/v1/chat/completions", body)).json() for _ in range(2)]

    for answer in (first, second):
        del answer["id"], answer["created"]
    assert first == second
