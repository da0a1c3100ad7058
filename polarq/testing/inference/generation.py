"""Letting a sample out token by token: pace, pause, abort, and the ledger's record of how far it came."""

from __future__ import annotations

import asyncio
import time
from typing import Literal

from polarq.testing.inference.calls import CallLedger, SampledCall
from polarq.testing.inference.sampling import Sample

PauseMode = Literal["abort", "wait", "keep"]


class Gate:
    """Pausing, resuming and the policy version: what a trainer does to an engine while it runs."""

    def __init__(self) -> None:
        self.weight_version = "default"
        self.paused: PauseMode | None = None
        self.running: set[Generation] = set()
        self.finished: dict[str, int] = {}
        self._resumed = asyncio.Event()
        self._resumed.set()
        self._idle = asyncio.Event()
        self._idle.set()

    async def pause(self, mode: PauseMode) -> None:
        """`abort` ends what runs, `wait` returns when it has ended, `keep` freezes it until `resume`."""
        self.paused = mode
        self._resumed.clear()
        if mode == "abort":
            self.abort()
        if mode in ("abort", "wait"):
            await self._idle.wait()

    def resume(self) -> None:
        self.paused = None
        self._resumed.set()

    def abort(self, request_ids: set[str] | None = None) -> int:
        """Aborts the running requests of these ids (None: all); returns how many choices were told."""
        chosen = [g for g in self.running if request_ids is None or g.call.request_id in request_ids]
        for generation in chosen:
            generation.abort()
        return len(chosen)

    async def frozen(self) -> None:
        """Returns at once unless the engine is paused with `keep`; then at `resume`."""
        while self.paused == "keep":
            await self._resumed.wait()

    async def running_again(self) -> None:
        """Returns at once unless the engine is paused, however; then at `resume`."""
        while self.paused is not None:
            await self._resumed.wait()

    def enter(self, generation: Generation) -> None:
        self.running.add(generation)
        self._idle.clear()

    def leave(self, generation: Generation) -> None:
        self.running.discard(generation)
        reason = generation.call.finish_reason or "abort"
        self.finished[reason] = self.finished.get(reason, 0) + 1
        if not self.running:
            self._idle.set()


class Generation:
    """One choice being generated. `advance` until it returns 0; `close` in any case."""

    def __init__(
        self,
        gate: Gate,
        ledger: CallLedger,
        call: SampledCall,
        sample: Sample,
        *,
        delay_s: float,
        tokens_per_s: float | None,
    ) -> None:
        self.call = call
        self.sample = sample
        self.count = 0
        self._gate = gate
        self._ledger = ledger
        self._rate = tokens_per_s
        self._due = time.monotonic() + delay_s
        self._aborted = asyncio.Event()
        gate.enter(self)
        ledger.append(call)

    def abort(self) -> None:
        self._aborted.set()

    async def advance(self, tokens: int = 1) -> int:
        """Samples up to `tokens` more tokens, in their time; returns how many came (0: none are left).

        After an abort, `sample` ends with what had been sampled, for the reason "abort".
        """
        before = self.count
        while self.count < min(before + tokens, len(self.sample.token_ids)):
            if not await self._token():
                self.sample = self.sample.cut(self.count, "abort")
                break
        if self.count == len(self.sample.token_ids):
            self._finish()
        return self.count - before

    async def _token(self) -> bool:
        """One token in its time; False when the request was aborted instead."""
        await self._until_due()
        while self._gate.paused == "keep":
            frozen_at = time.monotonic()
            await self._gate.frozen()
            self._due += time.monotonic() - frozen_at
            await self._until_due()
        if self._aborted.is_set():
            return False
        self.call.sampled_ids.append(self.sample.token_ids[self.count])
        self.call.logprobs.append(self.sample.logprobs[self.count])
        self.call.weight_versions.append(self._gate.weight_version)
        self.count += 1
        self._due += 1 / self._rate if self._rate else 0.0
        self._ledger.changed()
        return True

    async def _until_due(self) -> None:
        wait_s = self._due - time.monotonic()
        if wait_s <= 0:
            return
        try:
            async with asyncio.timeout(wait_s):
                await self._aborted.wait()
        except TimeoutError:
            return

    def _finish(self) -> None:
        if self.call.finish_reason is None:
            self.call.finish_reason = self.sample.finish_reason
            self.call.aborted = self.sample.finish_reason == "abort"
            self._end()

    def close(self) -> None:
        """Ends the record: whatever has not been sampled by now never will be."""
        if self.call.finished_at is None:
            self.call.aborted = True
            self._end()

    def _end(self) -> None:
        self.call.finished_at = time.time()
        self._gate.leave(self)
        self._ledger.changed()

    @property
    def weight_version_spans(self) -> list[dict[str, str | int]]:
        """vLLM's `weight_versions`: half-open spans over the sampled tokens."""
        spans: list[dict[str, str | int]] = []
        for at, version in enumerate(self.call.weight_versions):
            if spans and spans[-1]["version"] == version:
                spans[-1]["end"] = at + 1
            else:
                spans.append({"version": version, "start": at, "end": at + 1})
        return spans
