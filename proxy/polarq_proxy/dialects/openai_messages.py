"""Chat messages as harnesses send them, made into those that every engine reads.

Harnesses send back what their SDK gave them: null keys, no content, content as parts in every role, cache marks,
thinking under two names, calls of functions in the form of 2023. What means the same becomes the same here. What a
model cannot be shown (sound, files, addresses that would have to be fetched) is refused by its place in the request,
because leaving it out would make the harness act on an answer to another question.
"""

from __future__ import annotations

from typing import Any

from polarq_proxy.faults import CallFault, FaultKind
from polarq_proxy.jsons import encode

_TEXTS = frozenset({"text", "input_text", "output_text", "summary_text"})
_IMAGES = frozenset({"image_url", "input_image"})
_FILES = frozenset({"file", "input_file", "input_audio", "audio", "audio_url", "video_url", "input_video"})
_THOUGHTS = frozenset({"thinking", "reasoning", "redacted_thinking", "reasoning_text"})
_SYSTEM = frozenset({"system", "developer"})
_PLAIN = ("user", "assistant", "system")


def messages_of(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Raises `CallFault` that names the part which cannot be used."""
    reader = _Reader()
    return [
        message if reader.takes_as_it_is(message) else reader.message(message, f"messages[{place}]")
        for place, message in enumerate(messages)
    ]


class _Reader:
    """Remembers the calls of the last answer, for results that do not say which one they are of."""

    def __init__(self) -> None:
        self._count = 0
        self._last: list[dict[str, Any]] = []
        """The calls of the last answer."""
        self._answered: set[str] = set()
        """Which of them have a result."""

    def takes_as_it_is(self, message: dict[str, Any]) -> bool:
        """Most messages of a long history are as they should be already; they are not worth a copy."""
        role, content, size = message.get("role"), message.get("content"), len(message)
        if not isinstance(content, str):
            return False
        if size == 2:
            return role in _PLAIN
        if size != 3:
            return False
        if role == "tool":
            return _said(message.get("tool_call_id"))
        calls = message.get("tool_calls")
        if role != "assistant" or not isinstance(calls, list) or not calls or not all(map(_is_whole_call, calls)):
            return False
        self._begin(calls)
        return True

    def _begin(self, calls: list[dict[str, Any]]) -> None:
        self._last, self._answered = calls, set()
        self._count += len(calls)

    def message(self, message: dict[str, Any], where: str) -> dict[str, Any]:
        role = message["role"] if _said(message.get("role")) else "user"
        if role in _SYSTEM:
            return self._plain("system", message, where)
        if role == "assistant":
            return self._answer(message, where)
        if role in {"tool", "function"}:
            return self._result(message, where)
        return self._plain(role, message, where)

    def _plain(self, role: str, message: dict[str, Any], where: str) -> dict[str, Any]:
        shown = {"role": role, "content": content_of(message.get("content"), f"{where}.content")}
        return {**shown, "name": message["name"]} if isinstance(message.get("name"), str) else shown

    def _answer(self, message: dict[str, Any], where: str) -> dict[str, Any]:
        calls = self._calls(message)
        content, thought = _thoughts_apart(message.get("content"))
        said = content_of(content, f"{where}.content")
        if not said and isinstance(message.get("refusal"), str):
            said = message["refusal"]
        thinking = next((text for text in map(message.get, ("reasoning_content", "reasoning")) if _said(text)), thought)
        shown: dict[str, Any] = {"role": "assistant", "content": said}
        if thinking:
            shown["reasoning_content"] = thinking
        if calls:
            shown["tool_calls"] = calls
            if content is None:
                shown["content"] = None
        if isinstance(message.get("name"), str):
            shown["name"] = message["name"]
        return shown

    def _calls(self, message: dict[str, Any]) -> list[dict[str, Any]]:
        given = message.get("tool_calls")
        items = [item for item in given if isinstance(item, dict)] if isinstance(given, list) else []
        if not items and isinstance(message.get("function_call"), dict):
            items = [{"function": message["function_call"]}]
        calls = [self._call(item, self._count + place) for place, item in enumerate(items)]
        self._begin(calls)
        return calls

    def _call(self, item: dict[str, Any], place: int) -> dict[str, Any]:
        call_id = item["id"] if _said(item.get("id")) else f"call_{place}"
        function = item.get("function")
        custom = item.get("custom")
        if isinstance(custom, dict) and not isinstance(function, dict):
            function = {"name": custom.get("name"), "arguments": {"input": custom.get("input")}}
        function = function if isinstance(function, dict) else {}
        name, arguments = function.get("name"), function.get("arguments")
        if not isinstance(arguments, str):
            arguments = encode({} if arguments is None else arguments).decode()
        named = {"name": name if isinstance(name, str) else "", "arguments": arguments}
        return {"id": call_id, "type": "function", "function": named}

    def _result(self, message: dict[str, Any], where: str) -> dict[str, Any]:
        given, name = message.get("tool_call_id"), message.get("name")
        call_id = str(given) if _said(given) else self._oldest_open(name)
        self._answered.add(call_id)
        content = content_of(message.get("content"), f"{where}.content")
        shown = {"role": "tool", "tool_call_id": call_id, "content": content}
        return {**shown, "name": name} if isinstance(name, str) else shown

    def _oldest_open(self, name: Any) -> str:
        """The call of that name that has no result yet, or else of any name."""
        left = [call for call in self._last if call["id"] not in self._answered]
        call = next((call for call in left if call["function"]["name"] == name), left[0] if left else None)
        return "call_0" if call is None else str(call["id"])


def _is_whole_call(item: Any) -> bool:
    """Has all that engines read, and nothing else."""
    function = item.get("function") if isinstance(item, dict) and len(item) == 3 else None
    return (
        isinstance(function, dict)
        and len(function) == 2
        and isinstance(function.get("name"), str)
        and isinstance(function.get("arguments"), str)
        and item.get("type") == "function"
        and _said(item.get("id"))
    )


def content_of(content: Any, where: str) -> str | list[dict[str, Any]]:
    """Text, or parts of which every one is text or a picture. Raises `CallFault`."""
    if content is None or isinstance(content, str):
        return content or ""
    items = [content] if isinstance(content, dict) else content
    if not isinstance(items, list):
        raise _bad(f"{where} must be text or a list of parts", where)
    parts = [_part(item, f"{where}[{place}]") for place, item in enumerate(items)]
    return [part for part in parts if part is not None] or ""


def _part(part: Any, where: str) -> dict[str, Any] | None:
    if isinstance(part, str):
        return {"type": "text", "text": part}
    if not isinstance(part, dict):
        raise _bad(f"{where} must be an object", where)
    kind = part["type"] if isinstance(part.get("type"), str) else None
    if kind in _TEXTS or (kind is None and isinstance(part.get("text"), str)):
        text = part.get("text")
        return {"type": "text", "text": text if isinstance(text, str) else ""}
    if kind in _IMAGES or (kind is None and part.get("image_url") is not None):
        return _image(part, where)
    if kind == "refusal":
        return {"type": "text", "text": str(part.get("refusal") or "")}
    if kind in _THOUGHTS:
        return None
    if kind in _FILES:
        raise _bad(f"{where}: the model takes text and pictures, not '{kind}'", where)
    raise _bad(f"{where}: a part of type '{kind or 'unknown'}' cannot be shown to the model", where)


def _image(part: dict[str, Any], where: str) -> dict[str, Any]:
    given = part.get("image_url")
    inner = given if isinstance(given, dict) else {"url": given, "detail": part.get("detail")}
    image, detail = inner.get("url"), inner.get("detail")
    if not isinstance(image, str) or not image:
        cause = "a file id stands for a file that is not here" if part.get("file_id") else "it holds no data"
        raise _bad(f"{where}: the picture cannot be shown ({cause}); send it as a data: address", where)
    if not image.lower().startswith("data:"):
        raise _bad(f"{where}: pictures are not fetched from other places; send it as a data: address", where)
    shown = {"url": image}
    if isinstance(detail, str):
        shown["detail"] = detail
    return {"type": "image_url", "image_url": shown}


def _thoughts_apart(content: Any) -> tuple[Any, str]:
    """An answer's content without parts that are thinking, and the thinking."""
    if not isinstance(content, list):
        return content, ""
    thoughts, rest = [], []
    for part in content:
        kind = part.get("type") if isinstance(part, dict) else None
        if isinstance(kind, str) and kind in _THOUGHTS:
            text = next((part[key] for key in ("thinking", "text", "reasoning") if _said(part.get(key))), "")
            thoughts.append(text)
        else:
            rest.append(part)
    return rest, "".join(thoughts)


def _said(value: Any) -> bool:
    return isinstance(value, str) and bool(value)


def _bad(message: str, param: str) -> CallFault:
    return CallFault(FaultKind.BAD_REQUEST, message, param=param)
