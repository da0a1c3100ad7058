"""A streamed answer of the Responses API.

One item after the other: clients of several vendors keep one current item and lose what belongs to another. Harnesses
act on `response.output_item.done` of a call at once, before the response is completed. So the first call is shown
while it comes, but neither its end nor anything after it before `end`, when the answer is recorded.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from polarq_proxy.call import Answer, ModelCall, Piece
from polarq_proxy.dialects.base import ReplyHead, StreamWriter
from polarq_proxy.dialects.responses_errors import failure_of
from polarq_proxy.dialects.responses_output import (
    COMPLETED,
    IN_PROGRESS,
    Asked,
    ItemKind,
    ItemList,
    OutputItem,
    ended_response,
    first_choice,
    response_of,
    text_logprobs,
    text_or_blank,
)
from polarq_proxy.faults import CallFault
from polarq_proxy.jsons import encode

_TEXTS = (("reasoning_content", ItemKind.THINKING), ("content", ItemKind.MESSAGE))


class ResponsesStream(StreamWriter):
    def __init__(self, call: ModelCall, head: ReplyHead) -> None:
        asked: Asked = call.native
        self._call = call
        self._head = head
        self._found = ItemList(asked, head.completion_id)
        self._calls: dict[int, OutputItem] = {}
        self._open: OutputItem | None = None
        self._first_call: OutputItem | None = None
        self._done: dict[int, dict[str, Any]] = {}
        """Items that were sent whole, by place."""
        self._tools = msgspec.Raw(encode(asked.echo.get("tools")))
        self._sequence = 0
        self._over = False
        self._model = call.model

    def piece(self, piece: Piece) -> bytes:
        self._model = self._model or piece.model or ""
        out = [self._begun()]
        for change in piece.choices:
            if change.index:
                continue
            for key, kind in _TEXTS:
                text = change.delta.get(key)
                if isinstance(text, str) and text:
                    out.append(self._said(kind, text))
            calls = change.delta.get("tool_calls")
            for place, part in enumerate(calls if isinstance(calls, list) else ()):
                if isinstance(part, dict):
                    out.append(self._called(part, place))
        return b"".join(out)

    def end(self, held: Sequence[Piece], answer: Answer) -> bytes:
        out = [self._begun(), *(self.piece(piece) for piece in held)]
        choice, found = first_choice(answer), self._found
        found.complete(choice.finish_reason)
        logprobs = text_logprobs(self._call, found.items, choice)
        for item in found.items:
            if item.place not in self._done:
                if item is not self._open:
                    out.append(self._opened(item))
                    out.append(self._grown(item, item.text))
                out.append(self._closed(item, found.status(item, choice.finish_reason), logprobs))
        output = [self._done[item.place] for item in found.items]
        response = ended_response(self._call, self._head, answer, output, tools=self._tools)
        self._over = True
        return b"".join([*out, self._event(f"response.{response['status']}", response=response)])

    def fail(self, fault: CallFault) -> bytes:
        out = self._begun()
        self._over = True
        done = [self._done[place] for place in sorted(self._done)]
        return out + self._event("response.failed", response=self._response("failed", done, error=failure_of(fault)))

    def wait(self) -> bytes:
        """A real event, because Codex's idle clock does not hear comments; all clients skip this one."""
        if self._over:
            return super().wait()
        return self._begun() or self._event("response.in_progress", response=self._response(IN_PROGRESS, []))

    def _begun(self) -> bytes:
        if self._sequence:
            return b""
        response = self._response(IN_PROGRESS, [])
        return self._event("response.created", response=response) + self._event(
            "response.in_progress", response=response
        )

    def _said(self, kind: ItemKind, text: str) -> bytes:
        if self._open is not None and self._open.kind is kind:
            self._open.add(text)
            return self._grown(self._open, text)
        if self._first_call is not None:
            last = self._found.items[-1]
            (last if last.kind is kind else self._found.new(kind)).add(text)
            return b""
        item = self._found.new(kind)
        out = self._closed_before(item) + self._opened(item)
        item.add(text)
        return out + self._grown(item, text)

    def _called(self, part: dict[str, Any], place: int) -> bytes:
        index = part.get("index")
        index = index if isinstance(index, int) else place
        item = self._calls.get(index)
        if item is None:
            item = self._calls[index] = self._found.new(ItemKind.CALL)
            self._first_call = self._first_call or item
        function = part.get("function")
        function = function if isinstance(function, dict) else {}
        arguments = text_or_blank(function.get("arguments"))
        item.call_id = text_or_blank(part.get("id")) or item.call_id
        if item is not self._open:
            item.name += text_or_blank(function.get("name"))
        item.add(arguments)
        if not arguments or item is not self._first_call or not item.shown_as_it_comes:
            return b""
        if item is self._open:
            return self._grown(item, arguments)
        # Its name is whole once the first of its arguments comes.
        return self._closed_before(item) + self._opened(item) + self._grown(item, item.text)

    def _closed_before(self, item: OutputItem) -> bytes:
        return b"" if self._open is None or self._open is item else self._closed(self._open, COMPLETED, [])

    def _opened(self, item: OutputItem) -> bytes:
        if item.kind is ItemKind.CALL:
            self._found.name_call(item)
        self._open = item
        out = self._event("response.output_item.added", output_index=item.place, item=item.opened())
        if item.kind is ItemKind.CALL:
            return out
        return out + self._event("response.content_part.added", **self._at(item), part={**item.part(), "text": ""})

    def _grown(self, item: OutputItem, text: str) -> bytes:
        """What came to an item, in the form that its kind has; for a call other than of a function, at its end."""
        if not text or (item.kind is ItemKind.CALL and not item.shown_as_it_comes):
            return b""
        if item.kind is ItemKind.CALL:
            return self._event("response.function_call_arguments.delta", **self._of(item), delta=text)
        if item.kind is ItemKind.THINKING:
            return self._event("response.reasoning_text.delta", **self._at(item), delta=text)
        return self._event("response.output_text.delta", **self._at(item), delta=text, logprobs=[])

    def _closed(self, item: OutputItem, status: str, logprobs: list[Any]) -> bytes:
        shown = item.closed(status, logprobs)
        self._done[item.place] = shown
        self._open = None
        if item.kind is ItemKind.THINKING:
            out = self._event("response.reasoning_text.done", **self._at(item), text=item.text)
        elif item.kind is ItemKind.MESSAGE:
            out = self._event("response.output_text.done", **self._at(item), text=item.text, logprobs=logprobs)
        else:
            out = self._closed_call(item, shown)
        if item.kind is not ItemKind.CALL:
            out += self._event("response.content_part.done", **self._at(item), part=item.part(logprobs))
        return out + self._event("response.output_item.done", output_index=item.place, item=shown)

    def _closed_call(self, item: OutputItem, shown: dict[str, Any]) -> bytes:
        if shown["type"] == "custom_tool_call":
            whole = shown["input"]
            out = self._event("response.custom_tool_call_input.delta", **self._of(item), delta=whole) if whole else b""
            return out + self._event("response.custom_tool_call_input.done", **self._of(item), input=whole)
        if shown["type"] != "function_call":
            return b""
        out = b""
        if not item.shown_as_it_comes and item.text:
            out = self._event("response.function_call_arguments.delta", **self._of(item), delta=item.text)
        fields = {"name": shown["name"], "arguments": item.text}
        return out + self._event("response.function_call_arguments.done", **self._of(item), **fields)

    def _of(self, item: OutputItem) -> dict[str, Any]:
        return {"item_id": item.native_id, "output_index": item.place}

    def _at(self, item: OutputItem) -> dict[str, Any]:
        return {**self._of(item), "content_index": 0}

    def _response(self, status: str, output: list[dict[str, Any]], **fields: Any) -> dict[str, Any]:
        return response_of(self._call, self._head, self._model, status, output, tools=self._tools, **fields)

    def _event(self, kind: str, **fields: Any) -> bytes:
        data = encode({"type": kind, "sequence_number": self._sequence, **fields})
        self._sequence += 1
        return b"event: " + kind.encode() + b"\ndata: " + data + b"\n\n"
