"""The HTTP server: finds dialect, route and session of a request, and answers everything in the dialect's shape.

Any path works that ends in a dialect's route: `/s/<session>/v1/chat/completions`, without `/v1`, with `/v1` twice,
with doubled slashes. The session comes from the path, else from whatever key the harness sends. Nothing here logs a
path or a header, because both may hold a session's secret.
"""

from __future__ import annotations

import asyncio
import hmac
import logging
import re
import secrets
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from aiohttp import HttpVersion11, StreamReader, web
from redis.asyncio import Redis

import polarq
from polarq.contracts.completion import CompletionLabel
from polarq.ledger.keys import Keys
from polarq.registry import names, plugin
from polarq.store.completions import KEEP_S, CompletionLog
from polarq.store.pauses import PauseAck
from polarq.topology import Node
from polarq_proxy import rules
from polarq_proxy.bodies import BodyDamaged, BodyTooLarge, UnknownEncoding, read_body
from polarq_proxy.call import Answer, ModelCall
from polarq_proxy.carriers import session_in_keys, session_in_path
from polarq_proxy.counters import Counters
from polarq_proxy.dialects.base import Dialect, NativeRequest, Operation, Reply, ReplyHead, Route, ServedModel
from polarq_proxy.downstream import Downstream
from polarq_proxy.endpoints import Endpoint, Fleet
from polarq_proxy.faults import CallFault, FaultKind
from polarq_proxy.flight import Flight, too_deep
from polarq_proxy.gather import pieces_of
from polarq_proxy.grants import Session, Sessions
from polarq_proxy.jsons import encode
from polarq_proxy.listening import from_this_machine, guarded
from polarq_proxy.metrics import Metrics
from polarq_proxy.pausing import Gate, PauseWatch
from polarq_proxy.peers import Peers
from polarq_proxy.pool import PREFIX as POOL_PREFIX
from polarq_proxy.pool import Pool
from polarq_proxy.recorder import Capture, Recorder
from polarq_proxy.relay import MAX_EVENT_BYTES, Relay, fail, sent_last
from polarq_proxy.repeats import Ended, digest_of_call, marked_as_retry, same
from polarq_proxy.replay import answer_of
from polarq_proxy.side.rules import kind_of

log = logging.getLogger("polarq.proxy")

LARGE_BODY = 1 << 20
MAX_PARTS = 500_000
"""Objects and lists in one request's JSON."""
MAX_ROUTES = 256
MAX_HELD_BYTES = 2 << 30
"""Of the bodies of all calls under way, as they came."""
UNSAID_BYTES = 1 << 20
"""What a body without a length is taken for."""
_VERSIONS = frozenset({"v1", "v1beta", "v1alpha"})


@dataclass(frozen=True, slots=True)
class Place:
    """A request's path, taken apart."""

    grant: str | None
    shown: str
    """What the record may hold of it: without the session, with the query but not its key."""
    tail: str
    """Below session and API version; what routes match."""
    version: str = ""


def placed(path: str, query: Mapping[str, str]) -> Place:
    """`path` is percent-decoded."""
    parts = [part for part in path.split("/") if part]
    grant = session_in_path(path)
    if grant is not None:
        parts = parts[2:]
    kept = "&".join(f"{name}={value}" for name, value in query.items() if name != "key")
    shown = "/" + "/".join(parts) + (f"?{kept}" if kept else "")
    version = ""
    while parts and parts[0] in _VERSIONS:
        version, parts = parts[0], parts[1:]
    return Place(grant, shown, "/".join(parts), version)


def installed_dialects() -> list[Dialect]:
    """Every installed dialect, the one that answers for the unclaimed last. Raises `UnknownPlugin`."""
    dialects: list[Dialect] = [plugin("dialects", name)() for name in names("dialects")]
    return sorted(dialects, key=lambda dialect: dialect.fallback)


