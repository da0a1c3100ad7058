"""Acting out the faults of a scenario: on the answer's JSON, and on the connection."""

from __future__ import annotations

import asyncio
import copy
import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import NoReturn

from aiohttp import web

from polarq.testing.inference import faults
from polarq.testing.inference.faults import Fault
from polarq.testing.inference.generation import Generation
from polarq.testing.inference.wire import Json, dumps, error_body

_BAD_VALUES = {"NaN": math.nan, "-Infinity": -math.inf, "null": None, "-9999.0": -9999.0}
_HTML = "<!doctype html><html><head><title>Welcome</title></head><body>It works!</body></html>\n"


ErrorShape = Callable[[str, str, str | None, int], Json]
"""(message, kind, parameter, status) to the JSON that this engine's errors have."""


class ApiError(Exception):
    """An error answer; the application gives it its engine's shape."""

    def __init__(self, status: int, message: str, kind: str, param: str | None = None, **headers: str) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.kind = kind
        self.param = param
        self.headers = {name.replace("_", "-"): value for name, value in headers.items()}


class ConnectionClosed(Exception):
    """The server has closed the connection on purpose; there is nobody left to answer."""


def close_connection(request: web.BaseRequest) -> NoReturn:
    """Sends what is buffered, then closes."""
    if request.transport is not None:
        request.transport.close()
    raise ConnectionClosed


async def hang() -> NoReturn:
    """Waits until the client goes away or the server stops."""
    await asyncio.Event().wait()
    raise ConnectionClosed


async def before_sampling(request: web.BaseRequest, fault: Fault | None, *, streamed: bool) -> web.Response | None:
    """The faults of a server that never gets to sample. Returns an answer, raises, hangs, or lets pass (None)."""
    match fault:
        case faults.HttpStatus():
            retry = {} if fault.retry_after_s is None else {"Retry_After": f"{fault.retry_after_s:g}"}
            raise ApiError(fault.status, fault.message, _kind_of(fault.status), **retry)
        case faults.CloseBefore():
            close_connection(request)
        case faults.Hang(after_tokens=None):
            await hang()
        case faults.StreamError() if not streamed:
            raise ApiError(500, fault.message, "InternalServerError")
        case faults.NotJson():
            return web.Response(text=_HTML, content_type="text/html")
        case _:
            pass
    return None


def _kind_of(status: int) -> str:
    names = {400: "BadRequestError", 401: "AuthenticationError", 404: "NotFoundError", 429: "RateLimitError"}
    return names.get(status, "ServiceUnavailableError" if status == 503 else "InternalServerError")


@dataclass
class Spoiler:
    """Spoils the JSON of one answer, or of the chunks of one streamed answer, as its fault says."""

    fault: Fault | None
    _seen: dict[int, int] = field(default_factory=dict)
    _counted: bool = False

    def __call__(self, payload: Json) -> Json | None:
        """The payload to send; None when it is to be left out altogether."""
        if self.fault is None:
            return payload
        payload = copy.deepcopy(payload)
        match self.fault:
            case faults.Omit(fields=fields):
                return self._omit(payload, fields)
            case faults.OtherModel(model=model):
                payload["model"] = model
            case faults.WrongEcho():
                for holder in _holders(payload):
                    for name in _ALIASES["prompt_token_ids"]:
                        if holder.get(name):
                            holder[name] = holder[name][:-1]
            case faults.WrongUsage(delta=delta):
                if payload.get("usage"):
                    payload["usage"]["completion_tokens"] += delta
                    payload["usage"]["total_tokens"] += delta
            case faults.LogprobCount(delta=delta):
                self._miscount(payload, delta)
            case faults.BadLogprob(value=value, position=position):
                self._misvalue(payload, _BAD_VALUES[value], position)
        return payload

    @staticmethod
    def _omit(payload: Json, fields: tuple[str, ...]) -> Json | None:
        if "usage" in fields and "usage" in payload and not payload["choices"]:
            return None
        for holder in _holders(payload):
            for name in fields:
                for alias in _ALIASES.get(name, (name,)):
                    holder.pop(alias, None)
        return payload

    def _miscount(self, payload: Json, delta: int) -> None:
        for choice in payload["choices"]:
            if self._counted or not choice.get("logprobs"):
                continue
            self._counted = True
            columns = list(choice["logprobs"].values())
            columns += [meta["output_token_logprobs"] for meta in _meta_infos([choice])]
            for column in columns:
                if delta < 0:
                    column.pop()
                else:
                    column.append(column[-1])

    def _misvalue(self, payload: Json, value: float | None, position: int) -> None:
        for choice in payload["choices"]:
            logprobs = choice.get("logprobs")
            if not logprobs:
                continue
            entries = logprobs.get("content", logprobs.get("token_logprobs", []))
            at = position - self._seen.get(choice["index"], 0)
            self._seen[choice["index"]] = self._seen.get(choice["index"], 0) + len(entries)
            if not 0 <= at < len(entries):
                continue
            if "content" in logprobs:
                entries[at]["logprob"] = value
            else:
                entries[at] = value
            for meta in _meta_infos([choice]):
                meta["output_token_logprobs"][at][0] = value


