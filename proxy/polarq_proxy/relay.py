"""One model call: to the engine, back, into the record, and only then to the harness."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress

from polarq_proxy import rules
from polarq_proxy.call import Answer, ModelCall
from polarq_proxy.continuing import Continuing
from polarq_proxy.counters import Counters
from polarq_proxy.dialects.base import StreamWriter
from polarq_proxy.downstream import Downstream, HungUp
from polarq_proxy.endpoints import Endpoint, Fleet
from polarq_proxy.engines.base import EngineRequest
from polarq_proxy.faults import NOTED_KINDS, CallFault, FaultKind
from polarq_proxy.flight import Flight, Listener
from polarq_proxy.gather import pieces_of
from polarq_proxy.grants import MAX_FAILURES, Session
from polarq_proxy.jsons import encode
from polarq_proxy.metrics import Times
from polarq_proxy.pacing import Pace
from polarq_proxy.pausing import Gate
from polarq_proxy.reading import EngineStream
from polarq_proxy.recorder import Capture, Recorder

MAX_EVENT_BYTES = 32 * 1024 * 1024
"""Longest single event of an engine's stream; prompt ids of 131,072 tokens take about one MiB."""

HUNG_UP = "the harness hung up before the end of the answer"
MAX_ABORTS = 3
"""How often a call that the engine aborts is sampled anew before the harness is told to ask again."""


