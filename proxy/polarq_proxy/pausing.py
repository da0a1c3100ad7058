"""The gate that holds model calls back while the policy's weights change.

A trainer pauses, waits until nothing is in flight, updates the engine, and resumes. A pause is a record in Redis with
an expiry, so that it holds for every node (one that starts meanwhile too) and a trainer that dies ends it. Calls that
come meanwhile wait, with keep-alives where the harness reads a stream, and are told to come again after `hold_s`.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from contextlib import suppress

from redis.asyncio import Redis

from polarq.errors import LedgerUnavailable
from polarq.ledger.keys import Keys
from polarq.store.pauses import Pause, PauseAck, acknowledge, read_pause, withdraw
from polarq_proxy.faults import CallFault, FaultKind

log = logging.getLogger("polarq.proxy")

POLL_S = 0.2
WITHDRAW_S = 2.0
PRESENT_EVERY_S = 5.0
"""How often a process says that it is there, when it has nothing else to say."""


class Gate:
    """Open until a pause is set."""

    def __init__(self, hold_s: float) -> None:
        self.hold_s = hold_s
        """How long a call is held back at most."""
        self._open = asyncio.Event()
        self._open.set()
        self._running: set[asyncio.Timeout] = set()
        self._cut: set[asyncio.Timeout] = set()
        self.waiting = 0
        self.pause: Pause | None = None
        self.opened_at = float("-inf")
        """When the last pause was over, in the loop's time."""

    @property
    def in_flight(self) -> int:
        return len(self._running)

    def set(self, pause: Pause | None) -> None:
        """From now on no call passes, or every one does. In mode `abort` the ones in flight are cut."""
        self.pause = pause
        if pause is None:
            self.opened_at = asyncio.get_running_loop().time()
            self._open.set()
            return
        self._open.clear()
        if pause.mode == "abort":
            now = asyncio.get_running_loop().time()
            for scope in self._running - self._cut:
                if not scope.expired():  # else its own limit has ended it, and it is only winding down
                    self._cut.add(scope)
                    scope.reschedule(now)

    @property
    def open(self) -> bool:
        """No pause holds calls back."""
        return self.pause is None

    def passed(self, scope: asyncio.Timeout) -> None:
        """A call is at the engine within `scope`, which a pause may cut. `left` ends it."""
        self._running.add(scope)

    def left(self, scope: asyncio.Timeout) -> bool:
        """The call is no longer at the engine. Whether a pause has cut it."""
        self._running.discard(scope)
        cut = scope in self._cut
        self._cut.discard(scope)
        return cut

    async def opened(self) -> None:
        """Waits while there is a pause. Raises `CallFault` when it lasts longer than a call is held back."""
        self.waiting += 1
        try:
            async with asyncio.timeout(self.hold_s):
                while not self._open.is_set():
                    await self._open.wait()
        except TimeoutError:
            text = "model calls are held back while the policy's weights change; ask again"
            raise CallFault(FaultKind.PAUSED, text, retry_after_s=5.0) from None
        finally:
            self.waiting -= 1


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
            pause = await read_pause(self._redis, self._keys)
            if pause != self._gate.pause:
                log.info("model calls are %s", "let through" if pause is None else f"held back ({pause.mode})")
                self._gate.set(pause)
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
