"""Asks a judge (another model) for a verdict, and takes nothing for one that is none.

An answer counts when it is one JSON object of the shape that was asked for, bare, in a Markdown fence, or with prose
around it. Anything else (two objects, a score that is no number or off the scale, a refusal) is asked for again, within
the budget, and then there is no verdict. Text under judgement stands between marks made of its own digest, which it
cannot know; an object that it holds is never taken from a judge's prose.
"""

from __future__ import annotations

import hashlib
import json
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Self

from polarq.contracts.judging import JudgeConfig
from polarq.errors import EvaluatorFault
from polarq_worker.evaluators.asking import Asking, ServerFailed, Tally, allowed_key
from polarq_worker.evaluators.base import EvaluationContext
from polarq_worker.evaluators.verdicts import NoVerdict, one_object

log = logging.getLogger("polarq.worker.evaluators")

SHOWN = 2000
MAX_COUNT = 1 << 40
"""Of tokens; a server that counts more, or less than none, cannot count."""
DEFAULT_KEY_ENV = "JUDGE_API_KEY"
LOG = "eval/judge.jsonl"

Check = Callable[[dict[str, Any]], Any]
"""What a verdict says; raises `NoVerdict` for one that is none."""


@dataclass
class Question:
    """What is asked. `quoted` are the texts under judgement that stand in it."""

    messages: Sequence[Mapping[str, str]]
    schema: Mapping[str, Any]
    check: Check
    quoted: Sequence[str] = ()


@dataclass
class Costs(Tally):
    """What one evaluation has used, with the judge's own words as evidence."""

    cached: int = 0
    prompt_tokens: int = 0
    completion_tokens: int = 0
    replies: list[str] = field(default_factory=list)
    """Each cut to `SHOWN` characters."""

    @property
    def tokens(self) -> int:
        return self.prompt_tokens + self.completion_tokens

    def report(self) -> dict[str, Any]:
        return {
            "judge_calls": self.calls,
            "judge_cached": self.cached,
            "judge_tokens": {"prompt": self.prompt_tokens, "completion": self.completion_tokens},
            "judge_replies": self.replies,
            "judge_refused": self.refused,
        }


class JudgeFailed(EvaluatorFault):
    """No verdict within the budget."""


