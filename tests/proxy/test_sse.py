"""Event streams, read from bytes that come in any pieces."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from polarq_proxy.sse import EventTooLarge, SseEvent, SseParser

STREAM = (
    'data: {"text":"go \U0001f9ea \u0939"}\n\n: a comment\n\nevent: error\r\ndata: one\r\ndata:  two\r\n\r\n'
    "data\rid: 7\rretry: 5\r\rdata: [DONE]\n\n"
).encode()
EVENTS = [
    SseEvent('{"text":"go \U0001f9ea \u0939"}'.encode()),
    SseEvent(b"one\n two", b"error"),
    SseEvent(b""),
    SseEvent(b"[DONE]"),
]


def parsed(chunks: list[bytes], limit: int = 1 << 20) -> list[SseEvent]:
    parser = SseParser(limit)
    events = [event for chunk in chunks for event in parser.feed(chunk)]
    assert not parser.unfinished
    return events


def test_a_stream_cut_at_any_byte_gives_the_same_events() -> None:
    for cut in range(len(STREAM) + 1):
        assert parsed([STREAM[:cut], STREAM[cut:]]) == EVENTS


def test_a_stream_of_single_bytes_gives_the_same_events() -> None:
    assert parsed([STREAM[place : place + 1] for place in range(len(STREAM))]) == EVENTS


@given(st.lists(st.integers(0, len(STREAM)), max_size=12))
def test_a_stream_in_any_pieces_gives_the_same_events(cuts: list[int]) -> None:
    places = [0, *sorted(cuts), len(STREAM)]
    assert parsed([STREAM[a:b] for a, b in pairwise(places)]) == EVENTS


@pytest.mark.parametrize("cut", range(4))
def test_a_byte_order_mark_at_the_start_is_skipped(cut: int) -> None:
    stream = b"\xef\xbb\xbfdata: a\n\n"
    assert parsed([stream[:cut], stream[cut:]]) == [SseEvent(b"a")]


def test_an_event_of_many_megabytes_comes_whole() -> None:
    data = b"x" * (5 << 20)
    stream = b"data: " + data + b"\n\n"
    assert parsed([stream[at : at + 65536] for at in range(0, len(stream), 65536)], 6 << 20) == [SseEvent(data)]


def test_an_event_without_end_is_cut_at_the_limit() -> None:
    parser = SseParser(1000)
    assert parser.feed(b"data: ok\n\n") == [SseEvent(b"ok")]
    with pytest.raises(EventTooLarge, match="1000"):
        for _ in range(100):
            parser.feed(b"x" * 50)


def test_an_event_of_endless_lines_is_cut_at_the_limit() -> None:
    parser = SseParser(1000)
    with pytest.raises(EventTooLarge):
        for _ in range(100):
            parser.feed(b"data: 0123456789\n" * 10)


def test_what_was_never_ended_is_told() -> None:
    for rest in (b"data: half", b"data: whole line\n"):
        parser = SseParser(1000)
        assert parser.feed(b"data: a\n\n" + rest) == [SseEvent(b"a")]
        assert parser.unfinished
