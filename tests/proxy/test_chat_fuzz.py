"""Whatever JSON comes, a dialect's `parse` returns a call or says what is wrong; an answer that a harness gives back
means what it was."""

from __future__ import annotations

import json
import re
from typing import Any

from hypothesis import example, given
from hypothesis import strategies as st

from polarq_proxy.call import Answer, Choice, ModelCall
from polarq_proxy.dialects.base import Dialect, NativeRequest, ReplyHead
from polarq_proxy.dialects.google_generate import GoogleGenerateDialect
from polarq_proxy.dialects.openai_chat import OpenAIChatDialect
from polarq_proxy.dialects.openai_completions import OpenAICompletionsDialect
from polarq_proxy.faults import STATUS, CallFault
from polarq_proxy.gather import pieces_of
from polarq_proxy.jsons import encode

from .google_client import events
from .rig import Sse

HEAD = ReplyHead("c0ffee", 0)
CHAT, TEXT, GOOGLE = OpenAIChatDialect(), OpenAICompletionsDialect(), GoogleGenerateDialect()
PATHS: dict[Dialect, str] = {
    CHAT: "chat/completions",
    TEXT: "completions",
    GOOGLE: "models/m:streamGenerateContent",
}

SCALARS = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8)
ANYTHING = st.recursive(
    SCALARS, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3)
)
WORDS = (
    "assistant", "user", "system", "tool", "function", "developer", "model", "text", "image_url", "input_image",
    "refusal", "thinking", "data:image/png;base64,AAAA", "https://x/a.png", "AUTO", "ANY", "NONE", "OBJECT", "auto",
    "required", "allowed_tools", "custom", "web_search", "image/png", "text/plain", "audio/wav", "AAAA", "f", "g",
)  # fmt: skip
CHAT_KEYS = (
    "messages", "tools", "functions", "function_call", "tool_choice", "role", "content", "name", "tool_calls", "id",
    "tool_call_id", "function", "arguments", "custom", "input", "type", "text", "image_url", "url", "file_id", "detail",
    "reasoning", "reasoning_content", "thinking", "refusal", "parameters", "allowed_tools", "mode", "n", "stream",
    "stream_options", "include_usage", "model", "logprobs", "top_logprobs", "max_completion_tokens", "max_tokens",
    "reasoning_effort", "response_format", "cache_control", "prompt", "echo", "suffix", "stop",
)  # fmt: skip
GOOGLE_KEYS = (
    "contents", "parts", "role", "text", "thought", "thoughtSignature", "functionCall", "function_call", "name", "args",
    "id", "functionResponse", "response", "output", "inlineData", "inline_data", "mimeType", "data", "fileData",
    "executableCode", "code", "codeExecutionResult", "systemInstruction", "system_instruction", "tools",
    "functionDeclarations", "parameters", "parametersJsonSchema", "type", "properties", "items", "anyOf", "nullable",
    "minItems", "enum", "toolConfig", "functionCallingConfig", "mode", "allowedFunctionNames", "generationConfig",
    "temperature", "topK", "maxOutputTokens", "stopSequences", "candidateCount", "responseMimeType", "responseSchema",
    "thinkingConfig", "thinkingBudget", "thinkingLevel", "includeThoughts", "responseLogprobs", "logprobs",
    "cachedContent", "generateContentRequest",
)  # fmt: skip


def shaped(keys: tuple[str, ...]) -> st.SearchStrategy[Any]:
    """JSON of a request's own words in any disorder."""
    leaves = SCALARS | st.sampled_from(WORDS)
    return st.recursive(
        leaves,
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(keys), inner, max_size=4),
        max_leaves=24,
    )


def parse(dialect: Dialect, body: bytes) -> ModelCall | None:
    path = PATHS[dialect]
    match = next(filter(None, (route.match("POST", path) for route in dialect.routes)))
    try:
        return dialect.parse(NativeRequest(path, {"alt": "sse"}, {}, body), match)
    except CallFault as fault:
        assert fault.status == STATUS[fault.kind] == 400
        assert fault.message
        assert json.loads(dialect.fault(fault).body)["error"]["message"]
        return None


def never_fails(dialect: Dialect, body: Any) -> None:
    data = json.dumps(body).encode()
    call = parse(dialect, data)
    if call is not None:
        assert call.messages or call.prompt
        assert all(isinstance(message["role"], str) and "content" in message for message in call.messages)
        encode([call.messages, call.tools, call.options])
        assert parse(dialect, data) == call or "NaN" in data.decode()


@given(ANYTHING | st.fixed_dictionaries({"messages": st.lists(shaped(CHAT_KEYS), max_size=4)}) | shaped(CHAT_KEYS))
@example({"messages": [{"role": ["user"], "content": [{"type": {}}]}]})
@example({"messages": [{"role": "assistant", "tool_calls": [{"function": {"name": [], "arguments": 10**30}}]}]})
def test_any_json_is_a_chat_or_a_clear_refusal(body: Any) -> None:
    never_fails(CHAT, body)


@given(
    st.fixed_dictionaries(
        {"messages": st.just([{"role": "user", "content": "x"}])},
        optional={key: shaped(CHAT_KEYS) for key in CHAT_KEYS if key != "messages"},
    )
)
def test_any_settings_of_a_chat_are_taken_or_clearly_refused(body: Any) -> None:
    never_fails(CHAT, body)


@given(
    ANYTHING
    | st.fixed_dictionaries(
        {"prompt": ANYTHING}, optional=dict.fromkeys([key for key in CHAT_KEYS if key != "prompt"], ANYTHING)
    )
)
def test_any_json_is_a_completion_or_a_clear_refusal(body: Any) -> None:
    never_fails(TEXT, body)


