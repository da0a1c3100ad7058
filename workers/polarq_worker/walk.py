"""One attempt of one rollout, stage by stage: queue, prepare, ready, run, build, evaluate, teardown.

It always ends in a `RolloutResult`. Each stage has its own budget, so what one stage used up never costs another, and
whatever the model sampled becomes a (partial) trajectory, however the rollout ended.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

from polarq.contracts.rollout import (
    Boundary,
    HarnessReport,
    Outcome,
    Reward,
    RolloutResult,
    RolloutState,
    Timing,
)
from polarq.contracts.task import StageBudgets
from polarq.contracts.trajectory import Trajectory
from polarq.errors import DiskFull, EvaluatorFault, HarnessFault, InvalidInput, PolarqError, StepRefused, UnknownPlugin
from polarq.ledger import Claim
from polarq.ledger.states import ACTIVE
from polarq.registry import plugin
from polarq.trajectory.base import Builder, rewarded
from polarq_worker.access import ModelAccess, RecordLost
from polarq_worker.artifacts import Collector
from polarq_worker.evaluators.base import EvaluationContext, Evaluator
from polarq_worker.evaluators.create import create_evaluator
from polarq_worker.harnesses.base import Harness, HarnessContext, harness_env, run_harness
from polarq_worker.harnesses.create import create_harness
from polarq_worker.harnesses.verdicts import CallsSeen
from polarq_worker.lease import Lease
from polarq_worker.outcomes import (
    OF_OTHERS,
    StageFailed,
    failed,
    faithful,
    final_outcome,
    harness_outcome,
    is_full,
    on_full_disk,
    one_line,
    timed_out,
    what,
    worth_scoring,
)
from polarq_worker.runtimes.base import Runtime
from polarq_worker.sandboxes import Sandboxes
from polarq_worker.services import Services
from polarq_worker.stages import faults

log = logging.getLogger("polarq.worker.walk")

STOPPED = Outcome(
    state=RolloutState.CANCELLED, boundary=Boundary.CONTROL, reason="cancelled", message="cancelled on request"
)
"""What a stop from outside makes of a rollout, unless the engine gives it back or discards it."""


class LeaseLost(Exception):
    """Somebody else has this rollout now: stop, and commit nothing."""


class CancelRequested(Exception):
    """The ledger says: stop."""


class Walk:
    """See the module. `run` is called once; cancelling it stops the rollout wherever it is, with a clean teardown."""

    def __init__(self, claim: Claim, services: Services, lease: Lease) -> None:
        self.claim = claim
        self.services = services
        self.sandboxes = Sandboxes(claim, services)
        self.task = self.sandboxes.task
        self.budgets: StageBudgets = claim.task.budgets()
        self.timing: dict[str, float] = {"queue_s": claim.waited_s}
        self.lease = lease
        self.access = ModelAccess(claim, services, lease)
        self.collector = Collector(
            services.artifacts,
            services.topology.artifacts,
            scratch=services.collecting(claim.rollout_id, claim.token),
            rollout_id=claim.rollout_id,
            token=claim.token,
        )
        self.builder: Builder | None = None
        self._harness: Harness | None = None
        self.harness: HarnessReport | None = None
        self.trajectory: Trajectory | None = None
        self.reward: Reward | None = None
        self.waits_for_sandbox = False
        self.ending = False
        """The stages are over, by themselves or stopped; what follows must not be interrupted."""
        self._began = time.monotonic()

    @property
    def rollout_id(self) -> str:
        return self.claim.rollout_id

    async def run(self) -> RolloutResult:
        """The result of this attempt. Raises `LeaseLost`, and `RecordLost` while there may be another attempt."""
        try:
            outcome = await self._stages()
        except StageFailed as exc:
            outcome = exc.outcome
        except (asyncio.CancelledError, CancelRequested):
            outcome = STOPPED
        except LeaseLost:
            self.ending = True
            await self._teardown()
            raise
        except RecordLost as exc:
            if self.claim.attempt < self.services.topology.gateway.max_attempts:
                self.ending = True
                await self._teardown()
                raise
            outcome = Outcome(state=RolloutState.FAILED, boundary=Boundary.NODE, reason="record_lost", message=str(exc))
        except PolarqError as exc:
            outcome = Outcome(state=RolloutState.FAILED, boundary=Boundary.NODE, reason="node_error", message=str(exc))
        except OF_OTHERS as exc:
            log.exception("rollout %s: an error in the worker itself", self.rollout_id)
            outcome = Outcome(
                state=RolloutState.FAILED, boundary=Boundary.NODE, reason="internal_error", message=what(exc)
            )
        self.ending = True
        outcome = await self._keep_what_was_sampled(outcome)
        await self._teardown(well=outcome.state is RolloutState.COMPLETED, collect=True)
        return self._result(outcome)

    # --- the stages

    async def _stages(self) -> Outcome:
        budget = self.budgets.queue_s
        if budget is not None and self.claim.waited_s > budget:
            raise timed_out(Boundary.QUEUE, "queue", budget)
        harness, evaluator = self._plugins()
        self._harness = harness
        async with self.services.slots.seat() as seat:
            self.waits_for_sandbox = True
            await seat.enter("prepare")
            self.waits_for_sandbox = False
            runtime, baseline = await self._prepare(harness, evaluator)
            await self._enter(RolloutState.READY)
            ready_since = time.monotonic()
            await seat.enter("run")
            self.timing["ready_s"] = time.monotonic() - ready_since
            await self._enter(RolloutState.RUNNING)
            self.sandboxes.run_begins(self.budgets.evaluate_s)
            self.harness = await self._run(harness, runtime)
            ended_at = time.monotonic()
            await seat.enter("post")
            self.timing["post_queue_s"] = time.monotonic() - ended_at
            self.sandboxes.run_ended(self.budgets.evaluate_s)
            await self._enter(RolloutState.BUILDING)
            trajectory = await self._build()
            outcome = self._harness_outcome(harness, trajectory)
            outcome = await asyncio.to_thread(on_full_disk, outcome, runtime.root)
            faithful(self.task.require, outcome, trajectory)
            if evaluator is not None and worth_scoring(outcome, trajectory):
                await self._enter(RolloutState.EVALUATING)
                await self._evaluate(evaluator, runtime, baseline)
            return self._final(outcome, self.trajectory or trajectory, scored=evaluator is not None)

    def _plugins(self) -> tuple[Harness, Evaluator | None]:
        """The task's plug-ins, before anything is started: a name that is not installed costs no sandbox."""
        allowed = self.services.topology.security.allowed_modules
        task = self.task
        try:
            self.builder = plugin("builders", task.builder.strategy)(task.builder.config)
            evaluator = create_evaluator(task.evaluator, allowed) if task.evaluator is not None else None
            return create_harness(task.agent, allowed), evaluator
        except (UnknownPlugin, InvalidInput, HarnessFault, EvaluatorFault, ValueError) as exc:
            raise failed(Boundary.TASK, "unusable_task", str(exc)) from exc

    async def _prepare(self, harness: Harness, evaluator: Evaluator | None) -> tuple[Runtime, dict[str, Any]]:
        budget = self.budgets.prepare_s
        await self.lease.certainty()
        with self._timed("prepare_s"), faults.of_prepare(budget):
            async with asyncio.timeout(budget):
                runtime = await self.sandboxes.agent(harness, budget)
                baseline: dict[str, Any] = {}
                if evaluator is not None:
                    baseline = await evaluator.baseline(runtime, self.sandboxes.env(runtime), budget)
                return runtime, baseline

    async def _run(self, harness: Harness, runtime: Runtime) -> HarnessReport:
        budget = self.budgets.agent_s
        await self._proxy(budget)
        secret = await self.access.open(budget)
        network = self.sandboxes.network(runtime)
        base_url = network.base_url(secret)
        context = HarnessContext(
            task=self.task,
            rollout_id=self.rollout_id,
            instruction_path=f"{runtime.layout.session_dir}/instruction.txt",
            base_url=base_url,
            api_key=secret,
            layout=runtime.layout,
            env=harness_env(
                self.task,
                rollout_id=self.rollout_id,
                fencing_token=self.claim.token,
                base_url=base_url,
                api_key=secret,
                layout=runtime.layout,
                way_out=network.way_out,
            ),
            way_out=network.way_out,
        )
        with self._timed("agent_s"), faults.of_run():
            return await run_harness(harness, runtime, context, timeout_s=budget, timing=self.timing)

    async def _proxy(self, most_s: float) -> None:
        """A harness that is started while the proxy is away would only find that nobody answers."""
        try:
            async with asyncio.timeout(most_s):
                await self.services.proxy_there()
        except TimeoutError:
            text = f"the node's proxy was away and did not come back within {most_s:g} s"
            raise failed(Boundary.NODE, "proxy_away", text) from None

    async def _build(self) -> Trajectory:
        budget = self.budgets.build_s
        with self._timed("build_s"), faults.of_build(budget):
            async with asyncio.timeout(budget):
                self.trajectory = await self._trajectory()
                return self.trajectory

    async def _trajectory(self) -> Trajectory:
        """Built from the closed record: nothing that comes later can change it."""
        calls = await self.access.record()
        assert self.builder is not None
        built = await asyncio.to_thread(self.builder.build, calls, {"task_metadata": self.task.metadata})
        # Only the grant knows of calls that were answered without sampling: they leave no record.
        fidelity = built.fidelity.model_copy(update={"replays": self.access.use.replays})
        return built.model_copy(update={"fidelity": fidelity})

    def _harness_outcome(self, harness: Harness, trajectory: Trajectory) -> Outcome:
        """How the agent stage ended. A verdict on it goes into the report as well: evaluators read that."""
        assert self.harness is not None
        seen = CallsSeen.of(self.access.calls, self.access.use)
        verdict = harness.judge(self.harness, seen)
        if verdict is not None:
            metadata = {**self.harness.metadata, "verdict": verdict.reason}
            self.harness = self.harness.model_copy(update={"ok": False, "metadata": metadata})
        return harness_outcome(self.harness, self.access.use, trajectory, verdict, failing=seen.failing)

    async def _evaluate(self, evaluator: Evaluator, runtime: Runtime, baseline: dict[str, Any]) -> None:
        budget = self.budgets.evaluate_s
        assert self.trajectory is not None
        assert self.harness is not None

        context = EvaluationContext(
            task=self.task,
            rollout_id=self.rollout_id,
            trajectory=self.trajectory,
            harness=self.harness,
            runtime=runtime,
            env=self.sandboxes.env(runtime),
            timeout_s=budget,
            baseline=baseline,
            fresh_runtime=lambda: self.sandboxes.fresh(budget),
            rules=self.services.evaluator_rules,
        )
        with self._timed("evaluate_s"), faults.of_evaluate(budget):
            async with asyncio.timeout(budget):
                reward = await evaluator.evaluate(context)
                if not isinstance(reward, Reward):
                    raise EvaluatorFault(f"evaluator '{evaluator.name}' answered no Reward: {type(reward).__name__}")
                # Made without its checks, it could be what nobody can read again.
                reward = Reward.model_validate(reward.model_dump())
                if reward.outcome <= 0 and await asyncio.to_thread(is_full, runtime.root):
                    raise DiskFull("the disk of the sandbox was full when it was graded: that it failed says nothing")
                self.trajectory = rewarded(self.trajectory, reward)
                self.reward = reward.model_copy(update={"teacher_logprobs": None})

    def _final(self, outcome: Outcome, trajectory: Trajectory, *, scored: bool) -> Outcome:
        outcome, reward = final_outcome(outcome, trajectory, self.reward, self.task.endings, scored=scored)
        if reward is not None and reward is not self.reward:
            self.trajectory, self.reward = rewarded(trajectory, reward), reward
        return outcome

    async def _enter(self, state: RolloutState) -> None:
        answer = await self.services.patience.until_answered(lambda: self._advanced(state))
        if answer == "lost":
            raise LeaseLost(self.rollout_id)
        if answer == "cancel":
            raise CancelRequested(self.rollout_id)

    async def _advanced(self, state: RolloutState) -> str:
        """The ledger's answer. One that a failover of Redis set back is told again of every stage since."""
        ledger, advance = self.services.ledger, self.services.ledger.calls.advance
        try:
            return await ledger.do(advance(self.rollout_id, self.claim.token, state))
        except StepRefused as exc:
            since = ACTIVE[ACTIVE.index(RolloutState(exc.before)) + 1 : ACTIVE.index(state) + 1]
            if not since:
                raise
        for stage in since:
            answer = await ledger.do(advance(self.rollout_id, self.claim.token, stage))
            if answer != "ok":
                break
        return answer

    @contextmanager
    def _timed(self, stage: str) -> Iterator[None]:
        began = time.monotonic()
        try:
            yield
        finally:
            self.timing[stage] = time.monotonic() - began

    # --- the end

    async def _keep_what_was_sampled(self, outcome: Outcome) -> Outcome:
        """Builds the partial trajectory of a rollout that was stopped before its build stage."""
        if self.trajectory is not None or "agent_s" not in self.timing:
            return outcome
        try:
            async with asyncio.timeout(self.budgets.build_s):
                self.trajectory = await self._trajectory()
        except OF_OTHERS as exc:
            log.warning("rollout %s: no partial trajectory: %s", self.rollout_id, exc)
            text = one_line(f"{outcome.message}; the partial trajectory could not be built: {exc}")
            return outcome.model_copy(update={"message": text})
        return outcome

    async def _teardown(self, *, well: bool = False, collect: bool = False) -> None:
        """Stops whatever was started, under its own budget; never raises. `well`: the rollout completed; `collect`: it
        has a result, to which files of its sandbox may belong."""
        began = time.monotonic()
        budget = self.budgets.teardown_s
        if self.access.secret is not None:
            await self._quietly("close the grant", self.access.close(), budget)
        await self._quietly("stop what is not needed", self.sandboxes.no_more(), budget)
        await self._quietly("keep the logs", self.sandboxes.keep_shared_logs(), budget)
        runtimes = self.sandboxes.started
        for runtime in runtimes:
            await self._quietly("keep the logs", self.sandboxes.keep_logs(runtime), budget)
        if collect:
            await self._collect(budget)
        stopping = time.monotonic()
        endings = [self.sandboxes.end(runtime, well=well) for runtime in runtimes]
        await asyncio.gather(*(self._quietly("stop the sandbox", ending, budget) for ending in endings))
        if runtimes:
            self.timing["sandbox_stop_s"] = time.monotonic() - stopping
        self.timing["teardown_s"] = time.monotonic() - began

    async def _collect(self, budget_s: float) -> None:
        """Brings back what the task declared, however the rollout ended; never raises."""
        began = time.monotonic()
        agents = self.sandboxes.agents
        try:
            async with asyncio.timeout(budget_s):
                for runtime in self.sandboxes.started:
                    name = "logs" if runtime is agents or agents is None else "logs/fresh"
                    await self.collector.take_logs(runtime.host_log_dir, name)
                if agents is not None:
                    own = [] if self._harness is None else self._harness.artifacts(agents.layout)
                    await self.collector.take(agents, [*self.task.artifacts, *own])
        except TimeoutError:
            self.collector.say_rest(f"not collected within timeouts.teardown_s ({budget_s:g} s)")
        except OSError as exc:
            log.warning("rollout %s: its files cannot be collected: %s", self.rollout_id, exc)
            self.collector.say_rest(exc.strerror or str(exc))
        except OF_OTHERS as exc:
            log.exception("rollout %s: an error while its files were collected", self.rollout_id)
            self.collector.say_rest(what(exc))
        if self.collector.artifacts:
            self.timing["artifacts_s"] = time.monotonic() - began

    async def _quietly(self, what: str, work: Awaitable[None], budget_s: float) -> None:
        try:
            async with asyncio.timeout(budget_s):
                await work
        except OF_OTHERS as exc:
            log.error("rollout %s: could not %s: %s: %s", self.rollout_id, what, type(exc).__name__, exc)

    def _result(self, outcome: Outcome) -> RolloutResult:
        claim, task = self.claim, self.task
        self.timing["total_s"] = time.monotonic() - self._began
        return RolloutResult(
            rollout_id=claim.rollout_id,
            task_id=task.task_id,
            run_id=task.run_id,
            index=int(claim.rollout_id.rpartition(".")[2]),
            attempt=claim.attempt,
            policy_version=claim.policy_version,
            losses=list(claim.losses),
            versions=self.trajectory.fidelity.versions if self.trajectory is not None else [],
            node_id=self.services.node.id,
            outcome=outcome,
            reward=self.reward if outcome.boundary is not Boundary.EVALUATOR else None,
            trajectory=self.trajectory,
            harness=self.harness,
            sandbox=self.sandboxes.report(),
            artifacts=self.collector.artifacts,
            timing=Timing(**{k: round(v, 6) for k, v in {**self.sandboxes.timing, **self.timing}.items()}),
            started_at=claim.claimed_at,
            # The server's clock at the claim, and the monotonic one since: no host's wall clock is believed.
            ended_at=claim.claimed_at + timedelta(seconds=self.timing["total_s"]),
            metadata=task.metadata,
        )
