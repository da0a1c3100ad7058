"""From sampled text to a message, piece by piece: the server-side parsers of an engine.

`<think>...</think>` at the start becomes `reasoning`; `<tool_call>{"name": ..., "arguments": ...}</tool_call>`
becomes tool calls when the request brought tools (the hermes convention). Text and ids do not go in step: a piece
that may belong to a tag is held back, and the pieces of a tag show nothing at all. Whoever reads ids must not look
at text.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from polarq.testing.inference.rendering import to_json

THINK, END_THINK = "<think>", "</think>"
CALL, END_CALL = "<tool_call>", "</tool_call>"
_NAME = re.compile(r'\s*\{\s*"name"\s*:\s*("(?:[^"\\]|\\.)*")')
_ARGUMENTS = re.compile(r'\s*,\s*"arguments"\s*:\s*')


@dataclass(frozen=True)
class Delta:
    """What one piece of text added to the message. At most one of the three kinds."""

    kind: Literal["reasoning", "content", "tool_call"]
    text: str = ""
    """Reasoning or content; for a tool call a part of its arguments."""
    call_index: int = 0
    call_name: str | None = None
    """Given once per call, when its name is complete."""


@dataclass
class Message:
    """The parsed answer. `tool_calls` are (name, arguments as JSON text) in the order of the text."""

    reasoning: str | None = None
    content: str | None = None
    tool_calls: list[tuple[str, str]] = field(default_factory=list)


class MessageParser:
    """Turns pieces of text into deltas. `feed` every piece, then `finish`."""

    def __init__(self, *, tools: bool) -> None:
        self._tools = tools
        self._state: Literal["start", "reasoning", "gap", "content", "in_call", "between"] = "start"
        self._held = ""
        self._calls = 0
        self._call = _CallParser(0)

    def feed(self, piece: str) -> list[Delta]:
        self._held += piece
        deltas: list[Delta] = []
        while self._step(deltas):
            pass
        return deltas

    def finish(self) -> list[Delta]:
        """What was held back and turned out to be plain text after all."""
        held, self._held = self._held, ""
        if self._state in ("start", "content") and held:
            return [Delta("content", held)]
        if self._state == "reasoning" and held.rstrip("\n"):
            return [Delta("reasoning", held.rstrip("\n"))]
        return []

    @property
    def thinking(self) -> bool:
        """Whether the text so far has not yet left the thinking block."""
        return self._state == "reasoning"

    def _step(self, deltas: list[Delta]) -> bool:
        """Consumes from the held text what its state allows; False when more text is needed."""
        match self._state:
            case "start":
                return self._start()
            case "reasoning":
                return self._reasoning(deltas)
            case "gap":
                return self._gap()
            case "content":
                return self._content(deltas)
            case "in_call":
                return self._in_call(deltas)
            case "between":
                return self._between()

    def _start(self) -> bool:
        if self._held.startswith(THINK + "\n"):
            self._take(len(THINK) + 1, "reasoning")
        elif (THINK + "\n").startswith(self._held):
            return False
        else:
            self._state = "content"
        return True

    def _reasoning(self, deltas: list[Delta]) -> bool:
        text, closed = self._until(END_THINK, hold_newlines=True)
        if text:
            deltas.append(Delta("reasoning", text))
        if closed:
            self._state = "gap"
        return closed

    def _gap(self) -> bool:
        """The two newlines between thinking and answer belong to neither."""
        if len(self._held) < 2 and "\n\n".startswith(self._held):
            return False
        self._take(2 if self._held.startswith("\n\n") else 0, "content")
        return True

    def _content(self, deltas: list[Delta]) -> bool:
        if not self._tools:
            text, self._held = self._held, ""
            opened = False
        else:
            text, opened = self._until(CALL)
        if text:
            deltas.append(Delta("content", text))
        if opened:
            self._open_call()
        return opened

    def _in_call(self, deltas: list[Delta]) -> bool:
        text, closed = self._until(END_CALL)
        deltas.extend(self._call.feed(text))
        if closed:
            self._state = "between"
        return closed

    def _between(self) -> bool:
        """Text between and after calls is dropped from the message (its ids stay in the sample)."""
        _, opened = self._until(CALL)
        if opened:
            self._open_call()
        return opened

    def _open_call(self) -> None:
        self._state = "in_call"
        self._call = _CallParser(self._calls)
        self._calls += 1

    def _take(self, count: int, state: Literal["reasoning", "content"]) -> None:
        self._held = self._held[count:]
        self._state = state

    def _until(self, tag: str, *, hold_newlines: bool = False) -> tuple[str, bool]:
        """(text before the tag, whether the tag came). Holds back what may be the tag's beginning."""
        before, found, after = self._held.partition(tag)
        if found:
            self._held = after
            return (before.rstrip("\n") if hold_newlines else before), True
        keep = next((n for n in range(min(len(tag) - 1, len(before)), 0, -1) if before.endswith(tag[:n])), 0)
        if hold_newlines:
            body = before[: len(before) - keep]
            keep += len(body) - len(body.rstrip("\n"))
        self._held = before[len(before) - keep :]
        return before[: len(before) - keep], False