class Judge:
    """One evaluation's. Used as an async context manager."""

    def __init__(self, config: JudgeConfig, context: EvaluationContext, timeout_s: float) -> None:
        self._config = config
        self._rules = context.rules
        self._log = context.runtime.host_log_dir / LOG
        self._asks = config.judge_max_asks
        self.costs = Costs()
        url, key_env = config.judge_base_url, config.judge_api_key_env
        self._server = Asking(
            "the judge's server",
            key=allowed_key(context.rules, url=url, key="judge", key_env=key_env, default=DEFAULT_KEY_ENV),
            call_timeout_s=config.judge_timeout,
            retries=config.judge_max_retries,
            deadline=time.monotonic() + timeout_s,
            tally=self.costs,
        )

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        # Without a verdict there is no report, and what was said and spent is all the more worth keeping.
        await self._server.aclose()
        try:
            self._log.parent.mkdir(parents=True, exist_ok=True)
            with self._log.open("a", encoding="utf-8") as lines:
                lines.write(json.dumps(self.costs.report()) + "\n")
        except OSError as exc:
            log.warning("what a judge said was not written to %s: %s", self._log, exc)

    async def ask(self, question: Question) -> Any:
        """What `question.check` makes of the verdict. Raises `JudgeFailed`, `EvaluationTimedOut`."""
        body = self._body(question)
        kept = self._kept(body)
        if kept is not None:
            try:
                value = question.check(kept)
            except NoVerdict:
                pass  # kept by a version that asked otherwise
            else:
                self.costs.cached += 1
                return value
        why = ""
        for _ in range(self._asks):
            if self.costs.tokens >= self._config.judge_max_tokens:
                why = f"{why}; judge_max_tokens ({self._config.judge_max_tokens}) are used up".removeprefix("; ")
                break
            text = self._said(await self._call(body))
            try:
                verdict = one_object(text, question.quoted)
                value = question.check(verdict)
            except NoVerdict as exc:
                why = str(exc)
                self.costs.refused.append(why)
                continue
            try:
                self._keep(body, verdict)
            except OSError as exc:  # of a full disk, say: the verdict stands, and is asked for again another time
                log.warning("the verdict of a judge was not kept: %s", exc)
            return value
        raise JudgeFailed(f"the judge came to no verdict: {why}; {json.dumps(self._last())}")

    def _last(self) -> str:
        return " ".join(self.costs.replies[-1].split())[:200] if self.costs.replies else ""

    def _body(self, question: Question) -> dict[str, Any]:
        config = self._config
        schema = dict(question.schema)
        formats: dict[str, Any] = {
            "json_schema": {
                "type": "json_schema",
                "json_schema": {"name": "verdict", "strict": True, "schema": schema},
            },
            "json_object": {"type": "json_object"},
            "none": None,
        }
        chosen = formats[config.judge_response_format]
        return {
            "model": config.judge_model,
            "messages": [dict(message) for message in question.messages],
            "temperature": config.judge_temperature,
            "max_tokens": config.judge_max_output_tokens,
            **({"response_format": chosen} if chosen is not None else {}),
        }

    # --- the server

    async def _call(self, body: Mapping[str, Any]) -> dict[str, Any]:
        base = self._config.judge_base_url
        try:
            answer = await self._server(f"{base.removesuffix('/v1')}/v1/chat/completions", body)
        except ServerFailed as exc:
            raise JudgeFailed(str(exc)) from None
        return self._counted(answer)

    def _counted(self, data: dict[str, Any]) -> dict[str, Any]:
        usage = data.get("usage")
        for name in ("prompt_tokens", "completion_tokens"):
            count = usage.get(name) if isinstance(usage, dict) else None
            if isinstance(count, int) and not isinstance(count, bool) and 0 < count < MAX_COUNT:
                setattr(self.costs, name, getattr(self.costs, name) + count)
        return data

    def _said(self, data: Mapping[str, Any]) -> str:
        """The text of the answer; blank for a refusal, or where there is none."""
        choices = data.get("choices")
        first = choices[0] if isinstance(choices, list) and choices else None
        message = first.get("message") if isinstance(first, dict) else None
        content = message.get("content") if isinstance(message, dict) else None
        text = content if isinstance(content, str) else ""
        self.costs.replies.append((text or json.dumps(message or data))[:SHOWN])
        return text

    # --- the cache

    def _name(self, body: Mapping[str, Any]) -> str:
        whole = json.dumps([self._config.judge_base_url, body], sort_keys=True, ensure_ascii=True)
        return hashlib.sha256(whole.encode()).hexdigest()

    def _kept(self, body: Mapping[str, Any]) -> dict[str, Any] | None:
        folder = self._rules.judge_cache
        if folder is None or not self._config.judge_cache:
            return None
        try:
            found = json.loads((folder / f"{self._name(body)}.json").read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return None
        return found if isinstance(found, dict) else None

    def _keep(self, body: Mapping[str, Any], verdict: dict[str, Any]) -> None:
        folder = self._rules.judge_cache
        if folder is None or not self._config.judge_cache:
            return
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        name = self._name(body)
        part = folder / f"{name}.{time.monotonic_ns()}.part"
        try:
            part.write_text(json.dumps(verdict), encoding="utf-8")
            part.replace(folder / f"{name}.json")
        finally:
            part.unlink(missing_ok=True)


def section(title: str, text: str, most: int) -> str:
    """A text under judgement, between marks that it cannot hold."""
    if len(text) > most:
        cut = f"\n[... {len(text) - most} characters left out ...]\n"
        text = f"{text[: most // 2]}{cut}{text[-(most - most // 2) :]}"
    mark = hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:16]
    return f"## {title}\n<<<{mark}\n{text}\n{mark}>>>"


def number(verdict: Mapping[str, Any], key: str, low: float, high: float, *, whole: bool = False) -> float:
    """A score on its scale. Raises `NoVerdict`; nothing is clamped, and a text is no number."""
    if key not in verdict:
        raise NoVerdict(f"it has no '{key}'")
    value = verdict[key]
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise NoVerdict(f"'{key}' is no number")
    if not low <= value <= high:  # so is NaN
        raise NoVerdict(f"'{key}' is {str(value)[:20]}, off the scale of {low:g} to {high:g}")
    if whole and value != int(value):
        raise NoVerdict(f"'{key}' is no whole number")
    return float(value)
