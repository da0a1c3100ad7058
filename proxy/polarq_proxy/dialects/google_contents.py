"""Gemini contents as chat messages.

Calls have ids here and often none there: a call without one is named after its place in the conversation, so that it
has the same name in every later request, and a response without one answers the oldest open call of its name.
Contents of the model that follow one another are one message: SDKs keep one content for each event of a stream.
"""

from __future__ import annotations

import base64
from typing import Any

from polarq_proxy.dialects.google_names import named, standard_base64, thinking_in
from polarq_proxy.dialects.messages_arguments import said_arguments
from polarq_proxy.faults import CallFault, FaultKind
from polarq_proxy.jsons import encode

_PART_KINDS = (
    "functionCall", "functionResponse", "inlineData", "fileData", "executableCode", "codeExecutionResult",
)  # fmt: skip
_SILENT = frozenset({"thought", "thoughtSignature", "thought_signature", "videoMetadata", "video_metadata"})
_SAID = ("output", "result")


def messages_of(contents: Any, system: Any) -> list[dict[str, Any]]:
    """Raises `CallFault` that names the part which cannot be used."""
    reader = _Reader()
    instruction = _system(system)
    if instruction:
        reader.messages.append({"role": "system", "content": instruction})
    items = [contents] if isinstance(contents, dict) else contents
    if not isinstance(items, list) or not items:
        raise _bad("'contents' must be a list of at least one content object", "contents")
    for place, item in enumerate(items):
        content = {"parts": [{"text": item}]} if isinstance(item, str) else item
        if not isinstance(content, dict):
            raise _bad(f"contents[{place}] must be an object with 'parts'", f"contents[{place}]")
        reader.content(content, f"contents[{place}]")
    if all(message["role"] == "system" for message in reader.messages):
        raise _bad("'contents' hold no part that says something", "contents")
    return reader.messages


class _Reader:
    def __init__(self) -> None:
        self.messages: list[dict[str, Any]] = []
        self._count = 0
        self._open: list[tuple[str, str]] = []
        """(id, name) of calls that nothing has answered yet."""
        self._said: list[dict[str, Any]] = []
        """Parts of a user message that is not finished."""

    def content(self, content: dict[str, Any], where: str) -> None:
        role = content.get("role")
        parts = content.get("parts")
        before = len(self.messages)
        for place, item in enumerate(_list(parts)):
            part = {"text": item} if isinstance(item, str) else item
            if not isinstance(part, dict):
                raise _bad(f"{where}.parts[{place}] must be an object", f"{where}.parts[{place}]")
            at = f"{where}.parts[{place}]"
            if role == "model":
                self._of_model(part, at)
            else:
                self._of_user(part, at, before)
        self._flush()
        if role == "model" and len(self.messages) == before:
            self._answer()  # an empty answer is an answer

    def _of_model(self, part: dict[str, Any], at: str) -> None:
        thinking = thinking_in(named(part, "thoughtSignature"))
        if thinking is not None:
            self._answer()["reasoning_content"] = thinking
        text = part.get("text")
        if part.get("thought") is True:
            if thinking is None and isinstance(text, str):  # what a signature holds is whole already
                answer = self._answer()
                answer["reasoning_content"] = answer.get("reasoning_content", "") + text
            return
        call = named(part, "functionCall")
        if isinstance(call, dict):
            self._call(call)
            return
        shown = _shown(part, at)
        if shown is not None:
            answer = self._answer()
            answer["content"] = _joined(answer["content"], shown)

    def _of_user(self, part: dict[str, Any], at: str, before: int) -> None:
        call, response = named(part, "functionCall"), named(part, "functionResponse")
        if isinstance(call, dict):
            self._flush()
            self._call(call)
        elif isinstance(response, dict):
            self._flush()
            self._response(response, at)
        elif part.get("thought") is not True:
            shown = _shown(part, at)
            if shown is None:
                return
            last = self.messages[-1] if len(self.messages) > before else {}
            if shown["type"] != "text" and last.get("role") == "tool" and not self._said:
                # A picture right behind a tool's result is what the tool showed.
                last["content"] = [*_parts(last["content"]), shown]
            else:
                self._said.append(shown)

    def _flush(self) -> None:
        if self._said:
            self.messages.append({"role": "user", "content": _content(self._said)})
            self._said = []

    def _answer(self) -> dict[str, Any]:
        """The assistant message that is being read."""
        if not self.messages or self.messages[-1]["role"] != "assistant":
            self.messages.append({"role": "assistant", "content": ""})
            self._open = []
        return self.messages[-1]

    def _call(self, call: dict[str, Any]) -> None:
        answer = self._answer()
        name = call["name"] if isinstance(call.get("name"), str) else ""
        call_id = call["id"] if isinstance(call.get("id"), str) and call["id"] else f"call_{self._count}"
        self._count += 1
        self._open.append((call_id, name))
        function = {"name": name, "arguments": _arguments(call.get("args"))}
        answer.setdefault("tool_calls", []).append({"id": call_id, "type": "function", "function": function})
        answer["content"] = answer["content"] or None

    def _response(self, response: dict[str, Any], at: str) -> None:
        name = response["name"] if isinstance(response.get("name"), str) else ""
        given = response["id"] if isinstance(response.get("id"), str) and response["id"] else None
        shown = [_shown(part, f"{at}.functionResponse.parts") for part in _list(response.get("parts"))]
        pictures = [part for part in shown if part is not None]
        text = _result(response.get("response"))
        content: Any = [{"type": "text", "text": text}, *pictures] if pictures else text
        message = {"role": "tool", "tool_call_id": self._answered(given, name), "content": content}
        self.messages.append({**message, "name": name} if name else message)

    def _answered(self, given: str | None, name: str) -> str:
        """The id of the call that a response answers."""
        match = next((call for call in self._open if call[0] == given), None) if given else None
        if match is None and given is None:
            match = next((call for call in self._open if call[1] == name), self._open[0] if self._open else None)
        if match is None:
            return given or f"call_{max(0, self._count - 1)}"
        self._open.remove(match)
        return match[0]


