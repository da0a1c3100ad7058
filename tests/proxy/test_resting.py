"""Streams that rest between looks, and events that are read together."""

from __future__ import annotations

import asyncio
import itertools
import json
from contextlib import ExitStack
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from multidict import CIMultiDict
from redis.asyncio import Redis

from polarq.ledger.keys import Keys
from polarq_proxy import pacing
from polarq_proxy.app import installed_dialects
from polarq_proxy.call import Answer, ModelCall, Piece
from polarq_proxy.dialects.base import Dialect, NativeRequest, ReplyHead
from polarq_proxy.engines.vllm import VllmEngine
from polarq_proxy.gather import Gatherer
from polarq_proxy.http1 import Connection
from polarq_proxy.pacing import Pace
from polarq_proxy.sse import SseEvent, SseParser

from .raw_engine import FIRST, RawCall, delta, last, raw_engine
from .rig import running
from .test_http1 import Wire
from .tongues import CHAT, COMPLETIONS, TONGUES, Tongue

ENGINE = VllmEngine()
ENTRY = {"token": "ह", "logprob": -0.25, "bytes": [1], "top_logprobs": []}


def entries(count: int) -> dict[str, Any]:
    return {"content": [ENTRY] * count}


def choices() -> st.SearchStrategy[dict[str, Any]]:
    """One choice of one event, mostly of the usual kind."""
    text = st.sampled_from(["", "a", "go \U0001f9ea", '"\n', "ह"])
    call = st.builds(lambda text: {"tool_calls": [{"index": 0, "function": {"arguments": text}}]}, text)
    named: dict[str, Any] = {"tool_calls": [{"index": 0, "id": "c", "function": {"name": "f", "arguments": ""}}]}
    deltas = st.one_of(
        st.builds(lambda text: {"content": text}, text),
        st.builds(lambda text: {"content": text}, text),
        st.builds(lambda text: {"reasoning": text}, text),
        st.builds(lambda one, other: {"reasoning": one, "reasoning_content": other}, text, text),
        st.builds(lambda text: {"content": None, "reasoning_content": text}, text),
        st.builds(lambda text: {"content": text, "reasoning": text}, text),
        call,
        st.just({"content": None, **named}),
        st.just({}),
        st.just({"role": "assistant", "content": ""}),
        st.just({"refusal": "no"}),
    )
    ids = st.one_of(st.none(), st.lists(st.integers(0, 2**31 - 1), max_size=3), st.just([-1]))
    logprobs = st.one_of(
        st.none(), st.integers(0, 3).map(entries), st.just({"content": None}), st.just({"content": [{"logprob": "x"}]})
    )
    return st.fixed_dictionaries(
        {"index": st.sampled_from([0, 0, 0, 1]), "delta": deltas},
        optional={"token_ids": ids, "logprobs": logprobs, "stop_reason": st.just(None), "finish_reason": st.none()},
    )


EVENTS = st.lists(
    st.builds(lambda choice, model: {"model": model, "choices": [choice]}, choices(), st.sampled_from(["m", "m", ""])),
    max_size=12,
)


def stream_of(events: list[dict[str, Any]]) -> bytes:
    first = {"model": "m", "choices": [{"index": 0, "delta": {"content": ""}}], "prompt_token_ids": [1, 2]}
    ends: list[dict[str, Any]] = [
        {"index": index, "delta": {}, "finish_reason": "stop", "token_ids": [7]} for index in (0, 1)
    ]
    final = [{"model": "m", "choices": ends}, {"choices": [], "usage": {"prompt_tokens": 2, "completion_tokens": 9}}]
    blocks = [json.dumps(event, ensure_ascii=False).encode() for event in (first, *events, *final)]
    return b"".join(b"data: %b\n\n" % block for block in [*blocks, b"[DONE]"])


def gathered(pieces: list[Piece]) -> Answer:
    gatherer = Gatherer(2)
    for piece in pieces:
        gatherer.add(piece)
    assert gatherer.done
    return gatherer.answer()


def one_by_one(data: bytes) -> list[Piece]:
    return [ENGINE.read_event(event) for event in SseParser(1 << 20).feed(data)]