class Proxy:
    """Everything a node's proxy is made of. `start` and `close` frame its life; `app` serves it."""

    def __init__(
        self,
        node: Node,
        redis: Redis,
        keys: Keys,
        *,
        env: Mapping[str, str] | None = None,
        keep_s: float = KEEP_S,
        max_event_bytes: int = MAX_EVENT_BYTES,
        peers: Peers | None = None,
        token: str | None = None,
        replicas: int = 0,
    ) -> None:
        """`replicas`: of Redis, that must have a call's record before it is answered."""
        self.node = node
        self._token = token
        self.peers = peers
        """The other processes of this proxy; None: it is the only one."""
        self.counters = Counters()
        self.dialects = installed_dialects()
        self.max_held_bytes = MAX_HELD_BYTES
        self._held_bytes = 0
        self._routes: dict[tuple[str, str], tuple[Dialect, Route, re.Match[str]]] = {}
        """What paths were found to be; the same few come again and again."""
        self.fleet = Fleet.of(node, env or {})
        self.pool = Pool(node, env or {})
        completions = CompletionLog(redis, keys, keep_s, replicas=replicas)
        self.sessions = Sessions(redis, keys, completions)
        self.recorder = Recorder(redis, keys, completions, self.counters)
        self.metrics = Metrics(self.counters, self.fleet, self._gauges)
        self.gate = Gate(node.proxy.pause_hold_s)
        self.pauses = PauseWatch(self.gate, redis, keys, self._pause_ack)
        self.relay = Relay(
            self.fleet,
            self.recorder,
            self.counters,
            self.gate,
            self.metrics.times,
            stream_upstream=node.proxy.stream_upstream,
            max_event_bytes=max_event_bytes,
        )

    def server(self) -> web.Server:
        """Made for `web.ServerRunner`. Its body limits are this module's own."""
        return web.Server(guarded(self._handle), **SERVER_OPTIONS)

    async def start(self) -> None:
        await self.fleet.start()
        await self.pool.start()
        await self.pauses.start()

    async def close(self) -> None:
        if self.peers is not None:
            await self.peers.close()
        await self.pauses.close()
        for flight in self.sessions.under_way():
            flight.cancel()
            await flight.closed()
        await self.recorder.drain()
        await self.fleet.close()
        await self.pool.close()

    def health(self) -> dict[str, Any]:
        """`status` is `ok` when some inference server answers and gives token ids, else `degraded` (the proxy itself is
        up whenever it answers at all)."""
        endpoints = [endpoint.report() for endpoint in self.fleet.endpoints]
        good = any(endpoint["reachable"] and endpoint["ids"] for endpoint in endpoints)
        return {
            "status": "ok" if good else "degraded",
            "node": self.node.id,
            "version": polarq.__version__,
            "ids": any(endpoint["ids"] for endpoint in endpoints),
            "inference": endpoints,
            "sessions": len(self.sessions),
            "paused": self.gate.pause is not None,
            "held_back": self.gate.waiting,
            **self.counters.snapshot(),
        }

    @property
    def _of(self) -> dict[str, int]:
        return {} if self.peers is None else {"process": self.peers.index, "processes": self.peers.processes}

    def _health_for(self, request: web.BaseRequest) -> dict[str, Any]:
        """All of it for whoever shows the node's token, or without one for this machine, where `doctor` and the worker
        ask. Sandboxes reach this route too, and read that the proxy is up."""
        health = self.health()
        if self._token is None and from_this_machine(request):
            return health
        given = request.headers.get("Authorization", "").encode("utf-8", "surrogateescape")
        if self._token is not None and hmac.compare_digest(given, f"Bearer {self._token}".encode()):
            return health
        return {key: health[key] for key in ("status", "node", "version")}

    def _gauges(self) -> dict[str, float]:
        return {
            "in_flight": self.counters.in_flight,
            "sessions": len(self.sessions),
            "paused": self.gate.pause is not None,
            "held_back": self.gate.waiting,
        }

    def _pause_ack(self) -> PauseAck:
        pause, runs = self.gate.pause, self.gate.of_runs()
        if pause is None:
            return PauseAck(node_id=self.node.id, **self._of, runs=runs)
        return PauseAck(
            node_id=self.node.id,
            **self._of,
            pause_id=pause.pause_id,
            in_flight=self.gate.in_flight,
            waiting=self.gate.waiting,
            runs=runs,
        )

    async def _handle(self, request: web.BaseRequest) -> web.StreamResponse:
        if request.method == "HEAD":
            return web.Response()
        place = placed(request.path, request.query)
        if request.method == "GET" and place.tail == "health" and place.grant is None:
            return _response(Reply(encode(self._health_for(request))))
        if request.method == "GET" and not place.tail:
            return _response(Reply(encode({"status": "ok"})))
        native = NativeRequest(place.tail, request.query, request.headers, b"", place.version)
        dialect, route, match = self._routed(request.method, native)
        try:
            if self.peers is not None and (owner := self.peers.owner(place.grant or _key(request))) is not None:
                _told_to_send(request)
                return await self.peers.passed_on(request, owner)
            if "websocket" in request.headers.get("Upgrade", "").lower():
                raise CallFault(FaultKind.UPGRADE, "there are no websockets here: use plain HTTP")
            if route is None or match is None:
                text = f"{request.method} {place.shown.partition('?')[0]} is not a route of this proxy"
                raise CallFault(FaultKind.NO_SUCH_ROUTE, text)
            if route.operation is Operation.GENERATE:
                return await self._generate(request, place, dialect, match)
            if route.operation is Operation.COUNT_TOKENS:
                return _response(await self._counted(request, place, dialect, match))
            return _response(self._models(self._speaker(native, dialect), route, match))
        except CallFault as fault:
            self.counters.errors[str(fault.kind)] += 1
            return _response(dialect.fault(fault))
        except RecursionError:
            self.counters.errors[str(FaultKind.BAD_REQUEST)] += 1
            return _response(dialect.fault(too_deep()))
        except Exception:
            log.exception("a call failed inside the proxy")
            self.counters.errors[str(FaultKind.INTERNAL)] += 1
            return _response(dialect.fault(_internal()))

    def _routed(self, method: str, native: NativeRequest) -> tuple[Dialect, Route | None, re.Match[str] | None]:
        known = self._routes.get((method, native.path))
        if known is not None:
            return known
        for dialect in self.dialects:
            for route in dialect.routes:
                match = route.match(method, native.path)
                if match is not None:
                    if len(self._routes) >= MAX_ROUTES:
                        self._routes.clear()
                    self._routes[method, native.path] = dialect, route, match
                    return dialect, route, match
        claiming = (dialect for dialect in self.dialects if dialect.claims(native))
        return next(claiming, self.dialects[-1]), None, None

    def _speaker(self, native: NativeRequest, dialect: Dialect) -> Dialect:
        """Several dialects have the same models routes: who claims the request answers it."""
        return next((other for other in self.dialects if other.claims(native)), dialect)

    def _models(self, dialect: Dialect, route: Route, match: re.Match[str]) -> Reply:
        served = self.fleet.models()
        if route.operation is Operation.LIST_MODELS:
            return dialect.models([ServedModel(name, length) for name, length in served.items()])
        # Harnesses ask for whatever name they are configured with; all of them are answered by the node's model.
        name = match["model"]
        return dialect.model(ServedModel(name, served.get(name) or next(iter(served.values()), None)))

    async def _counted(self, request: web.BaseRequest, place: Place, dialect: Dialect, match: re.Match[str]) -> Reply:
        # Who has no session has no body read for it.
        session = await self.sessions.find(place.grant or _key(request))
        body = await self._body(request)
        call = dialect.parse(NativeRequest(place.tail, request.query, request.headers, body), match)
        return dialect.counted(call, len(await self.relay.rendered(session, call)))

    async def _generate(
        self, request: web.BaseRequest, place: Place, dialect: Dialect, match: re.Match[str]
    ) -> web.StreamResponse:
        # Who has no session has no body read for it.
        session = await self.sessions.find(place.grant or _key(request))
        size = self._room_for(request)
        self._held_bytes += size
        try:
            return await self._sampled_or_known(session, request, place, dialect, match)
        finally:
            self._held_bytes -= size

    def _room_for(self, request: web.BaseRequest) -> int:
        """The bytes that a call may hold while it is under way. Raises `CallFault` when all calls together hold too
        many."""
        size = request.content_length if request.content_length is not None else UNSAID_BYTES
        if self._held_bytes and self._held_bytes + size > self.max_held_bytes:
            text = f"the calls under way hold {self._held_bytes} bytes of requests already: ask again"
            raise CallFault(FaultKind.OVERLOADED, text)
        return size

    async def _sampled_or_known(
        self, session: Session, request: web.BaseRequest, place: Place, dialect: Dialect, match: re.Match[str]
    ) -> web.StreamResponse:
        body = await self._body(request)
        call = dialect.parse(NativeRequest(place.tail, request.query, request.headers, body), match)
        del body  # it is read, and its answer may take minutes
        digest, marked = digest_of_call(call), marked_as_retry(request.headers)
        flight = session.repeats.joinable(digest, call, marked=marked)
        ended = None if flight is not None else session.repeats.ended(digest, marked=marked)
        answer = None
        if ended is not None and ended.answered:
            answer = await self._recorded_answer(session, ended, call)
        if ended is not None and ended.unstored is not None and same(call, ended.unstored.capture.call):
            flight = self._stored_again(ended.unstored)
        if flight is None and answer is None:
            retry_of = ended.seq if ended is not None and not ended.answered else None
            flight = self._begun(session, call, dialect, place.shown, request.headers, digest, retry_of)
        elif flight is not None or answer is not None:
            self.counters.replays += 1
            self.recorder.note_replay(session)
        return await self._answered(request, dialect, call, flight, answer, ended)

    def _routed_beside(
        self, session: Session, call: ModelCall, headers: Mapping[str, str]
    ) -> tuple[CompletionLabel, str | None, Endpoint | None]:
        """(label, kind of side traffic, the frozen model that answers instead of the policy)."""
        if call.model.startswith(POOL_PREFIX):
            return CompletionLabel.SIDE, "pool", self.pool.find(call.model)
        kind = kind_of(call, session.spec.rules.harness, headers)
        treated = self.node.proxy.side_traffic.get(kind or "")
        if kind is None or treated == "train":
            return CompletionLabel.TRAIN, kind, None
        return CompletionLabel.SIDE, kind, self.pool.find(treated) if treated is not None else None

    def _begun(
        self,
        session: Session,
        call: ModelCall,
        dialect: Dialect,
        path: str,
        headers: Mapping[str, str],
        digest: str,
        retry_of: int | None,
    ) -> Flight:
        session.time_left_s()
        self.recorder.share_messages(session, call)
        label, kind, frozen = self._routed_beside(session, call, headers)
        try:
            first_seq = session.reserve(call.choices)
        except CallFault as fault:
            self.recorder.note_problem(session, fault, session.next_seq)
            raise
        sampled_before = session.sampled_tokens + session.promised_tokens
        capture = Capture(
            label=label,
            side_kind=kind,
            frozen=frozen,
            doubt=None if frozen is None else f"answered by the frozen model '{frozen.model}', not by the policy",
            session=session,
            call=call,
            dialect=dialect.name,
            path=path,
            request_digest=digest,
            completion_id=secrets.token_hex(12),
            first_seq=first_seq,
            retry_of=retry_of,
            overridden=rules.apply(session.spec.rules, call, sampled_before),
        )
        if session.spec.rules.max_sampled_tokens is not None:
            capture.promised_tokens = (rules.asked_limit(call) or 0) * call.choices
            session.promised_tokens += capture.promised_tokens
        flight = Flight(capture, self.node.proxy.retry_grace_s)
        self._start(flight, self.relay.sampled)
        return flight

    def _stored_again(self, earlier: Flight) -> Flight:
        """A flight that only has to record what an earlier one sampled."""
        answer = earlier.unstored
        assert answer is not None
        flight = Flight(earlier.capture, self.node.proxy.retry_grace_s)
        self._start(flight, lambda again: self.relay.stored(again, answer))
        return flight

    def _start(self, flight: Flight, work: Callable[[Flight], Awaitable[Answer]]) -> None:
        flight.capture.session.repeats.begin(flight)
        self.counters.in_flight += 1
        flight.start(work, self._landed)

    def _landed(self, flight: Flight, answered: bool) -> None:
        self.counters.in_flight -= 1
        session = flight.capture.session
        session.promised_tokens -= flight.capture.promised_tokens
        flight.capture.promised_tokens = 0
        if not answered and flight.unstored is None:
            session.sampled_tokens += flight.so_far().sampled_tokens
        session.repeats.end(flight, answered=answered)

    async def _recorded_answer(self, session: Session, ended: Ended, call: ModelCall) -> Answer | None:
        """What the record says to a repeat; None: it is about another call after all."""
        found = [
            completion
            for completion in await self.sessions.recorded(session)
            if ended.seq <= completion.seq < ended.seq + call.choices
        ]
        whole = len(found) == call.choices and found[0].completion_id == ended.completion_id and same(call, found[0])
        return answer_of(found) if whole else None

    async def _answered(
        self,
        request: web.BaseRequest,
        dialect: Dialect,
        call: ModelCall,
        flight: Flight | None,
        answer: Answer | None,
        ended: Ended | None,
    ) -> web.StreamResponse:
        """`answer` is out of the record, where there is no flight; `ended` is told when it was read."""
        completion_id = flight.capture.completion_id if flight is not None else secrets.token_hex(12)
        head = ReplyHead(completion_id, int(time.time()))
        headers = {"X-Request-Id": completion_id}
        if flight is not None:
            flight.join()
        try:
            if call.stream:
                return await self._stream(request, dialect, call, flight, answer, ended, head, headers)
            if answer is None:
                assert flight is not None
                answer = await flight.answer()
            response = _response(dialect.render(call, answer, head), headers)
            await response.prepare(request)
            with suppress(ConnectionError):
                await response.write_eof()
                _read(flight, ended)
            response.body = None  # it would live until the connection's next request
            return response
        finally:
            if flight is not None:
                flight.leave()

    async def _stream(
        self,
        request: web.BaseRequest,
        dialect: Dialect,
        call: ModelCall,
        flight: Flight | None,
        answer: Answer | None,
        ended: Ended | None,
        head: ReplyHead,
        headers: dict[str, str],
    ) -> web.StreamResponse:
        writer = dialect.writer(call, head)
        down = Downstream(request, headers, self.node.proxy.keepalive_s, writer.wait, writer.content_type)
        async with down:
            try:
                if flight is None:
                    assert answer is not None
                    if await sent_last(down, writer.end(pieces_of(answer), answer)):
                        _read(None, ended)
                elif await self.relay.deliver(flight, writer, down):
                    _read(flight, ended)
            except CallFault:
                raise
            except Exception:
                log.exception("a streamed call failed inside the proxy")
                await fail(_internal(), writer, down)
        return down.response

    async def _body(self, request: web.BaseRequest) -> bytes:
        body = await self._whole_body(request)
        if len(body) > LARGE_BODY and body.count(b"{") + body.count(b"[") > MAX_PARTS:
            # A few megabytes of empty objects would take every other session's time and gigabytes of memory.
            text = f"the request's JSON has more than {MAX_PARTS} objects and lists"
            raise CallFault(FaultKind.TOO_LARGE, text)
        return body

    async def _whole_body(self, request: web.BaseRequest) -> bytes:
        limit = self.node.proxy.max_body_bytes
        if request.content_length is not None and request.content_length > limit:
            raise CallFault(FaultKind.TOO_LARGE, f"the request body is larger than {limit} bytes")
        _told_to_send(request)
        encoding = request.headers.get("Content-Encoding", "")
        try:
            if not encoding:
                return await _plain_body(request.content, self.node.proxy.body_idle_s, limit)
            chunks = _in_time(request.content, self.node.proxy.body_idle_s)
            return await read_body(chunks, encoding, limit)
        except TimeoutError:
            text = f"the request's body stopped coming for {self.node.proxy.body_idle_s:g} s"
            raise CallFault(FaultKind.TOO_SLOW, text) from None
        except BodyTooLarge as exc:
            raise CallFault(FaultKind.TOO_LARGE, f"the request is refused: {exc}") from None
        except UnknownEncoding as exc:
            raise CallFault(FaultKind.UNSUPPORTED_ENCODING, str(exc)) from None
        except BodyDamaged as exc:
            raise CallFault(FaultKind.BAD_REQUEST, f"the request cannot be read: {exc}") from None


