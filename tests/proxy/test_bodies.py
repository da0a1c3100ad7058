"""Packed bodies: honest ones are read, hostile ones cost no more than the limit."""

from __future__ import annotations

import gzip
import sys
import tracemalloc
import zlib
from collections.abc import AsyncIterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from polarq_proxy.bodies import BodyDamaged, BodyTooLarge, UnknownEncoding, read_body

if sys.version_info >= (3, 14):
    from compression import zstd
else:
    from backports import zstd

PLAIN = b'{"messages": [' + b'{"role": "user"},' * 500 + b"{}]}"


def packed(data: bytes, encoding: str) -> bytes:
    if encoding == "gzip":
        return gzip.compress(data)
    return zlib.compress(data) if encoding == "deflate" else bytes(zstd.compress(data))


def raw_deflate(data: bytes) -> bytes:
    packer = zlib.compressobj(wbits=-15)
    return packer.compress(data) + packer.flush()


async def chunks(data: bytes, size: int) -> AsyncIterator[bytes]:
    for at in range(0, len(data), size):
        yield data[at : at + size]


async def read(data: bytes, encoding: str, limit: int = 1 << 20, size: int = 100) -> bytes:
    return await read_body(chunks(data, size), encoding, limit)


@pytest.mark.parametrize("size", [1, 7, 1 << 20])
@pytest.mark.parametrize(
    ("encoding", "body"),
    [
        ("", PLAIN),
        ("identity", PLAIN),
        ("gzip", gzip.compress(PLAIN)),
        ("GZip", gzip.compress(PLAIN[:100]) + gzip.compress(PLAIN[100:])),
        ("gzip", gzip.compress(PLAIN) + b"\0" * 20),
        ("deflate", zlib.compress(PLAIN)),
        ("deflate", raw_deflate(PLAIN)),
        ("zstd", zstd.compress(PLAIN)),
        ("zstd", zstd.compress(PLAIN[:100]) + zstd.compress(PLAIN[100:])),
        ("zstd, gzip", gzip.compress(zstd.compress(PLAIN))),
    ],
    ids=[
        "plain",
        "identity",
        "gzip",
        "gzip-two-members",
        "gzip-padded",
        "deflate",
        "raw-deflate",
        "zstd",
        "zstd-two-frames",
        "zstd-in-gzip",
    ],
)
async def test_an_honest_body_is_read(encoding: str, body: bytes, size: int) -> None:
    assert await read(body, encoding, size=size) == PLAIN


@given(st.binary(), st.sampled_from(["gzip", "deflate", "zstd"]), st.integers(1, 50))
async def test_any_bytes_come_back(data: bytes, encoding: str, size: int) -> None:
    assert await read(packed(data, encoding), encoding, size=size) == data


@pytest.mark.parametrize("encoding", ["gzip", "deflate", "zstd"])
async def test_a_cut_body_is_noticed(encoding: str) -> None:
    with pytest.raises(BodyDamaged):
        await read(packed(PLAIN, encoding)[:-3], encoding)


@pytest.mark.parametrize("encoding", ["gzip", "deflate", "zstd"])
async def test_a_body_that_is_not_what_it_says_is_noticed(encoding: str) -> None:
    with pytest.raises(BodyDamaged):
        await read(b"\x08\x1d" + PLAIN, encoding)


async def test_an_encoding_that_nobody_reads_is_named() -> None:
    with pytest.raises(UnknownEncoding, match="'br'"):
        await read(PLAIN, "gzip, br")


@pytest.mark.parametrize("encoding", ["", "gzip"])
async def test_too_many_bytes_on_the_wire_are_too_many(encoding: str) -> None:
    noise = bytes(range(256)) * 100
    with pytest.raises(BodyTooLarge):
        await read(gzip.compress(noise, 0) if encoding else noise, encoding, limit=len(noise) - 1000)


@pytest.mark.parametrize("encoding", ["gzip", "zstd"])
async def test_a_small_body_that_unpacks_to_a_huge_one_costs_no_more_than_the_limit(encoding: str) -> None:
    body = packed(bytes(256 << 20), encoding)
    limit = 8 << 20
    tracemalloc.start()
    try:
        with pytest.raises(BodyTooLarge):
            await read(body, encoding, limit=limit, size=65536)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert len(body) < 300_000
    assert peak < limit + (4 << 20)
