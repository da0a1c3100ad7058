"""The events that nearly all of a chat stream consists of, several of them read as one.

A read from a busy stream holds many events that each add a token to the same choice. They are decoded into exactly the
fields that such an event has, and what they add is put together before anybody makes objects of it. An event with
anything else in it ends the run and is read by itself; what both ways accept, they read alike.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal

import msgspec

from polarq_proxy.call import ChoiceDelta, Piece
from polarq_proxy.engines.vllm_answers import ChatLogprobs, TokenId, joined_raw_entries
from polarq_proxy.sse import SseEvent


class _Function(msgspec.Struct, forbid_unknown_fields=True):
    arguments: str


class _CallPart(msgspec.Struct, forbid_unknown_fields=True):
    """More of a call's arguments. A call's begin has a name."""

    index: int
    function: _Function


class _Delta(msgspec.Struct, forbid_unknown_fields=True):
    content: str | None = None
    reasoning: str | None = None
    reasoning_content: str | None = None
    tool_calls: tuple[_CallPart] | None = None


class _Choice(msgspec.Struct):
    index: int
    delta: _Delta
    token_ids: list[TokenId] | None = None
    logprobs: ChatLogprobs | None = None
    finish_reason: None = None
    stop_reason: None = None
    weight_versions: None = None


class _Event(msgspec.Struct):
    choices: tuple[_Choice]
    object: Literal["chat.completion.chunk", ""] = ""
    model: str = ""
    prompt_token_ids: None = None
    usage: None = None
    error: None = None


_decode = msgspec.json.Decoder(_Event).decode
_NOTHING = ""
"""The kind of an event that says nothing: parsers hold text back while its tokens already go by."""


def read_run(events: Sequence[SseEvent], read_one: Callable[[SseEvent], Piece]) -> Iterator[Piece]:
    """What `events` add, in as few pieces as can say it. Raises what `read_one` raises, in its place."""
    run: _Run | None = None
    for event in events:
        found = None if event.event else _usual(event.data)
        if found is None:
            if run is not None:
                yield from run.pieces(read_one)
                run = None
            yield read_one(event)
            continue
        choice = found.choices[0]
        delta = choice.delta
        kind: str | int
        if delta.content is not None:
            kind, said = "content", delta.content
        elif delta.reasoning_content is not None:
            kind, said = "reasoning_content", delta.reasoning_content
        elif delta.reasoning is not None:
            kind, said = "reasoning_content", delta.reasoning
        elif delta.tool_calls is not None:
            kind, said = delta.tool_calls[0].index, delta.tool_calls[0].function.arguments
        else:
            kind, said = _NOTHING, ""
        if run is None or run.index != choice.index or run.model != found.model or not run.takes(kind):
            if run is not None:
                yield from run.pieces(read_one)
            run = _Run(choice.index, found.model, kind)
        run.events.append(event)
        run.said.append(said)
        if choice.token_ids is not None:
            run.ids = choice.token_ids if run.ids is None else run.ids + choice.token_ids
        if choice.logprobs is not None:
            run.logprobs.append(choice.logprobs)
    if run is not None:
        yield from run.pieces(read_one)


class _Run:
    """Events that add the same kind of thing to the same choice."""

    __slots__ = ("events", "ids", "index", "kind", "logprobs", "model", "said")

    def __init__(self, index: int, model: str, kind: str | int) -> None:
        self.index = index
        self.model = model
        self.kind = kind
        """The message's key; a number for the arguments of that call."""
        self.said: list[str] = []
        self.ids: list[Any] | None = None
        self.logprobs: list[ChatLogprobs] = []
        self.events: list[SseEvent] = []

    def takes(self, kind: str | int) -> bool:
        if self.kind == _NOTHING:
            self.kind = kind
        return kind in (self.kind, _NOTHING)

    def pieces(self, read_one: Callable[[SseEvent], Piece]) -> Iterator[Piece]:
        """One piece; one for each event where the log-probabilities need a closer look."""
        entries = joined_raw_entries(self.logprobs)
        if entries is msgspec.UNSET:
            yield from map(read_one, self.events)
            return
        said = "".join(self.said)
        delta: dict[str, Any] = {}
        if isinstance(self.kind, int):
            delta["tool_calls"] = [{"index": self.kind, "function": {"arguments": said}}]
        elif self.kind != _NOTHING:
            delta[self.kind] = said
        yield Piece([ChoiceDelta(self.index, delta, self.ids, entries)], model=self.model or None)


def _usual(data: bytes) -> _Event | None:
    try:
        found = _decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None
    delta = found.choices[0].delta
    if delta.content is not None and (delta.reasoning is not None or delta.reasoning_content is not None):
        return None
    if delta.tool_calls is not None and not (delta.content is delta.reasoning is delta.reasoning_content is None):
        return None
    return found
