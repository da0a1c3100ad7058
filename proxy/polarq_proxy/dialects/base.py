"""What a dialect must say: its routes, how to read a request, and how to write answers, streams and errors.

A dialect does no I/O and knows nothing of engines. The server asks every installed dialect for its routes and has no
branch on any name.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import ClassVar

from polarq_proxy.call import Answer, ModelCall, Piece
from polarq_proxy.faults import CallFault


class Operation(StrEnum):
    """What a route is for."""

    GENERATE = "generate"
    COUNT_TOKENS = "count_tokens"
    """How long a prompt would be; `parse` reads its body too."""
    LIST_MODELS = "list_models"
    SHOW_MODEL = "show_model"


@dataclass(frozen=True, slots=True)
class Route:
    """`pattern` is matched against the whole path below the session and the API version: `chat/completions`."""

    method: str
    pattern: str
    operation: Operation

    def match(self, method: str, path: str) -> re.Match[str] | None:
        return re.fullmatch(self.pattern, path) if method == self.method else None


@dataclass(frozen=True, slots=True)
class NativeRequest:
    """A request as it came, its body decompressed."""

    path: str
    """Below the session and the API version."""
    query: Mapping[str, str]
    headers: Mapping[str, str]
    """Names are found however they are spelt."""
    body: bytes
    version: str = ""
    """The API version in the path, if there was one: `v1`, `v1beta`."""


@dataclass(frozen=True, slots=True)
class Reply:
    """A whole HTTP answer."""

    body: bytes
    status: int = 200
    headers: Mapping[str, str] | None = None


@dataclass(frozen=True, slots=True)
class ReplyHead:
    """What an answer carries beside what was sampled."""

    completion_id: str
    created: int
    """Seconds since the epoch."""


@dataclass(frozen=True, slots=True)
class ServedModel:
    """A model that the node offers."""

    name: str
    max_context: int | None = None


class StreamWriter(ABC):
    """Writes one streamed answer. Every method returns whole events, ready to be sent."""

    content_type: ClassVar[str] = "text/event-stream; charset=utf-8"

    @abstractmethod
    def piece(self, piece: Piece) -> bytes:
        """What the harness sees of a piece; may be nothing. Called for every piece before the end."""

    @abstractmethod
    def end(self, held: Sequence[Piece], answer: Answer) -> bytes:
        """The end: `held` are the pieces from the first finish reason on, not shown yet."""

    @abstractmethod
    def fail(self, fault: CallFault) -> bytes:
        """The dialect's way to say, after status 200, that no end will come."""

    def wait(self) -> bytes:
        """Keeps a connection alive while the model thinks: a comment, which readers skip."""
        return b": waiting\n\n"


class Dialect(ABC):
    """One language that harnesses speak."""

    name: ClassVar[str]
    routes: ClassVar[Sequence[Route]]
    fallback: ClassVar[bool] = False
    """Answers what no dialect claims. One installed dialect has this."""

    def claims(self, request: NativeRequest) -> bool:
        """Whether a request on no known route looks like this dialect, so that its error is read as one."""
        return False

    @abstractmethod
    def parse(self, request: NativeRequest, match: re.Match[str]) -> ModelCall:
        """Reads a generation request; `match` is its route's. Raises `CallFault` for what can never be answered.

        Unknown fields are passed on, never refused: harnesses answer a refusal by switching features off.
        """

    @abstractmethod
    def render(self, call: ModelCall, answer: Answer, head: ReplyHead) -> Reply:
        """A whole answer."""

    @abstractmethod
    def writer(self, call: ModelCall, head: ReplyHead) -> StreamWriter:
        """For a streamed answer."""

    @abstractmethod
    def fault(self, fault: CallFault) -> Reply:
        """An error, before anything was sent."""

    def counted(self, call: ModelCall, tokens: int) -> Reply:
        """The answer to a `COUNT_TOKENS` route."""
        raise NotImplementedError(f"{self.name} has no route that counts tokens")

    @abstractmethod
    def models(self, models: Sequence[ServedModel]) -> Reply:
        """The list of models."""

    @abstractmethod
    def model(self, model: ServedModel) -> Reply:
        """One model."""


def retry_headers(fault: CallFault) -> dict[str, str]:
    """Retry-After, in whole seconds, where trying again may help."""
    return {} if fault.retry_after_s is None else {"Retry-After": str(max(1, round(fault.retry_after_s)))}
