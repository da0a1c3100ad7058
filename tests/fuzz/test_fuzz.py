"""What `make fuzz` looks for, in small: any bytes, and real requests spoilt."""

from __future__ import annotations

import asyncio
import json
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from polarq.testing.redis import EmbeddedRedis
from polarq_proxy.carriers import session_in_head

from .blackbox import attacked
from .mutation import captured, changed, spoilt
from .targets import PATHS, TARGETS, exchanged

STREAM = b'data: {"a":1}\n\n: c\n\nevent: error\r\ndata: one\r\ndata:  two\r\n\r\ndata\rid: 7\r\rdata: [DONE]\n\n'
ANSWERS = [
    b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\nContent-Type: application/json\r\n\r\n[1,2]",
    b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n5\r\ndata:\r\nA;x=1\r\n 0123456\n\n\r\n0\r\nX: y\r\n\r\n",
    b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 503 Busy\r\nConnection: close\r\n\r\nbusy",
    b"HTTP/1.0 204 Nothing\r\n\r\n",
]
seeds = st.integers(0, 2**32).map(random.Random)


@pytest.mark.parametrize("name", sorted(TARGETS))
@given(data=st.binary(max_size=300))
def test_any_bytes_are_read_or_refused(name: str, data: bytes) -> None:
    TARGETS[name](data)


@settings(max_examples=200)
@given(
    data=st.lists(st.sampled_from([b"data", b":", b" ", b"\n", b"\r", b"event", b"x", b"\xef\xbb\xbf", b"\xff", b"id"]))
)
def test_any_stream_of_events_is_read_the_same_however_it_is_cut(data: list[bytes]) -> None:
    TARGETS["sse"](b"".join(data))


@given(dice=seeds)
def test_spoilt_streams_are_read_the_same_however_they_are_cut(dice: random.Random) -> None:
    TARGETS["sse"](dice.randbytes(2) + spoilt(STREAM, dice))


@settings(max_examples=150)
@given(dice=seeds)
def test_spoilt_requests_of_harnesses_are_read_or_refused(dice: random.Random) -> None:
    real = dice.choice(captured())
    place = next((at for at, path in enumerate(PATHS) if real.path.endswith(path)), dice.randrange(len(PATHS)))
    chosen = bytes([place if dice.random() < 0.9 else dice.randrange(256)])
    data = json.dumps(changed(real.body, dice)).encode("utf-8", "surrogatepass")
    TARGETS["request"](chosen + (data if dice.random() < 0.8 else spoilt(data, dice)))


@pytest.mark.parametrize("role", [[], {}, [[{}]], 1, None])
def test_a_role_that_is_no_word_is_read_or_refused(role: object) -> None:
    said = [{"role": role, "content": "x"}]
    for at in range(len(PATHS)):
        for name in ("messages", "input", "contents"):
            TARGETS["request"](bytes([at]) + json.dumps({"model": "m", "max_tokens": 9, name: said}).encode())


@pytest.mark.parametrize("kind", [[], {}, [[{}]], 1, None])
def test_a_tools_type_that_is_no_word_is_read_or_refused(kind: object) -> None:
    tool = {"name": "run", "type": kind, "function": {"name": "run"}}
    for at in range(len(PATHS)):
        for choice in (kind, {"type": kind, "mode": kind, "name": "run"}):
            asked = {"model": "m", "max_tokens": 9, "messages": [{"role": "user", "content": "x"}], "input": "x"}
            asked |= {"tools": [tool], "tool_choice": choice, "toolConfig": {"functionCallingConfig": choice}}
            TARGETS["request"](bytes([at]) + json.dumps(asked).encode())


@given(dice=seeds)
def test_spoilt_answers_are_read_the_same_however_they_are_cut(dice: random.Random) -> None:
    TARGETS["answer"](dice.randbytes(2) + spoilt(dice.choice(ANSWERS), dice))


@given(dice=seeds)
def test_spoilt_heads_say_whose_they_are_or_nothing(dice: random.Random) -> None:
    TARGETS["head"](spoilt(dice.choice(captured()).raw("secret").partition(b"\r\n\r\n")[0] + b"\r\n\r\n", dice))


@pytest.mark.parametrize("path", ["/s//secret/v1/messages", "//s/secret/v1/messages", "/s/secret?x=1", "/s/secret"])
def test_half_a_session_is_nobodys(path: str) -> None:
    line = f"POST {path} HTTP/1.1\r\n".encode()
    told = [session_in_head(line[:cut]) for cut in range(len(line) + 1)]
    assert {who for enough, who in told if enough} == {"secret"}
    assert told[-1] == (True, "secret")


async def test_a_proxy_that_is_sent_spoilt_requests_answers_the_next_honest_one(redis_server: EmbeddedRedis) -> None:
    outcome = await attacked(redis_server.url, seed=1, requests=120)
    assert outcome.sent == 120
    assert outcome.statuses["200"] > 10
    assert outcome.statuses["400"] > 10


@pytest.mark.parametrize("length", [1024, 1025, 1026])
@pytest.mark.parametrize("cut", range(-3, 4))
def test_a_line_before_a_chunk_is_too_long_however_it_comes(length: int, cut: int) -> None:
    line = b"5;" + b"x" * (length - 2)
    sent = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n" + line + b"\r\n[1,2]\r\n0\r\n\r\n"
    at = sent.index(line) + length + cut
    whole = asyncio.run(exchanged([sent]))
    assert asyncio.run(exchanged([sent[:at], sent[at:]])) == whole
    assert whole[2] == ("whole" if length <= 1024 else "Malformed")
