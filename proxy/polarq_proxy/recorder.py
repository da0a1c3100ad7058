"""Makes a completion of a call and its answer, says whether it can be trained on, and persists it.

Checked, so that nothing has to be believed: as many log-probabilities as ids, as many ids as the engine's usage says,
for prompt and sample alike; every log-probability a finite number and not the sentinel for "unknown"; the model that
was asked for; one policy version, or exact spans of several. What fails is recorded as it is, with the reason, and
nothing is filled in.
"""

from __future__ import annotations

import asyncio
import logging
import math
import secrets
import time
from collections.abc import Coroutine, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Annotated, Any, NamedTuple

import msgspec
import numpy as np
from redis.asyncio import Redis

from polarq.contracts.completion import CompletionLabel, Usage, VersionSpan
from polarq.errors import GrantRefused, LedgerUnavailable
from polarq.ledger.keys import Keys
from polarq.store.completions import CompletionLog, Draft
from polarq.store.grants import note_problem, note_replay, read_grant
from polarq.store.prefixes import NO_PROMPT, Prompt
from polarq.store.token_text import NotIds, ids_of, text_of
from polarq.trajectory.images import images_of, placed
from polarq_proxy.call import Answer, Choice, ModelCall
from polarq_proxy.counters import Counters
from polarq_proxy.endpoints import Endpoint
from polarq_proxy.exact.context import Plan
from polarq_proxy.faults import MODEL_KINDS, CallFault, FaultKind
from polarq_proxy.grants import Session
from polarq_proxy.tokens import LogprobEntries, PromptIds, prompt_text
from polarq_proxy.versions import UNREAD

log = logging.getLogger("polarq.proxy")

MISSING_LOGPROB = -9999.0
"""vLLM's word for a value that it does not have; also what it floors minus infinity to."""

_FLOATS = list[float]
_TOKEN_IDS = list[Annotated[int, msgspec.Meta(ge=0, lt=2**31)]]


@dataclass(slots=True)
class Capture:
    """One call on its way: everything about it but its answer."""

    session: Session
    call: ModelCall
    dialect: str
    path: str
    request_digest: str
    completion_id: str
    first_seq: int
    requested_at: datetime = field(default_factory=lambda: datetime.now(UTC))
    started: float = field(default_factory=time.monotonic)
    endpoint: Endpoint | None = None
    frozen: Endpoint | None = None
    """The frozen model that answers instead of the policy."""
    body: dict[str, Any] = field(default_factory=dict)
    """What was sent to the engine."""
    model_asked: str = ""
    label: CompletionLabel = CompletionLabel.TRAIN
    side_kind: str | None = None
    retry_of: int | None = None
    plan: Plan | None = None
    """How exact mode made the prompt; None: the mode is off."""
    exact_ids: list[int] | None = None
    """The prompt that was sent as ids; the engine's echo must equal it."""
    exact_missed: str | None = None
    overridden: dict[str, Any] = field(default_factory=dict)
    promised_tokens: int = 0
    """What it may sample of what its rollout may."""
    doubt: str | None = None
    """Why the call is not to be trained on, whatever comes back."""
    engine_s: float = 0.0
    """How long the engine took."""
    heard_at: float = 0.0
    """When something of its answer came last, by the monotonic clock; 0: nothing has."""
    given_up: bool = False
    """It was ended at a server that answers nothing."""
    held_s: float = 0.0
    """How long it was held back: by a pause, its rollout's pace, or a full engine."""
    version_before: str | None = None
    version_after: str | None = None
    continued: int = 0
    """How often sampling was cut and went on from the ids that were there."""
    joint_doubt: str | None = None
    """Why an answer in parts is not to be trained on."""

    def again(self, first_seq: int | None) -> None:
        """The same call is sampled anew; as a record of its own if it has left one."""
        if first_seq is not None:
            self.retry_of, self.first_seq = self.first_seq, first_seq
        self.completion_id = secrets.token_hex(12)
        self.body = {}
        self.version_before = self.version_after = None
        self.continued, self.joint_doubt = 0, None


