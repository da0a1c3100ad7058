"""Streams of the Messages dialect.

Blocks are shown in the order in which they begin, and one at a time is open. What the engine says of a later block
while the open one is not at its end waits, so that parallel calls that come in turns are shown one after the other.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from polarq_proxy.call import Answer, Choice, ModelCall, Piece
from polarq_proxy.dialects.base import ReplyHead, StreamWriter
from polarq_proxy.dialects.messages_arguments import ArgumentStream
from polarq_proxy.dialects.messages_output import (
    arguments_of,
    counts,
    error_of,
    opening,
    request_id,
    signature,
    stopped,
    str_of,
    usage_of,
)
from polarq_proxy.faults import CallFault
from polarq_proxy.jsons import encode


class MessagesStream(StreamWriter):
    """`message_start` goes first, whatever comes first: Claude Code drops a stream that begins with anything else, even
    with a ping, and asks again without streaming."""

    def __init__(self, call: ModelCall, head: ReplyHead) -> None:
        self._call = call
        self._head = head
        self._started = False
        self._index = 0
        """Of the open block, else of the next."""
        self._blocks: list[_Block] = []
        """The open one first, then those that wait for it."""
        self._calls: dict[int, _ToolBlock] = {}

    def piece(self, piece: Piece) -> bytes:
        out = self._start(piece.model or "", len(piece.prompt_ids or ()))
        for change in piece.choices:
            if change.index == 0:
                out += self._said(change.delta)
        return out

    def end(self, held: Sequence[Piece], answer: Answer) -> bytes:
        choice = answer.choices[0] if answer.choices else Choice(0)
        out = b"".join(self.piece(piece) for piece in held) or self._start(answer.model, len(answer.prompt_ids or ()))
        while self._blocks:
            out += self._close(cut_off=choice.finish_reason == "length")
        out += _event("message_delta", delta=stopped(self._call, choice), usage=usage_of(answer))
        return out + _event("message_stop")

    def fail(self, fault: CallFault) -> bytes:
        return b"event: error\ndata: " + encode(error_of(fault, request_id(self._head))) + b"\n\n"

    def wait(self) -> bytes:
        return self._start("", 0) + _event("ping")

    def _start(self, model: str, prompt_tokens: int) -> bytes:
        """Usage says what is known so far; the counts that hold come with `message_delta`."""
        if self._started:
            return b""
        self._started = True
        usage = counts(prompt_tokens, 0, 0)
        begun = opening(self._call, self._head, model)
        message = {**begun, "content": [], "stop_reason": None, "stop_sequence": None, "usage": usage}
        return _event("message_start", message=message)

    def _said(self, delta: dict[str, Any]) -> bytes:
        out = b""
        for key, kind in (("reasoning_content", _ThinkingBlock), ("content", _TextBlock)):
            text = delta.get(key)
            if isinstance(text, str) and text:
                if not self._blocks or not isinstance(self._blocks[-1], kind):
                    self._blocks.append(kind())
                self._blocks[-1].add(text)
                out += self._flow()
        calls = delta.get("tool_calls")
        for place, part in enumerate(calls if isinstance(calls, list) else ()):
            if isinstance(part, dict):
                self._tool(part, place)
                out += self._flow()
        return out

    def _tool(self, part: dict[str, Any], place: int) -> None:
        index = part.get("index")
        index = index if isinstance(index, int) else place
        block = self._calls.get(index)
        if block is None:
            block = self._calls[index] = _ToolBlock(f"toolu_{self._head.completion_id}_{index}")
            self._blocks.append(block)
        function = part.get("function")
        block.named(part.get("id"), function if isinstance(function, dict) else {})

    def _flow(self) -> bytes:
        """Shows what is new of the open block; when others wait and it is at its end, closes it."""
        out = b""
        while self._blocks:
            block = self._blocks[0]
            if len(self._blocks) == 1 or not block.at_end:
                return out + self._shown(block, block.take())
            out += self._close()
        return out

    def _close(self, *, cut_off: bool = False) -> bytes:
        block = self._blocks.pop(0)
        out = self._shown(block, block.take() + block.rest(cut_off=cut_off), always=True)
        if isinstance(block, _ThinkingBlock):
            delta = {"type": "signature_delta", "signature": signature(block.text)}
            out += _event("content_block_delta", index=self._index, delta=delta)
        out += _event("content_block_stop", index=self._index)
        self._index += 1
        return out

    def _shown(self, block: _Block, text: str, *, always: bool = False) -> bytes:
        out = b""
        if not block.opened and (text or always):
            block.opened = True
            out = _event("content_block_start", index=self._index, content_block=block.opening())
        if text:
            delta = {"type": block.delta_type, block.delta_key: text}
            out += _event("content_block_delta", index=self._index, delta=delta)
        return out


class _Block:
    """A content block while it comes; `take` gives what is new of it and may be shown."""

    delta_type = "text_delta"
    delta_key = "text"

    def __init__(self) -> None:
        self.opened = False
        self._new = ""

    @property
    def at_end(self) -> bool:
        """Whether nothing more belongs to it once another block has begun."""
        return True

    def opening(self) -> dict[str, Any]:
        return {"type": "text", "text": ""}

    def add(self, text: str) -> None:
        self._new += text

    def take(self) -> str:
        new, self._new = self._new, ""
        return new

    def rest(self, *, cut_off: bool) -> str:
        """What was held back until its end."""
        return ""


class _TextBlock(_Block):
    pass


class _ThinkingBlock(_Block):
    delta_type = "thinking_delta"
    delta_key = "thinking"

    def __init__(self) -> None:
        super().__init__()
        self.text = ""

    def opening(self) -> dict[str, Any]:
        return {"type": "thinking", "thinking": "", "signature": ""}

    def add(self, text: str) -> None:
        super().add(text)
        self.text += text


class _ToolBlock(_Block):
    """Opened when its arguments begin, by which time its name is whole."""

    delta_type = "input_json_delta"
    delta_key = "partial_json"

    def __init__(self, call_id: str) -> None:
        super().__init__()
        self._id = call_id
        self._name = ""
        self._arguments = ArgumentStream()

    @property
    def at_end(self) -> bool:
        return self._arguments.complete

    def opening(self) -> dict[str, Any]:
        return {"type": "tool_use", "id": self._id, "name": self._name, "input": {}}

    def named(self, call_id: Any, function: dict[str, Any]) -> None:
        self._id = call_id if isinstance(call_id, str) and call_id else self._id
        self._name += str_of(function.get("name"))
        self.add(arguments_of(function))

    def add(self, text: str) -> None:
        super().add(self._arguments.feed(text) if text else "")

    def rest(self, *, cut_off: bool) -> str:
        return self._arguments.finish(cut_off=cut_off)


def _event(name: str, **fields: Any) -> bytes:
    return b"event: " + name.encode() + b"\ndata: " + encode({"type": name, **fields}) + b"\n\n"
