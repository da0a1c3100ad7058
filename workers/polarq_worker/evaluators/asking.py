"""Asks an HTTP server what an evaluator needs to know of it: once more where it was busy or away, within the budget.

Whatever the server sends, an answer has a bound of bytes and of seconds. It is not unpacked (few bytes can hold any
number), and no redirect is followed: the node lends its key to one host.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing
from dataclasses import dataclass, field
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from typing import Any, cast

import httpx

from polarq.callback.address import check_callback_url
from polarq.errors import EvaluatorFault
from polarq_worker.evaluators.base import EvaluationTimedOut, NodeRules

FIRST_BACKOFF_S, MAX_BACKOFF_S = 0.5, 30.0
MAX_ANSWER_BYTES = 4 * 1024 * 1024
_SHOWN_BYTES = 1024
"""Of an answer that is none."""
WORTH_REPEATING = frozenset({408, 409, 425, 429})


class ServerFailed(EvaluatorFault):
    """It refused, or did not answer however often it was asked."""


class _AskAgain(Exception):
    """An answer that is none, where another try may get one."""

    def __init__(self, problem: str, after_s: float = 0.0) -> None:
        self.after_s = after_s
        super().__init__(problem)


@dataclass
class Tally:
    """What was asked: calls, and why some of them had to be repeated."""

    calls: int = 0
    refused: list[str] = field(default_factory=list)


def allowed_key(rules: NodeRules, *, url: str, key: str, key_env: str | None, default: str) -> str | None:
    """The key to send to `url`, which the task names in `evaluator.config.<key>_base_url`; None: none.

    Raises `EvaluatorFault` for a host or a variable that the node does not lend.
    """
    problem = check_callback_url(url, rules.judge_hosts, setting="security.judge_hosts")
    if problem is not None:
        raise EvaluatorFault(f"evaluator.config.{key}_base_url: {problem}")
    found = rules.judge_keys.get(key_env or default)
    if found is None and key_env is not None:
        raise EvaluatorFault(
            f"evaluator.config.{key}_api_key_env: {key_env} is not set on this node, or not among"
            " security.judge_key_envs"
        )
    return found


class Asking:
    """One evaluation's calls to one server, `who` in messages. Whoever makes it closes it.

    `call_timeout_s` is for a whole call, `deadline` on the monotonic clock, and `retries` are for all calls together.
    """

    def __init__(
        self, who: str, *, key: str | None, call_timeout_s: float, retries: int, deadline: float, tally: Tally
    ) -> None:
        self._who = who
        self._call_timeout_s = call_timeout_s
        self._retries = retries
        self._deadline = deadline
        self._tally = tally
        headers = {"accept-encoding": "identity"} | ({} if key is None else {"authorization": f"Bearer {key}"})
        self._client = httpx.AsyncClient(headers=headers, timeout=None, trust_env=False)  # noqa: S113 - see __call__

    async def aclose(self) -> None:
        await self._client.aclose()

    async def __call__(
        self, url: str, body: Mapping[str, Any] | None = None, *, most_bytes: int = MAX_ANSWER_BYTES
    ) -> dict[str, Any]:
        """The JSON object that answers a POST of `body`, or a GET. Raises `ServerFailed`, `EvaluationTimedOut`."""
        wait_s = FIRST_BACKOFF_S
        while True:
            left = self._deadline - time.monotonic()
            if left <= 0:
                raise self._late()
            self._tally.calls += 1
            try:
                async with asyncio.timeout(min(left, self._call_timeout_s)):
                    return await self._answer(url, body, most_bytes)
            except TimeoutError:
                if left <= self._call_timeout_s:
                    raise self._late() from None
                problem, asked_s = f"no whole answer within {self._call_timeout_s:g} s", 0.0
            except httpx.HTTPError as exc:
                problem, asked_s = f"{type(exc).__name__}: {exc}", 0.0
            except _AskAgain as exc:
                problem, asked_s = str(exc), exc.after_s
            problem = " ".join(problem.split())
            self._tally.refused.append(problem)
            if self._retries == 0:
                raise ServerFailed(f"{self._who} did not answer: {problem}")
            self._retries -= 1
            pause = max(wait_s, asked_s)
            if time.monotonic() + pause >= self._deadline:
                raise EvaluationTimedOut(f"{self._who} did not answer in time: {problem}")
            await asyncio.sleep(pause)
            wait_s = min(2 * wait_s, MAX_BACKOFF_S)

    def _late(self) -> EvaluationTimedOut:
        return EvaluationTimedOut(f"{self._who} did not answer within the evaluation's budget")

    async def _answer(self, url: str, body: Mapping[str, Any] | None, most_bytes: int) -> dict[str, Any]:
        async with self._client.stream("GET" if body is None else "POST", url, json=body) as answer:
            status, packed = answer.status_code, answer.headers.get("content-encoding", "identity")
            if answer.is_redirect:
                to = answer.headers.get("location", "")
                raise self._refused(
                    f"HTTP {status}: it redirects to '{to[:200]}', which is not followed; name that address"
                )
            if not answer.is_success:
                text = "" if packed != "identity" else _text(await _beginning(answer, _SHOWN_BYTES))
                if status < 500 and status not in WORTH_REPEATING:
                    raise self._refused(f"HTTP {status}: {text}")
                raise _AskAgain(f"HTTP {status}: {text}", _retry_after(answer))
            if packed != "identity":
                raise self._refused(f"its answer is packed ({packed[:40]}), which it was asked not to do")
            data = await _beginning(answer, most_bytes)
            if len(data) > most_bytes:
                raise self._refused(f"its answer has more than {most_bytes:,} bytes")
            kind = answer.headers.get("content-type", "no type")
        try:
            found = json.loads(data)
        except (ValueError, RecursionError):
            found = None
        if not isinstance(found, dict):
            raise _AskAgain(f"its answer ({kind[:80]}) is no JSON object: {_text(data[:_SHOWN_BYTES])}")
        return found

    def _refused(self, problem: str) -> ServerFailed:
        return ServerFailed(f"{self._who} refused: {' '.join(problem.split())}")


async def _beginning(answer: httpx.Response, most: int) -> bytes:
    """What an answer begins with: all of it, or a little more than `most` bytes."""
    data = bytearray()
    async with aclosing(cast(AsyncGenerator[bytes], answer.aiter_raw())) as chunks:
        async for chunk in chunks:
            data += chunk
            if len(data) > most:
                break
    return bytes(data)


def _text(data: bytes) -> str:
    return data.decode("utf-8", "replace")[:200]


def _retry_after(answer: httpx.Response) -> float:
    """The seconds for which the server wants to be left alone (it says a number, or a date); 0: it does not say."""
    text = answer.headers.get("retry-after", "").strip()
    if text.isascii() and text.isdecimal():
        return float(text)
    try:
        date = parsedate_to_datetime(text)
    except (OverflowError, ValueError):
        return 0.0
    return max(0.0, (date if date.tzinfo else date.replace(tzinfo=UTC)).timestamp() - datetime.now(UTC).timestamp())
