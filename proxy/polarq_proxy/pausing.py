"""The gate that holds model calls back while the policy's weights change.

A trainer pauses, waits until nothing is in flight, updates the engine, and resumes. A pause is a record in Redis with
an expiry, so that it holds for every node (one that starts meanwhile too) and a trainer that dies ends it. Calls that
come meanwhile wait, with keep-alives where the harness reads a stream, and are told to come again after `hold_s`.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import suppress

from redis.asyncio import Redis

from polarq.errors import LedgerUnavailable
from polarq.ledger.keys import Keys
from polarq.store.pauses import Pause, PauseAck, RunAck, acknowledge, read_pauses, withdraw
from polarq_proxy.faults import CallFault, FaultKind

log = logging.getLogger("polarq.proxy")

POLL_S = 0.2
WITHDRAW_S = 2.0
PRESENT_EVERY_S = 5.0
"""How often a process says that it is there, when it has nothing else to say."""


class Gate:
    """Open until a pause is set, of every call or of one run's."""

    def __init__(self, hold_s: float) -> None:
        self.hold_s = hold_s
        """How long a call is held back at most."""
        self._changed = asyncio.Event()
        """Set, and replaced by another, when the pauses are others."""
        self._running: dict[asyncio.Timeout, str] = {}
        """Whose call it is."""
        self._cut: set[asyncio.Timeout] = set()
        self._waiting: Counter[str] = Counter()
        self.pauses: Mapping[str, Pause] = {}
        """By run; under "" that of every call."""
        self.opened_at = float("-inf")
        """When the last pause was over, in the loop's time."""

    @property
    def in_flight(self) -> int:
        return len(self._running)

    @property
    def waiting(self) -> int:
        return self._waiting.total()

    @property
    def pause(self) -> Pause | None:
        """That of every call."""
        return self.pauses.get("")

    def set(self, pauses: Mapping[str, Pause]) -> None:
        """From now on these hold, and no others. In mode `abort` the calls in flight are cut."""
        now = asyncio.get_running_loop().time()
        if self.pauses.keys() - pauses.keys():
            self.opened_at = now
        self.pauses = pauses
        for scope, run_id in self._running.items():
            # One that has expired was ended by its own limit, and is only winding down.
            ended = scope in self._cut or scope.expired()
            if not ended and any(pause.mode == "abort" for pause in self._holding(run_id)):
                self._cut.add(scope)
                scope.reschedule(now)
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()

    def _holding(self, run_id: str) -> list[Pause]:
        return [self.pauses[of] for of in {"", run_id} if of in self.pauses]

    def holds(self, run_id: str) -> bool:
        """A pause holds the run's calls back."""
        return bool(self.pauses) and bool(self._holding(run_id))

    def of_runs(self) -> tuple[RunAck, ...]:
        """What there is to say of the runs that are paused by themselves."""
        in_flight = Counter(self._running.values())
        return tuple(
            RunAck(run_id=run, pause_id=pause.pause_id, in_flight=in_flight[run], waiting=self._waiting[run])
            for run, pause in sorted(self.pauses.items())
            if run
        )

    def passed(self, scope: asyncio.Timeout, run_id: str) -> None:
        """The run's call is at the engine within `scope`, which a pause may cut. `left` ends it."""
        self._running[scope] = run_id

    def left(self, scope: asyncio.Timeout) -> bool:
        """The call is no longer at the engine. Whether a pause has cut it."""
        self._running.pop(scope, None)
        cut = scope in self._cut
        self._cut.discard(scope)
        return cut

    async def opened(self, run_id: str) -> None:
        """Waits while a pause holds the run's calls back. Raises `CallFault` when that is too long."""
        self._waiting[run_id] += 1
        try:
            async with asyncio.timeout(self.hold_s):
                while self.holds(run_id):
                    await self._changed.wait()
        except TimeoutError:
            text = "model calls are held back while the policy's weights change; ask again"
            raise CallFault(FaultKind.PAUSED, text, retry_after_s=5.0) from None
        finally:
            self._waiting[run_id] -= 1
            if not self._waiting[run_id]:
                del self._waiting[run_id]


class PauseWatch:
    """Keeps the gate as the record in Redis says, and says back what the gate does and that this process is there."""

    def __init__(self, gate: Gate, redis: Redis, keys: Keys, say: Callable[[], PauseAck]) -> None:
        self._gate = gate
        self._redis = redis
        self._keys = keys
        self._say = say
        self._said: PauseAck | None = None
        self._due_at = float("-inf")
        """When this process has to say again that it is there, in the loop's time."""
        self._task: asyncio.Task[None] | None = None

    async def start(self) -> None:
        await self.look()
        self._task = asyncio.create_task(self._watching())

    async def close(self) -> None:
        while self._task is not None and not self._task.done():
            self._task.cancel()  # again and again: the Redis client's own time-outs can swallow a cancellation
            await asyncio.wait({self._task}, timeout=POLL_S)
        if self._said is not None and not self._gate.in_flight:
            # While Redis does not answer, nobody waits for it here: the key ends by itself.
            with suppress(LedgerUnavailable, TimeoutError):
                async with asyncio.timeout(WITHDRAW_S):
                    await withdraw(self._redis, self._keys, self._said.node_id, self._said.process)

    async def look(self) -> None:
        """Once. While Redis does not answer, the gate stays as it is: no call could be recorded anyway."""
        with suppress(LedgerUnavailable):
            # Presence first: who pauses between the two either finds this process there, or its pause is read here.
            if asyncio.get_running_loop().time() >= self._due_at:
                await self._tell(self._say())
            pauses = await read_pauses(self._redis, self._keys)
            if pauses != self._gate.pauses:
                held = [f"of {run or 'every run'} ({pause.mode})" for run, pause in sorted(pauses.items())]
                log.info("model calls are %s", f"held back: {', '.join(held)}" if held else "let through")
                self._gate.set(pauses)
            said = self._say()
            # A pause is acknowledged until it is drained, and its end once.
            if said != self._said:
                await self._tell(said)

    async def _tell(self, said: PauseAck) -> None:
        await acknowledge(self._redis, self._keys, said)
        self._said = said
        self._due_at = asyncio.get_running_loop().time() + PRESENT_EVERY_S

    async def _watching(self) -> None:
        while True:
            await asyncio.sleep(POLL_S)
            try:
                await self.look()
            except Exception:  # without this watch no pause would ever begin or end again
                log.exception("the pause of model calls could not be looked at")
