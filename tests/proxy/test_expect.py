"""Clients that ask before they send a body, as curl does with a large one."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace
from urllib.parse import urlsplit

from redis.asyncio import Redis

from polarq.ledger.keys import Keys
from polarq.testing.inference import Scenario, ScriptedInference

from .rig import HELLO, Rig, running

BODY = json.dumps({"model": "m", "messages": HELLO}).encode()


async def _asked(rig: Rig, expect: str) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    parts = urlsplit(rig.base_url)
    reader, writer = await asyncio.open_connection(parts.hostname, parts.port)
    head = f"POST {parts.path}/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(BODY)}\r\nExpect: {expect}"
    writer.write(f"{head}\r\n\r\n".encode())
    return reader, writer


async def test_a_client_that_asks_first_is_told_to_send_its_body(redis_client: Redis, keys: Keys) -> None:
    async with (
        ScriptedInference(scenario=Scenario.of("hi")) as inference,
        running(redis_client, keys, inference.base_url) as rig,
    ):
        reader, writer = await _asked(rig, "100-continue")
        assert await reader.readuntil(b"\r\n\r\n") == b"HTTP/1.1 100 Continue\r\n\r\n"
        writer.write(BODY)
        assert (await reader.readline()) == b"HTTP/1.1 200 OK\r\n"
        writer.close()


async def test_another_expectation_is_refused_in_the_dialects_words(redis_client: Redis, keys: Keys) -> None:
    async with (
        ScriptedInference(scenario=Scenario.of("hi")) as inference,
        running(redis_client, keys, inference.base_url) as rig,
    ):
        reader, writer = await _asked(rig, "a miracle")
        assert (await reader.readline()).startswith(b"HTTP/1.1 417 ")
        await reader.readuntil(b"\r\n\r\n")
        assert b"100-continue" in await reader.readuntil(b"}}")
        writer.close()


async def test_who_has_no_session_is_not_told_to_send_a_body(redis_client: Redis, keys: Keys) -> None:
    async with (
        ScriptedInference(scenario=Scenario.of("hi")) as inference,
        running(redis_client, keys, inference.base_url) as rig,
    ):
        reader, writer = await _asked(replace(rig, secret="pq-guess"), "100-continue")
        assert (await reader.readline()).startswith(b"HTTP/1.1 404 ")
        writer.close()