class Recorder:
    """Writes completions. Runs to its end even when the call that asked for it is cancelled."""

    def __init__(self, redis: Redis, keys: Keys, completions: CompletionLog, counters: Counters) -> None:
        self._redis = redis
        self._keys = keys
        self._completions = completions
        self._counters = counters
        self._running: set[asyncio.Task[None]] = set()

    async def keep(self, capture: Capture, answer: Answer) -> None:
        """Persists a whole answer; only then may the harness see its end. Not to be cancelled. Raises `CallFault`."""
        await self._append(capture, answer, None)

    async def keep_broken(self, capture: Capture, answer: Answer, reason: str) -> None:
        """Persists what was sampled of an answer that broke off. The harness gets an error anyway, so that trouble
        with the store is only logged."""
        await asyncio.shield(self.keep_broken_later(capture, answer, reason))

    def keep_broken_later(self, capture: Capture, answer: Answer, reason: str) -> asyncio.Task[None]:
        """The same, for who cannot wait because it is being cancelled."""
        return self._spawn(self._append_broken(capture, answer, reason))

    def share_messages(self, session: Session, call: ModelCall) -> None:
        """What the session's record holds of a call's messages is held once, however many calls are under way."""
        call.messages = self._completions.shared_messages(session.spec, call.messages)

    async def check_open(self, session: Session) -> None:
        """Raises `CallFault` when nothing more of this session could be recorded."""
        try:
            await read_grant(self._redis, self._keys, session.secret)
        except GrantRefused as exc:
            session.stale()
            raise CallFault(FaultKind.NO_SESSION, f"{exc}; nothing more will be answered here") from exc
        except LedgerUnavailable as exc:
            raise CallFault(FaultKind.STORE_DOWN, f"the session cannot be looked up now: {exc}") from exc

    def note_problem(self, session: Session, fault: CallFault, seq: int) -> None:
        """Tells the rollout's worker what a call was told in place of an answer."""
        self._spawn(self._note(session, fault, seq))

    def note_replay(self, session: Session) -> None:
        """Tells the rollout's worker that a call was answered without sampling."""
        self._spawn(self._note_replay(session))

    async def drain(self) -> None:
        """Waits for what is still being written."""
        while self._running:
            await asyncio.wait(set(self._running))

    def _spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task: asyncio.Task[None] = asyncio.create_task(work)
        self._running.add(task)
        task.add_done_callback(self._ended)
        return task

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._running.discard(task)
        # A caller that was cancelled no longer takes the exception; what it means was said where it was raised.
        if not task.cancelled():
            task.exception()

    async def _append(self, capture: Capture, answer: Answer, broken: str | None) -> None:
        session = capture.session
        drafts, doubts = drafts_of(capture, answer, broken, self._prompt(capture, answer))
        try:
            breaks = await self._completions.write(drafts, session.spec, session.secret)
        except GrantRefused as exc:
            session.stale()
            raise CallFault(FaultKind.NO_SESSION, f"{exc}; nothing more will be answered here") from exc
        except LedgerUnavailable as exc:
            text = f"the call could not be recorded, so it is not answered: {exc}"
            raise CallFault(FaultKind.STORE_DOWN, text) from exc
        counters = self._counters
        counters.calls += len(drafts)
        counters.sampled_tokens += sum(len(draft.sampled_ids) for draft in drafts)
        counters.prompt_tokens += drafts[0].prompt.count
        if capture.label is CompletionLabel.SIDE and broken is None:
            counters.side[capture.side_kind or "other"] += len(drafts)
        counters.breaks += breaks
        counters.continued += bool(capture.continued)
        counters.untrainable += len(doubts)
        for doubt in doubts:
            counters.untrainable_by[doubt.kind] += 1

    def _prompt(self, capture: Capture, answer: Answer) -> Prompt | None:
        """The answer's prompt ids as the session's record knows them; None when these are not all token ids."""
        given = answer.prompt_ids
        if given is None:
            return None
        try:
            prompt = self._completions.prompt(capture.session.spec, *prompt_text(given))
        except NotIds:
            return None
        if isinstance(given, PromptIds):
            given.prove(prompt)
        return prompt

    async def _append_broken(self, capture: Capture, answer: Answer, reason: str) -> None:
        self._counters.aborted += 1
        try:
            await self._append(capture, answer, reason)
        except CallFault as fault:
            log.warning("rollout %s: a partial sample is lost: %s", capture.session.spec.rollout_id, fault.message)

    async def _note(self, session: Session, fault: CallFault, seq: int) -> None:
        line, of_engine = f"{fault.kind}: {fault.message}", fault.kind in MODEL_KINDS
        try:
            await note_problem(self._redis, self._keys, session.secret, line, seq, of_engine=of_engine)
        except LedgerUnavailable as exc:
            log.warning("rollout %s: a call without an answer is not noted: %s", session.spec.rollout_id, exc)

    async def _note_replay(self, session: Session) -> None:
        try:
            await note_replay(self._redis, self._keys, session.secret)
        except LedgerUnavailable as exc:
            log.warning("rollout %s: a replay is not noted: %s", session.spec.rollout_id, exc)


class Doubt(NamedTuple):
    """Why a call is not trained on."""

    kind: str
    """For counting."""
    text: str


