"""Asks an HTTP server what an evaluator needs to know of it: once more where it was busy or away, within the budget."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import httpx

from polarq.callback.address import check_callback_url
from polarq.errors import EvaluatorFault
from polarq_worker.evaluators.base import EvaluationTimedOut, NodeRules

MAX_BACKOFF_S = 30.0
WORTH_REPEATING = frozenset({408, 409, 425, 429})


class ServerFailed(EvaluatorFault):
    """It refused, or did not answer however often it was asked."""


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

    `deadline` is on the monotonic clock; `retries` are for all calls together.
    """

    def __init__(
        self, who: str, *, key: str | None, call_timeout_s: float, retries: int, deadline: float, tally: Tally
    ) -> None:
        self._who = who
        self._retries = retries
        self._deadline = deadline
        self._tally = tally
        self._client = httpx.AsyncClient(
            headers={} if key is None else {"authorization": f"Bearer {key}"}, timeout=call_timeout_s, trust_env=False
        )

    async def aclose(self) -> None:
        await self._client.aclose()

    async def __call__(self, url: str, body: Mapping[str, Any] | None = None) -> httpx.Response:
        """The answer to a POST of `body`, or to a GET. Raises `ServerFailed`, `EvaluationTimedOut`."""
        wait_s = 0.5
        while True:
            left = self._deadline - time.monotonic()
            if left <= 0:
                raise EvaluationTimedOut(f"{self._who} did not answer within the evaluation's budget")
            self._tally.calls += 1
            try:
                async with asyncio.timeout(left):
                    answer = await (self._client.get(url) if body is None else self._client.post(url, json=body))
            except TimeoutError:
                raise EvaluationTimedOut(f"{self._who} did not answer within the evaluation's budget") from None
            except httpx.HTTPError as exc:
                problem, asked_s = f"{type(exc).__name__}: {exc}", 0.0
            else:
                if answer.status_code < 300:
                    return answer
                problem, asked_s = f"HTTP {answer.status_code}: {answer.text[:200]}", _retry_after(answer)
                if answer.status_code < 500 and answer.status_code not in WORTH_REPEATING:
                    raise ServerFailed(f"{self._who} refused: {' '.join(problem.split())}")
            problem = " ".join(problem.split())
            self._tally.refused.append(problem)
            if self._retries == 0:
                raise ServerFailed(f"{self._who} did not answer: {problem}")
            self._retries -= 1
            pause = min(max(wait_s, asked_s), MAX_BACKOFF_S)
            if time.monotonic() + pause >= self._deadline:
                raise EvaluationTimedOut(f"{self._who} did not answer in time: {problem}")
            await asyncio.sleep(pause)
            wait_s = min(2 * wait_s, MAX_BACKOFF_S)


def json_object(answer: httpx.Response) -> dict[str, Any]:
    """The object that an answer consists of; empty where it is none."""
    try:
        data = answer.json()
    except ValueError:
        return {}
    return data if isinstance(data, dict) else {}


def _retry_after(answer: httpx.Response) -> float:
    text = answer.headers.get("retry-after", "")
    return float(text) if text.isdecimal() else 0.0
