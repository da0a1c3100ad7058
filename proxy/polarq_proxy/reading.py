"""An engine's stream, on its way into a flight."""

from __future__ import annotations

from polarq_proxy.call import Piece
from polarq_proxy.engines.base import Engine
from polarq_proxy.faults import CallFault, FaultKind
from polarq_proxy.flight import Flight
from polarq_proxy.pacing import Pace
from polarq_proxy.sse import EventTooLarge, SseParser
from polarq_proxy.upstream import UpstreamResponse


class EngineStream:
    """`take` is called where bytes arrive: no task wakes up for what does no more than pass through."""

    def __init__(
        self, engine: Engine, response: UpstreamResponse, flight: Flight, pace: Pace, max_event_bytes: int
    ) -> None:
        self._engine = engine
        self._response = response
        self._flight = flight
        self._pace = pace
        self._parser = SseParser(max_event_bytes)

    async def read(self) -> None:
        """To its end, or until the engine says that it is done. Raises `CallFault`."""
        with self._pace.one_more():
            await self._response.each(self.take)

    def take(self, chunk: bytes) -> bool:
        """Whether more is wanted. Raises `CallFault`."""
        try:
            events = self._parser.feed(chunk)
        except EventTooLarge as exc:
            raise CallFault(FaultKind.ENGINE_FAULT, f"the inference server's stream is cut: {exc}") from exc
        pieces: list[Piece] = []
        broken: CallFault | None = None
        try:
            for piece in self._engine.read_events(events):
                pieces.append(piece)  # noqa: PERF402 - what came before a fault stays
        except CallFault as fault:
            broken = fault
        if pieces:
            self._flight.take(pieces)  # also what came before an error was sampled
        gatherer = self._flight.gatherer
        if gatherer.done:
            return False
        if broken is not None:
            raise broken
        if gatherer.began:
            self._response.rest(self._pace)
        return True
