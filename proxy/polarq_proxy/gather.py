"""Puts an answer together from the pieces of a stream, so that it equals what the engine would have said at once."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from polarq_proxy.call import Answer, Choice, ChoiceDelta, Piece
from polarq_proxy.tokens import joined_entries

_TEXTS = frozenset({"content", "reasoning_content", "refusal"})


class Gatherer:
    """`answer()` is whole at any time: what came so far. Ids are concatenated over all events, empty deltas included,
    because parsers hold text back while its tokens already went by."""

    def __init__(self, choices: int) -> None:
        self._choices = {index: _Growing(index) for index in range(choices)}
        self._answer = Answer()
        self.done = False

    def add(self, piece: Piece) -> None:
        answer = self._answer
        if piece.prompt_ids is not None and answer.prompt_ids is None:
            answer.prompt_ids = piece.prompt_ids
        if piece.usage is not None:
            answer.usage = piece.usage
        if piece.model:
            answer.model = piece.model
        self.done = self.done or piece.done
        for change in piece.choices:
            growing = self._choices.get(change.index)
            if growing is None:
                growing = self._choices[change.index] = _Growing(change.index)
            growing.add(change)

    @property
    def began(self) -> bool:
        """Something was sampled."""
        return any(growing.said or growing.choice.ids for growing in self._choices.values())

    @property
    def finished(self) -> bool:
        return all(growing.choice.finish_reason for growing in self._choices.values())

    def answer(self) -> Answer:
        self._answer.choices = [self._choices[index].whole() for index in sorted(self._choices)]
        return self._answer


class _Growing:
    """One choice while it comes in."""

    def __init__(self, index: int) -> None:
        self.choice = Choice(index)
        self.said = False
        self._logprobs: list[Sequence[Any]] = []
        self._texts: dict[str, list[str]] = {}
        self._calls: dict[int, _GrowingCall] = {}
        self._other: dict[str, Any] = {}

    def add(self, change: ChoiceDelta) -> None:
        choice = self.choice
        if change.ids is not None:
            choice.ids = list(change.ids) if choice.ids is None else _extended(choice.ids, change.ids)
        if change.logprobs is not None:
            self._logprobs.append(change.logprobs)
        if change.finish_reason is not None:
            choice.finish_reason = change.finish_reason
        if change.stop_reason is not None:
            choice.stop_reason = change.stop_reason
        if change.weight_versions is not None:
            choice.weight_versions = change.weight_versions
        for key, value in change.delta.items():
            self._say(key, value)

    def _say(self, key: str, value: Any) -> None:
        if key == "tool_calls" and isinstance(value, list):
            for place, part in enumerate(value):
                if isinstance(part, dict):
                    index = part.get("index")
                    self._calls.setdefault(index if isinstance(index, int) else place, _GrowingCall()).add(part)
                    self.said = True
        elif key in _TEXTS and isinstance(value, str):
            self._texts.setdefault(key, []).append(value)
            self.said = self.said or bool(value)
        elif value is not None and key != "role":
            self._other[key] = value

    def whole(self) -> Choice:
        texts = {key: "".join(parts) for key, parts in self._texts.items()}
        message: dict[str, Any] = {"role": "assistant", "content": texts.pop("content", "")}
        message.update({key: text for key, text in texts.items() if text})
        if self._calls:
            message["tool_calls"] = [self._calls[index].whole() for index in sorted(self._calls)]
        if not message["content"] and len(message) > 2:
            message["content"] = None  # as in an answer that comes whole, where thinking or a call is all there is
        message.update(self._other)
        self.choice.message = message
        if self._logprobs:
            self._logprobs = [joined_entries(self._logprobs)]
            self.choice.logprobs = self._logprobs[0]
        return self.choice


class _GrowingCall:
    """One tool call while it comes in."""

    def __init__(self) -> None:
        self._id = ""
        self._type = "function"
        self._name: list[str] = []
        self._arguments: list[str] = []

    def add(self, part: dict[str, Any]) -> None:
        self._id = part.get("id") or self._id
        self._type = part.get("type") or self._type
        function = part.get("function")
        if isinstance(function, dict):
            self._name.append(function.get("name") or "")
            self._arguments.append(function.get("arguments") or "")

    def whole(self) -> dict[str, Any]:
        function = {"name": "".join(self._name), "arguments": "".join(self._arguments)}
        return {"id": self._id, "type": self._type, "function": function}


def _extended(first: list[Any], more: list[Any]) -> list[Any]:
    first.extend(more)
    return first


def pieces_of(answer: Answer) -> list[Piece]:
    """A whole answer as the stream of one piece that it could have been."""
    changes = []
    for choice in answer.choices:
        delta = dict(choice.message)
        calls = delta.get("tool_calls")
        if isinstance(calls, list):
            delta["tool_calls"] = [{"index": index, **call} for index, call in enumerate(calls)]
        changes.append(
            ChoiceDelta(choice.index, delta, choice.ids, choice.logprobs, choice.finish_reason, choice.stop_reason)
        )
    return [Piece(changes, answer.prompt_ids, answer.usage, answer.model, done=True)]
