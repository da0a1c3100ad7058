"""The `input` of a Responses request as chat messages.

One answer of the model is several items there (thinking, message, calls) and one message here. Items belong together
when their ids say so: polarq's ids name the answer that they come from. Harnesses that drop ids are read by order: an
answer is thinking, then a message, then calls, and everything up to the calls' results.

Left out, because the model never saw it and could do nothing with it: calls that ran on the vendor's servers (web
search, file search, code interpreter, image generation, MCP), other servers' encrypted histories, and item types that
are not known and carry no text. Calls that a harness ran itself are told by their `call_id` and shown, whatever their
type. A reference to a stored item is refused: what it stands for was seen, and leaving it out would change the prompt.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any

from polarq_proxy.dialects.responses_parts import content_of, output_of, text_of, thinking_of
from polarq_proxy.dialects.responses_tools import CUSTOM_ARGUMENT, Toolbox, ToolKind
from polarq_proxy.faults import CallFault, FaultKind
from polarq_proxy.jsons import encode

RAW_CALL = "ctcraw"
"""Ids that begin so are of custom calls whose `input` is what the model wrote, for want of an argument in it."""

_OWN_ID = re.compile(r"[a-z]+_([0-9a-f]{16,})_\d+")
_CALL_FIELDS = frozenset({"type", "id", "call_id", "status", "namespace", "name", "caller", "async", "async_"})


def item_id(prefix: str, completion_id: str, place: int) -> str:
    """The id of an output item; `answer_of` reads it."""
    return f"{prefix}_{completion_id}_{place}"


def answer_of(native_id: Any) -> str | None:
    """Which answer an item comes from; None when its id is not polarq's."""
    match = _OWN_ID.fullmatch(native_id) if isinstance(native_id, str) else None
    return match[1] if match else None


def messages_of(given: Any, instructions: Any, toolbox: Toolbox) -> list[dict[str, Any]]:
    """Raises `CallFault` for what cannot be read or shown."""
    history = _History()
    if isinstance(instructions, (str, list)):
        history.say("system", content_of(instructions, "instructions"))
    if isinstance(given, str):
        history.say("user", given)
    elif isinstance(given, list):
        for place, item in enumerate(given):
            _read(item, f"input[{place}]", history, toolbox)
    elif given is not None:
        raise CallFault(FaultKind.BAD_REQUEST, "'input' must be a string or a list of items", param="input")
    messages = history.finished()
    if not messages:
        raise CallFault(FaultKind.BAD_REQUEST, "'input' holds nothing for the model to read", param="input")
    return messages


@dataclass(slots=True)
class _Turn:
    """One answer of the model while its items come in; `message` stands in the list already."""

    answer: str | None
    message: dict[str, Any] = field(default_factory=dict)
    thinking: list[str] = field(default_factory=list)
    texts: list[str] = field(default_factory=list)
    calls: list[dict[str, Any]] = field(default_factory=list)
    ended: bool = False
    """Something else came after it."""

    def fits(self, answer: str | None, kind: str) -> bool:
        if answer is not None and self.answer is not None:
            return answer == self.answer
        if self.ended:
            return False
        if kind == "reasoning":
            return not self.texts and not self.calls
        return kind == "call" or not self.texts or bool(self.calls)

    def finish(self) -> None:
        if not (self.thinking or self.texts or self.calls):
            return
        said = bool(self.texts) or not self.calls
        self.message.update(role="assistant", content="".join(self.texts) if said else None)
        if self.thinking:
            self.message["reasoning_content"] = "\n".join(self.thinking)
        if self.calls:
            self.message["tool_calls"] = self.calls


class _History:
    def __init__(self) -> None:
        self._messages: list[dict[str, Any]] = []
        self._turn: _Turn | None = None

    def say(self, role: str, content: Any) -> None:
        if role == "system" and not content:
            return
        if role == "system" and isinstance(content, str) and self._opened_by_text():
            # Many templates take one system message only, and only as the first.
            self._messages[0]["content"] += f"\n\n{content}"
            return
        self._add({"role": role, "content": content})
        self._turn = None

    def _opened_by_text(self) -> bool:
        """A system message is all there is so far, and it is text."""
        first = self._messages[0] if len(self._messages) == 1 else {}
        return first.get("role") == "system" and isinstance(first.get("content"), str)

    def answered(self, call_id: str, content: Any) -> None:
        self._add({"role": "tool", "tool_call_id": call_id, "content": content})

    def turn(self, native_id: Any, kind: str) -> _Turn:
        """Where an item of the model's goes. Results may stand between calls of one answer."""
        answer = answer_of(native_id)
        turn = self._turn
        if turn is None or not turn.fits(answer, kind):
            self._end_turn()
            turn = self._turn = _Turn(answer)
            self._messages.append(turn.message)
        turn.answer = turn.answer or answer
        return turn

    def finished(self) -> list[dict[str, Any]]:
        self._end_turn()
        return [message for message in self._messages if message]

    def _add(self, message: dict[str, Any]) -> None:
        self._end_turn()
        self._messages.append(message)

    def _end_turn(self) -> None:
        if self._turn is not None:
            self._turn.finish()
            self._turn.ended = True


