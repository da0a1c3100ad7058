"""A call that was cut while it was sampled goes on from the ids that are there, whoever cut it and however often.

The engine is sent the prompt and what was sampled of the answer, as ids, so that nothing is sampled twice; at the end
its own parsers make the message of all the ids together. A harness that reads a stream has seen a part already: what
it saw must be a beginning of that message, field by field, and then it is shown the rest. Which policy sampled which
of the ids is recorded to the id.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from polarq.contracts.completion import Usage, VersionSpan
from polarq_proxy import rules
from polarq_proxy.beginnings import Seen, rest_of, seen_of
from polarq_proxy.call import ABORT, Answer, Choice, ChoiceDelta, Piece
from polarq_proxy.endpoints import Endpoint
from polarq_proxy.engines.base import EngineRequest, TokensIn
from polarq_proxy.faults import CallFault, FaultKind
from polarq_proxy.flight import Flight
from polarq_proxy.gather import Gatherer, pieces_of
from polarq_proxy.jsons import encode
from polarq_proxy.recorder import Capture, Recorder, version_spans
from polarq_proxy.sse import EventTooLarge, SseParser
from polarq_proxy.upstream import UpstreamResponse

log = logging.getLogger("polarq.proxy")

MAX_BARREN = 3
"""How often in a row sampling may be cut before it brought anything new."""
AGAIN_S = 0.2
"""How long after it refused an engine is asked again: its own pause may outlast the proxy's by a little."""
MESSAGE_TIMEOUT_S = 30.0
"""For making a message of ids; a long one goes through parsers written in Python."""

_GIVEN_UP = frozenset(
    {
        FaultKind.REFUSED,
        FaultKind.MISCONFIGURED,
        FaultKind.CONTEXT_OVERFLOW,
        FaultKind.TOO_LARGE,
        FaultKind.OVERLOADED,
        FaultKind.ABORTED,
        FaultKind.ENGINE_FAULT,
        FaultKind.ENGINE_DOWN,
    }
)
AtEngine = Callable[[Endpoint, Capture, Callable[[], Awaitable[Answer]]], Awaitable[Answer]]
"""Does its work as a call does: past the gate, at its place, in its time."""


