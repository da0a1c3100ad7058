"""What goes to a server through a sandbox's HTTP proxy is one request, which nobody can read as two."""

from __future__ import annotations

import asyncio

import pytest

from polarq_worker.network.body import BadBody, Body
from polarq_worker.network.head import BadHead, parse_head
from tests.network.rig import LONG_S, Web, egress, serving

ASK = "GET http://a.example/ HTTP/1.1\r\n"


@pytest.mark.parametrize(
    ("head", "status"),
    [
        ("GET / HTTP/1.1\r\nHost: a.example", 400),
        ("GET a.example HTTP/1.1", 400),
        ("get http://a.example/ HTTP/1.1", 400),
        ("GET http://a.example/ HTTP/2.0", 400),
        ("GET  http://a.example/ HTTP/1.1", 400),
        ("GET http://a.example/#x HTTP/1.1", 400),
        ("GET http://b.example@a.example/ HTTP/1.1", 400),
        ("GET http://a.example:0/ HTTP/1.1", 400),
        ("GET http://a.example:99999/ HTTP/1.1", 400),
        ("GET http://a%2eexample/ HTTP/1.1", 400),
        ("GET http:///x HTTP/1.1", 400),
        ("GET http://a.example\\@b.example/ HTTP/1.1", 400),
        ("GET ftp://a.example/ HTTP/1.1", 501),
        ("GET https://a.example/ HTTP/1.1", 501),
        ("CONNECT a.example HTTP/1.1", 400),
        ("CONNECT a.example:443 HTTP/1.1\r\nContent-Length: 5", 400),
        ("CONNECT a.example:443 HTTP/1.1\r\nTransfer-Encoding: chunked", 400),
        (f"{ASK}Content-Length: 5\r\nTransfer-Encoding: chunked", 400),
        (f"{ASK}Content-Length: 5\r\nContent-Length: 6", 400),
        (f"{ASK}Content-Length: +5", 400),
        (f"{ASK}Content-Length: 5, 5", 400),
        (f"{ASK}Transfer-Encoding: xchunked", 400),
        (f"{ASK}Transfer-Encoding: gzip, chunked", 400),
        (f"{ASK}Transfer-Encoding: chunked\r\nTransfer-Encoding: chunked", 400),
        ("GET http://a.example/ HTTP/1.0\r\nTransfer-Encoding: chunked", 400),
        (f"{ASK}Content-Length : 5", 400),
        (f"{ASK} Content-Length: 5", 400),
        (f"{ASK}X: a\r\n folded", 400),
        (f"{ASK}X: a\nContent-Length: 5", 400),
        (f"{ASK}X: a\rContent-Length: 5", 400),
        (f"{ASK}X: a\0b", 400),
        (f"{ASK}Host: a\r\nHost: b", 400),
        (f"{ASK}X: {'a' * 20000}", 431),
        (f"{ASK}" + "X: a\r\n" * 500 + "Y: b", 431),
    ],
)
def test_what_can_be_read_in_two_ways_is_not_carried(head: str, status: int) -> None:
    with pytest.raises(BadHead) as caught:
        parse_head(head.encode("latin-1"))
    assert caught.value.status == status
    assert "\n" not in str(caught.value)


def test_a_request_is_written_anew_with_its_own_host_and_no_word_between_proxies() -> None:
    head = parse_head(
        b"POST http://A.Example:8080?q=1 HTTP/1.1\r\nHost: b.example\r\nConnection: close, X-Secret\r\nX-Secret: 1\r\n"
        b"Proxy-Authorization: Basic eA==\r\nProxy-Connection: keep-alive\r\nUpgrade: h2c\r\nContent-Length: 3\r\n"
        b"X-Mine: 2"
    )
    assert head.forwarded == (
        b"POST /?q=1 HTTP/1.1\r\nHost: a.example:8080\r\nContent-Length: 3\r\nX-Mine: 2\r\nConnection: close\r\n\r\n"
    )
    assert (str(head.target), head.asked, head.body_bytes) == ("a.example:8080", "A.Example:8080", 3)


def test_what_says_where_a_body_ends_cannot_be_taken_out_of_a_request() -> None:
    head = parse_head(f"{ASK}Connection: transfer-encoding\r\nTransfer-Encoding: chunked".encode())
    assert b"Transfer-Encoding: chunked\r\n" in head.forwarded


def test_a_body_is_as_long_as_it_says() -> None:
    body = Body(5)
    assert [body.take(b"abc"), body.done, body.take(b"deGET /"), body.done, body.take(b"more")] == [
        b"abc",
        False,
        b"de",
        True,
        b"",
    ]


def test_a_chunked_body_is_written_anew_wherever_it_is_cut() -> None:
    raw = b"5 ;ext=1\r\nhello\r\n00a\r\n0123456789\r\n0\r\nTrailer: x\r\n\r\nGET / HTTP/1.1\r\n"
    for size in (1, 2, 3, 7, len(raw)):
        body = Body(None)
        out = b"".join(body.take(raw[at : at + size]) for at in range(0, len(raw), size))
        assert out == b"5\r\nhello\r\na\r\n0123456789\r\n0\r\n\r\n"
        assert body.done


@pytest.mark.parametrize(
    "raw", [b"-1\r\n", b"0x5\r\n", b"\r\n", b"5\nhello", b"5\r\nhelloX\r\n", b"f" * 20 + b"\r\n", b"1" * 9000]
)
def test_a_chunked_body_that_cannot_be_read_is_not_carried(raw: bytes) -> None:
    with pytest.raises(BadBody):
        Body(None).take(raw + b"\r\n\r\n")


async def test_a_second_request_on_a_connection_goes_nowhere() -> None:
    web = Web()
    async with serving(web.handle) as port, egress(f"127.0.0.1:{port}") as door:
        where = f"http://127.0.0.1:{port}"
        hidden = f"GET {where}/hidden HTTP/1.1\r\nHost: other\r\n\r\n"
        bodies = ("Content-Length: 2\r\n\r\nhi", "Transfer-Encoding: chunked\r\n\r\n2\r\nhi\r\n0\r\n\r\n", "\r\n")
        for body in bodies:
            said = await door.ask(f"POST {where}/seen HTTP/1.1\r\n{body}{hidden}")
            assert said.count("HTTP/1.1 200") == 1
            assert "heard /seen" in said
    assert len(web.heads) == len(bodies)
    assert b"hidden" not in b"".join(web.bodies)


async def test_a_large_body_arrives_whole() -> None:
    web, block = Web(), b"0123456789abcdef" * (1 << 16)
    async with serving(web.handle) as port, egress(f"127.0.0.1:{port}") as door:
        head = f"PUT http://127.0.0.1:{port}/up HTTP/1.1\r\nContent-Length: {len(block)}\r\n\r\n"
        assert "heard /up" in await door.ask(head.encode() + block)
    assert web.bodies == [block]


async def test_a_body_that_cannot_be_read_on_never_ends_for_its_server() -> None:
    heard: asyncio.Queue[bytes] = asyncio.Queue()

    async def server(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        heard.put_nowait(await reader.read())

    async with serving(server) as port, egress(f"127.0.0.1:{port}") as door:
        head = f"PUT http://127.0.0.1:{port}/ HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n"
        assert await door.ask(f"{head}3\r\nabcdef\r\n0\r\n\r\n") == ""
        async with asyncio.timeout(LONG_S):
            assert not (await heard.get()).endswith(b"0\r\n\r\n")
