"""Making one sandbox: its record, its start, its recipe. What lives of this worker is known here."""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

from polarq.contracts.sandbox import ExecCategory, SandboxRecord, ScrubbedHistory
from polarq.errors import PolarqError
from polarq.ledger import Claim
from polarq.ledger.calls import Call
from polarq.ledger.keys import Keys
from polarq.ledger.sandboxes import drop_sandbox, note_sandbox
from polarq.topology.models import SecuritySection
from polarq_worker.harnesses.environment import prepare_env
from polarq_worker.harnesses.programs.registries import Registries
from polarq_worker.kept_logs import keep_logs
from polarq_worker.orphans import record_of
from polarq_worker.runtimes.base import Host, Runtime
from polarq_worker.runtimes.create import create_runtime, runtime_named
from polarq_worker.runtimes.exec_times import ExecTimes
from polarq_worker.spent import measured
from polarq_worker.stages.prepare import prepare
from polarq_worker.warm.recipe import Recipe

log = logging.getLogger("polarq.worker.warm")

Begun = Callable[[Runtime], None]
"""Told of a sandbox before it is started: from then on whoever asked for it has to see to its end."""


class Maker:
    """One worker's. `insist` carries out a step of the ledger, however long that takes."""

    def __init__(
        self,
        host: Host,
        security: SecuritySection,
        folder: Path,
        keys: Keys,
        insist: Callable[[Call[None]], Awaitable[object]],
    ) -> None:
        self.host = host
        self.living: dict[str, Runtime] = {}
        """By runtime id, from before their start until their end."""
        self.used: set[type[Runtime]] = set()
        """Backends of which anything was started."""
        self._records: dict[str, SandboxRecord] = {}
        self._security = security
        self._folder = folder
        self._keys = keys
        self._insist = insist
        self._starting = asyncio.Semaphore(host.settings.pool.max_starting)
        self._made = 0
        self._ending: set[asyncio.Task[None]] = set()

    def neutral_id(self) -> str:
        """For one that belongs to no rollout yet. Never given twice, by any worker."""
        self._made += 1
        return f"warm-{self.host.incarnation[:8] or 'none'}-{self._made}"

    def create(self, recipe: Recipe, runtime_id: str) -> Runtime:
        """Raises `UnknownPlugin`, `InvalidTask`."""
        runtime = create_runtime(
            recipe.made_with,
            runtime_id=runtime_id,
            root=self._folder / runtime_id,
            security=self._security,
            host=self.host,
        )
        self.living[runtime_id] = runtime
        self.used.add(recipe.runtime)
        return runtime

    def named(self, name: str) -> type[Runtime]:
        """The backend that a task names so. Raises `UnknownPlugin`."""
        return runtime_named(name, self._security.allowed_modules)

    async def start(
        self, runtime: Runtime, claim: Claim | None, *, snapshot: str | None = None, online: bool = True
    ) -> None:
        """Raises `RuntimeFault`; `stop` is due in any case."""
        await self.note(runtime, claim)
        async with self._starting:
            with measured("sandbox_start_s"):
                await runtime.start(snapshot=snapshot, online=online)

    async def note(self, runtime: Runtime, claim: Claim | None) -> None:
        """Before it is started, and when it has found its rollout, so that whatever happens somebody knows of it."""
        record = record_of(runtime, self.host.node_id, self.host.incarnation, claim)
        if record is not None:
            self._records[runtime.runtime_id] = record
            await self._insist(note_sandbox(self._keys, record))

    async def carry_out(self, recipe: Recipe, runtime: Runtime, budget_s: float) -> list[ScrubbedHistory]:
        """The recipe, in a sandbox that has been started. Raises `PrepareFailed`, `RuntimeFault`."""
        deadline = time.monotonic() + budget_s
        env = prepare_env(recipe.spec, runtime.layout)

        def left_s() -> float:
            return max(deadline - time.monotonic(), 0.0)

        with measured("recipe_s", there=bool(recipe.setup or recipe.actions)):
            if recipe.setup:
                registries = await asyncio.to_thread(Registries.of, os.environ, Path.home())
                async with registries.lent(runtime) as lent:
                    own = {**lent, **env}
                    await prepare(
                        runtime,
                        recipe.setup,
                        env=own,
                        timeout_s=left_s(),
                        upload_roots=["*"],
                        category=ExecCategory.SETUP,
                    )
            roots = self._security.upload_roots
            await prepare(runtime, recipe.actions, env=env, timeout_s=left_s(), upload_roots=roots)
        with measured("history_s", there=bool(recipe.finish)):
            return [said for step in recipe.finish for said in await step.carry_out(runtime, env, left_s())]

    async def lives(self, runtime: Runtime) -> bool:
        """Whether one that waited is still there."""
        # Looking at it is no command of its rollout's.
        times, runtime.exec_times = runtime.exec_times, ExecTimes()
        try:
            with measured("sandbox_check_s"):
                lives = await runtime.alive()
            if lives:
                return True
            log.warning("sandbox %s died while it waited; another one is taken", runtime.runtime_id)
        except PolarqError as exc:
            log.warning("sandbox %s died while it waited: %s", runtime.runtime_id, exc)
        except Exception:
            log.exception("sandbox %s: an error in its runtime", runtime.runtime_id)
        finally:
            runtime.exec_times = times
        return False

    async def stop(self, runtime: Runtime) -> None:
        """Raises `RuntimeFault`; the record of one that could not be stopped stays, for whoever can."""
        try:
            await runtime.stop()
        finally:
            self.living.pop(runtime.runtime_id, None)
            record = self._records.pop(runtime.runtime_id, None)
        if record is not None:
            await self._insist(drop_sandbox(self._keys, record))

    async def keep_logs(self, runtime: Runtime, kept: Path) -> None:
        try:
            await asyncio.to_thread(keep_logs, runtime.host_log_dir, kept)
        except OSError as exc:
            log.warning("the logs of %s are not kept (%s)", runtime.runtime_id, exc.strerror or exc)

    def end(self, runtime: Runtime) -> asyncio.Task[None]:
        """Stops it, whatever happens to whoever asked. Waiting for it is not needed."""
        ending = asyncio.create_task(self._end(runtime), name=f"end of {runtime.runtime_id}")
        self._ending.add(ending)
        ending.add_done_callback(self._ending.discard)
        return ending

    async def _end(self, runtime: Runtime) -> None:
        try:
            await self.stop(runtime)
        except PolarqError as exc:
            log.error("sandbox %s: %s", runtime.runtime_id, exc)
        except Exception:
            log.exception("sandbox %s could not be stopped", runtime.runtime_id)

    async def ended(self) -> None:
        """Returns when all that was ended in the background has ended."""
        while self._ending:
            await asyncio.wait(self._ending)