def _read(item: Any, where: str, history: _History, toolbox: Toolbox) -> None:
    if isinstance(item, str):
        history.say("user", item)
        return
    if not isinstance(item, dict):
        raise CallFault(FaultKind.BAD_REQUEST, f"{where} must be an object", param=where)
    kind = item.get("type")
    kind = kind if isinstance(kind, str) else "message"
    if kind == "item_reference" or {key for key, value in item.items() if value is not None} == {"id"}:
        text = (
            f"Item with id {item.get('id')!r} not found. polarq stores no items: send the item itself in its place, as "
            "clients do that set 'store' to false"
        )
        raise CallFault(FaultKind.BAD_REQUEST, text, status=404, param="input")
    if kind == "message" or (isinstance(item.get("role"), str) and "content" in item):
        _read_message(item, where, history)
    elif kind == "reasoning":
        thinking = thinking_of(item)
        turn = history.turn(item.get("id"), "reasoning")
        if thinking:
            turn.thinking.append(thinking)
    elif kind.endswith("_output"):
        call_id = _call_id(item) if "call_id" in item or kind == "local_shell_call_output" else None
        if call_id is not None:
            rest = {key: value for key, value in item.items() if key not in _CALL_FIELDS}
            history.answered(call_id, output_of(item.get("output", rest), f"{where}.output"))
    elif kind.endswith("_call"):
        call = _call(kind, item, where, toolbox)
        if call is not None:
            history.turn(item.get("id"), "call").calls.append(call)


def _read_message(item: dict[str, Any], where: str, history: _History) -> None:
    role = item.get("role")
    if role == "assistant":
        history.turn(item.get("id"), "message").texts.append(text_of(item.get("content"), f"{where}.content"))
        return
    content = content_of(item.get("content"), f"{where}.content")
    if role == "tool" and isinstance(item.get("tool_call_id"), str):
        history.answered(item["tool_call_id"], content)
        return
    history.say("system" if role in ("system", "developer") else "user", content)


def _call(kind: str, item: dict[str, Any], where: str, toolbox: Toolbox) -> dict[str, Any] | None:
    """A call in chat form; None for one that the harness did not run."""
    call_id = _call_id(item)
    if call_id is None:
        return None
    name, namespace = item.get("name"), item.get("namespace")
    if kind in {"function_call", "custom_tool_call"} and not (isinstance(name, str) and name):
        raise CallFault(FaultKind.BAD_REQUEST, f"{where} needs a name", param=f"{where}.name")
    namespace = namespace if isinstance(namespace, str) else None
    if kind == "function_call":
        prompt_name = toolbox.prompt_name(ToolKind.FUNCTION, str(name), namespace)
        arguments = item.get("arguments")
    elif kind == "custom_tool_call":
        prompt_name = toolbox.prompt_name(ToolKind.CUSTOM, str(name), namespace)
        text = item.get("input")
        raw = str(item.get("id")).startswith(f"{RAW_CALL}_")
        arguments = text if raw else {CUSTOM_ARGUMENT: text if isinstance(text, str) else ""}
    elif kind == "local_shell_call":
        prompt_name = toolbox.prompt_name(ToolKind.LOCAL_SHELL, "local_shell", None)
        action = item.get("action")
        action = action if isinstance(action, dict) else {}
        arguments = {key: value for key, value in action.items() if key != "type" and value not in (None, {})}
    else:
        prompt_name = kind.removesuffix("_call") or kind
        arguments = {key: value for key, value in item.items() if key not in _CALL_FIELDS and value is not None}
    spelt = arguments if isinstance(arguments, str) else encode({} if arguments is None else arguments).decode()
    return {"id": call_id, "type": "function", "function": {"name": prompt_name, "arguments": spelt}}


def _call_id(item: dict[str, Any]) -> str | None:
    kind = item.get("type")
    keys = (
        ("call_id", "id") if kind in {"function_call", "local_shell_call", "local_shell_call_output"} else ("call_id",)
    )
    return next((item[key] for key in keys if isinstance(item.get(key), str)), None)
