"""What a message means, apart from how a harness happens to spell it.

Between two requests harnesses move cache marks, drop nulls and ids, turn a text into a list of one text part and back,
write tool arguments with other blanks, escapes and key order, strip blanks at the end, and keep or drop the thinking.
None of that makes it another message. (Seen in captured requests of thirty harnesses.)
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Sequence
from typing import Any

from polarq_proxy.exact.base import Message

_TEXT_PARTS = frozenset({"text", "input_text", "output_text"})
_THINKING_PARTS = frozenset({"thinking", "redacted_thinking", "reasoning", "reasoning_text", "reasoning_content"})
_THINKING_KEYS = ("reasoning_content", "reasoning")
_UNMEANT_KEYS = frozenset({"cache_control", "id", "annotations", "logprobs", "status"})
_EXACT_INTEGERS = float(1 << 53)

START = b""
"""The chain's value before the first message."""


def message_digest(message: Message) -> bytes:
    """Equal for two messages of equal meaning, and only for those. 16 bytes."""
    role = message.get("role")
    tree: list[Any] = [role]
    if role == "assistant":
        tree += [_content(message.get("content"), answer=True), _calls(message)]
    else:
        name = message.get("name") if role not in {"tool", "function"} else None
        tree += [name, _content(message.get("content"), answer=False)]
    return _digest(tree)


def chained(before: bytes, digest: bytes) -> bytes:
    """The digest of a history, from that of its beginning and its last message."""
    return hashlib.blake2b(before + digest, digest_size=16).digest()


def tools_digest(tools: Sequence[Message] | None) -> bytes:
    """Equal for lists of tools with equal meaning, in equal order. No list and an empty one are the same."""
    return _digest([_tool(tool) for tool in tools]) if tools else START


def tree_digest(tree: Any) -> bytes:
    """Equal for equal JSON, whatever the order of keys."""
    return _digest(_json(tree))


def thinking_of(message: Message) -> str | None:
    """The thinking that a message of the assistant carries, without blanks around it; None: it carries none."""
    for key in _THINKING_KEYS:
        if isinstance(message.get(key), str) and message[key].strip():
            return str(message[key].strip())
    content = message.get("content")
    parts = content if isinstance(content, list) else ()
    texts = [
        part.get("thinking") or part.get("text")
        for part in parts
        if isinstance(part, dict) and part.get("type") in _THINKING_PARTS
    ]
    joined = "\n".join(text for text in texts if isinstance(text, str)).strip()
    return joined or None


def thinking_digest(message: Message) -> bytes | None:
    thinking = thinking_of(message)
    return None if thinking is None else _digest(thinking)


def call_ids_of(message: Message) -> tuple[str, ...]:
    """The ids of its tool calls, as far as it has any."""
    calls = message.get("tool_calls")
    found = [call.get("id") for call in calls if isinstance(call, dict)] if isinstance(calls, list) else []
    return tuple(call_id for call_id in found if isinstance(call_id, str))


def only_text(message: Message) -> bool:
    """Whether a message holds nothing but text: no image, sound or file."""
    content = message.get("content")
    return not isinstance(content, list) or all(_text_of(part) is not None or _is_thinking(part) for part in content)


def texts_of(message: Message) -> Iterable[str]:
    """Every text that a message puts into a prompt."""
    content = message.get("content")
    if isinstance(content, str):
        yield content
    elif isinstance(content, list):
        yield from (text for part in content if (text := _text_of(part)) is not None)


def _digest(tree: Any) -> bytes:
    text = json.dumps(tree, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
    # Half a surrogate pair is no text, but it may be in arguments; two spellings of it must still be equal.
    return hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=16).digest()


def _content(content: Any, *, answer: bool) -> Any:
    """A text, or a list of texts and other parts. Nothing, null and an empty text are the same."""
    if content is None:
        return ""
    if isinstance(content, str):
        return content.strip() if answer else content.rstrip()
    if not isinstance(content, list):
        return _json(content)
    parts = [_part(part, answer=answer) for part in content if not (answer and _is_thinking(part))]
    parts = [part for part in parts if part != ""]
    if not parts:
        return ""
    return parts[0] if len(parts) == 1 and isinstance(parts[0], str) else parts


def _part(part: Any, *, answer: bool) -> Any:
    text = _text_of(part)
    if text is not None:
        return text.strip() if answer else text.rstrip()
    if not isinstance(part, dict):
        return _json(part)
    return {key: _json(value) for key, value in part.items() if value is not None and key not in _UNMEANT_KEYS}


def _text_of(part: Any) -> str | None:
    if isinstance(part, str):
        return part
    if isinstance(part, dict) and part.get("type") in _TEXT_PARTS and isinstance(part.get("text"), str):
        return str(part["text"])
    return None


def _is_thinking(part: Any) -> bool:
    return isinstance(part, dict) and part.get("type") in _THINKING_PARTS


def _calls(message: Message) -> list[list[Any]]:
    """Name and arguments of each tool call, in order."""
    calls = message.get("tool_calls")
    functions = [call.get("function", call) for call in calls if isinstance(call, dict)] if calls else []
    if message.get("function_call"):
        functions.append(message["function_call"])
    return [
        [function.get("name"), *_arguments(function.get("arguments"))]
        for function in functions
        if isinstance(function, dict)
    ]


def _arguments(arguments: Any) -> list[Any]:
    """["json", the parsed value], or ["text", what cannot be parsed]. Nothing at all is an empty object."""
    if arguments is None:
        return ["json", {}]
    if not isinstance(arguments, str):
        return ["json", _json(arguments)]
    if not arguments.strip():
        return ["json", {}]
    try:
        return ["json", _json(json.loads(arguments))]
    except (ValueError, RecursionError):
        return ["text", arguments.rstrip()]


def _json(value: Any) -> Any:
    """The same JSON with numbers in one spelling: 1.0 comes back from JavaScript as 1."""
    if isinstance(value, float) and value.is_integer() and abs(value) < _EXACT_INTEGERS:
        return int(value)
    if isinstance(value, list):
        return [_json(item) for item in value]
    if isinstance(value, dict):
        return {str(key): _json(item) for key, item in value.items()}
    return value


def _tool(tool: Message) -> Any:
    """A tool without cache marks and nulls, outside its schema (where null may be a value)."""
    kept = {key: value for key, value in tool.items() if value is not None and key not in _UNMEANT_KEYS}
    function = kept.get("function")
    if isinstance(function, dict):
        kept["function"] = {key: value for key, value in function.items() if value is not None}
    return _json(kept)
