"""From the messages of a Messages request to chat messages.

Each message of the harness becomes chat messages of its own, consecutive ones of the same role included: so no later
request changes what an earlier one said, and a history that only grew stays a prefix of itself. The exception are
system messages inside the list, which many chat templates refuse. Those before the first answer join the leading
system message, because nothing was sampled yet after them; later ones become user messages where they stand.

Text blocks of one message are joined by line ends, so that a list of one block and a plain string are the same. Marks
for the vendor's cache, citations and whatever else rides on blocks is left out: it moves from turn to turn.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from polarq_proxy.dialects.messages_arguments import as_json, said_arguments
from polarq_proxy.faults import CallFault, FaultKind

BILLING = "x-anthropic-billing-header"
"""How a line of Claude Code's system prompt begins whose hash changes with every request: left in the prompt, no two
turns would begin with the same tokens."""

TOOL_ERROR = "[tool error]"

_Part = dict[str, Any]
"""A content part of a chat message: {type: text, text} or {type: image_url, image_url: {url}}."""

_LEFT_OUT = frozenset({"cache_control", "citations", "caller", "data", "signature"})


def chat_messages(system: Any, messages: Any) -> list[dict[str, Any]]:
    """Raises `CallFault` for what can never be shown to the model, naming the part."""
    if not isinstance(messages, list) or not messages:
        raise refused("messages", "must be a list of at least one message object")
    leading = [_without_billing(text) for text in _texts(system, "system")]
    chat: list[dict[str, Any]] = []
    answered = False
    for place, message in enumerate(messages):
        where = f"messages.{place}"
        if not isinstance(message, dict):
            raise refused(where, "must be a message object")
        content, where = message.get("content"), f"{where}.content"
        role = message.get("role")
        if role == "assistant":
            answered = True
            chat.append(_assistant(content, where))
        elif role not in ("system", "developer"):  # a tuple: what comes may be a list
            chat.extend(_user(content, where))
        elif answered:
            chat.append({"role": "user", "content": f"<system>\n{_joined(_texts(content, where))}\n</system>"})
        else:
            leading.append(_joined(_texts(content, where)))
    text = "\n\n".join(part for part in leading if part)
    return [{"role": "system", "content": text}, *chat] if text else chat


def is_prefill(messages: Any) -> bool:
    """Whether the answer is to go on in the middle of a last message of text that the harness wrote itself."""
    last = messages[-1] if isinstance(messages, list) and messages else None
    if not isinstance(last, dict) or last.get("role") != "assistant":
        return False
    content = last.get("content")
    blocks = [{"type": "text", "text": content}] if isinstance(content, str) else content
    return (
        isinstance(blocks, list)
        and all(isinstance(block, str) or (isinstance(block, dict) and block.get("type") == "text") for block in blocks)
        and any(block if isinstance(block, str) else block.get("text") for block in blocks)
    )


def refused(where: str, why: str) -> CallFault:
    return CallFault(FaultKind.BAD_REQUEST, f"{where}: {why}", param=where)


def _user(content: Any, where: str) -> Iterator[dict[str, Any]]:
    """Results of tools first, as the model's turn must be answered before anything else is said."""
    parts: list[_Part] = []
    results = []
    for block, at in _blocks(content, where):
        if block.get("type") == "tool_result":
            results.append(_tool(block, at))
        else:
            parts.extend(_parts(block, at))
    yield from results
    if parts or not results:
        yield {"role": "user", "content": _content(parts)}


def _tool(block: dict[str, Any], where: str) -> dict[str, Any]:
    parts = [part for inner, at in _blocks(block.get("content"), f"{where}.content") for part in _parts(inner, at)]
    if block.get("is_error") is True:
        # The flag has no place in a chat message, and the text of an error need not look like one.
        parts.insert(0, _text_part(TOOL_ERROR))
    return {"role": "tool", "tool_call_id": _str(block.get("tool_use_id")), "content": _content(parts)}


def _assistant(content: Any, where: str) -> dict[str, Any]:
    """Texts are put together without anything between them, because a streamed answer may have been cut into several
    blocks around its tool calls."""
    texts: list[str] = []
    thinking: list[str] = []
    calls = []
    for block, at in _blocks(content, where):
        kind = block.get("type")
        if kind == "thinking":
            thinking.append(_str(block.get("thinking")))
        elif kind == "tool_use":
            function = {"name": _str(block.get("name")), "arguments": said_arguments(block.get("input"))}
            calls.append({"id": _str(block.get("id")), "type": "function", "function": function})
        else:
            texts.extend(_only_texts(block, at))
    message: dict[str, Any] = {"role": "assistant", "content": "".join(texts)}
    if any(thinking):
        message["reasoning_content"] = "".join(thinking)
    if calls:
        message["tool_calls"] = calls
    return message


