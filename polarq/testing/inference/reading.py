"""From a request's bytes to its model, with vLLM's answers to what cannot be read."""

from __future__ import annotations

import json
from typing import TypeVar

from aiohttp import web
from pydantic import BaseModel, ValidationError

from polarq.testing.inference.acting import ApiError
from polarq.testing.inference.requests import validation_message

Body = TypeVar("Body", bound=BaseModel)


async def read_body(request: web.Request, kind: type[Body]) -> Body:
    """Raises `ApiError` (400) that names the first field that is wrong."""
    try:
        data = json.loads(await request.read())
    except (ValueError, RecursionError) as exc:
        at = getattr(exc, "pos", 0)
        mistake = {"type": "json_invalid", "loc": f"body.{at}", "msg": "JSON decode error", "input": {}}
        raise ApiError(400, f"1 validation error:\n  {mistake}", "Bad Request", f"body.{at}") from None
    try:
        return kind.model_validate(data)
    except ValidationError as exc:
        message, param = validation_message(exc)
        raise ApiError(400, message, "Bad Request", param) from None