def _shown(part: Any, at: str) -> dict[str, Any] | None:
    """A part as a chat content part; None when it says nothing. Raises `CallFault` for one that cannot be shown."""
    if not isinstance(part, dict):
        raise _bad(f"{at} must hold objects", at)
    if isinstance(part.get("text"), str):
        return {"type": "text", "text": part["text"]}
    kind = next((kind for kind in _PART_KINDS if isinstance(named(part, kind), dict)), None)
    if kind is None:
        unknown = sorted(key for key, value in part.items() if value is not None and key not in _SILENT)
        if unknown:
            raise _bad(f"{at}.{unknown[0]} is nothing that the model can be shown", f"{at}.{unknown[0]}")
        return None
    value: dict[str, Any] = named(part, kind)
    if kind == "inlineData":
        return _inline(value, f"{at}.inlineData")
    if kind == "executableCode":
        language = str(value.get("language") or "").lower().replace("language_unspecified", "")
        return {"type": "text", "text": f"```{language}\n{value.get('code') or ''}\n```"}
    if kind == "codeExecutionResult":
        return {"type": "text", "text": str(value.get("output") or "")}
    if kind == "fileData":
        text = f"{at}.fileData: files and remote addresses cannot be fetched here; send the bytes as inlineData"
        raise _bad(text, f"{at}.fileData")
    raise _bad(f"{at} holds a '{kind}', which has no place here", f"{at}.{kind}")


def _inline(value: dict[str, Any], at: str) -> dict[str, Any]:
    kind = named(value, "mimeType")
    kind = kind.lower() if isinstance(kind, str) else ""
    data = standard_base64(value["data"]) if isinstance(value.get("data"), str) else None
    if data is None:
        raise _bad(f"{at}.data must be base64", f"{at}.data")
    if kind.startswith("image/"):
        return {"type": "image_url", "image_url": {"url": f"data:{kind};base64,{data}"}}
    if kind.startswith("text/"):
        return {"type": "text", "text": base64.b64decode(data).decode("utf-8", "replace")}
    raise _bad(f"{at}: the model takes text and images, not '{kind or 'data without a mimeType'}'", at)


def _arguments(args: Any) -> str:
    return said_arguments(args if isinstance(args, dict) else None)


def _result(response: Any) -> str:
    """What a function gave back, as text: its output alone where that is all there is."""
    if isinstance(response, dict) and len(response) == 1:
        [(key, value)] = response.items()
        if key in _SAID and isinstance(value, str):
            return value
    if isinstance(response, str):
        return response
    return "" if response is None else encode(response).decode()


def _system(system: Any) -> str | list[dict[str, Any]]:
    if isinstance(system, str):
        return system
    parts = system.get("parts") if isinstance(system, dict) else system
    texts = []
    for part in _list(parts):
        text = part.get("text") if isinstance(part, dict) else part
        if isinstance(text, str):
            texts.append({"type": "text", "text": text})
    return _content(texts)


def _content(parts: list[dict[str, Any]]) -> str | list[dict[str, Any]]:
    if len(parts) == 1 and parts[0]["type"] == "text":
        text: str = parts[0]["text"]
        return text
    return parts or ""


def _parts(content: Any) -> list[dict[str, Any]]:
    if isinstance(content, list):
        return content
    return [{"type": "text", "text": content}] if content else []


def _joined(content: Any, part: dict[str, Any]) -> Any:
    """An answer's content with one part more: its texts are one text, however a stream cut them."""
    if part["type"] == "text":
        if not isinstance(content, list):
            return (content or "") + part["text"]
        if content[-1]["type"] == "text":
            return [*content[:-1], {"type": "text", "text": content[-1]["text"] + part["text"]}]
    return [*_parts(content), part]


def _list(value: Any) -> list[Any]:
    if isinstance(value, dict):
        return [value]
    return value if isinstance(value, list) else []


def _bad(message: str, param: str) -> CallFault:
    return CallFault(FaultKind.BAD_REQUEST, message, param=param)
