"""Arguments that a model sampled and no engine can parse do not end the conversation."""

from __future__ import annotations

import json
from typing import Any

import pytest

from polarq.registry import plugin
from polarq_proxy.call import ModelCall
from polarq_proxy.engines.history import UNPARSED, readable


def called(arguments: Any) -> dict[str, Any]:
    function = {"name": "run", "arguments": arguments}
    return {"role": "assistant", "content": None, "tool_calls": [{"id": "c", "type": "function", "function": function}]}


@pytest.mark.parametrize(
    "arguments", ['{"a": 1}', "{}", ' {"a":  [1, {"b": null}]}\n', '{"ü": "\\ud83e\\uddea"}', {"a": 1}]
)
def test_what_can_be_parsed_goes_as_it_was_sampled(arguments: Any) -> None:
    message = called(arguments)
    assert readable(message) is message


@pytest.mark.parametrize(
    "arguments", ['{"a": ', "ls -la", "[1]", "1", '"x"', "null", '{"a": NaN}', "\ud800", "[" * 5000]
)
@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_what_cannot_be_parsed_is_shown_to_the_model_as_text(engine: str, arguments: str) -> None:
    message = called(arguments)
    call = ModelCall([{"role": "user", "content": "x"}, message, {"role": "tool", "content": "no"}], None, {}, "m")
    room = plugin("engines", engine)()
    for request in (room.request(call, "m", stream=False), room.rendering(call, "m")):
        assert request is not None
        sent = request.body["messages"][1]["tool_calls"][0]["function"]
        assert json.loads(sent["arguments"]) == {UNPARSED: arguments}
        assert sent["name"] == "run"
    assert call.messages[1] == called(arguments)  # the record's own is untouched


@pytest.mark.parametrize("arguments", ["", "  ", None])
def test_no_arguments_are_an_empty_object(arguments: Any) -> None:
    assert readable(called(arguments))["tool_calls"][0]["function"]["arguments"] == "{}"


@pytest.mark.parametrize(
    "message", [{"role": "assistant"}, {"tool_calls": None}, {"tool_calls": "x"}, {"tool_calls": [1]}]
)
def test_odd_messages_are_left_to_the_engine(message: dict[str, Any]) -> None:
    assert readable(message) == message
