"""One call being sampled, and everybody who waits for its answer.

A flight belongs to no connection: a harness that hangs up and asks the same again joins the flight that is under way
instead of making the engine sample twice. When nobody has waited for `grace_s`, it is cancelled, which frees the
engine; what was sampled until then is recorded as aborted.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Sequence

from polarq_proxy.call import Answer, ChoiceDelta, Piece
from polarq_proxy.dialects.base import StreamWriter
from polarq_proxy.downstream import Downstream, HungUp
from polarq_proxy.faults import CallFault, FaultKind
from polarq_proxy.gather import Gatherer, pieces_of
from polarq_proxy.recorder import Capture
from polarq_proxy.repeats import Ended

log = logging.getLogger("polarq.proxy")


MAX_BACKLOG = 64 * 1024 * 1024
"""Bytes that wait for a harness that does not read, before it counts as gone."""


class Listener:
    """A harness that reads a streamed answer while it is sampled. One that does not read holds up nobody: what it has
    not taken waits for it here."""

    def __init__(self, writer: StreamWriter, down: Downstream) -> None:
        self.writer = writer
        self.down = down
        self.whole = False
        """It is given the answer at its end, at once: it came after the end was being held back."""
        self.broken: Exception | None = None
        """Why what was sampled cannot be written for it."""
        self._backlog: list[bytes] = []
        self._size = 0
        self._sender: asyncio.Task[None] | None = None
        self._gone = False

    def show(self, pieces: Sequence[Piece]) -> None:
        """Does not wait for the harness. Raises `HungUp`."""
        events = b"".join([self.writer.piece(piece) for piece in pieces])
        if self._gone:
            raise HungUp
        if not events or (self._sender is None and self.down.send_now(events)):
            return
        self._backlog.append(events)
        self._size += len(events)
        if self._size > MAX_BACKLOG:
            self._gone = True
            raise HungUp
        if self._sender is None:
            self._sender = asyncio.create_task(self._send_backlog())

    async def read(self) -> None:
        """Waits until all that was shown is on its way. Raises `HungUp`, and what went wrong as it was written."""
        if self.broken is not None:
            raise self.broken
        if self._sender is not None:
            await asyncio.wait({self._sender})
        if self._gone:
            raise HungUp

    def close(self) -> None:
        if self._sender is not None:
            self._sender.cancel()

    async def _send_backlog(self) -> None:
        try:
            while self._backlog:
                events = b"".join(self._backlog)
                self._backlog.clear()
                self._size = 0
                await self.down.send(events)
        except HungUp:
            self._gone = True
        finally:
            self._sender = None

    def end(self, held: Sequence[Piece], answer: Answer) -> bytes:
        return self.writer.end(pieces_of(answer) if self.whole else held, answer)


class Flight:
    """`start` it once; wait for `answer`; `leave` when you stop waiting."""

    def __init__(self, capture: Capture, grace_s: float) -> None:
        self.capture = capture
        self.gatherer = Gatherer(capture.call.choices)
        self.held: list[Piece] = []
        """From the first finish reason on: shown only once the call is recorded."""
        self.cut: Answer | None = None
        """What was sampled in parts so far, where sampling was cut and goes on from there."""
        self.first_shown: float | None = None
        """When the first of what was sampled came."""
        self.shown = False
        """Some of what was sampled has gone to a harness."""
        self.left_record = False
        """What was sampled before it was cut stands in the record."""
        self.settling = False
        """Its answer is whole and is being recorded."""
        self.delivered = False
        self.unstored: Answer | None = None
        """It was sampled, and the store did not take it."""
        self.noted: Ended | None = None
        """What repeats are told of it once it is over."""
        """Somebody has read the whole answer, as far as a server can tell."""
        self._listeners: list[Listener] = []
        self._waiting = 0
        self._grace_s = grace_s
        self._grace: asyncio.TimerHandle | None = None
        self._task: asyncio.Task[None] | None = None
        self._outcome: asyncio.Future[Answer] = asyncio.get_running_loop().create_future()

    def start(self, work: Callable[[Flight], Awaitable[Answer]], ended: Callable[[Flight, bool], None]) -> None:
        """Runs `work`; calls `ended` when it is over, and says whether there is an answer, before anybody hears of
        it."""
        self._task = asyncio.create_task(self._run(work, ended))

    @property
    def over(self) -> bool:
        return self._outcome.done()

    @property
    def awaited(self) -> bool:
        """Somebody is waiting for it."""
        return self._waiting > 0

    def read_by_harness(self) -> None:
        """Its answer was written to its end."""
        self.delivered = True
        if self.noted is not None:
            self.noted.delivered = True

    def cancel(self) -> None:
        """Nobody wants the answer any more. One that is whole is recorded all the same, for who asks again."""
        if self._task is not None and not self.settling:
            self._task.cancel()

    async def closed(self) -> None:
        """Waits until it is over."""
        if self._task is not None:
            await asyncio.wait({self._task})

    def join(self) -> None:
        """One more waits for it."""
        self._waiting += 1
        if self._grace is not None:
            self._grace.cancel()
            self._grace = None

    def leave(self) -> None:
        """One fewer waits. The last one's going starts the time in which a repeat may still join."""
        self._waiting -= 1
        if self._waiting == 0 and not self.over:
            self._grace = asyncio.get_running_loop().call_later(self._grace_s, self.cancel)

    async def answer(self) -> Answer:
        """The recorded answer. Raises `CallFault`. Cancelling the wait does not cancel the flight."""
        return await asyncio.shield(self._outcome)

    def listen(self, listener: Listener) -> None:
        """From now on `listener` is shown what is sampled, and first what it missed. Raises `HungUp`."""
        if self.held:
            listener.whole = True
            return
        missed = _so_far(self.gatherer)
        self._listeners.append(listener)
        if missed is not None:
            self.shown = True
            listener.show([missed])

    def begin_again(self) -> None:
        """What was sampled so far is given up; nobody has seen it."""
        self.left_record = False
        self.gatherer = Gatherer(self.capture.call.choices)
        self.held = []
        self.cut = None

    def so_far(self) -> Answer:
        """What was sampled until now."""
        return self.gatherer.answer() if self.cut is None else self.cut

    @property
    def began(self) -> bool:
        """Something was sampled."""
        return self.cut is not None or self.gatherer.began

    def forget(self, listener: Listener) -> None:
        if listener in self._listeners:
            self._listeners.remove(listener)

    def take(self, pieces: Sequence[Piece]) -> None:
        """What the engine said: gathered, and shown to all who listen up to the first finish reason."""
        shown = []
        for piece in pieces:
            self.gatherer.add(piece)
            if self.held or any(change.finish_reason is not None for change in piece.choices):
                self.held.append(piece)
            else:
                shown.append(piece)
        now = self.capture.heard_at = time.monotonic()
        if not shown:
            return
        if self.first_shown is None:
            self.first_shown = now
        self.shown = self.shown or bool(self._listeners)
        for listener in list(self._listeners):
            try:
                listener.show(shown)
            except HungUp:
                self.forget(listener)
            except Exception as exc:  # that it cannot be written is one harness's trouble, and not the call's
                listener.broken = exc
                self.forget(listener)

    async def _run(self, work: Callable[[Flight], Awaitable[Answer]], ended: Callable[[Flight, bool], None]) -> None:
        result: Answer | CallFault
        try:
            result = await work(self)
        except CallFault as fault:
            result = fault
        except asyncio.CancelledError:
            result = CallFault(FaultKind.ABORTED, "nobody waited for this call any more")
        except RecursionError:
            result = too_deep()
        except Exception:
            log.exception("a call failed inside the proxy")
            result = CallFault(FaultKind.INTERNAL, "polarq's proxy failed; its log says why")
        if self._grace is not None:
            self._grace.cancel()
        if isinstance(result, CallFault):
            self._outcome.set_exception(result)
            self._outcome.exception()  # when nobody waits, nobody has to hear of it
        else:
            self._outcome.set_result(result)
        ended(self, not isinstance(result, CallFault))


def too_deep() -> CallFault:
    return CallFault(FaultKind.BAD_REQUEST, "the request is nested too deeply")


def _so_far(gatherer: Gatherer) -> Piece | None:
    """What was shown until now, as one piece; None: nothing."""
    answer = gatherer.answer()
    if not gatherer.began and answer.prompt_ids is None:
        return None
    (piece,) = pieces_of(answer)
    changes = [
        ChoiceDelta(
            change.index,
            change.delta,
            None if change.ids is None else list(change.ids),
            None if change.logprobs is None else list(change.logprobs),
        )
        for change in piece.choices
    ]
    return Piece(changes, piece.prompt_ids, None, piece.model)
