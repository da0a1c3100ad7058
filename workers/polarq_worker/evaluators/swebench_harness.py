"""Evaluator `swebench_harness`: an instance's own evaluation script on the agent's work, graded by swebench itself.

The package reads the log in a sandbox of its own. Where it finds nothing in it, the same script is run on the tree
without the agent's work: if that is no better, the environment is to blame, and there is no reward.
"""

from __future__ import annotations

import importlib.util
import time
from collections.abc import Mapping
from typing import Any, ClassVar

from polarq.contracts.evaluators import TestStatus
from polarq.contracts.rollout import ExecKind, Reward
from polarq.contracts.sandbox import ExecCategory
from polarq.contracts.specs import EvaluatorSpec
from polarq.contracts.swebench import SwebenchConfig
from polarq.errors import EvaluatorFault, OutOfMemory, SandboxLost, UnknownPlugin
from polarq_worker.evaluators import snapshot
from polarq_worker.evaluators.apart import TooMuch, run_apart
from polarq_worker.evaluators.base import EvaluationContext, EvaluationTimedOut, Evaluator
from polarq_worker.evaluators.checks import swebench_check
from polarq_worker.evaluators.snapshot_scripts import PLAIN_GIT
from polarq_worker.evaluators.statuses import from_output
from polarq_worker.evaluators.swebench_script import EvalScript, files_of_patch
from polarq_worker.evaluators.work import Graded, WorkLost, set_up
from polarq_worker.runtimes.base import Runtime

CPU_S = 60
MAX_LOG_BYTES = 16 * 1024 * 1024
SHARE_OF_BUDGET = 0.6
"""What of the evaluation's budget the tests may use when `test_timeout` is longer: grading them comes after."""
LISTED = 50


class SwebenchHarnessEvaluator(Evaluator):
    """See `SwebenchConfig`."""

    name: ClassVar[str] = "swebench_harness"

    def __init__(self, spec: EvaluatorSpec) -> None:
        super().__init__(spec)
        self._config = SwebenchConfig.parse(spec.config, what="evaluator.config")
        if importlib.util.find_spec("swebench") is None:
            raise UnknownPlugin("evaluator 'swebench_harness' needs polarq[swebench] on the node (pip install it)")

    async def baseline(self, runtime: Runtime, env: Mapping[str, str], timeout_s: float) -> dict[str, Any]:
        taken = await snapshot.take(runtime, self._config.repo_dir, {**env, **self.spec.env}, timeout_s)
        return taken.model_dump()

    async def evaluate(self, context: EvaluationContext) -> Reward:
        config, env = self._config, {**context.env, **self.spec.env}
        deadline = time.monotonic() + context.timeout_s
        # An instance's script is written for a container in which nothing runs yet, and its last step undoes what was
        # done to the tests: whoever changes them in time would not be seen to have done it.
        await context.runtime.end_background()
        try:
            graded = await set_up(
                context,
                config.repo_dir,
                env,
                fresh=self.spec.refresh_runtime,
                tests=[f"{path}::" for path in files_of_patch(config.instance.test_patch)],
                exclude=config.exclude_patterns,
                keep_scaffolding=config.keep_agent_scaffolding,
                even_without_work=False,
                step_s=config.apply_timeout,
            )
        except WorkLost as exc:
            return self.verdict(0.0, {"resolved": False, **exc.report})
        report: dict[str, Any] = {
            "instance_id": config.instance.instance_id,
            "resolved": False,
            "empty_generation": bool(graded.nothing),
            "test_timeout": False,
            **graded.report,
        }
        if graded.nothing:
            return self.verdict(0.0, report)
        run = _Run(self, context, graded, env, deadline)
        found = await run.graded("eval/swebench")
        try:
            if not self.spec.refresh_runtime and await graded.put_back_again():
                found = await run.graded("eval/swebench.again")
        except WorkLost as exc:
            return self.verdict(0.0, {**report, **exc.report})
        report |= {**graded.report, **run.report}
        if run.starved and (found is None or found.get("resolved") is not True):
            raise OutOfMemory(run.starved)
        if found is None:
            return self.verdict(0.0, {**report, "test_timeout": True})
        if not found.get("patch_successfully_applied"):
            report["reason"] = found.get("infra_failure_reason", "no test was seen to run")
            await graded.without_work()
            control = await run.graded("eval/swebench.control")
            if control is None or not control.get("patch_successfully_applied"):
                raise EvaluatorFault(
                    f"swebench sees no tests even on the tree as it was before the agent ({report['reason']});"
                    " see log eval/swebench.control"
                )
            return self.verdict(0.0, report)
        resolved = found.get("resolved") is True
        if denied := run.denied if resolved else []:
            # The package takes the last word about a test; the code under test may have had it.
            report |= {"told_otherwise": denied[:LISTED]}
            resolved = False
        return self.verdict(1.0 if resolved else 0.0, {**report, "resolved": resolved, **_counts(found)})

    @property
    def config(self) -> SwebenchConfig:
        return self._config