def in_reads(data: bytes, places: list[int]) -> list[Piece]:
    """As they come when the stream is cut into reads at `places`."""
    marks = [0, *sorted(place % (len(data) + 1) for place in places), len(data)]
    parser = SseParser(1 << 20)
    reads = [parser.feed(data[begin:end]) for begin, end in itertools.pairwise(marks)]
    return [piece for events in reads for piece in ENGINE.read_events(events)]


def asked(tongue: Tongue, **fields: Any) -> tuple[Dialect, ModelCall]:
    path, body = tongue.request([("user", "x")], stream=True)
    tail = path.partition("?")[0].removeprefix("/v1beta/").removeprefix("/v1/")
    data = json.dumps({**body, **fields}).encode()
    request = NativeRequest(tail, {"alt": "sse"} if "?" in path else {}, CIMultiDict(), data)
    for dialect in installed_dialects():
        for route in dialect.routes:
            match = route.match("POST", tail)
            if match is not None:
                return dialect, dialect.parse(request, match)
    raise AssertionError(tail)


def written(dialect: Dialect, call: ModelCall, pieces: list[Piece]) -> bytes:
    writer = dialect.writer(call, ReplyHead("abc", 1))
    begin = next(place for place, piece in enumerate(pieces) if any(c.finish_reason for c in piece.choices))
    shown = b"".join(writer.piece(piece) for piece in pieces[:begin])
    return shown + writer.end(pieces[begin:], gathered(pieces))


@given(EVENTS, st.lists(st.integers(0, 1 << 16), max_size=6))
def test_events_that_come_together_are_recorded_as_if_they_came_alone(
    events: list[dict[str, Any]], places: list[int]
) -> None:
    data = stream_of(events)
    alone, together = gathered(one_by_one(data)), gathered(in_reads(data, places))
    assert together == alone
    assert [choice.ids for choice in together.choices] == [choice.ids for choice in alone.choices]


@pytest.mark.parametrize("tongue", TONGUES, ids=[tongue.name for tongue in TONGUES])
@given(EVENTS, st.lists(st.integers(0, 1 << 16), max_size=6))
def test_events_that_come_together_say_the_same_to_the_harness(
    tongue: Tongue, events: list[dict[str, Any]], places: list[int]
) -> None:
    data = stream_of(events)
    dialect, call = asked(tongue)
    alone = tongue.streamed(written(dialect, call, one_by_one(data)))
    assert tongue.streamed(written(dialect, call, in_reads(data, places))) == alone


@pytest.mark.parametrize("tongue", [CHAT, COMPLETIONS], ids=["chat", "completions"])
@given(st.lists(st.sampled_from(["a", "ह", ""]), max_size=9), st.lists(st.integers(0, 1 << 16), max_size=4))
def test_who_asked_for_ids_gets_all_of_them(tongue: Tongue, texts: list[str], places: list[int]) -> None:
    events = [
        {"choices": [{"index": 0, "delta": {"content": text}, "token_ids": [at, at], "logprobs": entries(2)}]}
        for at, text in enumerate(texts)
    ]
    data = stream_of(events)
    dialect, call = asked(tongue, return_token_ids=True)
    shown = written(dialect, call, in_reads(data, places))
    told = [json.loads(line[6:]) for line in shown.split(b"\n") if line.startswith(b"data: {")]
    found = [choice for event in told for choice in event["choices"] if choice["index"] == 0]
    ids = [token_id for choice in found for token_id in choice.get("token_ids") or []]
    assert ids == [at for at in range(len(texts)) for _ in range(2)] + [7]


def test_a_busy_read_is_one_piece() -> None:
    events = SseParser(1 << 20).feed(delta("a", (1,)) + delta("b", (2, 3)) + delta(None, (4,)))
    [piece] = ENGINE.read_events(events)
    [change] = piece.choices
    assert (change.delta, change.ids) == ({"content": "ab"}, [1, 2, 3, 4])
    assert [entry["logprob"] for entry in change.logprobs or ()] == [-0.5] * 4


def test_what_came_before_an_error_is_read() -> None:
    events = [SseEvent(b'{"choices":[{"index":0,"delta":{"content":"a"}}]}'), SseEvent(b'{"error":{"code":500}}')]
    pieces = ENGINE.read_events(events)
    assert next(pieces).choices[0].delta == {"content": "a"}
    with pytest.raises(Exception, match="answered 500"):
        next(pieces)