def drafts_of(
    capture: Capture, answer: Answer, broken: str | None, prompt: Prompt | None
) -> tuple[list[Draft], list[Doubt]]:
    """One record per choice, in order of their index, and the doubts about them; `broken` says why the answer has no
    end."""
    call, engine = capture.call, capture.endpoint.engine if capture.endpoint is not None else None
    choices = answer.choices or [Choice(0)]
    total = sum(len(choice.ids or ()) for choice in choices)
    shared = _known_doubt(capture, broken) or _shared_doubt(capture, answer, prompt, total)
    if shared is None and engine is not None and (said := engine.untrainable(capture.body)) is not None:
        shared = Doubt("no sample", said)
    lasting, common = _lasting(capture, answer, broken), {**_common_fields(capture), **_images(capture, prompt)}
    drafts: list[Draft] = []
    doubts: list[Doubt] = []
    for place, choice in enumerate(choices):
        ids = _ids(choice.ids)
        logprobs, bad = _logprobs(choice.logprobs)
        spans, odd = version_spans(capture, choice, len(ids or ()))
        doubt = shared or _doubt(choice, ids, logprobs) or bad
        if doubt is None and odd is not None:
            doubt = Doubt("policy version", odd)
        if doubt is not None:
            doubts.append(doubt)
        seq = capture.first_seq + place
        completion_id = capture.completion_id if place == 0 else f"{capture.completion_id}-{place}"
        fields = {
            **common,
            "seq": seq,
            "completion_id": completion_id,
            "reply": choice.message,
            "stop_reason": choice.stop_reason,
            "weight_versions": [{"version": span.version, "start": span.start, "end": span.end} for span in spans],
            "usage": _usage(answer.usage, ids, len(choices), total),
        }
        drafts.append(
            Draft(
                seq=seq,
                completion_id=completion_id,
                lasting={
                    **lasting,
                    "finish_reason": choice.finish_reason,
                    "untrainable": None if doubt is None else doubt.text,
                },
                fields=fields,
                prompt=prompt or NO_PROMPT,
                sampled_ids=ids or [],
                logprobs=logprobs,
                messages=call.messages,
                tools=call.tools,
            )
        )
    return drafts, doubts


def _known_doubt(capture: Capture, broken: str | None) -> Doubt | None:
    """What is known before one looks at the ids."""
    if broken is not None:
        return Doubt("incomplete", broken)
    if capture.doubt is not None:
        return Doubt("frozen model", capture.doubt)
    if capture.endpoint is not None and capture.endpoint.state.logprobs_mode == "logits":
        return Doubt("logits", "the engine gives logits for log-probabilities (its --logprobs-mode)")
    return None if capture.joint_doubt is None else Doubt("policy version", capture.joint_doubt)


def _lasting(capture: Capture, answer: Answer, broken: str | None) -> dict[str, str | bool | None]:
    engine = capture.endpoint.engine if capture.endpoint is not None else None
    return {
        "rollout_id": capture.session.spec.rollout_id,
        "dialect": capture.dialect,
        "path": capture.path,
        "streamed": capture.call.stream,
        "logprobs_mode": capture.endpoint.logprobs_mode(capture.body) if capture.endpoint is not None else "unknown",
        "grammar": engine.grammar(capture.body) if engine is not None else None,
        "engine": engine.name if engine is not None else "",
        "model_served": answer.model or capture.model_asked,
        "model_requested": capture.call.model,
        "exact": capture.exact_ids is not None,
        "exact_missed": capture.exact_missed,
        "label": str(capture.label if broken is None else CompletionLabel.ABORTED),
        "side_kind": capture.side_kind,
        "incomplete": broken is not None,
    }


def _common_fields(capture: Capture) -> dict[str, Any]:
    """What else all choices of an answer have in common."""
    engine = capture.endpoint.engine if capture.endpoint is not None else None
    return {
        "attempt": capture.session.spec.attempt,
        "retry_of": capture.retry_of,
        "requested_at": capture.requested_at.isoformat(),
        "answered_at": datetime.now(UTC).isoformat(),
        "latency_s": time.monotonic() - capture.started,
        "request_digest": capture.request_digest,
        "continued": capture.continued,
        "forged": capture.plan.forged if capture.plan is not None else 0,
        "sampling": engine.sampling(capture.body) if engine is not None else {},
        "overridden": capture.overridden,
    }


def _images(capture: Capture, prompt: Prompt | None) -> dict[str, Any]:
    """The pictures of the prompt; nothing where there are none."""
    images = images_of(capture.call.messages)
    wanted = capture.endpoint.spec.image_token_id if capture.endpoint is not None else None
    if images and wanted is not None and prompt is not None:
        images = placed(images, ids_of(prompt.line.text), wanted)
    return {"images": [image.model_dump() for image in images]} if images else {}