class _Run:
    """Runs of one evaluation's script."""

    def __init__(
        self,
        evaluator: SwebenchHarnessEvaluator,
        context: EvaluationContext,
        graded: Graded,
        env: Mapping[str, str],
        deadline: float,
    ) -> None:
        self._config = evaluator.config
        self._context = context
        self._graded = graded
        self._env = env
        self._deadline = deadline
        self.report: dict[str, Any] = {}
        self.denied: list[str] = []
        """Required tests that the log calls failed as well as passed."""
        self.starved = ""
        """Why the last run says nothing against the work: the script ends well whatever was killed in it."""

    async def graded(self, log: str) -> dict[str, Any] | None:
        """The package's report; None where the tests did not end in their own time. Raises `EvaluatorFault`."""
        config, runtime = self._config, self._graded.runtime
        setting = {name: value for name, value in PLAIN_GIT.items() if name not in self._env}
        script = EvalScript(config, setting)
        left = max(self._deadline - time.monotonic(), 0.0)
        limit_s = min(config.test_timeout, left * SHARE_OF_BUDGET)
        result = await runtime.exec(
            f"exec 2>&1\n{script.text}",
            cwd=config.repo_dir,
            env={**self._env, **setting},
            timeout_s=limit_s,
            log=log,
            max_output_bytes=MAX_LOG_BYTES,
            category=ExecCategory.VERIFIER,
        )
        await runtime.end_background()
        self.report = {"test_s": round(result.duration_s, 3), "log": log, "output_truncated": result.truncated}
        if result.kind is ExecKind.SANDBOX_LOST:
            raise SandboxLost(f"the evaluation script could not be run: {result.why}")
        starved = f"the sandbox ran out of memory while it was graded ({result.why}); see log {log}"
        self.starved = starved if result.out_of_memory else ""
        if result.out_of_memory and not result.ok:
            raise OutOfMemory(starved)
        if result.kind is ExecKind.COULD_NOT_START or result.signal == 9:
            raise EvaluatorFault(f"the evaluation script could not be run: {result.why}; see log {log}")
        if result.kind is ExecKind.TIMED_OUT:
            if limit_s < config.test_timeout:
                raise EvaluationTimedOut(
                    f"only {limit_s:.0f} s were left for the tests, and they took longer; raise timeouts.evaluate_s"
                )
            return None
        printed = result.stdout_text
        required = {*config.instance.FAIL_TO_PASS, *config.instance.PASS_TO_PASS}
        said = from_output(script.ran(printed), required) if config.parser.startswith("parse_log_pytest") else {}
        self.denied = [one for one in sorted(required) if said.get(one) in {TestStatus.FAILED, TestStatus.ERROR}]
        return await self._by_the_package(script.log(printed), log)

    async def _by_the_package(self, text: str, log: str) -> dict[str, Any]:
        config = self._config
        instance = {
            **config.instance.model_dump(include={"instance_id", "repo", "version", "FAIL_TO_PASS", "PASS_TO_PASS"}),
            "log_parser": config.parser,
            "eval_type": config.kind,
        }
        request = {"instance": instance, "log": text, "patch": "as applied"}
        left = max(self._deadline - time.monotonic(), 0.0)
        try:
            found = await run_apart(self._context, swebench_check, request, cpu_s=CPU_S, timeout_s=left)
        except TooMuch as exc:
            raise EvaluatorFault(f"swebench could not read log {log} in {CPU_S} s: {exc}") from None
        if "unusable" in found:
            raise EvaluatorFault(f"evaluator.config: {found['unusable']}")
        return found


def _counts(found: Mapping[str, Any]) -> dict[str, Any]:
    """The package's report, cut where it is long."""
    short: dict[str, Any] = {}
    for kind, sides in found.get("tests_status", {}).items():
        for side, tests in sides.items():
            if tests:
                short[f"{kind}.{side}"] = len(tests)
                if side == "failure":
                    short[f"{kind}.failed"] = tests[:LISTED]
    return {"tests": short}