HEAD = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


@given(st.lists(st.binary(min_size=1, max_size=9), max_size=9), st.lists(st.integers(0, 1 << 16), max_size=9))
def test_a_stream_that_rests_loses_nothing_and_ends_at_once(parts: list[bytes], places: list[int]) -> None:
    body = b"".join(map(chunk, parts))
    marks = [0, *sorted(place % (len(body) + 1) for place in places), len(body)]

    async def taken(longest_s: float) -> list[bytes]:
        pace, seen = LongPace(longest_s), []
        connection = Connection()
        connection.connection_made(Wire())
        connection.expect_answer()
        connection.data_received(HEAD)

        def take(data: bytes) -> bool:
            seen.append(data)
            connection.rest(pace)
            return True

        reading = asyncio.create_task(connection.each(take))
        await asyncio.sleep(0)
        for begin, end in itertools.pairwise(marks):
            connection.data_received(body[begin:end])
        connection.data_received(chunk(b"end") + b"0\r\n\r\n")
        await reading
        assert connection.reusable
        return seen

    for longest_s in (0.0, 3600.0):
        seen = asyncio.run(taken(longest_s))
        assert b"".join(seen) == b"".join(parts) + b"end"
    assert len(seen) <= 2  # all that came while it rested, at once


class LongPace(Pace):
    def __init__(self, longest_s: float) -> None:
        super().__init__()
        self._longest_s = longest_s

    @property
    def rest_s(self) -> float:
        return self._longest_s


async def test_what_came_while_a_stream_rested_is_read_before_its_connection_is_lost() -> None:
    seen: list[bytes] = []
    connection = Connection()
    connection.connection_made(Wire())
    connection.expect_answer()
    connection.data_received(HEAD)
    pace = LongPace(3600.0)

    def take(data: bytes) -> bool:
        seen.append(data)
        connection.rest(pace)
        return True

    reading = asyncio.create_task(connection.each(take))
    await asyncio.sleep(0)
    for part in (b"a", b"b", b"c"):
        connection.data_received(chunk(part))
    assert seen == [b"a"]
    connection.connection_lost(None)
    with pytest.raises(ConnectionError):
        await reading
    assert seen == [b"a", b"bc"]


def test_few_streams_do_not_rest_and_many_not_for_long() -> None:
    pace = Pace()
    with ExitStack() as streams:
        for count in range(300):
            assert (pace.rest_s == 0.0) == (count * pacing.REST_PER_STREAM_S < pacing.TICK_S)
            assert pace.rest_s <= pacing.LONGEST_REST_S
            streams.enter_context(pace.one_more())
    assert pace.rest_s == 0.0


async def test_a_streams_first_token_and_its_end_wait_for_no_rest(
    redis_client: Redis, keys: Keys, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pacing, "REST_PER_STREAM_S", 3600.0)
    monkeypatch.setattr(pacing, "LONGEST_REST_S", 3600.0)
    others_run, begun, read = asyncio.Event(), asyncio.Event(), asyncio.Event()

    async def act(call: RawCall) -> None:
        await call.head()
        await call.chunk(FIRST)
        if others_run.is_set():
            await begun.wait()
        await call.chunk(delta("a", (11,)))
        others_run.set()
        await read.wait()
        await call.chunk(delta("b", (12,)))
        await call.chunk(delta("c", (13,)) + delta(finish="stop") + last(3))
        await call.end()

    async with raw_engine(act) as engine, running(redis_client, keys, engine.url) as rig:
        other = asyncio.create_task(rig.stream())
        await others_run.wait()
        body = {"model": "m", "messages": [{"role": "user", "content": "second"}], "stream": True}
        async with rig.http.post(rig.base_url + "/v1/chat/completions", json=body) as answer:
            seen = await answer.content.readuntil(b"\n\n")
            begun.set()  # the first token comes by itself
            while b'"a"' not in seen:
                seen += await answer.content.readuntil(b"\n\n")
            read.set()
            seen += await answer.content.read()
        assert seen.endswith(b"data: [DONE]\n\n")
        assert (await other).text() == "abc"
        assert [record.sampled_ids for record in await rig.records()] == [[11, 12, 13]] * 2