def _parts(block: dict[str, Any], where: str) -> list[_Part]:
    """What the model is shown of a block in a user message or a tool's result."""
    match block.get("type"):
        case "text":
            return [_text_part(_str(block.get("text")))]
        case "image":
            return [_image(block.get("source"), f"{where}.source")]
        case "image_url":
            return [_image_at(_url(block.get("image_url")), where)]
        case "document":
            return _document(block, where)
        case "search_result":
            head = [_text_part(_str(block.get(key))) for key in ("title", "source") if block.get(key)]
            return head + [part for inner, at in _blocks(block.get("content"), where) for part in _parts(inner, at)]
        case "thinking" | "redacted_thinking":
            return []  # nobody here can read the second
    return [_text_part(_shown(block))]


def _only_texts(block: dict[str, Any], where: str) -> list[str]:
    """The same where a chat message holds nothing but text."""
    parts = _parts(block, where)
    if any(part["type"] != "text" for part in parts):
        raise refused(where, "an image can be in a user message or a tool_result only")
    return [part["text"] for part in parts]


def _document(block: dict[str, Any], where: str) -> list[_Part]:
    source = block.get("source")
    kind = source.get("type") if isinstance(source, dict) else None
    head = [_text_part(_str(block.get(key))) for key in ("title", "context") if block.get(key)]
    if isinstance(source, dict) and kind == "text":
        return [*head, _text_part(_str(source.get("data")))]
    if isinstance(source, dict) and kind == "content":
        where = f"{where}.source.content"
        return head + [part for inner, at in _blocks(source.get("content"), where) for part in _parts(inner, at)]
    raise refused(
        f"{where}.source",
        f"a document of type '{_str(kind)}' cannot be shown to the model; send its text (type 'text' or 'content')",
    )


def _image(source: Any, where: str) -> _Part:
    if not isinstance(source, dict):
        raise refused(where, "must be an object {type: base64, media_type, data}")
    if source.get("type") == "url":
        return _image_at(_str(source.get("url")), where)
    data, kind = source.get("data"), source.get("media_type")
    if source.get("type") != "base64" or not isinstance(data, str) or not data:
        raise refused(
            where, "an image must be sent as base64: nothing is fetched for the model, files and URLs neither"
        )
    return _image_part(f"data:{kind if isinstance(kind, str) and kind else 'image/png'};base64,{data}")


def _image_at(url: str, where: str) -> _Part:
    if not url.startswith("data:"):
        raise refused(
            where, "an image must be sent as base64: nothing is fetched for the model, files and URLs neither"
        )
    return _image_part(url)


def _url(value: Any) -> str:
    return _str(value.get("url")) if isinstance(value, dict) else _str(value)


def _shown(block: dict[str, Any]) -> str:
    """A block of a kind that chat messages have no form for, server tools' use and results among them: its JSON,
    without what is meant for the vendor's eyes only."""
    return as_json(_readable(block), sort_keys=True)


def _readable(value: Any) -> Any:
    if isinstance(value, list):
        return [_readable(item) for item in value]
    if not isinstance(value, dict):
        return value
    return {
        key: _readable(item)
        for key, item in value.items()
        if item is not None and key not in _LEFT_OUT and not key.startswith("encrypted_")
    }


def _blocks(content: Any, where: str) -> Iterator[tuple[dict[str, Any], str]]:
    """Content as blocks, each with its place for messages of errors."""
    if isinstance(content, str | dict):
        content = [content]
    elif content is None:
        return
    elif not isinstance(content, list):
        raise refused(where, "must be a string or a list of blocks")
    for place, block in enumerate(content):
        if isinstance(block, str):
            yield {"type": "text", "text": block}, f"{where}.{place}"
        elif isinstance(block, dict):
            yield block, f"{where}.{place}"
        else:
            raise refused(f"{where}.{place}", "must be an object with a 'type'")


def _texts(content: Any, where: str) -> list[str]:
    return [text for block, at in _blocks(content, where) for text in _only_texts(block, at)]


def _without_billing(text: str) -> str:
    if not text.startswith(BILLING):
        return text
    return text.partition("\n")[2].lstrip("\n")


def _content(parts: Sequence[_Part]) -> str | list[_Part]:
    if all(part["type"] == "text" for part in parts):
        return _joined([part["text"] for part in parts])
    return list(parts)


def _joined(texts: Sequence[str]) -> str:
    return "\n".join(texts)


def _text_part(text: str) -> _Part:
    return {"type": "text", "text": text}


def _image_part(url: str) -> _Part:
    return {"type": "image_url", "image_url": {"url": url}}


def _str(value: Any) -> str:
    return value if isinstance(value, str) else ""