class Continuing:
    """`whole` is all there is to it."""

    def __init__(self, recorder: Recorder, at_engine: AtEngine, *, patience_s: float, max_event_bytes: int) -> None:
        self._recorder = recorder
        self._at_engine = at_engine
        self._patience_s = patience_s
        self._max_event_bytes = max_event_bytes

    async def whole(self, flight: Flight, cut: Answer) -> Answer | None:
        """The answer that `cut` is the beginning of; its end is in `flight.held`. None: there is no going on, and
        `flight.so_far()` is what was sampled. Raises `CallFault`, with the same left there."""
        capture = flight.capture
        endpoint = capture.endpoint
        if cut.finished and not cut.aborted:
            return cut  # it was cut after its last id
        if endpoint is None or endpoint.tokens_in is None or not _can(capture, cut):
            return None
        seen = seen_of(flight)
        if seen is None or not (cut.choices[0].ids or flight.shown):
            return None  # where nobody has seen anything, it is sampled anew
        work = _Work(capture, endpoint, endpoint.tokens_in, _Parts(cut), _limit(capture, endpoint, cut))
        work.parts.add(capture, cut)
        flight.cut = work.parts.answer(ABORT)
        flight.held = flight.held or [Piece()]  # who comes now is shown everything at the end
        try:
            await self._sample_on(flight, work)
            message = await self._message(work)
        except CallFault as fault:
            if fault.kind is FaultKind.MISCONFIGURED:
                endpoint.cannot_continue(fault.message)
            if fault.kind not in _GIVEN_UP:
                raise
            log.warning("rollout %s: a cut call cannot go on: %s", capture.session.spec.rollout_id, fault.message)
            return None
        return _ended(flight, work.parts, seen, message)

    async def _sample_on(self, flight: Flight, work: _Work) -> None:
        """Until the answer's own end. Raises `CallFault`."""
        parts, barren, patience = work.parts, 0, time.monotonic() + self._patience_s
        while parts.finish_reason is None:
            if work.limit is not None and len(parts.ids) >= work.limit:
                parts.finish_reason = "length"
                return
            before = len(parts.ids)
            fault = await self._one_part(flight, work)
            new = len(parts.ids) > before
            barren = 0 if new else barren + 1
            if fault is not None and fault.kind is FaultKind.OVERLOADED and not new and time.monotonic() < patience:
                barren = 0
                await asyncio.sleep(AGAIN_S)
            elif fault is not None and (fault.kind is not FaultKind.ABORTED or barren > MAX_BARREN):
                raise fault

    async def _one_part(self, flight: Flight, work: _Work) -> CallFault | None:
        """Samples on until the end or the next cut; whatever comes is kept. Returns why it is not the end."""
        gatherer, parts, fault = Gatherer(1), work.parts, None
        try:
            await self._at_engine(work.endpoint, work.capture, lambda: self._sampled(work, gatherer))
        except CallFault as exc:
            fault = exc
        finally:  # also when nobody waits any more
            answer = gatherer.answer()
            parts.went_on_from(answer)
            parts.add(work.capture, answer)
            flight.cut = parts.answer(ABORT)
        ended = answer.finished and not answer.aborted
        if ended:
            parts.end(answer)
            return None
        return fault or CallFault(FaultKind.ABORTED, "the inference server aborted the call")

    async def _sampled(self, work: _Work, gatherer: Gatherer) -> Answer:
        capture, endpoint, parts = work.capture, work.endpoint, work.parts
        await self._recorder.check_open(capture.session)
        if work.settings is None:
            work.settings = await _posted(endpoint, work.tokens_in.settings(capture.body), _headers(capture))
        request = work.tokens_in.going_on(work.settings, parts.prompt_ids, parts.ids, work.limit)
        if request is None:
            raise CallFault(FaultKind.REFUSED, "it counts, stops or sees by more than the ids that are there")
        async with endpoint.upstream.post(request.path, encode(request.body), _headers(capture)) as response:
            if response.status != 200:
                raise endpoint.engine.fault(response.status, response.headers, await response.read())
            await self._gathered(work.tokens_in, response, gatherer)
        if not gatherer.finished:
            raise CallFault(FaultKind.ENGINE_FAULT, "the inference server ended its stream before the answer's end")
        return gatherer.answer()

    async def _gathered(self, tokens_in: TokensIn, response: UpstreamResponse, gatherer: Gatherer) -> None:
        parser = SseParser(self._max_event_bytes)
        async for chunk in response.chunks():
            try:
                events = parser.feed(chunk)
            except EventTooLarge as exc:
                raise CallFault(FaultKind.ENGINE_FAULT, f"the inference server's stream is cut: {exc}") from exc
            for event in events:
                gatherer.add(tokens_in.read_event(event))
            if gatherer.done:
                return

    async def _message(self, work: _Work) -> Choice:
        capture, endpoint = work.capture, work.endpoint
        request = work.tokens_in.message(capture.body, work.parts.answer(None))
        try:
            async with asyncio.timeout(MESSAGE_TIMEOUT_S):
                data = await _posted(endpoint, request, _headers(capture))
        except TimeoutError:
            text = f"{endpoint.upstream.where} made no message in {MESSAGE_TIMEOUT_S:g} s"
            raise CallFault(FaultKind.ENGINE_FAULT, text) from None
        choice = work.tokens_in.read_message(data)
        calls = choice.message.get("tool_calls")
        if isinstance(calls, list) and capture.call.options.get("parallel_tool_calls") is False:
            choice.message["tool_calls"] = calls[:1]
        return choice


@dataclass(slots=True)
class _Work:
    """One call that goes on."""

    capture: Capture
    endpoint: Endpoint
    tokens_in: TokensIn
    parts: _Parts
    limit: int | None
    """How many ids the answer may have in all; None: nobody knows."""
    settings: bytes | None = None


