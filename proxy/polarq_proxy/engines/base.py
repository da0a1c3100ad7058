"""What an engine room must say: how to ask for token ids, and how to read what comes back. No I/O happens here."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

from polarq_proxy.call import Answer, Choice, ModelCall, Piece
from polarq_proxy.faults import CallFault
from polarq_proxy.sse import SseEvent


@dataclass(frozen=True, slots=True)
class EngineRequest:
    """An HTTP POST to the engine. `body` is JSON-able."""

    path: str
    body: dict[str, Any]


@dataclass(frozen=True, slots=True)
class EngineFacts:
    """What an engine says about itself. Blank or None: it did not say."""

    version: str = ""
    models: dict[str, int | None] = field(default_factory=dict)
    """Model names it serves, each with its context length in tokens."""


@dataclass(frozen=True, slots=True)
class Features:
    """What an engine of this kind and version can do."""

    streams_ids: bool = True
    """A streamed answer gives its token ids too."""
    token_in: bool = True
    """Prompts may be sent as token ids."""
    rendering: bool = True
    """It renders a prompt to ids without sampling."""
    versions_in_answer: bool = True
    """Answers say themselves which policy version sampled them."""


class TokensIn(ABC):
    """An engine's routes for ids: sampling goes on from given ids, and ids become a message. No I/O happens here."""

    routes: ClassVar[Sequence[str]]
    """POST: all of them are needed. A server that has one refuses an empty body; one that has not, the path."""

    @abstractmethod
    def settings(self, body: Mapping[str, Any]) -> EngineRequest:
        """Asks how the engine itself would sample a chat request's `body`."""

    @abstractmethod
    def going_on(
        self, settings: bytes, prompt_ids: Sequence[int], sampled_ids: Sequence[int], limit: int | None
    ) -> EngineRequest | None:
        """Samples what follows `sampled_ids`, `limit` ids in all, as a stream. `settings` is the answer to that
        question. None: this call cannot be gone on with as if it had never been cut. Raises `CallFault`."""

    @abstractmethod
    def read_event(self, event: SseEvent) -> Piece:
        """One event of that stream; its ids are new ones. Raises `CallFault`."""

    @abstractmethod
    def message(self, body: Mapping[str, Any], answer: Answer) -> EngineRequest:
        """Makes the message of an answer's ids, as the chat request's `body` wants it."""

    @abstractmethod
    def read_message(self, data: bytes) -> Choice:
        """Message and finish reason. Raises `CallFault`."""


class Engine(ABC):
    """One kind of inference server. Instances hold only what they are fitted to, and are shared by all calls."""

    name: ClassVar[str]

    def configured(self, facts: EngineFacts) -> Engine:
        """This engine, fitted to a server that said `facts`."""
        return self

    def features(self) -> Features:
        return Features()

    def tokens_in(self) -> TokensIn | None:
        """Its routes for ids, where its kind has any; whether a server opens them, only asking it tells."""
        return None

    def logprobs_mode(self, body: Mapping[str, Any]) -> str:
        """What the log-probabilities of a request's answer mean; "unknown" where only the server's own start knows."""
        return "unknown"

    version_path: ClassVar[str | None] = None
    """GET: its version. None: it has no such route."""
    models_path: ClassVar[str] = "/v1/models"
    health_path: ClassVar[str] = "/health"
    weights_path: ClassVar[str | None] = None
    """GET: the policy version that samples now. None: it has no such route."""

    @abstractmethod
    def request(
        self, call: ModelCall, model: str, *, stream: bool, prompt_ids: Sequence[int] | None = None
    ) -> EngineRequest:
        """The request that makes `model` answer `call` and give up its token ids.

        With `prompt_ids` the engine is to condition on exactly these ids instead of rendering the messages.
        """

    def rendering(self, call: ModelCall, model: str, *, generation_prompt: bool = True) -> EngineRequest | None:
        """The request that gives the ids of `call`'s prompt without sampling; None: this engine cannot.

        Without `generation_prompt` the prompt ends with its last message.
        """
        return None

    def read_rendering(self, data: bytes) -> list[int]:
        """The ids in the answer to `rendering`. Raises `CallFault`."""
        raise NotImplementedError(f"{self.name} renders nothing")

    @abstractmethod
    def sampling(self, body: Mapping[str, Any]) -> dict[str, Any]:
        """Those values of a request's body that decide what is sampled."""

    @abstractmethod
    def grammar(self, body: Mapping[str, Any]) -> str | None:
        """What constrains sampling beyond the policy, in a few words; None: nothing does."""

    def untrainable(self, body: Mapping[str, Any]) -> str | None:
        """Why a request's answer is not a sample of the policy, whatever comes back; None: it is."""
        return None

    @abstractmethod
    def read(self, data: bytes) -> Answer:
        """A whole answer. Raises `CallFault` when it is none."""

    @abstractmethod
    def read_event(self, event: SseEvent) -> Piece:
        """One event of a streamed answer. Raises `CallFault` for an error event and for what cannot be read."""

    def read_events(self, events: Sequence[SseEvent]) -> Iterator[Piece]:
        """Events that came together, in their order; those that say the same kind of thing may become one piece.
        Raises what `read_event` raises, after the pieces before it."""
        return map(self.read_event, events)

    @abstractmethod
    def fault(self, status: int, headers: Mapping[str, str], data: bytes) -> CallFault:
        """What an error status means. Decided by status and error fields; by words only where an older engine gives
        nothing else."""

    @abstractmethod
    def read_facts(self, version: Any, models: Any) -> EngineFacts:
        """From the JSON of `version_path` and `models_path`; either may be None."""

    @abstractmethod
    def read_weights(self, data: Any) -> str | None:
        """The policy version in the JSON of `weights_path`."""