class _WithoutRequests(logging.Filter):
    """aiohttp tells of requests that it cannot read by showing them, and sessions' secrets stand in them."""

    def filter(self, record: logging.LogRecord) -> bool:
        if record.exc_info and record.exc_info[0] is not None:
            record.msg = f"{record.getMessage()}: {record.exc_info[0].__name__}"
            record.args = ()
            record.exc_info = record.exc_text = None
        return True


_http_log = logging.getLogger("polarq.proxy.http")
_http_log.addFilter(_WithoutRequests())

SERVER_OPTIONS: dict[str, Any] = {
    "access_log": None,
    "logger": _http_log,
    "handler_cancellation": True,
    "auto_decompress": False,
    "keepalive_timeout": 620.0,
    "max_line_size": 32 * 1024,
    "max_field_size": 64 * 1024,
    "read_bufsize": 1 << 18,
}
"""Keywords of `web.Server`: no paths in logs, a harness that leaves frees the engine, bodies are unpacked here."""


def _told_to_send(request: web.BaseRequest) -> None:
    """A client that asks before it sends its body is told to. Raises `CallFault`."""
    expected = request.headers.get("Expect")
    if expected is None:
        return
    if expected.lower() != "100-continue":
        raise CallFault(FaultKind.BAD_REQUEST, "of the header Expect only '100-continue' is understood", status=417)
    if request.version >= HttpVersion11:
        assert request.transport is not None
        request.transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")


