"""The sandboxes of one attempt: the agent's, and those that its evaluator asks for."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path

from polarq.contracts.rollout import Boundary
from polarq.contracts.sandbox import SandboxRecord
from polarq.contracts.specs import PrepareAction, RuntimeSpec
from polarq.ledger import Claim
from polarq.ledger.sandboxes import drop_sandbox, note_sandbox
from polarq_worker.harnesses.base import sandbox_env
from polarq_worker.kept_logs import keep_logs
from polarq_worker.orphans import record_of
from polarq_worker.outcomes import failed
from polarq_worker.runtimes.base import Runtime
from polarq_worker.runtimes.create import create_runtime
from polarq_worker.services import Services
from polarq_worker.stages.prepare import prepare


class Sandboxes:
    """See the module."""

    def __init__(self, claim: Claim, services: Services) -> None:
        self.started: list[Runtime] = []
        """Whatever was begun, for the teardown."""
        self._records: dict[str, SandboxRecord] = {}
        """Of those that would outlive this worker, by runtime id."""
        self._claim = claim
        self._services = services

    @property
    def spec(self) -> RuntimeSpec:
        """Raises `StageFailed` where neither the task nor the node names a runtime."""
        node = self._services.node
        spec = self._claim.task.runtime or node.default_runtime
        if spec is None:
            text = f"the task names no runtime and node '{node.id}' has no default_runtime"
            raise failed(Boundary.TASK, "no_runtime", text)
        return spec

    async def start(self, actions: Sequence[PrepareAction], role: str, budget_s: float) -> Runtime:
        """A new one with the prepare actions carried out. `role` tells the attempt's sandboxes apart."""
        claim, spec = self._claim, self.spec
        name = f"{claim.rollout_id}-{claim.token}-{role}"
        root = self._services.rollouts_dir / name
        security = self._services.topology.security
        runtime = create_runtime(spec, runtime_id=name, root=root, security=security)
        self.started.append(runtime)
        await self._note(runtime)
        await runtime.start()
        env = self.env(runtime)
        await prepare(runtime, actions, env=env, timeout_s=budget_s, upload_roots=security.upload_roots)
        return runtime

    def env(self, runtime: Runtime) -> dict[str, str]:
        """The environment of prepare and evaluation: no secret in it, and no model to be reached."""
        return sandbox_env(self._claim.task, rollout_id=self._claim.rollout_id, layout=runtime.layout)

    async def stop(self, runtime: Runtime) -> None:
        """Raises `RuntimeFault`; the record of one that could not be stopped stays, for the worker's next start."""
        await runtime.stop()
        if (record := self._records.pop(runtime.runtime_id, None)) is not None:
            ledger = self._services.ledger
            await ledger.do(drop_sandbox(ledger.calls.keys, record))

    async def _note(self, runtime: Runtime) -> None:
        """Before it is started, so that whatever happens somebody knows of it."""
        node, place = self._services.node, self._services.place
        record = record_of(runtime, self.spec, self._claim, node.id, place.incarnation)
        if record is not None:
            ledger = self._services.ledger
            await self._services.patience.insist(ledger, note_sandbox(ledger.calls.keys, record))
            self._records[runtime.runtime_id] = record

    async def keep_logs(self, runtime: Runtime) -> None:
        kept: Path = self._services.logs_dir / "rollouts" / f"{self._claim.rollout_id}-{self._claim.token}"
        await asyncio.to_thread(keep_logs, runtime.host_log_dir, kept / runtime.runtime_id)
