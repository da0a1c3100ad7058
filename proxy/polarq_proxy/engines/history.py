"""What engines can read of a history: the arguments of earlier tool calls, if they are a JSON object.

A model may have sampled others, and they cannot go to any engine as they are. Each one parses them before the template
sees them: SGLang refuses the whole request for what it cannot parse, and with it every later turn of the conversation;
so did vLLM (0.25.1 among others: vllm-project/vllm pull request 48922). Newer vLLM takes the request, but shows the
model a call without arguments (0.32: `renderers/chat_utils.py`). Inside an object the text gets through everywhere, so
that the model sees what it did wrong.
"""

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