async def _in_time(content: StreamReader, idle_s: float) -> AsyncIterator[bytes]:
    """The body as it comes. Raises `TimeoutError` when nothing of it comes for so long."""
    while not content.at_eof():
        # What is there already needs no timer: most bodies are whole by now.
        chunk = content.read_nowait()
        if not chunk:
            async with asyncio.timeout(idle_s):
                chunk = await content.readany()
        if chunk:
            yield chunk


async def _plain_body(content: StreamReader, idle_s: float, limit: int) -> bytes:
    """A body that is not packed. Raises `TimeoutError` when nothing of it comes for so long, `BodyTooLarge`."""
    if content.is_eof():
        body = content.read_nowait()  # most bodies are whole by now
        if len(body) > limit:
            raise BodyTooLarge(f"the body is larger than {limit} bytes")
        return body
    loop, pieces, size = asyncio.get_running_loop(), [], 0
    async with asyncio.timeout(idle_s) as patience:
        while not content.at_eof():
            piece = await content.readany()
            patience.reschedule(loop.time() + idle_s)
            pieces.append(piece)
            size += len(piece)
            if size > limit:
                raise BodyTooLarge(f"the body is larger than {limit} bytes")
    return b"".join(pieces)


def _read(flight: Flight | None, ended: Ended | None) -> None:
    """The harness has had the whole answer: who asks the same again unmarked wants another sample."""
    if flight is not None:
        flight.read_by_harness()
    elif ended is not None:
        ended.delivered = True


def _internal() -> CallFault:
    return CallFault(FaultKind.INTERNAL, "polarq's proxy failed; its log says why")


def _key(request: web.BaseRequest) -> str | None:
    return session_in_keys(request.headers, request.query)


def _response(reply: Reply, headers: Mapping[str, str] | None = None) -> web.Response:
    return web.Response(
        body=reply.body,
        status=reply.status,
        content_type="application/json",
        headers={**(reply.headers or {}), **(headers or {})},
    )