def _shared_doubt(capture: Capture, answer: Answer, prompt: Prompt | None, total: int) -> Doubt | None:
    """What is wrong with the answer as a whole."""
    usage = answer.usage
    if answer.model and capture.model_asked and answer.model != capture.model_asked:
        return Doubt("other model", f"asked for model '{capture.model_asked}', answered by '{answer.model}'")
    if prompt is None:
        return Doubt("no ids", "the engine gave no prompt ids")
    if capture.exact_ids is not None and prompt.line.text != text_of(capture.exact_ids):
        return Doubt("other prompt", "the engine conditioned on other ids than the ones it was sent")
    if usage is None or usage.completion_tokens is None or usage.prompt_tokens is None:
        return Doubt("no usage", "the engine gave no usage, so that the ids cannot be counted")
    if prompt.count != usage.prompt_tokens:
        return Doubt("counts differ", f"{prompt.count} prompt ids, but usage says {usage.prompt_tokens}")
    if all(choice.ids is not None for choice in answer.choices) and total != usage.completion_tokens:
        return Doubt("counts differ", f"{total} sampled ids, but usage says {usage.completion_tokens}")
    return None


def _doubt(choice: Choice, ids: list[int] | None, logprobs: Sequence[float | None]) -> Doubt | None:
    """What is wrong with one choice."""
    if ids is None:
        return Doubt("no ids", "the engine gave no token ids")
    if choice.logprobs is None and ids:
        return Doubt("no log-probabilities", "the engine gave no log-probabilities")
    if len(ids) != len(logprobs):
        return Doubt("counts differ", f"{len(ids)} sampled ids, but {len(logprobs)} log-probabilities")
    if choice.finish_reason is None:
        return Doubt("no finish reason", "the engine gave no finish reason")
    return None


def _ids(values: list[Any] | None) -> list[int] | None:
    """Token ids, or None when these are not all token ids."""
    try:
        return None if values is None else msgspec.convert(values, _TOKEN_IDS)
    except msgspec.ValidationError:
        return None


def _logprobs(entries: Sequence[Any] | None) -> tuple[Sequence[float | None], Doubt | None]:
    """The values, None where there is no number to believe, and the first such place in words."""
    plain = _all_good(entries or ())
    if plain is not None:
        return plain, None
    values: list[float | None] = []
    reason = None
    for position, entry in enumerate(entries or ()):
        value = entry.get("logprob") if isinstance(entry, dict) else None
        number = _number(value)
        good = math.isfinite(number) and number != MISSING_LOGPROB
        values.append(number if good else None)
        if not good and reason is None:
            text = f"the log-probability at position {position} is {_named(value)}"
            reason = Doubt("bad log-probability", text)
    return values, reason


def _all_good(entries: Sequence[Any]) -> Sequence[float | None] | None:
    """The values at once, if there is nothing wrong with any of them."""
    values: Sequence[float | None]
    if isinstance(entries, LogprobEntries):
        return None if MISSING_LOGPROB in entries.numbers else entries.numbers
    try:
        values = msgspec.convert([entry["logprob"] for entry in entries], _FLOATS)
    except (msgspec.ValidationError, TypeError, KeyError):
        return None
    array = np.array(values, dtype=np.float64)
    return values if bool((np.isfinite(array) & (array != MISSING_LOGPROB)).all()) else None


def _number(value: Any) -> float:
    """NaN for what is no number; JSON writes whole numbers without a point, and engines floats."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return math.nan
    try:
        return float(value)
    except OverflowError:
        return math.nan


def _named(value: Any) -> str:
    if value == MISSING_LOGPROB:
        return "-9999.0, the engine's sign for unknown"
    return "missing" if value is None else f"not a finite number ({value})"


def version_spans(capture: Capture, choice: Choice, length: int) -> tuple[list[VersionSpan], str | None]:
    """Which policy version sampled which of a choice's `length` ids, and why that is not known."""
    if choice.weight_versions is None:
        before, after = capture.version_before, capture.version_after
        if before is None or after is None:
            return [], None
        if UNREAD in {before, after}:
            return [], "the policy version could not be read around the call"
        if before != after:
            return [], f"the policy version changed during the call (from {before} to {after})"
        return [VersionSpan(version=before, start=0, end=length)], None
    position = 0
    for span in choice.weight_versions:
        if span.start != position or span.end < span.start:
            break
        position = span.end
    odd = None if position == length else "the policy version spans do not cover the sampled ids"
    return choice.weight_versions, odd


def _usage(usage: Usage | None, ids: list[int] | None, choices: int, total: int) -> dict[str, int | None]:
    if usage is None:
        return {"prompt_tokens": None, "completion_tokens": None, "cached_tokens": None}
    own = usage.completion_tokens
    if choices > 1:
        # The engine counts all choices together; each is given its own share only where the sum is proven.
        own = len(ids) if ids is not None and total == usage.completion_tokens else None
    return {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": own,
        "cached_tokens": usage.cached_tokens,
        "reasoning_tokens": usage.reasoning_tokens if choices == 1 else None,
    }
