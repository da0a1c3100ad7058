"""Token ids and log-probabilities of an answer, kept as the JSON that the engine wrote until somebody needs values.

A long prompt has 32,000 ids and is mostly known already; the harness mostly wants none of them. So they are never made
into Python numbers on the way through: the store compares and cuts them as text, and who echoes them writes the text.
Both classes are sequences like the lists that they stand for, and cost what a list costs as soon as they are used so.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Sequence
from typing import Any, overload

from polarq.store.prefixes import Prompt
from polarq.store.token_text import NotIds, ids_of, text_of
from polarq_proxy.jsons import InJson, NotJson, decode, encode


class _Kept(Sequence[Any], InJson):
    """A list that is still JSON."""

    __slots__ = ("_values",)

    def __init__(self) -> None:
        self._values: list[Any] | None = None

    @property
    @abstractmethod
    def json(self) -> bytes:
        """As the engine wrote it."""

    @property
    def values(self) -> list[Any]:
        if self._values is None:
            try:
                values = decode(self.json)
            except NotJson:
                values = []
            self._values = values if isinstance(values, list) else []
        return self._values

    def as_json(self) -> bytes | memoryview:
        return encode(self.values)

    def __len__(self) -> int:
        return len(self.values)

    def __iter__(self) -> Iterator[Any]:
        return iter(self.values)

    @overload
    def __getitem__(self, index: int) -> Any: ...
    @overload
    def __getitem__(self, index: slice) -> list[Any]: ...
    def __getitem__(self, index: int | slice) -> Any:
        return self.values[index]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, (_Kept, list)) and self.values == list(other)

    __hash__ = None  # type: ignore[assignment]  # as a list has none

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.json[:60]!r})"


class PromptIds(_Kept):
    """The prompt's ids in `data[begin:end]`, brackets included. They may have been found there without having been
    parsed: what they are is only known once the store has read them."""

    __slots__ = ("_begin", "_data", "_end", "_proven")

    def __init__(self, data: bytes, begin: int, end: int) -> None:
        super().__init__()
        self._data, self._begin, self._end = data, begin, end
        self._proven = False

    @property
    def json(self) -> bytes:
        return self._data[self._begin : self._end]

    @property
    def text(self) -> tuple[bytes, int, int]:
        """(data, begin, end) of what is between the brackets."""
        return self._data, self._begin + 1, self._end - 1

    def prove(self, prompt: Prompt) -> None:
        """They are the ids of `prompt`."""
        if not prompt.canonical:
            self._data = b"[" + prompt.line.text + b"]"
            self._begin, self._end = 0, len(self._data)
        self._proven = True

    def as_json(self) -> bytes | memoryview:
        if not self._proven:
            data, begin, end = self.text
            try:
                ids_of(data[begin:end])
            except NotIds:
                return super().as_json()
            self._proven = True
        return memoryview(self._data)[self._begin : self._end]

    def __bool__(self) -> bool:
        return self._end - self._begin > 2


class LogprobEntries(_Kept):
    """One entry per sampled id: {token, logprob, bytes, top_logprobs}; `numbers` are the log-probabilities, finite."""

    __slots__ = ("_json", "numbers")

    def __init__(self, json: bytes, numbers: list[float]) -> None:
        super().__init__()
        self._json = json
        self.numbers = numbers

    @property
    def json(self) -> bytes:
        return self._json

    def __len__(self) -> int:
        return len(self.numbers)

    def as_json(self) -> bytes | memoryview:
        if not self._json.isascii():
            try:
                self._json.decode()  # the parser that only skipped it did not look
            except UnicodeDecodeError:
                return super().as_json()
        return self._json


def joined_entries(runs: Sequence[Sequence[Any]]) -> Sequence[Any]:
    """One after the other, as the events of a stream bring them."""
    if len(runs) == 1:
        return runs[0]
    kept = [run for run in runs if isinstance(run, LogprobEntries)]
    if len(kept) < len(runs):
        return [entry for run in runs for entry in run]
    json = b",".join([run.json[1:-1] for run in kept if run.numbers])
    return LogprobEntries(b"[%b]" % json, [number for run in kept for number in run.numbers])


def prompt_text(ids: Sequence[Any]) -> tuple[bytes, int, int]:
    """A prompt's ids, whatever they are, as JSON without its brackets: (data, begin, end)."""
    if isinstance(ids, PromptIds):
        return ids.text
    try:
        text = text_of(ids)
    except (TypeError, ValueError, OverflowError):
        text = b"?"
    return text, 0, len(text)
