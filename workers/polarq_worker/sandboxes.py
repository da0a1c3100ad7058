"""The sandboxes of one attempt: the agent's, and the fresh one that its evaluator may ask for.

The fresh one is not held during the run: it is asked for when the harness ends, and comes while the trajectory is
built. Where its recipe is not the agent's, what that leaves on disk is made during the run.
"""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path

from polarq.contracts.evaluators import grades_fresh
from polarq.contracts.rollout import Boundary
from polarq.contracts.sandbox import SandboxReport
from polarq.contracts.task import Task
from polarq.errors import PolarqError
from polarq.ledger import Claim
from polarq_worker.harnesses.base import Harness, sandbox_env
from polarq_worker.kept_logs import keep_logs
from polarq_worker.network.sandbox_network import SandboxNetwork
from polarq_worker.outcomes import failed
from polarq_worker.runtimes.base import Runtime
from polarq_worker.services import Services
from polarq_worker.spent import counted_in
from polarq_worker.warm.members import Member
from polarq_worker.warm.recipe import Recipe, with_runtime
from polarq_worker.warm.snapshots import RecipeChanged

log = logging.getLogger("polarq.worker.walk")

_TRIES = 3
"""How often a recipe is taken up whose files change while they are uploaded."""


class Sandboxes:
    """See the module."""

    def __init__(self, claim: Claim, services: Services) -> None:
        self.started: list[Runtime] = []
        """Whatever was begun, for the teardown."""
        self.task: Task = with_runtime(claim.task, services.node)
        self._claim = claim
        self._services = services
        self._warm = services.warm
        self._spent: dict[str, dict[str, float]] = {}
        """Seconds that taking each of the two has cost, by part."""
        self._agent: Member | None = None
        self._said: SandboxReport | None = None
        """What there was to say of it when it was done with."""
        self._shared_logs: list[Path] = []
        """What was printed where this attempt's recipes were prepared together with others'."""
        self._fresh: asyncio.Task[Member] | None = None
        self._unused: Runtime | None = None
        """A fresh one that nothing has been done in."""
        self._readying: asyncio.Task[None] | None = None
        self._networks: dict[str, SandboxNetwork] = {}
        """By runtime id."""

    # --- the agent's

    async def agent(self, harness: Harness, budget_s: float) -> Runtime:
        """A prepared one, for the harness. Raises as `WarmPool.take`, and `StageFailed` without any runtime."""
        if self.task.runtime is None:
            text = f"the task names no runtime and node '{self._services.node.id}' has no default_runtime"
            raise failed(Boundary.TASK, "no_runtime", text)
        tries = _TRIES
        while True:
            recipe = await self._warm.recipes.of_agent(self.task, harness)
            try:
                self._agent = await self._take(recipe, "agent", budget_s)
            except RecipeChanged:
                tries -= 1
                if not tries:
                    raise
            else:
                return self._agent.runtime

    def report(self) -> SandboxReport | None:
        """What the result says of the sandbox that the harness ran in."""
        return self._said if self._said is not None or self._agent is None else self._report(self._agent)

    def _report(self, agent: Member) -> SandboxReport:
        runtime, recipe = agent.runtime, agent.recipe
        network = self.network(runtime)
        return SandboxReport(
            backend=recipe.spec.import_path or recipe.spec.backend,
            isolation=runtime.isolation,
            image_id=runtime.image_id,
            recipe=recipe.key,
            origin=agent.origin,
            network=network.policy,
            denied=network.denied,
            denied_more=network.denied_more,
            history=list(agent.history),
            exec_times=runtime.exec_times.report(),
        )

    @property
    def agents(self) -> Runtime | None:
        """The agent's, once it was handed over."""
        return None if self._agent is None else self._agent.runtime

    @property
    def timing(self) -> dict[str, float]:
        """What taking the sandboxes has cost, by the names in `Timing`."""
        eval_parts = {f"eval_{part}": s for part, s in self._spent.get("eval", {}).items() if part != "history_s"}
        return {**self._spent.get("agent", {}), **eval_parts}

    # --- the evaluator's

    @property
    def _wants_fresh(self) -> bool:
        return self.task.evaluator is not None and grades_fresh(self.task.evaluator)

    def run_begins(self, budget_s: float) -> None:
        """Has the fresh one's recipe left on disk by the time it is needed, where the agent's is another."""
        if self._wants_fresh:
            self._readying = asyncio.create_task(self._ready_fresh(budget_s), name="recipe of the fresh sandbox")

    def run_ended(self, budget_s: float) -> None:
        """Asks for the fresh one, if the evaluator will."""
        if self._wants_fresh and self._fresh is None:
            self._fresh = asyncio.create_task(self._take_fresh(budget_s), name="fresh sandbox")

    async def fresh(self, budget_s: float) -> Runtime:
        """One that the agent never saw, prepared. Raises as `WarmPool.take`."""
        asked, self._fresh = self._fresh, None
        if asked is None:
            member = await self._take_fresh(budget_s)
        else:
            try:
                member = await asyncio.shield(asked)
            except asyncio.CancelledError:
                # `no_more` ends it, and waits for that: a sandbox that is still starting cannot be stopped.
                self._fresh = asked
                raise
        self._unused = None
        return member.runtime

    async def _take_fresh(self, budget_s: float) -> Member:
        if self._readying is not None:
            await asyncio.wait([self._readying])
        recipe = await self._warm.recipes.of_evaluator(self.task)
        member = await self._take(recipe, "eval", budget_s)
        self._unused = member.runtime
        return member

    async def _ready_fresh(self, budget_s: float) -> None:
        recipes, snapshots = self._warm.recipes, self._warm.snapshots
        try:
            recipe = await recipes.of_evaluator(self.task)
            if snapshots.can_keep(recipe):
                snapshots.release(await snapshots.lease(recipe, budget_s))
        except PolarqError as exc:
            log.info("rollout %s: its fresh sandbox is not ready yet: %s", self._claim.rollout_id, exc)

    # --- both

    async def _take(self, recipe: Recipe, role: str, budget_s: float) -> Member:
        """`role` tells the attempt's sandboxes apart."""
        name = f"{self._claim.rollout_id}-{self._claim.token}-{role}"
        shared = self._warm.snapshots.logs_of(recipe)
        known = self._warm.snapshots.has(recipe)
        spent = self._spent.setdefault(role, {})
        try:
            with counted_in(spent):
                member = await self._warm.pool.take(recipe, name, self._claim, budget_s, self._begun)
        finally:
            if not known and recipe.has_work:
                self._shared_logs.append(shared)
        connect = self._services.networks.connect
        # The policy of this task: another one's may have made the same sandbox.
        network = await connect(member.runtime, recipe.policy, recipe.spec, model=role == "agent")
        self._networks[member.runtime.runtime_id] = network
        return member

    def _begun(self, runtime: Runtime) -> None:
        self.started.append(runtime)

    def env(self, runtime: Runtime) -> dict[str, str]:
        """The environment of evaluation: no secret in it, and no model to be reached."""
        way_out = self.network(runtime).way_out
        return sandbox_env(self.task, rollout_id=self._claim.rollout_id, layout=runtime.layout, way_out=way_out)

    def network(self, runtime: Runtime) -> SandboxNetwork:
        """What one that was taken reaches."""
        return self._networks[runtime.runtime_id]

    # --- the end

    async def no_more(self) -> None:
        """Nothing is begun any more: `started` is all there is."""
        for asked in (self._readying, self._fresh):
            if asked is not None:
                asked.cancel()
                await asyncio.wait([asked])
                if not asked.cancelled() and (problem := asked.exception()) is not None:
                    log.info("rollout %s: a fresh sandbox that nobody needs: %s", self._claim.rollout_id, problem)

    async def end(self, runtime: Runtime, *, well: bool) -> None:
        """Stops it, or gives it back to the pool: unused, or after a rollout that ended `well`, where its task lets a
        sandbox be used again. Raises `RuntimeFault`; the record of one that could not be stopped stays."""
        if (network := self._networks.get(runtime.runtime_id)) is not None:
            await network.close()
        if self._agent is not None and runtime is self._agent.runtime:
            # The next rollout may have it before this one's result is made.
            self._said = self._report(self._agent)
        pool = self._warm.pool
        reusable = well and runtime.spec.reuse and self._agent is not None and runtime is self._agent.runtime
        if runtime is self._unused or reusable:
            try:
                if await pool.give_back(runtime, used=reusable):
                    return
            except (PolarqError, OSError) as exc:
                log.warning("sandbox %s cannot be used again: %s", runtime.runtime_id, exc)
                return
        await pool.stop(runtime)

    async def keep_logs(self, runtime: Runtime) -> None:
        await asyncio.to_thread(keep_logs, runtime.host_log_dir, self._kept / runtime.runtime_id)

    async def keep_shared_logs(self) -> None:
        for shared in self._shared_logs:
            await asyncio.to_thread(keep_logs, shared, self._kept / shared.name)

    @property
    def _kept(self) -> Path:
        return self._services.logs_dir / "rollouts" / f"{self._claim.rollout_id}-{self._claim.token}"
