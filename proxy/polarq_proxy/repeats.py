"""Which request of a session is a repeat of an earlier one, so that it is answered and not sampled again.

The same request may come twice because an SDK tries again, because a connection was cut, or because a harness lost
patience with a stream and asks for the whole answer. It may also come twice because the harness wants two samples.
What tells them apart:

- the earlier call's harness is gone, or was never sent the whole answer: a repeat;
- the request says itself that it is one (`X-Stainless-Retry-Count` above 0): a repeat;
- the earlier call is under way for a harness that is still there: a repeat only if one streams and the other does not;
- the earlier answer was delivered and nothing says that it is a repeat: a new call.

An answer that was sampled while the store took nothing is kept for the repeat that the harness was asked for.

A repeat of a call that is under way joins it. A repeat of one that is over is answered from the record. A call that
failed or was aborted has no answer to give: the repeat of one is sampled, and recorded as its retry.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from polarq.contracts.completion import Completion, CompletionLabel
from polarq_proxy.call import ModelCall
from polarq_proxy.jsons import encode

if TYPE_CHECKING:
    from polarq_proxy.flight import Flight

RETRY_HEADER = "X-Stainless-Retry-Count"
_REMEMBERED = 64
OTHER_CHOICE = "-"
"""In the id of a completion that is not the first choice of its answer."""
_OF_THE_TRANSPORT = frozenset({"stream", "stream_options", "return_token_ids"})


@dataclass(slots=True)
class Ended:
    """A call that is over, as far as a repeat of it is concerned."""

    seq: int
    completion_id: str
    delivered: bool
    answered: bool = True
    """There is a whole answer in the record."""
    unstored: Flight | None = None
    """It has an answer that the store did not take: the repeat has it stored, and is given it."""


def digest_of_call(call: ModelCall) -> str:
    """Cheap and the same for every repeat: whoever finds a call by it compares the messages too (`same`)."""
    options = {key: value for key, value in sorted(call.options.items()) if key not in _OF_THE_TRANSPORT}
    last = call.messages[-1] if call.messages else None
    asked = (len(call.messages), last, call.prompt, call.choices, call.model, options)
    return hashlib.blake2b(encode(asked), digest_size=16).hexdigest()


def same(call: ModelCall, other: ModelCall | Completion) -> bool:
    """Whether two calls of one digest ask the same of the model."""
    return call.messages == other.messages and (call.tools or None) == (other.tools or None)


def marked_as_retry(headers: Mapping[str, str]) -> bool:
    value = headers.get(RETRY_HEADER, "0")
    return value.isdecimal() and int(value) > 0


def _goes_on_from(later: Completion, earlier: Completion) -> bool:
    known = len(earlier.messages)
    return len(later.messages) > known and later.messages[:known] == earlier.messages


class Repeats:
    """The calls of one session, by digest."""

    def __init__(self) -> None:
        self._flying: dict[str, list[Flight]] = {}
        self._ended: OrderedDict[str, Ended] = OrderedDict()

    def under_way(self) -> list[Flight]:
        return [flight for flights in self._flying.values() for flight in flights]

    def joinable(self, digest: str, call: ModelCall, *, marked: bool) -> Flight | None:
        """A call under way that this one repeats."""
        for flight in reversed(self._flying.get(digest, [])):
            other = flight.capture.call
            if same(call, other) and (marked or not flight.awaited or other.stream != call.stream):
                return flight
        return None

    def ended(self, digest: str, *, marked: bool) -> Ended | None:
        """An earlier call that this one repeats, if the record says that its messages are the same."""
        ended = self._ended.get(digest)
        return None if ended is None or (ended.delivered and not marked) else ended

    def begin(self, flight: Flight) -> None:
        self._flying.setdefault(flight.capture.request_digest, []).append(flight)

    def end(self, flight: Flight, *, answered: bool) -> None:
        """`flight` is over."""
        digest = flight.capture.request_digest
        flights = self._flying.get(digest, [])
        if flight in flights:
            flights.remove(flight)
        if not flights:
            self._flying.pop(digest, None)
        ended = Ended(flight.capture.first_seq, flight.capture.completion_id, flight.delivered, answered)
        ended.unstored = flight if flight.unstored is not None else None
        flight.noted = ended
        self._note(digest, ended)

    def restore(self, completions: list[Completion]) -> None:
        """What a process before this one recorded. Which of its answers were delivered only a later request shows,
        which goes on from one; a harness that asks for another one again has not got it."""
        for place, completion in enumerate(completions):
            if OTHER_CHOICE in completion.completion_id:
                continue  # another answer to the same request
            answered = completion.label is not CompletionLabel.ABORTED and not completion.incomplete
            read = any(_goes_on_from(later, completion) for later in completions[place + 1 :])
            ended = Ended(completion.seq, completion.completion_id, delivered=read, answered=answered)
            self._note(completion.request_digest, ended)

    def _note(self, digest: str, ended: Ended) -> None:
        self._ended[digest] = ended
        self._ended.move_to_end(digest)
        while len(self._ended) > _REMEMBERED:
            self._ended.popitem(last=False)
