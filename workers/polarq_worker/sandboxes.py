"""The sandboxes of one attempt: the agent's, and those that its evaluator asks for."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path

from polarq.contracts.rollout import Boundary
from polarq.contracts.specs import PrepareAction, RuntimeSpec
from polarq.ledger import Claim
from polarq_worker.harnesses.base import sandbox_env
from polarq_worker.kept_logs import keep_logs
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
        await runtime.start()
        env = self.env(runtime)
        await prepare(runtime, actions, env=env, timeout_s=budget_s, upload_roots=security.upload_roots)
        return runtime

    def env(self, runtime: Runtime) -> dict[str, str]:
        """The environment of prepare and evaluation: no secret in it, and no model to be reached."""
        return sandbox_env(self._claim.task, rollout_id=self._claim.rollout_id, layout=runtime.layout)

    async def keep_logs(self, runtime: Runtime) -> None:
        kept: Path = self._services.logs_dir / "rollouts" / f"{self._claim.rollout_id}-{self._claim.token}"
        await asyncio.to_thread(keep_logs, runtime.host_log_dir, kept / runtime.runtime_id)
