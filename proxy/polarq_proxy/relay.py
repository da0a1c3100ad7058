"""One model call: to the engine, back, into the record, and only then to the harness."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from contextlib import aclosing, asynccontextmanager

from polarq_proxy.call import Answer, Piece
from polarq_proxy.counters import Counters
from polarq_proxy.dialects.base import StreamWriter
from polarq_proxy.downstream import Downstream, HungUp
from polarq_proxy.endpoints import Endpoint, Fleet
from polarq_proxy.faults import MODEL_KINDS, CallFault, FaultKind
from polarq_proxy.gather import Gatherer, pieces_of
from polarq_proxy.grants import MAX_FAILURES
from polarq_proxy.jsons import encode
from polarq_proxy.recorder import Capture, Recorder
from polarq_proxy.sse import EventTooLarge, SseParser
from polarq_proxy.upstream import UpstreamResponse

MAX_EVENT_BYTES = 32 * 1024 * 1024
"""Longest single event of an engine's stream; prompt ids of 131,072 tokens take about one MiB."""

HUNG_UP = "the harness hung up before the end of the answer"


class Relay:
    """`whole` and `streamed` raise `CallFault` when nothing was sent and the call cannot be answered."""

    def __init__(
        self,
        fleet: Fleet,
        recorder: Recorder,
        counters: Counters,
        *,
        stream_upstream: bool = True,
        max_event_bytes: int = MAX_EVENT_BYTES,
    ) -> None:
        self._fleet = fleet
        self._recorder = recorder
        self._counters = counters
        self._stream_upstream = stream_upstream
        self._max_event_bytes = max_event_bytes

    async def whole(self, capture: Capture) -> Answer:
        """An answer that is recorded and may be shown."""
        try:
            answer = await self._asked(capture)
        except asyncio.CancelledError:
            if capture.body:  # it was sent, so that something may have been sampled
                self._recorder.keep_broken_later(capture, Answer(), HUNG_UP)
            raise
        await self._recorded(capture, answer)
        return answer

    async def streamed(self, capture: Capture, writer: StreamWriter, down: Downstream) -> None:
        """Sends the answer as it is sampled; its end (finish reason, usage, end mark) follows once it is recorded."""
        if self._stream_upstream:
            await self._relayed(capture, writer, down)
            return
        try:
            answer = await self.whole(capture)
        except CallFault as fault:
            await fail(fault, writer, down)
            return
        await _sent_last(down, writer.end(pieces_of(answer), answer))

    async def _relayed(self, capture: Capture, writer: StreamWriter, down: Downstream) -> None:
        gatherer = Gatherer(capture.call.choices)
        held: list[Piece] = []
        try:
            await self._on_an_endpoint(capture, lambda: self._pumped(capture, gatherer, writer, down, held))
        except (asyncio.CancelledError, HungUp) as exc:
            if gatherer.began:
                self._recorder.keep_broken_later(capture, gatherer.answer(), HUNG_UP)
            if isinstance(exc, HungUp):
                return
            raise
        except CallFault as fault:
            if gatherer.began:
                await self._recorder.keep_broken(capture, gatherer.answer(), fault.message)
            await fail(fault, writer, down)
            return
        answer = gatherer.answer()
        try:
            await self._recorded(capture, answer)
        except CallFault as fault:
            await fail(fault, writer, down)
            return
        await _sent_last(down, writer.end(held, answer))

    async def _pumped(
        self, capture: Capture, gatherer: Gatherer, writer: StreamWriter, down: Downstream, held: list[Piece]
    ) -> None:
        """Everything up to the end goes down as it comes; from the first finish reason on it is held."""
        async with (
            self._posted(capture, stream=True) as response,
            aclosing(self._pieces(capture, response)) as stream,
        ):
            async for pieces in stream:
                out = []
                for piece in pieces:
                    gatherer.add(piece)
                    if held or any(change.finish_reason is not None for change in piece.choices):
                        held.append(piece)
                    else:
                        out.append(writer.piece(piece))
                await down.send(b"".join(out))
                if gatherer.done:
                    break
        if not gatherer.finished:
            raise CallFault(FaultKind.ENGINE_FAULT, "the inference server ended its stream before the answer's end")

    async def _pieces(self, capture: Capture, response: UpstreamResponse) -> AsyncGenerator[list[Piece], None]:
        engine = _endpoint_of(capture).engine
        if not response.is_stream:
            # Either an error in the clothes of a 200, or an engine that does not stream.
            yield pieces_of(engine.read(await response.read()))
            return
        parser = SseParser(self._max_event_bytes)
        async for chunk in response.chunks():
            try:
                events = parser.feed(chunk)
            except EventTooLarge as exc:
                raise CallFault(FaultKind.ENGINE_FAULT, f"the inference server's stream is cut: {exc}") from exc
            pieces: list[Piece] = []
            broken: CallFault | None = None
            for event in events:
                try:
                    piece = engine.read_event(event)
                except CallFault as fault:
                    broken = fault
                    break
                pieces.append(piece)
            if pieces:
                yield pieces  # also what came before an error was sampled
            if broken is not None:
                raise broken

    async def _asked(self, capture: Capture) -> Answer:
        """A whole answer, not recorded yet."""
        found: list[Answer] = []

        async def ask() -> None:
            async with self._posted(capture, stream=False) as response:
                found.append(_endpoint_of(capture).engine.read(await response.read()))

        await self._on_an_endpoint(capture, ask)
        return found[0]

    async def _on_an_endpoint(self, capture: Capture, work: Callable[[], Awaitable[None]]) -> None:
        """Does `work` on the session's endpoint; on another one while there is one that answers at all."""
        session = capture.session
        tried: set[Endpoint] = set()
        while True:
            endpoint = self._fleet.choose(session.endpoint)
            session.use(endpoint)
            capture.endpoint = endpoint
            tried.add(endpoint)
            try:
                async with self._place_at(endpoint):
                    await self._bounded(endpoint, capture, work)
                return
            except CallFault as fault:
                if fault.kind is FaultKind.ENGINE_DOWN:
                    endpoint.unreachable(fault.message)
                    if self._fleet.choose(endpoint) not in tried:
                        continue
                raise self._judged(capture, fault) from fault

    @asynccontextmanager
    async def _place_at(self, endpoint: Endpoint) -> AsyncIterator[None]:
        async with endpoint.gate:
            endpoint.in_flight += 1
            try:
                yield
            finally:
                endpoint.in_flight -= 1

    async def _bounded(self, endpoint: Endpoint, capture: Capture, work: Callable[[], Awaitable[None]]) -> None:
        limit_s = endpoint.spec.timeout_s
        try:
            async with asyncio.timeout(limit_s) as limit:
                if endpoint.asks_versions:
                    capture.version_before = await endpoint.versions.before()
                await work()
                if capture.version_before is not None:
                    capture.version_after = await endpoint.versions.after()
        except TimeoutError as exc:
            if not limit.expired():
                raise CallFault(FaultKind.ENGINE_DOWN, f"{endpoint.upstream.where} does not answer: {exc}") from exc
            raise CallFault(FaultKind.TIMED_OUT, f"no whole answer within {limit_s:g} s") from exc

    @asynccontextmanager
    async def _posted(self, capture: Capture, *, stream: bool) -> AsyncIterator[UpstreamResponse]:
        """The engine's answer, its status 200. Raises `CallFault` for any other."""
        endpoint = _endpoint_of(capture)
        capture.model_asked = capture.session.spec.model or await endpoint.ensure_model()
        request = endpoint.engine.request(capture.call, capture.model_asked, stream=stream)
        capture.body = request.body
        headers = {"X-Session-ID": capture.session.spec.rollout_id, "X-Request-Id": capture.completion_id}
        async with endpoint.upstream.post(request.path, encode(request.body), headers) as response:
            if response.status != 200:
                raise endpoint.engine.fault(response.status, response.headers, await response.read())
            yield response

    async def _recorded(self, capture: Capture, answer: Answer) -> None:
        """Raises `CallFault` when it is not, or when there is nothing to show."""
        endpoint = _endpoint_of(capture)
        if answer.aborted:
            await self._recorder.keep_broken(capture, answer, "the engine aborted the call")
            fault = CallFault(FaultKind.ABORTED, "the inference server aborted the call; it may be asked again")
            raise self._judged(capture, fault)
        if any(choice.weight_versions is not None for choice in answer.choices):
            endpoint.gives_versions = True
        if answer.usage is None or answer.usage.completion_tokens:
            endpoint.note_ids(all(choice.ids for choice in answer.choices) and bool(answer.prompt_ids))
        await self._recorder.keep(capture, answer)
        capture.session.failures.pop(capture.request_digest, None)

    def _judged(self, capture: Capture, fault: CallFault) -> CallFault:
        """Notes a fault of the model; a request that breaks the engine again and again is told not to come back."""
        session = capture.session
        if fault.kind not in MODEL_KINDS:
            return fault
        self._recorder.note_fault(session, fault)
        if fault.kind is FaultKind.ENGINE_FAULT and session.failed(capture.request_digest) >= MAX_FAILURES:
            text = f"this request made the inference server fail {MAX_FAILURES} times: {fault.message}"
            return CallFault(FaultKind.ENGINE_FAULT, text, status=400)
        return fault


def _endpoint_of(capture: Capture) -> Endpoint:
    assert capture.endpoint is not None
    return capture.endpoint


async def fail(fault: CallFault, writer: StreamWriter, down: Downstream) -> None:
    """As a plain error while nothing was sent, else as the stream's last event."""
    await down.quiet()
    if not down.started:
        raise fault
    await _sent_last(down, writer.fail(fault))


async def _sent_last(down: Downstream, events: bytes) -> None:
    try:
        await down.send(events)
    except HungUp:
        return  # everything is recorded; who leaves at the last event has had the answer
    await down.finish()