class _CallParser:
    """The inside of one tool call: its name once complete, then its arguments as they come."""

    def __init__(self, index: int) -> None:
        self._index = index
        self._text = ""
        self._named = False
        self._opened = False
        self._value = _ValueScanner()

    def feed(self, text: str) -> list[Delta]:
        self._text += text
        deltas = []
        if not self._named and (name := _NAME.match(self._text)):
            self._named = True
            self._text = self._text[name.end() :]
            deltas.append(Delta("tool_call", call_index=self._index, call_name=str(json.loads(name[1]))))
        if self._named and not self._opened and (opening := _ARGUMENTS.match(self._text)):
            self._opened = True
            self._text = self._text[opening.end() :]
        if self._opened:
            part = self._value.take(self._text)
            self._text = ""
            if part:
                deltas.append(Delta("tool_call", part, self._index))
        return deltas


class _ValueScanner:
    """Passes one JSON object or array on, from text that arrives in parts; nothing before or after it."""

    def __init__(self) -> None:
        self._depth = 0
        self._begun = False
        self._in_string = False
        self._escaped = False

    def take(self, text: str) -> str:
        if not self._begun:
            text = text.lstrip()
            self._begun = bool(text)
        elif self._depth == 0:
            return ""
        for at, char in enumerate(text):
            self._see(char)
            if self._depth == 0:
                return text[: at + 1]
        return text

    def _see(self, char: str) -> None:
        if self._escaped:
            self._escaped = False
        elif self._in_string:
            self._escaped = char == "\\"
            self._in_string = char != '"'
        elif char == '"':
            self._in_string = True
        elif char in "{[":
            self._depth += 1
        elif char in "}]":
            self._depth -= 1


def parse(text: str, *, tools: bool) -> Message:
    """The message of a complete text. When a tool call is not valid JSON, everything stays in `content`, as the
    hermes parser of vLLM does it."""
    parser = MessageParser(tools=False)
    deltas = [*parser.feed(text), *parser.finish()]
    message = Message(reasoning="".join(delta.text for delta in deltas if delta.kind == "reasoning") or None)
    content = "".join(delta.text for delta in deltas if delta.kind == "content")
    if tools and CALL in content:
        before, *bodies = content.split(CALL)
        try:
            message.tool_calls = [_call(body.partition(END_CALL)[0]) for body in bodies]
            content = before
        except (ValueError, KeyError, TypeError):
            message.tool_calls = []
    message.content = content or (None if message.reasoning or message.tool_calls else "")
    return message


def thinking_pieces(pieces: Sequence[str]) -> int:
    """How many pieces of an answer come up to the end of its thinking."""
    if not parse("".join(pieces), tools=False).reasoning:
        return 0
    said = ""
    for count, piece in enumerate(pieces, 1):
        said += piece
        if END_THINK in said:
            return count
    return len(pieces)


def _call(body: str) -> tuple[str, str]:
    call = json.loads(body)
    return str(call["name"]), to_json(call["arguments"])
