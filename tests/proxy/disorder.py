"""A world of one engine, one store and one session, in which calls, cuts, faults, pauses and restarts happen in any
order; it notes what harnesses asked and read, so that the record can be compared with both sides."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass
from typing import Literal

import aiohttp
from aiohttp import web
from redis.asyncio import Redis

from polarq.contracts.completion import Completion
from polarq.ledger.keys import Keys
from polarq.store.completions import read_completions
from polarq.store.grants import GrantSpec, open_grant
from polarq.store.pauses import PauseMode
from polarq.testing.inference import SampledCall
from polarq.testing.inference.engine import Engine
from polarq.topology import InferenceEndpoint, Node
from polarq.topology.models import ProxySection
from polarq_proxy.app import Proxy
from polarq_proxy.serve import connect
from tests.pauses import clear_pause, set_pause

from .novelty import SESSION, Novel, novel_engine
from .rig import until
from .tongues import Tongue

Then = Literal["", "whole", "streamed", "abort"]


@dataclass(frozen=True)
class Question:
    """What a call asks; the same for every repeat of it."""

    tongue: Tongue
    talk: tuple[tuple[str, str], ...]


@dataclass
class Reading:
    """What a harness got of one call."""

    question: Question
    text: str
    whole: bool
    """It read the answer to its end, and none says that something is missing."""
    new: bool
    """It may not be answered with anything that an earlier call was answered with."""
    status: int = 200


@dataclass
class Asked:
    """How often a question was asked as one, as far as anybody could tell."""

    calls: int = 0
    """At most so many samples may end well."""
    read: bool = False
    """The last call was read to its end, so that the same again is another call."""
    unread: bool = False
    """The last call was certainly not read, so that the same again is a repeat."""


class World:
    """Made by `world`. Steps happen one after the other; what is at the same time is one step."""

    def __init__(self, redis: Redis, keys: Keys, engine: Engine, url: str, grace_s: float, up: bool) -> None:
        self.redis, self.keys, self.engine = redis, keys, engine
        self.asked: dict[Question, Asked] = {}
        self.readings: list[Reading] = []
        self.requests = 0
        self.replays = 0
        self.sampled_tokens = 0
        self.cut_short: set[str] = set()
        """Samples (by request id) that were on their way when their call was cut from this side of it."""
        self.refused: set[str] = set()
        """Samples that ended while the store took nothing."""
        self.untaken: set[Question] = set()
        """What was asked meanwhile."""
        assert isinstance(engine.selector, Novel)
        self.model = engine.selector
        self.spec = GrantSpec(rollout_id=SESSION, task_id="task", attempt=1, token=1, node_id="node0")
        self.secret = ""
        self._node = Node(
            id="node0",
            inference=[InferenceEndpoint(base_url=url, engine="vllm")],
            proxy=ProxySection(retry_grace_s=grace_s, stream_upstream=up),
        )
        self._runner: web.ServerRunner | None = None
        self.http: aiohttp.ClientSession
        self.proxy: Proxy

    # The proxy's life

    async def start(self) -> None:
        if not self.secret:
            self.secret = await open_grant(self.redis, self.keys, self.spec, ttl_s=3600)
        self.proxy = Proxy(self._node, self.redis, self.keys)
        self._runner = web.ServerRunner(self.proxy.server(), shutdown_timeout=0.02)
        await self._runner.setup()
        await self.proxy.start()
        await web.TCPSite(self._runner, "127.0.0.1", 0).start()
        self.base_url = f"http://127.0.0.1:{self._runner.addresses[0][1]}/s/{self.secret}"
        self.http = aiohttp.ClientSession()

    async def stop(self) -> None:
        assert self._runner is not None
        await self._runner.cleanup()
        await self.proxy.close()
        await self.http.close()
        self.replays += self.proxy.counters.replays
        self.sampled_tokens += self.proxy.counters.sampled_tokens

    async def restart(self) -> None:
        """All that the old process knew is gone. Whether the last answers were read nobody knows any more."""
        self._cut_now()
        await self.stop()
        await self.start()
        for asked in self.asked.values():
            asked.read = asked.unread = False

    # What is true

    @property
    def samples(self) -> list[SampledCall]:
        return [call for call in self.engine.ledger if call.session_id == SESSION]

    async def records(self) -> list[Completion]:
        return await read_completions(self.redis, self.keys, SESSION, self.spec.attempt, self.spec.token)

    def _cut_now(self) -> None:
        """What runs at the engine now may end there before the cut comes there."""
        self.cut_short |= {call.request_id for call in self.samples if call.finished_at is None}

    async def at_rest(self) -> None:
        """Waits until no call is under way and all of it is written."""
        await until(lambda: not self.proxy.sessions.under_way() and self.proxy.counters.in_flight == 0)
        await self.proxy.recorder.drain()
        await until(lambda: not self.engine.gate.running)

    # One call

    def _counted(self, question: Question, *, marked: bool) -> bool:
        """Notes that it is asked; whether it must get a sample of its own."""
        self.requests += 1
        known = self.asked.setdefault(question, Asked())
        repeat = known.calls > 0 and (marked or known.unread)
        if not repeat:
            known.calls += 1
        new = known.read and not repeat
        known.read = known.unread = False
        return new

    async def ask(self, question: Question, *, stream: bool, marked: bool = False) -> Reading:
        """Reads to the end."""
        new = self._counted(question, marked=marked)
        reading = await self._read(question, stream=stream, marked=marked, new=new)
        self.asked[question].read = reading.whole
        return reading

    async def _read(self, question: Question, *, stream: bool, marked: bool, new: bool) -> Reading:
        try:
            async with self._posted(question, stream=stream, marked=marked) as answer:
                raw = await answer.read()
        except aiohttp.ClientError:  # the proxy was restarted meanwhile
            return self._noted(Reading(question, "", whole=False, new=new, status=0))
        assert answer.status != 500 or b"polarq's proxy failed" not in raw, raw
        if answer.status != 200:
            return self._noted(Reading(question, "", whole=False, new=new, status=answer.status))
        if stream:
            text, ended = question.tongue.streamed(raw)
            return self._noted(Reading(question, text, whole=ended, new=new))
        return self._noted(Reading(question, question.tongue.said(await answer.json()), whole=True, new=new))

    def _noted(self, reading: Reading) -> Reading:
        self.readings.append(reading)
        return reading

    @asynccontextmanager
    async def _posted(self, question: Question, *, stream: bool, marked: bool) -> AsyncIterator[aiohttp.ClientResponse]:
        path, body = question.tongue.request(question.talk, stream=stream)
        headers = {"X-Stainless-Retry-Count": "1"} if marked else {}
        async with self.http.post(self.base_url + path, json=body, headers=headers) as answer:
            yield answer

    async def cut(self, question: Question, *, stream: bool, marked: bool, where: str, then: Then = "") -> None:
        """Asks and hangs up: before the head, in the middle of a stream, or when its last event has come. Then the same
        harness asks the same again at once, or what goes on without it is aborted by a pause."""
        self._counted(question, marked=marked)
        before = len(self.samples)
        seen = bytearray()
        came = asyncio.Event()
        reading = asyncio.create_task(self._read_until(question, stream, marked, where, seen, came))
        begun = asyncio.create_task(self._begun(before, tokens=0 if where == "head" else 2))
        signs = {reading, begun} if where == "head" or not stream else {reading, asyncio.create_task(came.wait())}
        with suppress(TimeoutError):
            async with asyncio.timeout(20):
                await asyncio.wait({*signs, reading}, return_when=asyncio.FIRST_COMPLETED)
        await self.engine.gate.pause("keep")
        unfinished = [call for call in self.samples[before:] if call.finished_at is None]
        for task in (reading, begun, *signs):
            task.cancel()
        await asyncio.wait({reading, begun, *signs})
        if seen:
            text, _ = question.tongue.streamed(bytes(seen))
            self._noted(Reading(question, text, whole=False, new=False))
        await until(lambda: not any(flight.awaited for flight in self.proxy.sessions.under_way()))
        self.asked[question].unread = len(unfinished) == 1
        if then in {"whole", "streamed"}:
            await self._asked_while_frozen(question, stream=then == "streamed")
            return
        self.engine.gate.resume()
        if then == "abort" and unfinished:
            await self.engine.ledger.wait_until(
                lambda _: unfinished[0].finished_at is not None or len(unfinished[0].sampled_ids) >= 2, timeout_s=20
            )
            await self._pausing("abort")
            await self._resumed()

    async def _asked_while_frozen(self, question: Question, *, stream: bool) -> Reading:
        """Lets the engine go on when the call has been joined to one under way, or is one of its own."""
        replays, flights = self.proxy.counters.replays, self.proxy.sessions.under_way()
        asking = asyncio.create_task(self.ask(question, stream=stream))
        await until(
            lambda: (
                asking.done()
                or self.proxy.counters.replays > replays
                or any(flight not in flights for flight in self.proxy.sessions.under_way())
            )
        )
        self.engine.gate.resume()
        return await asking

    async def _begun(self, before: int, tokens: int = 2) -> None:
        await self.engine.ledger.wait_until(
            lambda _: len(self.samples) > before and len(self.samples[-1].sampled_ids) >= tokens, timeout_s=20
        )

    async def _pausing(self, mode: PauseMode) -> None:
        """The policy's weights are about to change; returns when nothing is in flight any more."""
        if mode == "abort":
            self._cut_now()
        await set_pause(self.redis, self.keys, lease_s=600, mode=mode)
        await self.proxy.pauses.look()
        await until(lambda: self.proxy.gate.in_flight == 0)

    async def _resumed(self) -> None:
        await clear_pause(self.redis, self.keys)
        await self.proxy.pauses.look()

    async def _read_until(
        self, question: Question, stream: bool, marked: bool, where: str, seen: bytearray, came: asyncio.Event
    ) -> None:
        with suppress(aiohttp.ClientError):
            async with AsyncExitStack() as stack:
                answer = await stack.enter_async_context(self._posted(question, stream=stream, marked=marked))
                while not answer.content.at_eof():
                    chunk = await answer.content.readany()
                    if stream and answer.status == 200:
                        seen += chunk
                    text, ended = question.tongue.streamed(bytes(seen))
                    if (text and where == "middle") or ended:
                        came.set()
                        await asyncio.Event().wait()

    # Steps of several at the same time

    async def overlapped(self, question: Question, *, stream: bool) -> None:
        """Asked in one form, and while that is under way in the other."""
        before = len(self.samples)
        first = asyncio.create_task(self.ask(question, stream=stream))
        begun = asyncio.create_task(self._begun(before))
        await asyncio.wait({first, begun}, return_when=asyncio.FIRST_COMPLETED)
        await self.engine.gate.pause("keep")
        known = self.asked[question]
        if not first.done() and [call.finish_reason for call in self.samples[before:]] == [None]:
            known.unread = True
        second = await self._asked_while_frozen(question, stream=not stream)
        begun.cancel()
        await asyncio.wait({first, begun})
        known.read = first.result().whole and second.whole

    async def paused(self, question: Question, *, stream: bool, mode: PauseMode) -> None:
        """The policy's weights change in the middle of it."""
        before = len(self.samples)
        asking = asyncio.create_task(self.ask(question, stream=stream))
        begun = asyncio.create_task(self._begun(before))
        await asyncio.wait({asking, begun}, return_when=asyncio.FIRST_COMPLETED)
        await self._pausing(mode)
        await self._resumed()
        begun.cancel()
        await asyncio.wait({asking, begun})
        asking.result()

    async def interrupted(self, question: Question, *, stream: bool) -> None:
        """The proxy is restarted in the middle of it."""
        before = len(self.samples)
        asking = asyncio.create_task(self.ask(question, stream=stream))
        begun = asyncio.create_task(self._begun(before))
        await asyncio.wait({asking, begun}, return_when=asyncio.FIRST_COMPLETED)
        begun.cancel()
        await self.restart()
        await asyncio.wait({asking, begun})
        asking.result()
        self.asked[question].read = False

    async def unstored(self, question: Question, *, stream: bool, again: bool) -> None:
        """The store takes nothing while it is asked. Who asks `again`, as told, is given what was sampled."""
        await self.at_rest()  # what was asked before is not in question
        before = len(self.samples)
        await self.redis.config_set("maxmemory", "1")
        try:
            await self.ask(question, stream=stream)
            await self.at_rest()
        finally:
            await self.redis.config_set("maxmemory", "0")
        sampled = self.samples[before:]
        self.asked[question].unread = True
        self.untaken.add(question)
        if again and len(sampled) == 1 and sampled[0].delivered and not sampled[0].aborted:
            reading = await self.ask(question, stream=not stream)
            assert reading.whole, reading
            assert len(self.samples) == before + 1, "what the store did not take was sampled again"
        else:
            self.refused |= {call.request_id for call in sampled}

    async def twins(self, question: Question, *, stream: bool) -> None:
        """Asked twice at the same time in the same form: two samples are wanted."""
        one, other = await asyncio.gather(self.ask(question, stream=stream), self.ask(question, stream=stream))
        assert not (one.whole and one.text == other.text), "two who wanted a sample each were given one"


@asynccontextmanager
async def world(redis_url: str, keys: Keys, *, grace_s: float, stream_upstream: bool) -> AsyncIterator[World]:
    async with novel_engine() as (engine, url), connect(redis_url) as redis:
        made = World(redis, keys, engine, url, grace_s, stream_upstream)
        await made.start()
        try:
            yield made
        finally:
            await made.stop()