class Relay:
    """`sampled` is a flight's work; `deliver` brings an answer to a harness that reads a stream."""

    def __init__(
        self,
        fleet: Fleet,
        recorder: Recorder,
        counters: Counters,
        gate: Gate,
        times: Times,
        *,
        stream_upstream: bool = True,
        max_event_bytes: int = MAX_EVENT_BYTES,
    ) -> None:
        self._fleet = fleet
        self._recorder = recorder
        self._counters = counters
        self._gate = gate
        self._times = times
        self._stream_upstream = stream_upstream
        self._max_event_bytes = max_event_bytes
        self._pace = Pace()
        self._continuing = Continuing(
            recorder, self._at_engine, patience_s=gate.hold_s, max_event_bytes=max_event_bytes
        )

    async def sampled(self, flight: Flight) -> Answer:
        """An answer that is recorded and may be shown. Raises `CallFault`."""
        capture = flight.capture
        session = capture.session
        if (pace_s := session.wait_s()) > 0:
            await asyncio.sleep(pace_s)
            capture.held_s += pace_s
        for left in range(MAX_ABORTS, -1, -1):
            try:
                answer = await self._recorded_answer(flight)
                break
            except CallFault as fault:
                if fault.kind is not FaultKind.ABORTED:
                    raise
                if flight.shown or not left:
                    # Told to the worker only now: what is sampled anew has failed nobody.
                    raise (fault if capture.frozen is not None else self._judged(capture, fault)) from fault
                # Aborted for new weights, and nobody has seen any of it: it is sampled anew, and counts once. What it
                # left in the record keeps its number.
                capture.again(session.reserve_again(capture.call.choices) if flight.left_record else None)
                flight.begin_again()
        session.sampled_tokens += answer.sampled_tokens
        self._timed(flight)
        return answer

    def _timed(self, flight: Flight) -> None:
        capture = flight.capture
        total_s = time.monotonic() - capture.started
        self._times.ended(
            capture.dialect,
            _endpoint_of(capture).engine.name,
            total_s=total_s,
            engine_s=capture.engine_s,
            held_s=capture.held_s,
        )
        if flight.first_shown is not None:
            self._times.first_byte(capture.dialect, flight.first_shown - capture.started)

    async def _recorded_answer(self, flight: Flight) -> Answer:
        capture = flight.capture
        try:
            answer = await self._answer(flight)
        except asyncio.CancelledError:
            if capture.body:  # it was sent, so that something may have been sampled
                self._recorder.keep_broken_later(capture, flight.so_far(), HUNG_UP)
            raise
        except CallFault as fault:
            if flight.began:
                flight.left_record = True
                await self._recorder.keep_broken(capture, flight.so_far(), fault.message)
            raise
        except Exception:
            if flight.began:
                flight.left_record = True
                await self._recorder.keep_broken(capture, flight.so_far(), "polarq's proxy failed at the answer")
            raise
        flight.settling = True
        try:
            await self._recorded(flight, answer)
        except CallFault as fault:
            flight.settling = False  # it may be asked again
            flight.unstored = answer if fault.kind is FaultKind.STORE_DOWN else None
            raise
        return answer

    async def stored(self, flight: Flight, answer: Answer) -> Answer:
        """Another try to record what was sampled before. Raises `CallFault`."""
        flight.settling = True
        try:
            await self._recorder.keep(flight.capture, answer)
        except CallFault as fault:
            flight.settling = False
            flight.unstored = answer if fault.kind is FaultKind.STORE_DOWN else None
            raise
        flight.capture.session.sampled_tokens += answer.sampled_tokens
        return answer

    async def _answer(self, flight: Flight) -> Answer:
        """Whole, also when it was cut and can go on; else marked as aborted, or as its `CallFault`."""
        cut, fault = None, None
        try:
            answer = await self._fitting_answer(flight)
            if not answer.aborted:
                return answer
            cut = answer
        except CallFault as exc:
            if exc.kind is not FaultKind.ABORTED:
                raise
            fault = exc
        whole = await self._continuing.whole(flight, cut or flight.so_far())
        if whole is not None:
            return whole
        if cut is None:
            assert fault is not None
            raise fault
        return flight.cut or cut

    async def _fitting_answer(self, flight: Flight) -> Answer:
        capture = flight.capture
        try:
            return await self._on_an_endpoint(flight)
        except CallFault as fault:
            if flight.gatherer.began or not _fits_after_all(capture, fault):
                raise
        return await self._on_an_endpoint(flight)

    async def rendered(self, session: Session, call: ModelCall) -> list[int]:
        """The ids of a call's prompt, without sampling. Raises `CallFault`."""
        endpoint = self._fleet.choose(session.endpoint)
        request = endpoint.engine.rendering(call, session.spec.model or await endpoint.ensure_model())
        if request is None:
            raise CallFault(FaultKind.REFUSED, f"{endpoint.upstream.where} cannot count tokens")
        async with endpoint.upstream.post(request.path, encode(request.body), {}) as response:
            data = await response.read()
            if response.status != 200:
                raise endpoint.without_key(endpoint.engine.fault(response.status, response.headers, data))
        return endpoint.engine.read_rendering(data)

    async def deliver(self, flight: Flight, writer: StreamWriter, down: Downstream) -> bool:
        """The answer as it is sampled; its end (finish reason, usage, end mark) follows once it is recorded.

        Returns whether the harness has read it to its end. Raises `CallFault` when nothing was sent.
        """
        listener = Listener(writer, down)
        try:
            flight.listen(listener)
            try:
                answer = await flight.answer()
            finally:
                flight.forget(listener)
            await listener.read()
        except HungUp:
            return False
        except CallFault as fault:
            with suppress(HungUp):
                await listener.read()
            await fail(fault, writer, down)
            return False
        finally:
            listener.close()
        return await sent_last(down, listener.end(flight.held or pieces_of(answer), answer))

    def _streams(self, capture: Capture) -> bool:
        """Whether the engine is asked to stream."""
        chosen = capture.session.spec.rules.stream
        wanted = self._stream_upstream if chosen is None else chosen
        return capture.call.stream and wanted and _endpoint_of(capture).features.streams_ids

    async def _asked(self, flight: Flight) -> Answer:
        """A whole answer, not recorded yet."""
        capture = flight.capture
        streams, endpoint = self._streams(capture), _endpoint_of(capture)
        request = await self._request(capture, stream=streams)
        headers = {"X-Session-ID": capture.session.spec.rollout_id, "X-Request-Id": capture.completion_id}
        async with endpoint.upstream.post(request.path, encode(request.body), headers) as response:
            if response.status != 200:
                raise endpoint.engine.fault(response.status, response.headers, await response.read())
            if not streams and not response.is_stream:
                return endpoint.engine.read(await response.read())
            # What came decides: there are servers that stream without being asked to.
            if response.is_stream:
                await EngineStream(endpoint.engine, response, flight, self._pace, self._max_event_bytes).read()
            else:  # either an error in the clothes of a 200, or an engine that does not stream
                flight.take(pieces_of(endpoint.engine.read(await response.read())))
        if not flight.gatherer.finished:
            raise CallFault(FaultKind.ENGINE_FAULT, "the inference server ended its stream before the answer's end")
        return flight.gatherer.answer()

    async def _on_an_endpoint(self, flight: Flight) -> Answer:
        """From the session's endpoint; from another one while there is one that answers at all."""
        capture = flight.capture
        session = capture.session
        tried: set[Endpoint] = set()
        while True:
            endpoint = capture.frozen or self._fleet.choose(session.endpoint, tried)
            if capture.frozen is None and session.endpoint is not endpoint:
                session.use(endpoint)
            capture.endpoint = endpoint
            tried.add(endpoint)
            try:
                return await self._at_engine(endpoint, capture, lambda: self._asked(flight))
            except CallFault as fault:
                endpoint.without_key(fault)
                if capture.frozen is not None or fault.kind is FaultKind.ABORTED:
                    raise  # it is not the policy that failed; what was cut may go on
                if fault.kind is FaultKind.ENGINE_DOWN:
                    endpoint.unreachable(fault.message)
                elsewhere = fault.kind in {FaultKind.ENGINE_DOWN, FaultKind.OVERLOADED} and not flight.gatherer.began
                if elsewhere and self._fleet.choose(None, tried) not in tried:
                    continue
                raise self._judged(capture, fault) from fault

    async def _at_engine(self, endpoint: Endpoint, capture: Capture, work: Callable[[], Awaitable[Answer]]) -> Answer:
        # A frozen model's weights do not change: its calls are not held back.
        gate = None if capture.frozen is not None else self._gate
        run_id = capture.session.spec.run_id
        came = time.monotonic()
        await endpoint.met()
        while True:
            if gate is not None and gate.holds(run_id):
                await gate.opened(run_id)
            await endpoint.gate.acquire()
            if gate is None or not gate.holds(run_id):
                break
            endpoint.gate.release()  # a pause began while it waited for its place
        endpoint.in_flight += 1
        try:
            capture.held_s += time.monotonic() - came
            return await self._bounded(endpoint, capture, work, gate)
        finally:
            endpoint.in_flight -= 1
            endpoint.gate.release()

    async def _bounded(
        self, endpoint: Endpoint, capture: Capture, work: Callable[[], Awaitable[Answer]], gate: Gate | None
    ) -> Answer:
        left_s = capture.session.time_left_s()
        limit_s = endpoint.spec.timeout_s if left_s is None else min(endpoint.spec.timeout_s, left_s)
        limit, cut = asyncio.timeout(limit_s), False
        capture.given_up = False
        endpoint.waiting[limit] = capture
        try:
            async with limit:
                if gate is None:
                    return await self._versioned(endpoint, capture, work)
                gate.passed(limit, capture.session.spec.run_id)
                try:
                    return await self._versioned(endpoint, capture, work)
                finally:
                    cut = gate.left(limit)
        except TimeoutError as exc:
            if capture.given_up:
                text = f"{endpoint.upstream.where} has answered nothing for {endpoint.spec.unanswered_s:g} s"
                raise CallFault(FaultKind.ENGINE_DOWN, text) from None
            if cut:
                text = "the call was aborted because the policy's weights change; it may be asked again"
                raise CallFault(FaultKind.ABORTED, text) from None
            if not limit.expired():
                raise CallFault(FaultKind.ENGINE_DOWN, f"{endpoint.upstream.where} does not answer: {exc}") from exc
            if left_s is not None and limit_s == left_s:
                text = "the rollout's time is over; nothing more will be answered here"
                raise CallFault(FaultKind.NO_SESSION, text) from exc
            raise CallFault(FaultKind.TIMED_OUT, f"no whole answer within {limit_s:g} s") from exc
        finally:
            del endpoint.waiting[limit]

    async def _versioned(self, endpoint: Endpoint, capture: Capture, work: Callable[[], Awaitable[Answer]]) -> Answer:
        """The answer, with the policy versions around it where the engine does not say them itself."""
        if endpoint.asks_versions or (endpoint.tokens_in is not None and capture.frozen is None):
            capture.version_before = await endpoint.versions.before(self._gate.opened_at)
        began = time.monotonic()
        try:
            answer = await work()
        except asyncio.CancelledError:
            if capture.version_before is not None and self._gate.holds(capture.session.spec.run_id):
                # While the call still counts as one in flight, so that the weights cannot have changed yet.
                capture.version_after = await endpoint.versions.after()
            raise
        finally:
            capture.engine_s += time.monotonic() - began
        if endpoint.asks_versions and capture.version_before is not None:
            capture.version_after = await endpoint.versions.after()
        return answer

    async def _request(self, capture: Capture, *, stream: bool) -> EngineRequest:
        """What the engine is asked. Raises `CallFault`."""
        endpoint = _endpoint_of(capture)
        await self._plan(capture, endpoint)
        named = None if capture.frozen is not None else capture.session.spec.model
        capture.model_asked = named or await endpoint.ensure_model()
        context, asked = endpoint.state.max_context, rules.asked_limit(capture.call)
        if context is not None and asked is not None and asked >= context:
            _ask_for_less(capture, None)  # what is left of the context is less than that, and is what is given then
        request = endpoint.engine.request(
            capture.call, capture.model_asked, stream=stream, prompt_ids=capture.exact_ids
        )
        capture.body = request.body
        return request

    async def _plan(self, capture: Capture, endpoint: Endpoint) -> None:
        """In exact mode: which ids the prompt is, or why the engine renders it after all."""
        suffixes, session = endpoint.suffixes, capture.session
        capture.plan, capture.exact_ids, capture.exact_missed = None, None, None
        if suffixes is None or capture.frozen is not None:
            return
        if session.earlier:
            session.exact.remember(session.earlier, suffixes.name)
            session.earlier = []
        plan = capture.plan = await session.exact.prompt(capture.call, suffixes)
        capture.exact_ids, capture.exact_missed = plan.ids, plan.missed
        self._counters.exact[plan.missed or ("continued" if plan.ids is not None else "first turn")] += 1
        self._counters.forged += plan.forged

    async def _recorded(self, flight: Flight, answer: Answer) -> None:
        """Raises `CallFault` when it is not, or when there is nothing to show."""
        capture = flight.capture
        endpoint = _endpoint_of(capture)
        if answer.aborted:
            if answer.sampled_tokens:
                flight.left_record = True
                await self._recorder.keep_broken(capture, answer, "the engine aborted the call")
            raise CallFault(FaultKind.ABORTED, "the inference server aborted the call; it may be asked again")
        if capture.frozen is not None:
            await self._recorder.keep(capture, answer)
            return
        told = any(choice.weight_versions is not None for choice in answer.choices)
        if told and not capture.continued and endpoint.features.versions_in_answer:
            endpoint.gives_versions = True
        if answer.usage is None or answer.usage.completion_tokens:
            endpoint.note_ids(all(choice.ids for choice in answer.choices) and bool(answer.prompt_ids))
        await self._recorder.keep(capture, answer)
        if capture.plan is not None:
            for choice in answer.choices:
                capture.session.exact.sampled(capture.plan, answer.prompt_ids, choice)
        capture.session.failures.pop(capture.request_digest, None)

    def _judged(self, capture: Capture, fault: CallFault) -> CallFault:
        """Notes a fault of the model; a request that breaks the engine again and again is told not to come back."""
        session = capture.session
        if fault.kind not in NOTED_KINDS:
            return fault
        self._recorder.note_problem(session, fault, capture.first_seq)
        if fault.kind is FaultKind.ENGINE_FAULT and session.failed(capture.request_digest) >= MAX_FAILURES:
            text = f"this request made the inference server fail {MAX_FAILURES} times: {fault.message}"
            return CallFault(FaultKind.ENGINE_FAULT, text, status=400)
        return fault