_ALIASES = {
    "prompt_token_ids": ("prompt_token_ids", "input_ids"),
    "token_ids": ("token_ids", "response_token_ids", "output_ids", "output_token_logprobs"),
    "logprobs": ("logprobs", "output_token_logprobs"),
}
"""Under what names the engines give one thing."""


def _holders(payload: Json) -> Iterator[Json]:
    """The objects of an answer in which ids, log-probabilities and counts are."""
    yield payload
    yield from payload["choices"]
    yield from _meta_infos(payload["choices"])
    if payload.get("sglext"):
        yield payload["sglext"]


def _meta_infos(choices: list[Json]) -> Iterator[Json]:
    """SGLang's `meta_info` objects that hold log-probabilities."""
    return (choice["meta_info"] for choice in choices if "output_token_logprobs" in (choice.get("meta_info") or {}))


class Answer:
    """Writes one body to the connection, and cuts it where the fault says so."""

    def __init__(self, request: web.Request, fault: Fault | None, shape: ErrorShape = error_body) -> None:
        self._request = request
        self._fault = fault
        self._shape = shape
        self._left = fault.byte if isinstance(fault, faults.CutAtByte) else None
        self.response = web.StreamResponse()

    async def sampled(self, generations: Iterable[Generation]) -> None:
        """Samples choices to their ends, one after the other."""
        for generation in generations:
            while await generation.advance():
                if isinstance(self._fault, faults.Hang) and generation.count >= (self._fault.after_tokens or 0):
                    await hang()

    async def unary(self, payload: Json | None) -> web.StreamResponse:
        if isinstance(self._fault, faults.CloseAfterSampling | faults.CutAfterTokens):
            close_connection(self._request)
        body = dumps(payload)
        self.response.content_type = "application/json"
        self.response.content_length = len(body)
        await self.response.prepare(self._request)
        await self._write(body)
        await self.response.write_eof()
        return self.response

    async def open_stream(self) -> None:
        if isinstance(self._fault, faults.CloseAfterSampling):
            close_connection(self._request)
        self.response.headers["Content-Type"] = "text/event-stream; charset=utf-8"
        await self.response.prepare(self._request)

    async def event(self, payload: Json | None) -> None:
        if payload is not None:
            await self._write(b"data: " + dumps(payload) + b"\n\n")

    async def done(self) -> web.StreamResponse:
        await self._write(b"data: [DONE]\n\n")
        await self.response.write_eof()
        return self.response

    async def ended_after(self, count: int) -> bool:
        """The faults that strike in a stream once so many tokens have been sent; True: the stream is over."""
        match self._fault:
            case faults.Hang(after_tokens=after) if after is not None and count >= after:
                await hang()
            case faults.CutAfterTokens() if count >= self._fault.after_tokens:
                close_connection(self._request)
            case faults.StreamError() if count >= self._fault.after_tokens:
                await self.event(self._shape(self._fault.message, "InternalServerError", None, 500))
                await self.done()
                return True
        return False

    async def _write(self, data: bytes) -> None:
        if self._left is not None and len(data) > self._left:
            await self.response.write(data[: self._left])
            close_connection(self._request)
        await self.response.write(data)
        if self._left is not None:
            self._left -= len(data)