@dataclass(slots=True)
class _Parts:
    """What was sampled, part after part."""

    first: Answer
    prompt_ids: list[int] = field(init=False)
    ids: list[int] = field(default_factory=list)
    entries: list[Any] = field(default_factory=list)
    spans: list[VersionSpan] = field(default_factory=list)
    finish_reason: str | None = None
    stop_reason: str | int | None = None
    usage: Usage | None = None
    doubt: str | None = None
    _unsaid: int = 0

    def __post_init__(self) -> None:
        self.prompt_ids = list(self.first.prompt_ids or ())

    def add(self, capture: Capture, answer: Answer) -> None:
        """What came of one part, the policy versions around it, and what the engine counted so far."""
        (choice,) = answer.choices
        new = choice.ids or []
        self.usage = self._counted(answer.usage, len(self.ids))
        if new:
            spans, odd = version_spans(capture, choice, len(new))
            start = len(self.ids)
            capture.continued += bool(start)
            for span in spans:
                self._span(span.version, start + span.start, start + span.end)
            self._unsaid += 0 if spans else len(new)
            self.doubt = self.doubt or odd
            self.ids += new
            self.entries += choice.logprobs or ()
        capture.version_before = capture.version_after = None

    def _span(self, version: str, start: int, end: int) -> None:
        if self.spans and self.spans[-1].version == version and self.spans[-1].end == start:
            start = self.spans.pop().start
        self.spans.append(VersionSpan(version=version, start=start, end=end))

    def went_on_from(self, answer: Answer) -> None:
        """Checks, before they are added, what the ids of a part were sampled on."""
        if not answer.choices[0].ids:
            return
        if answer.prompt_ids is None:
            self.doubt = self.doubt or "the engine did not say what ids it went on from"
        elif list(answer.prompt_ids) != [*self.prompt_ids, *self.ids]:
            self.doubt = self.doubt or "the engine went on from other ids than the ones it was sent"

    def end(self, answer: Answer) -> None:
        """The last part came to the answer's own end."""
        (choice,) = answer.choices
        self.finish_reason, self.stop_reason = choice.finish_reason, choice.stop_reason
        if self._unsaid and self.spans:
            self.doubt = self.doubt or f"the policy version of {self._unsaid} of the sampled ids is not known"

    def _counted(self, last: Usage | None, before: int) -> Usage | None:
        """The engine's count of a part that went on from `before` ids, as that of the whole; None: it gave none."""
        if last is None or last.prompt_tokens is None or last.completion_tokens is None:
            return None
        first = self.first.usage
        return Usage(
            prompt_tokens=last.prompt_tokens - before,
            completion_tokens=last.completion_tokens + before,
            cached_tokens=first.cached_tokens if first is not None else None,
        )

    def answer(self, finish_reason: str | None, message: dict[str, Any] | None = None) -> Answer:
        choice = Choice(
            0,
            self.first.choices[0].message if message is None else message,
            list(self.ids),
            list(self.entries),
            finish_reason or self.finish_reason,
            self.stop_reason,
            list(self.spans) or None,
        )
        return Answer([choice], self.first.prompt_ids, self.usage, self.first.model)


def _can(capture: Capture, cut: Answer) -> bool:
    """Whether there is something to go on from, and nothing but its ids decides what follows."""
    if capture.frozen is not None or capture.endpoint is None or capture.call.prompt is not None:
        return False
    engine = capture.endpoint.engine
    if not capture.body or capture.call.choices != 1 or len(cut.choices) != 1:
        return False
    if engine.grammar(capture.body) is not None or engine.untrainable(capture.body) is not None:
        return False
    (choice,) = cut.choices
    whole = len(choice.ids or ()) == len(choice.logprobs or ())
    return whole and bool(cut.prompt_ids) and _are_ids(choice.ids or ()) and _are_ids(cut.prompt_ids or ())


def _are_ids(values: Sequence[Any]) -> bool:
    return all(type(value) is int for value in values)


def _limit(capture: Capture, endpoint: Endpoint, cut: Answer) -> int | None:
    asked, context = rules.asked_limit(capture.call), endpoint.state.max_context
    room = None if context is None else context - len(cut.prompt_ids or ())
    return min((most for most in (asked, room) if most is not None), default=None)


def _ended(flight: Flight, parts: _Parts, seen: Seen, choice: Choice) -> Answer | None:
    """The whole answer, if what was seen is a beginning of it."""
    message, capture = choice.message, flight.capture
    rest = rest_of(seen.message, message)
    if rest is None:
        rollout_id = capture.session.spec.rollout_id
        log.warning("rollout %s: what was shown of a cut call is no beginning of the whole answer", rollout_id)
        return None
    if message.get("tool_calls") and parts.finish_reason == "stop":
        parts.finish_reason = "tool_calls"
    capture.joint_doubt = parts.doubt
    answer = parts.answer(None, message)
    (said,) = answer.choices
    flight.held = pieces_of(answer)
    if flight.shown:
        ids, entries = parts.ids[seen.ids :], parts.entries[seen.ids :]
        change = ChoiceDelta(0, rest, ids, entries, said.finish_reason, said.stop_reason)
        flight.held = [Piece([change], None, answer.usage, answer.model, done=True)]
    return answer


def _headers(capture: Capture) -> dict[str, str]:
    return {"X-Session-ID": capture.session.spec.rollout_id, "X-Request-Id": capture.completion_id}


async def _posted(endpoint: Endpoint, request: EngineRequest, headers: Mapping[str, str]) -> bytes:
    async with endpoint.upstream.post(request.path, encode(request.body), headers) as response:
        data = await response.read()
        if response.status != 200:
            raise endpoint.engine.fault(response.status, response.headers, data)
    return data