def _endpoint_of(capture: Capture) -> Endpoint:
    assert capture.endpoint is not None
    return capture.endpoint


def _fits_after_all(capture: Capture, fault: CallFault) -> bool:
    """Whether only the limit that the harness asked for was too much for the context; then what is left is asked for.

    Engines refuse instead of giving less, and harnesses ask for what the model that they know could give.
    """
    asked = rules.asked_limit(capture.call)
    refused = fault.kind is FaultKind.REFUSED and fault.param in rules.LIMITS
    if asked is None or not (refused or fault.kind is FaultKind.CONTEXT_OVERFLOW):
        return False
    most = None
    if fault.max_context is not None and fault.prompt_tokens is not None:
        most = fault.max_context - fault.prompt_tokens
        if most < 1:
            return False
        if most >= asked:  # the engine counts otherwise than it says: leave it to it
            most = None
    _ask_for_less(capture, most)
    return True


def _ask_for_less(capture: Capture, most: int | None) -> None:
    for name, value in rules.limit(capture.call, most).items():
        capture.overridden.setdefault(name, value)


async def fail(fault: CallFault, writer: StreamWriter, down: Downstream) -> None:
    """As a plain error while nothing was sent, else as the stream's last event."""
    await down.quiet()
    if not down.started:
        raise fault
    await sent_last(down, writer.fail(fault))


async def sent_last(down: Downstream, events: bytes) -> bool:
    """Whether the harness was still there to read them."""
    await down.quiet()  # nothing may follow the end, however slowly it is read
    try:
        await down.send(events)
        return await down.finish()
    except HungUp:
        return False  # everything is recorded
