"""Responses requests: what the engine is offered and told, and what it is spared."""

from __future__ import annotations

from typing import Any

import pytest

from .responses_client import answered, asked, call_part, messages, rendered

PARAMETERS = {"type": "object", "properties": {"x": {"type": "integer"}}}
FLAT = {"type": "function", "name": "f", "description": "does", "strict": True, "parameters": PARAMETERS}
CUSTOM: dict[str, Any] = {
    "type": "custom",
    "name": "patch",
    "description": "edits",
    "format": {"type": "grammar", "syntax": "lark", "definition": "start: LINE"},
}


def namespace(name: str, *members: str) -> dict[str, Any]:
    return {"type": "namespace", "name": name, "tools": [{**FLAT, "name": member} for member in members]}


def offered(*tools: Any, **fields: Any) -> list[str]:
    return [tool["function"]["name"] for tool in asked(tools=list(tools), **fields).tools or []]


def test_a_flat_function_is_offered_in_chat_form() -> None:
    function = {"name": "f", "description": "does", "parameters": PARAMETERS}
    assert asked(tools=[FLAT]).tools == [{"type": "function", "function": function}]
    assert asked(tools=[{"type": "function", "function": function}]).tools == asked(tools=[FLAT]).tools
    [bare] = asked(tools=[{"type": "function", "name": "f", "parameters": None, "description": None}]).tools or []
    assert bare["function"] == {"name": "f", "parameters": {"type": "object", "properties": {}}}


def test_a_custom_tool_is_offered_as_a_function_of_one_string() -> None:
    [tool] = asked(tools=[CUSTOM]).tools or []
    function = tool["function"]
    assert (function["name"], function["description"]) == ("patch", "edits")
    assert function["parameters"]["required"] == ["input"]
    assert "start: LINE" in function["parameters"]["properties"]["input"]["description"]


def test_what_nobody_here_can_run_is_not_offered_and_not_refused() -> None:
    builtin = [{"type": kind} for kind in ("web_search", "file_search", "code_interpreter", "tool_search", "new_one")]
    assert offered(*builtin, FLAT, {"type": "mcp", "server_label": "x"}) == ["f"]
    call = asked(tools=builtin, tool_choice="auto", parallel_tool_calls=True)
    assert (call.tools, call.options) == (None, {})
    assert rendered(call, answered(content="ok"))["tools"] == builtin


def test_members_of_a_namespace_are_offered_and_called_back_with_it() -> None:
    call = asked(tools=[namespace("agents", "spawn", "wait"), FLAT])
    assert [tool["function"]["name"] for tool in call.tools or []] == ["spawn", "wait", "f"]
    answer = answered("tool_calls", tool_calls=[call_part("wait", "{}", "c1"), call_part("f", "{}", "c2")])
    first, second = rendered(call, answer)["output"]
    assert (first["name"], first["namespace"]) == ("wait", "agents")
    assert (second["name"], "namespace" in second) == ("f", False)
    history = messages(first, second, tools=[namespace("agents", "spawn", "wait"), FLAT])
    assert history[0]["tool_calls"] == answer.choices[0].message["tool_calls"]


def test_names_that_two_tools_share_are_told_apart() -> None:
    tools = [namespace("a", "f", "g"), namespace("mcp__b__", "f"), FLAT, {**CUSTOM, "name": "f"}]
    call = asked(tools=tools)
    names = [tool["function"]["name"] for tool in call.tools or []]
    assert names == ["a__f", "g", "mcp__b__f", "f", "f_"]
    calls = [call_part(name, '{"input":"x"}', name) for name in names]
    output = rendered(call, answered("tool_calls", tool_calls=calls))["output"]
    assert [(item["type"], item["name"], item.get("namespace")) for item in output] == [
        ("function_call", "f", "a"),
        ("function_call", "g", "a"),
        ("function_call", "f", "mcp__b__"),
        ("function_call", "f", None),
        ("custom_tool_call", "f", None),
    ]
    assert messages(*output, tools=tools)[0]["tool_calls"] == calls


