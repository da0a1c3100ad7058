"""What engines can read of a history: some parse the arguments of earlier tool calls, and refuse the whole request for
one that is no JSON object, although a model sampled it."""

from __future__ import annotations

import json
from typing import Any

import msgspec

UNPARSED = "__unparsed_arguments__"
"""The member under which text that is no JSON object is shown to the model."""

_OBJECT = msgspec.json.Decoder(dict[str, msgspec.Raw])


def readable(message: dict[str, Any]) -> dict[str, Any]:
    """The message with arguments that every engine can read. The record keeps what the harness sent."""
    calls = message.get("tool_calls")
    if not isinstance(calls, list) or all(_is_read(call) for call in calls):
        return message
    return {**message, "tool_calls": [call if _is_read(call) else _made_readable(call) for call in calls]}


def _is_read(call: Any) -> bool:
    function = call.get("function") if isinstance(call, dict) else None
    arguments = function.get("arguments") if isinstance(function, dict) else None
    if not isinstance(arguments, str):
        return not isinstance(function, dict) or isinstance(arguments, dict)
    try:
        _OBJECT.decode(arguments)
    except (msgspec.DecodeError, UnicodeEncodeError, RecursionError):
        return False
    return True


def _made_readable(call: dict[str, Any]) -> dict[str, Any]:
    function = call["function"]
    arguments = function.get("arguments")
    if arguments is None or (isinstance(arguments, str) and not arguments.strip()):
        text = "{}"
    else:
        text = json.dumps({UNPARSED: arguments}, ensure_ascii=False)
    return {**call, "function": {**function, "arguments": text}}