@given(
    ANYTHING
    | shaped(GOOGLE_KEYS)
    | st.fixed_dictionaries(
        {"contents": st.lists(st.fixed_dictionaries({"parts": st.lists(shaped(GOOGLE_KEYS), max_size=3)}), max_size=3)},
        optional={key: shaped(GOOGLE_KEYS) for key in GOOGLE_KEYS if key != "contents"},
    )
)
@example({"contents": [{"parts": [{"functionCall": {"args": {"a": 10**30, "b": float("nan")}}}]}]})
def test_any_json_is_a_gemini_request_or_a_clear_refusal(body: Any) -> None:
    never_fails(GOOGLE, body)


@given(st.binary(max_size=64))
def test_any_bytes_are_refused_clearly(body: bytes) -> None:
    for dialect in PATHS:
        parse(dialect, body)


def test_a_body_nested_without_end_is_refused_clearly() -> None:
    for inner in ('{"anyOf":[', '{"items":', "["):
        closing = {'{"anyOf":[': "]}", '{"items":': "}", "[": "]"}[inner]
        for depth in (200, 900, 100_000):
            nested = inner * depth + "1" + closing * depth
            call = (
                f'{{"contents":[{{"parts":[{{"functionCall":{{"args":{{"a":{nested}}}}}}}]}}],"messages":[{nested}]}}'
            )
            tool = f'{{"contents":"x","prompt":{nested},"tools":[{{"functionDeclarations":[{{"name":"f",'
            tool += f'"parameters":{nested}}}]}}]}}'
            for body in (call, tool):
                for dialect in PATHS:
                    parse(dialect, body.encode())


TEXTS = st.text(st.characters(exclude_categories=["Cs"]), max_size=20)
ARGUMENTS = st.one_of(
    TEXTS, st.dictionaries(TEXTS, SCALARS.filter(lambda value: value == value), max_size=3).map(json.dumps)
)
CALLS = st.lists(st.fixed_dictionaries({"name": st.sampled_from(["f", "g"]), "arguments": ARGUMENTS}), max_size=3)


def answer_of(text: str, thinking: str, calls: list[dict[str, str]]) -> Answer:
    message: dict[str, Any] = {"role": "assistant", "content": text or (None if calls or thinking else "")}
    if thinking:
        message["reasoning_content"] = thinking
    if calls:
        message["tool_calls"] = [
            {"id": f"c{place}", "type": "function", "function": call} for place, call in enumerate(calls)
        ]
    return Answer([Choice(0, message, [1], [], "tool_calls" if calls else "stop")], [1, 2], None, "m")


def same_arguments(one: str, other: str) -> bool:
    """Equal as written, or as JSON: an object's spelling may change on the way."""
    if one == other or (not one.strip() and other == "{}"):
        return True
    return re.sub(r"\s", "", json.dumps(json.loads(one))) == re.sub(r"\s", "", json.dumps(json.loads(other)))


def same_message(one: dict[str, Any], other: dict[str, Any]) -> None:
    assert (one["content"] or "") == (other["content"] or "")
    assert one.get("reasoning_content") == other.get("reasoning_content")
    calls, others = one.get("tool_calls", []), other.get("tool_calls", [])
    assert [call["function"]["name"] for call in calls] == [call["function"]["name"] for call in others]
    for call, again in zip(calls, others, strict=True):
        assert same_arguments(call["function"]["arguments"], again["function"]["arguments"])


@given(TEXTS, TEXTS, CALLS)
def test_a_chat_answer_that_is_given_back_means_what_it_was(
    text: str, thinking: str, calls: list[dict[str, str]]
) -> None:
    answer = answer_of(text, thinking, calls)
    hello = {"role": "user", "content": "x"}
    call = parse(CHAT, json.dumps({"messages": [hello]}).encode())
    assert call is not None
    [choice] = json.loads(CHAT.render(call, answer, HEAD).body)["choices"]
    again = parse(CHAT, json.dumps({"messages": [hello, choice["message"]]}).encode())
    assert again is not None
    same_message(answer.choices[0].message, again.messages[1])
    sse = Sse.of(200, {}, CHAT.writer(call, HEAD).end(pieces_of(answer), answer))
    assert (sse.text(), sse.text("reasoning_content")) == (text, thinking)


@given(TEXTS, TEXTS, CALLS, st.booleans(), st.booleans())
def test_a_gemini_answer_that_is_given_back_means_what_it_was(
    text: str, thinking: str, calls: list[dict[str, str]], thoughts: bool, keeps_thoughts: bool
) -> None:
    answer = answer_of(text, thinking, calls)
    hello = {"role": "user", "parts": [{"text": "x"}]}
    asked = {"contents": [hello], "generationConfig": {"thinkingConfig": {"includeThoughts": thoughts}}}
    call = parse(GOOGLE, json.dumps(asked).encode())
    assert call is not None
    whole = json.loads(GOOGLE.render(call, answer, HEAD).body)
    streamed = events(GOOGLE.writer(call, HEAD).end(pieces_of(answer), answer))
    for answered in ([whole], streamed):
        contents = [candidate["content"] for one in answered for candidate in one["candidates"]]
        if not keeps_thoughts:
            for content in contents:
                content["parts"] = [part for part in content["parts"] if not part.get("thought")]
        again = parse(GOOGLE, json.dumps({"contents": [hello, *contents]}).encode())
        assert again is not None
        same_message(answer.choices[0].message, again.messages[1])
