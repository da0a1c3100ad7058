"""What a Gemini request means: contents, tools and settings, in either spelling."""

from __future__ import annotations

import base64
import json
from typing import Any

import pytest

from polarq_proxy.dialects.google_names import signature_of
from polarq_proxy.dialects.messages_arguments import UNPARSED
from polarq_proxy.faults import CallFault, FaultKind

from .google_client import DIALECT, HELLO, PIXEL, asked, model, native, parsed, user

IMAGE = {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{PIXEL}"}}
INLINE = {"inlineData": {"mimeType": "image/png", "data": PIXEL}}


def refused(*contents: dict[str, Any], **fields: Any) -> CallFault:
    with pytest.raises(CallFault) as caught:
        asked(*contents, **fields)
    assert caught.value.kind is FaultKind.BAD_REQUEST
    return caught.value


@pytest.mark.parametrize(
    ("path", "name"),
    [
        ("models/gemini-2.5-pro:generateContent", "gemini-2.5-pro"),
        ("tunedModels/mine:generateContent", "mine"),
        ("models/Qwen/Qwen3-8B:generateContent", "Qwen/Qwen3-8B"),
        ("publishers/google/models/g:generateContent", "g"),
        ("v1beta1/projects/p/locations/l/publishers/google/models/g:generateContent", "g"),
        ("models/a:b:generateContent", "a:b"),
        ("Qwen/Qwen3-8B:generateContent", "Qwen/Qwen3-8B"),
    ],
)
def test_every_path_of_the_api_names_its_model(path: str, name: str) -> None:
    call = parsed({"contents": HELLO}, path)
    assert (call.model, call.stream) == (name, False)


@pytest.mark.parametrize(("query", "sse"), [({"alt": "sse"}, True), ({}, False), ({"alt": "json"}, False)])
def test_a_stream_is_events_only_if_they_are_asked_for(query: dict[str, str], sse: bool) -> None:
    call = parsed({"contents": HELLO}, "models/m:streamGenerateContent", query)
    assert (call.stream, call.native.sse) == (True, sse)


@pytest.mark.parametrize(
    ("path", "headers", "claimed"),
    [
        ("models", {"x-goog-api-key": "k"}, True),
        ("models/m:embedContent", {}, True),
        ("v1beta1/nothing", {}, True),
        ("models", {}, False),
        ("chat/completions", {"authorization": "Bearer k"}, False),
    ],
)
def test_a_request_is_known_by_its_key_or_its_path(path: str, headers: dict[str, str], claimed: bool) -> None:
    request = native({}, path)
    assert DIALECT.claims(type(request)(path, {}, headers, b"")) is claimed


def test_texts_and_pictures_keep_their_order() -> None:
    call = asked(user({"text": "a"}, INLINE, {"text": "b"}), user({"text": "alone"}))
    text = [{"type": "text", "text": "a"}, IMAGE, {"type": "text", "text": "b"}]
    assert call.messages == [{"role": "user", "content": text}, {"role": "user", "content": "alone"}]


@pytest.mark.parametrize("name", ["systemInstruction", "system_instruction"])
@pytest.mark.parametrize(
    ("given", "content"),
    [
        ({"parts": [{"text": "s"}]}, "s"),
        ({"role": "user", "parts": {"text": "s"}}, "s"),
        ("s", "s"),
        ({"parts": [{"text": "s"}, {"text": "t"}]}, [{"type": "text", "text": "s"}, {"type": "text", "text": "t"}]),
    ],
)
def test_the_system_instruction_is_the_first_message(name: str, given: Any, content: Any) -> None:
    assert asked(**{name: given}).messages[0] == {"role": "system", "content": content}


def test_a_system_instruction_without_text_is_no_message() -> None:
    assert asked(systemInstruction={"parts": []}).messages == [{"role": "user", "content": "hello"}]


def test_contents_of_the_model_in_a_row_are_one_answer() -> None:
    call = asked(
        *HELLO,
        model({"text": "hm", "thought": True}),
        model({"text": "m", "thought": True}),
        model({"text": "Let me "}),
        model({"text": "see"}, {"functionCall": {"name": "f", "args": {"a": 1}}}),
        model({"text": ""}),
    )
    [_, answer] = call.messages
    assert answer["content"] == "Let me see"
    assert answer["reasoning_content"] == "hmm"
    assert answer["tool_calls"] == [
        {"id": "call_0", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
    ]


def test_an_answer_of_nothing_but_calls_has_no_content() -> None:
    call = asked(*HELLO, model({"functionCall": {"name": "f"}}))
    assert call.messages[1]["content"] is None
    assert call.messages[1]["tool_calls"][0]["function"]["arguments"] == "{}"


def test_an_empty_answer_stays_an_answer() -> None:
    assert asked(*HELLO, model(), user({"text": "go on"})).messages[1] == {"role": "assistant", "content": ""}


@pytest.mark.parametrize("alphabet", [base64.b64encode, base64.urlsafe_b64encode])
@pytest.mark.parametrize("name", ["thoughtSignature", "thought_signature"])
def test_thinking_comes_back_out_of_a_signature(alphabet: Any, name: str) -> None:
    signature = alphabet(base64.b64decode(signature_of("because \U0001f9ea ???>>>"))).decode().rstrip("=")
    call = asked(*HELLO, model({"functionCall": {"name": "f"}, name: signature}))
    assert call.messages[1]["reasoning_content"] == "because \U0001f9ea ???>>>"


def test_thoughts_that_come_with_their_signature_count_once() -> None:
    signature = signature_of("ab")
    before = asked(*HELLO, model({"text": "a", "thought": True}, {"text": "b", "thought": True}, {"text": "c"}))
    signed = asked(
        *HELLO,
        model({"text": "a", "thought": True}),
        model({"text": "b", "thought": True}, {"text": "c", "thoughtSignature": signature}),
    )
    own = asked(*HELLO, model({"text": "ab", "thought": True, "thoughtSignature": signature}, {"text": "c"}))
    assert before.messages == signed.messages == own.messages


def test_a_signature_of_somebody_else_says_nothing() -> None:
    for signature in ("c2lnLWNhcHR1cmU=", "skip_thought_signature_validator", "", 7):
        call = asked(*HELLO, model({"text": "a", "thoughtSignature": signature}))
        assert call.messages[1] == {"role": "assistant", "content": "a"}


def test_results_without_ids_answer_calls_by_name_and_order() -> None:
    call = asked(
        *HELLO,
        model({"functionCall": {"name": "f", "args": {"n": 1}}}, {"functionCall": {"name": "g"}}),
        user({"functionResponse": {"name": "g", "response": {"output": "of g"}}}),
        user({"functionResponse": {"name": "f", "response": {"output": "of f"}}}),
        model({"functionCall": {"name": "f"}}, {"functionCall": {"name": "f"}}),
        user(
            {"functionResponse": {"name": "f", "response": {"output": "third"}}},
            {"functionResponse": {"name": "f", "response": {"output": "fourth"}}},
        ),
    )
    results = [(m["tool_call_id"], m["content"]) for m in call.messages if m["role"] == "tool"]
    assert results == [("call_1", "of g"), ("call_0", "of f"), ("call_2", "third"), ("call_3", "fourth")]


def test_results_with_ids_answer_those() -> None:
    call = asked(
        *HELLO,
        model({"functionCall": {"id": "x", "name": "f"}}, {"functionCall": {"id": "y", "name": "f"}}),
        user({"functionResponse": {"id": "y", "name": "f", "response": {}}}),
        user({"functionResponse": {"id": "x", "name": "f", "response": {}}}),
    )
    assert [m["tool_call_id"] for m in call.messages if m["role"] == "tool"] == ["y", "x"]


def test_a_call_keeps_its_name_in_every_later_request() -> None:
    turn = [*HELLO, model({"functionCall": {"name": "f"}}), user({"functionResponse": {"name": "f", "response": {}}})]
    later = [*turn, model({"functionCall": {"name": "f"}}), user({"functionResponse": {"name": "f", "response": {}}})]
    first, second = asked(*turn).messages, asked(*later).messages
    assert second[: len(first)] == first


@pytest.mark.parametrize(
    ("response", "content"),
    [
        ({"output": "text"}, "text"),
        ({"result": "text"}, "text"),
        ({"output": {"a": 1}}, '{"output":{"a":1}}'),
        ({"error": "no"}, '{"error":"no"}'),
        ({"output": "a", "code": 1}, '{"output":"a","code":1}'),
        (None, ""),
        ("text", "text"),
    ],
)
def test_a_result_is_its_output_or_its_json(response: Any, content: str) -> None:
    call = asked(*HELLO, model({"functionCall": {"name": "f"}}), user({"functionResponse": {"response": response}}))
    assert call.messages[-1]["content"] == content


def test_pictures_of_a_result_stand_beside_its_text() -> None:
    response = {"name": "f", "response": {"output": "shot"}}
    shown = [{"type": "text", "text": "shot"}, IMAGE]
    behind = asked(
        *HELLO,
        model({"functionCall": {"name": "f"}}),
        user({"functionResponse": response}, INLINE, {"text": "and now?"}),
    )
    inside = asked(
        *HELLO,
        model({"functionCall": {"name": "f"}}),
        user({"functionResponse": {**response, "parts": [INLINE]}}, {"text": "and now?"}),
    )
    assert behind.messages == inside.messages
    assert behind.messages[2]["content"] == shown
    assert behind.messages[3] == {"role": "user", "content": "and now?"}


def test_code_that_was_run_is_shown_as_text() -> None:
    call = asked(
        *HELLO,
        model(
            {"executableCode": {"language": "PYTHON", "code": "print(1)"}},
            {"codeExecutionResult": {"outcome": "OUTCOME_OK", "output": "1"}},
        ),
    )
    assert call.messages[1]["content"] == "```python\nprint(1)\n```1"


def test_bytes_of_a_text_are_text() -> None:
    data = base64.b64encode("नमस्ते".encode()).decode()
    call = asked(user({"text": "a"}, {"inline_data": {"mime_type": "text/plain", "data": data}}))
    assert call.messages[0]["content"][1] == {"type": "text", "text": "नमस्ते"}


@pytest.mark.parametrize(
    ("part", "where"),
    [
        ({"fileData": {"fileUri": "gs://a/b.png", "mimeType": "image/png"}}, "contents[1].parts[1].fileData"),
        ({"file_data": {"file_uri": "https://a/b.png"}}, "contents[1].parts[1].fileData"),
        ({"inlineData": {"mimeType": "audio/wav", "data": "AAAA"}}, "contents[1].parts[1].inlineData"),
        ({"inlineData": {"mimeType": "image/png", "data": "no base64!"}}, "contents[1].parts[1].inlineData.data"),
        ({"toolMagic": {}}, "contents[1].parts[1].toolMagic"),
        (7, "contents[1].parts[1]"),
    ],
)
def test_a_part_that_cannot_be_shown_is_refused_by_name(part: Any, where: str) -> None:
    fault = refused(*HELLO, {"role": "user", "parts": [{"text": "a"}, part]})
    assert fault.param == where
    assert where in fault.message


@pytest.mark.parametrize("contents", [None, [], 7, [7], "text"])
def test_a_request_without_contents_is_refused(contents: Any) -> None:
    with pytest.raises(CallFault) as caught:
        parsed({"contents": contents})
    assert "contents" in caught.value.message


@pytest.mark.parametrize("name", ["cachedContent", "cached_content"])
def test_cached_content_is_refused_by_name(name: str) -> None:
    assert "cachedContent" in refused(**{name: "cachedContents/abc"}).message


def test_arguments_that_did_not_parse_come_back_as_they_were() -> None:
    call = asked(*HELLO, model({"functionCall": {"name": "f", "args": {UNPARSED: '{"a": '}}}))
    assert call.messages[1]["tool_calls"][0]["function"]["arguments"] == '{"a": '


GEMINI_SCHEMA = {
    "type": "OBJECT",
    "properties": {
        "tags": {"type": "ARRAY", "items": {"type": "STRING", "nullable": True}, "minItems": "1"},
        "type": {"type": "STRING", "enum": ["OBJECT", "B"]},
        "any": {"anyOf": [{"type": "INTEGER"}, {"type": "NUMBER"}]},
        "min_items": {"type": "BOOLEAN"},
    },
    "propertyOrdering": ["tags"],
    "required": ["tags"],
}
JSON_SCHEMA = {
    "type": "object",
    "properties": {
        "tags": {"type": "array", "items": {"type": ["string", "null"]}, "minItems": 1},
        "type": {"type": "string", "enum": ["OBJECT", "B"]},
        "any": {"anyOf": [{"type": "integer"}, {"type": "number"}]},
        "min_items": {"type": "boolean"},
    },
    "required": ["tags"],
}


@pytest.mark.parametrize(
    ("given", "sent"),
    [
        ({"parameters": GEMINI_SCHEMA}, JSON_SCHEMA),
        ({"parametersJsonSchema": JSON_SCHEMA}, JSON_SCHEMA),
        ({"parameters_json_schema": JSON_SCHEMA}, JSON_SCHEMA),
        ({}, {"type": "object", "properties": {}}),
    ],
)
@pytest.mark.parametrize("name", ["functionDeclarations", "function_declarations"])
def test_functions_are_declared_with_either_kind_of_schema(given: Any, sent: Any, name: str) -> None:
    call = asked(tools=[{name: [{"name": "f", "description": "does", **given}]}])
    assert call.tools == [{"type": "function", "function": {"name": "f", "description": "does", "parameters": sent}}]


def test_tools_that_only_the_vendor_runs_are_left_out() -> None:
    others: list[dict[str, Any]] = [
        {"googleSearch": {}},
        {"codeExecution": {}},
        {"urlContext": {}},
        {"google_search_retrieval": {}},
    ]
    assert asked(tools=others).tools is None
    assert len(asked(tools=[*others, {"functionDeclarations": [{"name": "f"}]}]).tools or ()) == 1


@pytest.mark.parametrize(
    ("config", "choice", "names"),
    [
        ({"mode": "AUTO"}, "auto", "fg"),
        ({"mode": "VALIDATED"}, "auto", "fg"),
        ({"mode": "NONE"}, "none", "fg"),
        ({"mode": "ANY"}, "required", "fg"),
        ({"mode": "any", "allowedFunctionNames": ["f", "g"]}, "required", "fg"),
        ({"mode": "ANY", "allowed_function_names": ["g"]}, {"type": "function", "function": {"name": "g"}}, "g"),
        ({"mode": "VALIDATED", "allowedFunctionNames": ["g"]}, "auto", "g"),
        ({"mode": "ANY", "allowedFunctionNames": ["unknown"]}, "required", "fg"),
        ({}, None, "fg"),
    ],
)
def test_the_mode_of_calling_is_the_tool_choice(config: Any, choice: Any, names: str) -> None:
    tools = [{"functionDeclarations": [{"name": "f"}, {"name": "g"}]}]
    call = asked(tools=tools, toolConfig={"functionCallingConfig": config})
    assert call.options.get("tool_choice") == choice
    assert "".join(tool["function"]["name"] for tool in call.tools or ()) == names


def test_settings_go_by_the_engines_names() -> None:
    call = asked(
        generationConfig={
            "temperature": 0.5, "topP": 0.9, "topK": 64.0, "maxOutputTokens": "100", "stopSequences": ["x", ""],
            "seed": 7, "candidateCount": 2, "presencePenalty": 0.1, "frequencyPenalty": 0.2, "responseLogprobs": True,
            "logprobs": 3, "audioTimestamp": True, "thinkingConfig": {"includeThoughts": True, "thinkingBudget": 8192},
        },
        safetySettings=[{"category": "c"}],
        labels={"a": "b"},
    )  # fmt: skip
    assert call.options == {
        "temperature": 0.5, "top_p": 0.9, "top_k": 64, "max_tokens": 100, "stop": ["x"], "seed": 7, "n": 2,
        "presence_penalty": 0.1, "frequency_penalty": 0.2, "top_logprobs": 3,
    }  # fmt: skip
    assert (call.choices, call.wants_logprobs, call.native.thoughts) == (2, True, True)


def test_settings_may_be_spelt_in_snake_case() -> None:
    settings = {"top_p": 0.9, "max_output_tokens": 5, "thinking_config": {"include_thoughts": True}}
    call = asked(generation_config=settings)
    assert call.options == {"top_p": 0.9, "max_tokens": 5}
    assert call.native.thoughts


@pytest.mark.parametrize(
    ("thinking", "options"),
    [
        ({"thinkingBudget": 0}, {"chat_template_kwargs": {"enable_thinking": False}}),
        ({"thinkingBudget": -1}, {}),
        ({"thinkingLevel": "LOW"}, {"reasoning_effort": "low"}),
        ({"thinkingLevel": "THINKING_LEVEL_UNSPECIFIED"}, {}),
    ],
)
def test_how_much_is_thought_can_be_asked_for(thinking: Any, options: Any) -> None:
    assert asked(generationConfig={"thinkingConfig": thinking}).options == options


@pytest.mark.parametrize(
    ("settings", "options"),
    [
        ({"responseMimeType": "application/json"}, {"response_format": {"type": "json_object"}}),
        ({"responseMimeType": "application/json", "responseSchema": GEMINI_SCHEMA}, JSON_SCHEMA),
        ({"response_mime_type": "application/json", "response_json_schema": JSON_SCHEMA}, JSON_SCHEMA),
        ({"responseMimeType": "text/x.enum", "responseSchema": {"type": "STRING", "enum": ["a", "b"]}}, None),
        ({"responseMimeType": "text/plain"}, {}),
    ],
)
def test_the_form_of_an_answer_can_be_asked_for(settings: Any, options: Any) -> None:
    found = asked(generationConfig=settings).options
    if options is JSON_SCHEMA:
        assert found["response_format"]["json_schema"]["schema"] == JSON_SCHEMA
    else:
        assert found == ({"structured_outputs": {"choice": ["a", "b"]}} if options is None else options)


def test_too_many_candidates_are_refused() -> None:
    assert refused(generationConfig={"candidateCount": 1000}).param == "generationConfig.candidateCount"


def test_a_count_of_tokens_may_hold_a_whole_request() -> None:
    wrapped = {"generateContentRequest": {"contents": HELLO, "systemInstruction": {"parts": [{"text": "s"}]}}}
    call = parsed(wrapped, "models/m:countTokens")
    assert [message["role"] for message in call.messages] == ["system", "user"]
    assert json.loads(DIALECT.counted(call, 12).body) == {"totalTokens": 12}
