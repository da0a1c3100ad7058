"""Answers of a server, however they are cut, framed or broken."""

from __future__ import annotations

import asyncio
import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from polarq_proxy.http1 import Connection, Malformed

WHOLE = b"HTTP/1.1 200 OK\r\nContent-Type: a\r\nContent-Length: 5\r\n\r\nhello"
CHUNKED = (
    b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 200\r\ntransfer-encoding: Chunked\r\n\r\n"
    b"2;x=1\r\nhe\r\n003\r\nllo\r\n0\r\nTrailer: 1\r\n\r\n"
)
TO_THE_END = b"HTTP/1.0 200 OK\r\n\r\nhello"


class Wire(asyncio.Transport):
    """What a connection does to its transport."""

    def __init__(self) -> None:
        super().__init__()
        self.gone = False

    def abort(self) -> None:
        self.gone = True

    def is_closing(self) -> bool:
        return self.gone

    def get_write_buffer_size(self) -> int:
        return 0


def fed(pieces: list[bytes]) -> tuple[Connection, Wire]:
    connection, wire = Connection(), Wire()
    connection.connection_made(wire)
    connection.expect_answer()
    for piece in pieces:
        if not wire.gone:
            connection.data_received(piece)
    return connection, wire


def cut(data: bytes, places: list[int]) -> list[bytes]:
    marks = [0, *sorted(place % (len(data) + 1) for place in places), len(data)]
    return [data[begin:end] for begin, end in itertools.pairwise(marks) if end > begin]


async def body(connection: Connection) -> bytes:
    found = b""
    while piece := await connection.some():
        found += piece
    return found


@given(st.sampled_from([WHOLE, CHUNKED]), st.lists(st.integers(0, 500), max_size=12))
def test_an_answer_is_the_same_however_it_is_cut(data: bytes, places: list[int]) -> None:
    connection, wire = fed(cut(data, places))
    assert connection.ended
    assert connection.status == 200
    assert connection.reusable
    assert asyncio.run(body(connection)) == b"hello"
    assert not wire.gone


@given(st.lists(st.integers(0, 500), max_size=12))
def test_an_answer_without_a_length_ends_with_its_connection(places: list[int]) -> None:
    connection, _ = fed(cut(TO_THE_END, places))
    assert not connection.ended
    connection.connection_lost(None)
    assert connection.ended
    assert not connection.reusable
    assert asyncio.run(body(connection)) == b"hello"


@pytest.mark.parametrize("data", [WHOLE[:-1], CHUNKED[:-2], CHUNKED[:-20], WHOLE[:20]])
def test_a_cut_answer_is_no_answer(data: bytes) -> None:
    connection, _ = fed([data])
    connection.connection_lost(None)
    with pytest.raises(ConnectionError):
        asyncio.run(body(connection))


HEAD = b"HTTP/1.1 200 OK\r\n"


@pytest.mark.parametrize(
    "data",
    [
        b"<html>\r\n\r\n",
        b"HTTP/2 200 OK\r\n\r\n",
        b"HTTP/1.1 +20 OK\r\n\r\n",
        b"HTTP/1.1 101 Switching\r\n\r\n",
        HEAD + b"no colon\r\n\r\n",
        HEAD + b" folded: x\r\n\r\n",
        HEAD + b"Content-Length: -1\r\n\r\n",
        HEAD + b"Content-Length: 1\r\nContent-Length: 2\r\n\r\n",
        HEAD + b"Transfer-Encoding: gzip, chunked\r\n\r\n",
        HEAD + b"Transfer-Encoding: chunked\r\n\r\n+1\r\n",
        HEAD + b"Transfer-Encoding: chunked\r\n\r\nffffffffffffffffff\r\n",
        HEAD + b"Transfer-Encoding: chunked\r\n\r\n1\r\nab\r\n",
        HEAD + b"x: " + b"y" * 70_000,
        HEAD + b"Transfer-Encoding: chunked\r\n\r\n" + b"1" * 2000,
    ],
)
def test_what_is_not_http_closes_the_connection(data: bytes) -> None:
    connection, wire = fed([data])
    assert wire.gone
    with pytest.raises(Malformed):
        asyncio.run(body(connection))


@pytest.mark.parametrize("data", [WHOLE + b"HTTP/1.1 200 OK\r\n", CHUNKED + b"x"])
def test_more_than_one_answer_ends_the_connection_and_not_the_answer(data: bytes) -> None:
    connection, wire = fed([data])
    assert wire.gone
    assert asyncio.run(body(connection)) == b"hello"


@pytest.mark.parametrize(
    ("data", "kept"),
    [
        (WHOLE, True),
        (WHOLE.replace(b"Content-Type: a", b"Connection: close"), False),
        (WHOLE.replace(b"/1.1", b"/1.0"), False),
        (WHOLE.replace(b"/1.1", b"/1.0").replace(b"Content-Type: a", b"Connection: keep-alive"), True),
        (CHUNKED.replace(b"transfer", b"Content-Length: 3\r\ntransfer"), False),
        (b"HTTP/1.1 204 No\r\n\r\n", True),
    ],
)
def test_a_connection_is_kept_as_its_server_says(data: bytes, kept: bool) -> None:
    assert fed([data])[0].reusable == kept
