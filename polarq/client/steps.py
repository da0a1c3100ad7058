"""What a client does, written once and carried out by threads and by asyncio alike.

Whatever takes more than one request is a generator of steps: requests to the ledger, pauses, and work that blocks. The
answer of each step is sent back into it, and what a step met is thrown into it, so that it reads like plain code.
`Client` carries the steps out one after the other; `AsyncClient` awaits them, and does what blocks beside its loop.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable, Generator
from contextlib import closing
from dataclasses import dataclass
from typing import Any, Generic, TypeVar, cast

from polarq.contracts.node import NodeRecord
from polarq.errors import LedgerUnavailable
from polarq.ledger import AsyncLedger, Call, Calls, Ledger
from polarq.ledger.connection import merge_nodes

T = TypeVar("T")
R = TypeVar("R")

log = logging.getLogger("polarq.client")


@dataclass(frozen=True, slots=True)
class Sleep:
    """A step: wait."""

    seconds: float


@dataclass(frozen=True, slots=True)
class Work:
    """A step: something that blocks or takes long, other than a request to the ledger."""

    make: Callable[[], Any]


Steps = Generator[Any, Any, R]
"""Yields `Call`, `Sleep` and `Work`, to be answered, and, where results come one by one, the results. Returns R."""


def ask(call: Call[T]) -> Steps[T]:
    """The answer of a request."""
    answer: T = yield call
    return answer


OUTAGE_S = 600.0
"""How long Redis may be away in the middle of a stream."""

_PAUSES_S = (0.1, 0.2, 0.5, 1.0, 2.0)


@dataclass(slots=True)
class Outage:
    """How long Redis is away, and how long it may be."""

    most_s: float = OUTAGE_S
    was: bool = False
    """It was away: what comes from it now need not follow on what came before."""
    _since: float | None = None
    _tries: int = 0

    def met(self, exc: LedgerUnavailable) -> float:
        """Seconds until the next try. Raises the error when that was long enough."""
        now = time.monotonic()
        if self._since is None:
            self._since, self._tries = now, 0
        if now - self._since > self.most_s:
            raise exc
        log.warning("waiting for the ledger: %s", exc)
        self.was = True
        self._tries += 1
        return _PAUSES_S[min(self._tries, len(_PAUSES_S)) - 1]

    def over(self) -> None:
        self._since = None


def patiently(call: Call[T], outage: Outage, most_s: Callable[[], float]) -> Steps[T]:
    """As `ask`, again and again while Redis is away; `most_s` says how long to pause at most, or raises."""
    while True:
        try:
            answer: T = yield call
        except LedgerUnavailable as exc:
            yield Sleep(min(outage.met(exc), most_s()))
        else:
            outage.over()
            return answer


def work(make: Callable[[], T]) -> Steps[T]:
    """What `make` returns; it may block."""
    made: T = yield Work(make)
    return made


def all_nodes(calls: Calls) -> Steps[list[NodeRecord]]:
    """Every node that announced itself, with liveness, flags and queue depth."""
    rows = yield from ask(calls.node_records())
    states = yield from ask(calls.node_states([node_id for node_id, _ in rows]))
    depths = calls.depths_elsewhere(list(states))
    if depths is None:
        return merge_nodes(rows, states)
    try:
        return merge_nodes(rows, states, (yield from ask(depths)))
    except LedgerUnavailable as exc:
        log.warning("how much waits in the queues is not known: %s", exc)
        return merge_nodes(rows, states)


def _carried(ledger: Ledger, step: Call[Any] | Sleep | Work) -> Any:
    match step:
        case Call():
            return ledger.do(step)
        case Sleep():
            return time.sleep(step.seconds)
        case Work():
            return step.make()


async def _carried_async(ledger: AsyncLedger, step: Call[Any] | Sleep | Work) -> Any:
    match step:
        case Call():
            return await ledger.do_blocking(step)
        case Sleep():
            return await asyncio.sleep(step.seconds)
        case Work():
            return await asyncio.to_thread(step.make)


class _Course(Generic[R]):
    """Steps on their way: `step` is the one to be carried out now, until `over`."""

    def __init__(self, steps: Steps[R]) -> None:
        self._steps = steps
        self.over = False
        self.step: Any = None
        self.returned: R | None = None
        self._go_on(lambda: next(steps))

    @property
    def yields(self) -> bool:
        """The step is a result."""
        return not isinstance(self.step, Call | Sleep | Work)

    def answer(self, value: Any) -> None:
        self._go_on(lambda: self._steps.send(value))

    def fail(self, exc: Exception) -> None:
        self._go_on(lambda: self._steps.throw(exc))

    def _go_on(self, how: Callable[[], Any]) -> None:
        try:
            self.step = how()
        except StopIteration as end:
            self.over, self.returned = True, end.value


def each(ledger: Ledger, steps: Steps[R]) -> Generator[Any, None, R]:
    """Carries the steps out and yields the results among them; returns what they return. Raises what they raise."""
    with closing(steps):
        course = _Course(steps)
        while not course.over:
            if course.yields:
                yield course.step
                course.answer(None)
                continue
            try:
                answer = _carried(ledger, course.step)
            except Exception as exc:
                course.fail(exc)
            else:
                course.answer(answer)
        return cast(R, course.returned)


def outcome(ledger: Ledger, steps: Steps[R]) -> R:
    """What the steps return. Raises what they raise."""
    course = each(ledger, steps)
    while True:
        try:
            next(course)
        except StopIteration as end:
            return cast(R, end.value)


async def each_async(ledger: AsyncLedger, steps: Steps[R]) -> AsyncIterator[Any]:
    """As `each`, on an event loop."""
    with closing(steps):
        course = _Course(steps)
        while not course.over:
            if course.yields:
                yield course.step
                course.answer(None)
                continue
            try:
                answer = await _carried_async(ledger, course.step)
            except Exception as exc:
                course.fail(exc)
            else:
                course.answer(answer)


async def outcome_async(ledger: AsyncLedger, steps: Steps[R]) -> R:
    """As `outcome`, on an event loop."""
    with closing(steps):
        course = _Course(steps)
        while not course.over:
            try:
                answer = await _carried_async(ledger, course.step)
            except Exception as exc:
                course.fail(exc)
            else:
                course.answer(answer)
        return cast(R, course.returned)
