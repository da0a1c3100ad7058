"""The inner form of a model call, between dialect and engine: chat messages in, samples out.

Messages are chat-completions messages (roles system, user, assistant, tool; `reasoning_content` for thinking). Every
dialect parses into this and renders from it; every engine sends this and parses into it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from polarq.contracts.completion import Usage, VersionSpan


@dataclass(slots=True)
class ModelCall:
    """What a harness asks of the model."""

    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]] | None
    options: dict[str, Any]
    """Everything else that goes to the engine, in chat-completions names: sampling, stops, tool choice, formats."""
    model: str
    """The name the harness asked for; its answer carries it back."""
    stream: bool = False
    choices: int = 1
    """How many answers to one prompt (`n`)."""
    wants_usage: bool = True
    """Whether a streamed answer ends with its token counts."""
    wants_ids: bool = False
    """Whether the harness itself asked for token ids."""
    wants_logprobs: bool = False
    prompt: str | list[int] | None = None
    """A bare prompt instead of messages (legacy completions); `messages` then only says it for the record."""
    native: Any = None
    """What the dialect needs again from the request to write the answer; nobody else reads it."""


@dataclass(slots=True)
class ChoiceDelta:
    """What one event of a stream adds to one choice."""

    index: int
    delta: dict[str, Any] = field(default_factory=dict)
    """Part of the assistant message, as chat streams write it."""
    ids: list[Any] | None = None
    logprobs: Sequence[Any] | None = None
    """Entries as the engine gave them, one per id: {token, logprob, bytes, top_logprobs}."""
    finish_reason: str | None = None
    stop_reason: str | int | None = None
    weight_versions: list[VersionSpan] | None = None


@dataclass(slots=True)
class Piece:
    """One event of an engine's stream. `done` is the engine's own end mark."""

    choices: list[ChoiceDelta] = field(default_factory=list)
    prompt_ids: Sequence[Any] | None = None
    usage: Usage | None = None
    model: str | None = None
    done: bool = False


@dataclass(slots=True)
class Choice:
    """One sampled answer, whole or as far as it came."""

    index: int
    message: dict[str, Any] = field(default_factory=dict)
    ids: list[Any] | None = None
    """As given; None when the engine gave none. Checked by the recorder."""
    logprobs: Sequence[Any] | None = None
    finish_reason: str | None = None
    stop_reason: str | int | None = None
    weight_versions: list[VersionSpan] | None = None


@dataclass(slots=True)
class Answer:
    """What an engine sampled for one call."""

    choices: list[Choice] = field(default_factory=list)
    prompt_ids: Sequence[Any] | None = None
    usage: Usage | None = None
    model: str = ""

    @property
    def sampled_tokens(self) -> int:
        return sum(len(choice.ids or ()) for choice in self.choices)

    @property
    def finished(self) -> bool:
        """Every choice came to an end of its own."""
        return bool(self.choices) and all(choice.finish_reason for choice in self.choices)

    @property
    def aborted(self) -> bool:
        """The engine gave up a choice in the middle: not an answer to show to a harness."""
        return any(choice.finish_reason == ABORT for choice in self.choices)


ABORT = "abort"
