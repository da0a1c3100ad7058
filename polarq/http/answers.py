"""JSON answers, and one shape for every refusal: `{"detail": ...}`, as clients of a FastAPI server expect it."""

from __future__ import annotations

import logging
import math
import secrets
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

import msgspec
from aiohttp import web

from polarq.contracts.task import MAX_TASK_BYTES
from polarq.errors import (
    InvalidInput,
    LedgerUnavailable,
    NodeNotFound,
    NotEnded,
    PayloadCorrupt,
    PayloadMissing,
    PolarqError,
    QueueFull,
    TaskConflict,
    TaskNotFound,
)
from polarq.http.polar_shapes import Problem

log = logging.getLogger(__name__)

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]

RETRY_AFTER_S = 2.0
"""What a client is told to wait when Redis is away."""


class Refused(Exception):
    """Answers a request with a status and a detail. Known inside the shim only."""

    def __init__(self, status: int, detail: str | Sequence[Problem], headers: Mapping[str, str] | None = None) -> None:
        self.status = status
        self.detail = detail
        self.headers = dict(headers or {})
        super().__init__(status)


def answer(value: Any, status: int = 200, headers: Mapping[str, str] | None = None) -> web.Response:
    return json_response(msgspec.json.encode(value), status, headers)


def json_response(body: bytes, status: int = 200, headers: Mapping[str, str] | None = None) -> web.Response:
    return web.Response(body=body, status=status, headers=headers, content_type="application/json", charset="utf-8")


def refusal(status: int, detail: str | Sequence[Problem], headers: Mapping[str, str] | None = None) -> web.Response:
    return answer({"detail": detail}, status, headers)


def problems(lines: Sequence[str], where: str = "body") -> list[Problem]:
    """FastAPI's list of mistakes, from polarq's lines (`<path>: <what is wrong>`, or a line about the whole)."""
    made: list[Problem] = []
    for line in lines:
        path, colon, text = line.partition(": ")
        is_path = bool(colon) and " " not in path
        loc = [where, *path.split(".")] if is_path else [where]
        made.append({"loc": loc, "msg": text if is_path else line, "type": "value_error"})
    return made


def of_error(exc: PolarqError) -> web.Response:
    """The answer to an error that polarq raises on purpose. Its text is one line meant for the caller."""
    text = str(exc)
    match exc:
        case InvalidInput():
            return refusal(422, problems(exc.problems))
        case TaskNotFound():
            return refusal(404, "Task not found")
        case NodeNotFound():
            return refusal(404, "Node not found")
        case TaskConflict() | NotEnded():
            return refusal(409, text)
        case QueueFull():
            return refusal(429, text, retry_after(exc.retry_after_s))
        case LedgerUnavailable():
            return refusal(503, text, retry_after(RETRY_AFTER_S))
        case PayloadMissing() | PayloadCorrupt():
            return refusal(410, text)
    log.error("a request failed: %s: %s", type(exc).__name__, text)
    return refusal(500, text)


def retry_after(seconds: float) -> dict[str, str]:
    return {"Retry-After": str(max(1, math.ceil(seconds)))}


@web.middleware
async def errors(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Turns whatever a handler raises into an answer; nothing of an unexpected error but its id reaches a client."""
    try:
        return await handler(request)
    except Refused as exc:
        return refusal(exc.status, exc.detail, exc.headers)
    except PolarqError as exc:
        return of_error(exc)
    except web.HTTPRequestEntityTooLarge:
        return refusal(413, f"the body is larger than {MAX_TASK_BYTES // 1024 // 1024} MiB")
    except web.HTTPException as exc:
        allow = {"Allow": exc.headers["Allow"]} if "Allow" in exc.headers else {}
        return refusal(exc.status, exc.reason, allow)
    except web.RequestPayloadError as exc:
        return refusal(400, f"the body cannot be read: {exc.__cause__ or exc}".replace("\n", " "))
    except ConnectionResetError:
        # The client has gone; the server knows how to forget it.
        raise
    except Exception:
        error_id = secrets.token_hex(6)
        log.exception("error %s in %s %s", error_id, request.method, request.path)
        return refusal(500, f"an error in polarq itself; its log has it as {error_id}")