def test_a_history_outlives_its_tools() -> None:
    item = {"type": "function_call", "call_id": "c1", "name": "wait", "namespace": "agents", "arguments": "{}"}
    assert messages(item)[0]["tool_calls"] == [call_part("wait", "{}")]


@pytest.mark.parametrize("choice", ["auto", "none", "required"])
def test_words_of_choice_go_to_the_engine(choice: str) -> None:
    options = asked(tools=[FLAT], tool_choice=choice, parallel_tool_calls=False).options
    assert options == {"tool_choice": choice, "parallel_tool_calls": False}


@pytest.mark.parametrize(
    ("choice", "name"),
    [
        ({"type": "function", "name": "f"}, "f"),
        ({"type": "function", "function": {"name": "f"}}, "f"),
        ({"type": "custom", "name": "patch"}, "patch"),
        ({"type": "function", "name": "wait", "namespace": "agents"}, "wait"),
        ({"type": "function", "name": "wait"}, "wait"),
        ({"type": "local_shell"}, "local_shell"),
    ],
)
def test_a_named_choice_goes_to_the_engine(choice: dict[str, Any], name: str) -> None:
    tools = [FLAT, CUSTOM, namespace("agents", "wait"), {"type": "local_shell"}]
    options = asked(tools=tools, tool_choice=choice).options
    assert options["tool_choice"] == {"type": "function", "function": {"name": name}}


@pytest.mark.parametrize("choice", [{"type": "web_search"}, {"type": "mcp", "server_label": "x"}, {"type": []}])
def test_nobody_can_be_made_to_call_what_is_not_offered(choice: dict[str, Any]) -> None:
    assert asked(tools=[FLAT, {"type": "web_search"}], tool_choice=choice).options["tool_choice"] == "auto"


def test_allowed_tools_are_all_that_is_offered() -> None:
    allowed = [{"type": "function", "name": "wait"}, {"type": "web_search"}, None]
    choice = {"type": "allowed_tools", "mode": "required", "tools": allowed}
    call = asked(tools=[FLAT, namespace("agents", "wait")], tool_choice=choice)
    assert [tool["function"]["name"] for tool in call.tools or []] == ["wait"]
    assert call.options["tool_choice"] == "required"
    assert rendered(call, answered(content="ok"))["tool_choice"] == choice


def test_settings_have_the_engines_names() -> None:
    call = asked(
        max_output_tokens=7, temperature=0.5, top_p=0.9, reasoning={"effort": "high", "summary": "auto"}, seed=3
    )
    assert call.options == {
        "max_completion_tokens": 7,
        "temperature": 0.5,
        "top_p": 0.9,
        "reasoning_effort": "high",
        "seed": 3,
    }


def test_effort_is_said_only_by_a_harness_that_says_it() -> None:
    assert asked(reasoning={"summary": "auto"}).options == {}
    assert asked(reasoning=None, text=None, tools=None, tool_choice=None, max_output_tokens=None).options == {}


def test_what_only_the_vendors_servers_understand_stays_here() -> None:
    fields = {
        "store": True,
        "include": ["reasoning.encrypted_content", "file_search_call.results"],
        "prompt_cache_key": "k",
        "client_metadata": {"a": "b"},
        "metadata": {"a": "b"},
        "service_tier": "flex",
        "truncation": "auto",
        "background": True,
        "user": "u",
        "safety_identifier": "s",
        "stream_options": {"include_obfuscation": False},
        "n": 5,
        "messages": [{"role": "user", "content": "other"}],
        "text": {"verbosity": "low"},
    }
    call = asked(**fields)
    assert (call.options, call.choices) == ({}, 1)
    assert call.messages == [{"role": "user", "content": "hello"}]


def test_forms_of_text_are_response_formats() -> None:
    schema = {"type": "object", "properties": {}}
    form = {"type": "json_schema", "name": "s", "schema": schema, "strict": True, "description": None}
    assert asked(text={"format": form}).options["response_format"] == {
        "type": "json_schema",
        "json_schema": {"name": "s", "schema": schema, "strict": True},
    }
    assert asked(text={"format": {"type": "json_object"}}).options["response_format"] == {"type": "json_object"}
    assert asked(text={"format": {"type": "text"}}).options == {}
