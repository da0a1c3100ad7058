"""Tool arguments of the Messages dialect: text that was sampled, shown as the JSON object that harnesses expect.

Models sample arguments as text, which need not be JSON. What is a JSON object goes through as it was sampled, byte for
byte, and while it is still coming. What is not would make SDKs raise in the middle of a stream, so nothing doubtful is
let through: such arguments are shown as an object whose member `UNPARSED` holds the text. When the first part of them
was on its way already, it is closed as an object and gets the same member as its last. An object with that member,
coming back in a history, stands for the text.
"""

from __future__ import annotations

import json
import re
from typing import Any

import msgspec

UNPARSED = "__unparsed_arguments__"
MAX_DEPTH = 100
"""Readers of JSON in SDKs give up somewhere beyond this."""

_BLANK = " \t\n\r"
_SPACE = re.compile(r"[ \t\n\r]*")
_SCALAR = re.compile(r"-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][+-]?[0-9]+)?|true|false|null")
_SCALAR_END = re.compile(r'[\s,:"\[\]{}]')
# Halves of surrogate pairs count as broken: no reader of UTF-8 takes them.
_STRING_PART = re.compile(
    r'(?:[^"\\\x00-\x1f]+|\\["\\/bfnrt]|\\u(?![dD][89a-fA-F])[0-9a-fA-F]{4}'
    r"|\\u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2})*"
)
_ESCAPE_BEGUN = re.compile(
    r"\\(?:u(?:[dD]?|[dD][0-7][0-9a-fA-F]?|[0-9abceABCEfF][0-9a-fA-F]{0,2}"
    r"|[dD][89abAB](?:[0-9a-fA-F](?:[0-9a-fA-F](?:\\(?:u(?:[dD](?:[c-fC-F][0-9a-fA-F]?)?)?)?)?)?)?)?)?"
)


class ArgumentStream:
    """The arguments of one call while they come. `feed` and `finish` return what may be shown now; all that they
    return is a JSON object, or the beginning of one when the answer was cut off by its length."""

    def __init__(self) -> None:
        self._all: list[str] = []
        self._rest = ""
        self._stack: list[str] = []
        self._expect = "start"
        self._in_string = False
        self._is_key = False
        self._broken = False
        self.complete = False
        """A whole object came; its last brace is held back until nothing else can follow."""

    def feed(self, text: str) -> str:
        self._all.append(text)
        if self.complete:
            self._broken = self._broken or bool(text.strip(_BLANK))
        if self._broken or self.complete:
            return ""
        self._rest += text
        at = self._scan()
        shown, self._rest = self._rest[:at], self._rest[at:]
        return shown

    def finish(self, *, cut_off: bool = False) -> str:
        """`cut_off`: the answer ended by its length, so that the arguments may stay half."""
        whole = "".join(self._all)
        if not whole.strip():
            return "{}"
        if self.complete and not self._broken:
            return "}"
        if not self._stack:
            return json.dumps({UNPARSED: whole}, ensure_ascii=False)
        if cut_off and not self._broken:
            return self._rest
        return self._closed() + f"{json.dumps(UNPARSED)}:{json.dumps(whole, ensure_ascii=False)}}}"

    def _scan(self) -> int:
        """Up to where the rest is certainly well-formed."""
        text, at = self._rest, 0
        while True:
            if self._in_string:
                end = self._string(text, at)
                if end < 0:
                    return ~end
                at = end
                continue
            space = _SPACE.match(text, at)
            after = space.end() if space else at
            if after == len(text):
                return at if self._expect == "start" else after
            end = self._structure(text, after)
            if end < 0:
                return at if self._expect == "start" else after
            at = end

    def _string(self, text: str, at: int) -> int:
        """Past the string's end, or the complement of how far it is well-formed."""
        part = _STRING_PART.match(text, at)
        at = part.end() if part else at
        if at == len(text):
            return ~at
        if text[at] == '"':
            self._in_string = False
            self._expect = "colon" if self._is_key else "comma"
            return at + 1
        if not _ESCAPE_BEGUN.fullmatch(text, at):
            self._broken = True
        return ~at

    def _structure(self, text: str, at: int) -> int:
        """Past the next token, or -1 when it is unknown yet, wrong, or the object's last brace."""
        char, expect = text[at], self._expect
        if expect in {"comma", "key_or_end", "value_or_end"} and char == ("}" if self._stack[-1] == "{" else "]"):
            if len(self._stack) == 1:
                self.complete = True
                self._broken = bool(text[at + 1 :].strip(_BLANK))
                return -1
            self._stack.pop()
            self._expect = "comma"
        elif expect == "comma" and char == ",":
            self._expect = "key" if self._stack[-1] == "{" else "value"
        elif expect == "colon" and char == ":":
            self._expect = "value"
        elif expect in {"key", "key_or_end"} and char == '"':
            self._in_string = self._is_key = True
        elif expect in {"value", "value_or_end"} and char == '"':
            self._in_string, self._is_key = True, False
        elif (expect in {"value", "value_or_end"} and char in "{[") or (expect == "start" and char == "{"):
            if len(self._stack) == MAX_DEPTH:
                return self._wrong()
            self._stack.append(char)
            self._expect = "key_or_end" if char == "{" else "value_or_end"
        elif expect in {"value", "value_or_end"}:
            return self._scalar(text, at)
        else:
            return self._wrong()
        return at + 1

    def _scalar(self, text: str, at: int) -> int:
        end = _SCALAR_END.search(text, at)
        if end is None:
            # Not ended yet: held back, so that no half number is ever shown.
            return -1 if len(text) - at < 400 else self._wrong()
        if not _SCALAR.fullmatch(text, at, end.start()):
            return self._wrong()
        self._expect = "comma"
        return end.start()

    def _wrong(self) -> int:
        self._broken = True
        return -1

    def _closed(self) -> str:
        """What makes of the part shown so far an object that takes one more member."""
        out = ""
        if self._in_string:
            out, self._expect = '"', "colon" if self._is_key else "comma"
        if self._expect == "colon":
            out += ":null"
        elif self._expect == "value":
            out += "null"
        elif self._expect == "key" and len(self._stack) > 1:
            out += '"":null'
        for bracket in reversed(self._stack[1:]):
            out += "}" if bracket == "{" else "]"
        first = len(self._stack) == 1 and self._expect in {"key", "key_or_end"}
        return out if first else out + ","


def shown_input(arguments: str) -> Any:
    """A whole call's arguments as the `input` of its block; can be encoded as JSON."""
    stream = ArgumentStream()
    stream.feed(arguments)
    shown = stream.finish()
    if stream.complete and shown == "}":
        return msgspec.Raw(arguments.strip(_BLANK).encode())
    return {UNPARSED: arguments} if arguments.strip() else {}


def said_arguments(shown: Any) -> str:
    """The arguments that a block's `input` stands for."""
    if shown is None:
        return "{}"
    if isinstance(shown, dict) and isinstance(shown.get(UNPARSED), str):
        return str(shown[UNPARSED])
    return as_json(shown)


def as_json(value: Any, *, sort_keys: bool = False) -> str:
    """JSON in one line; numbers that are not finite become null."""
    try:
        return json.dumps(value, ensure_ascii=False, allow_nan=False, sort_keys=sort_keys)
    except ValueError:
        finite = json.loads(json.dumps(value), parse_constant=lambda _: None)
        return json.dumps(finite, ensure_ascii=False, sort_keys=sort_keys)
