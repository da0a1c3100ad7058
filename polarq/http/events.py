"""The event stream for browsers and scripts (server-sent events).

Polar's framing, and an `id:` line on every frame: a client that reconnects with `Last-Event-ID` (browsers do by
themselves) gets what happened in between. A client that reads slowly costs one cursor and no memory.
"""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime
from typing import Any

from aiohttp import hdrs, web

from polarq.errors import LedgerUnavailable
from polarq.http.answers import Refused, problems
from polarq.http.feed import position
from polarq.http.polar_json import event_frame
from polarq.http.queries import EventsQuery, query
from polarq.http.shim import Shim
from polarq.http.task_body import encode

PING_S = 15.0
_WRITE_TIMEOUT_S = 60.0
"""A client that takes nothing for so long is cut off; it resumes with the last id it has."""
_OUTAGE_PAUSE_S = 1.0


async def stream(shim: Shim, request: web.Request) -> web.StreamResponse:
    asked = query(request, EventsQuery)
    cursor = request.headers.get("Last-Event-ID", "").strip() or asked.after
    try:
        resumed = cursor is not None
        cursor = cursor if cursor is not None else await shim.feed.newest()
        position(cursor)
    except ValueError as exc:
        raise Refused(422, problems([f"after: {exc}"], "query")) from None
    gap = resumed and await shim.feed.missed(cursor)
    response = web.StreamResponse(
        headers={
            hdrs.CONTENT_TYPE: "text/event-stream; charset=utf-8",
            hdrs.CACHE_CONTROL: "no-cache",
            hdrs.CONNECTION: "keep-alive",
            "X-Accel-Buffering": "no",
        }
    )
    await response.prepare(request)
    try:
        await _write(response, _frame(cursor, _own("hello")))
        if gap:
            # Some events are no longer kept: the client must read the tasks again.
            await _write(response, _frame(cursor, _own("gap")))
        await _follow(shim, response, cursor, asked.task_id)
    except (TimeoutError, ConnectionResetError):
        if request.transport is not None:
            request.transport.abort()
    return response


async def _follow(shim: Shim, response: web.StreamResponse, cursor: str, task_id: str | None) -> None:
    while not shim.feed.closed:
        try:
            if not await shim.feed.news(cursor, PING_S):
                if not shim.feed.closed:
                    await _write(response, _frame(cursor, _own("ping")))
                continue
            events = await shim.feed.after(cursor)
        except LedgerUnavailable:
            await _write(response, _frame(cursor, _own("ping")))
            await asyncio.sleep(_OUTAGE_PAUSE_S)
            continue
        frames = b""
        for event in events:
            cursor = event.event_id
            if task_id is None or event.data.get("task_id") == task_id:
                frames += _frame(cursor, event_frame(event))
        if frames:
            await _write(response, frames)


def _own(kind: str) -> dict[str, Any]:
    return {"type": kind, "ts": datetime.now(UTC).isoformat(), "data": {}}


def _frame(event_id: str, body: dict[str, Any]) -> bytes:
    return b"id: " + event_id.encode() + b"\ndata: " + encode(body) + b"\n\n"


async def _write(response: web.StreamResponse, data: bytes) -> None:
    async with asyncio.timeout(_WRITE_TIMEOUT_S):
        await response.write(data)
