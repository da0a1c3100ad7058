"""Evaluator `script`: a command of the task's says what the agent's work is worth.

A command that could not be run (a program is missing, also in the middle of a pipe) has judged nothing: that is a
fault, never a reward.
"""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, ClassVar

from polarq.contracts.rollout import ExecKind, Reward
from polarq.contracts.sandbox import ExecCategory
from polarq.contracts.specs import EvaluatorSpec
from polarq.contracts.verifiers import ScriptConfig
from polarq.errors import EvaluatorFault, InvalidTask, OutOfMemory, SandboxLost
from polarq_worker.evaluators import snapshot
from polarq_worker.evaluators.answers import NoAnswer, read_file
from polarq_worker.evaluators.base import EvaluationContext, EvaluationTimedOut, Evaluator
from polarq_worker.evaluators.numbers import credit_of, reward_of
from polarq_worker.evaluators.work import Graded, WorkLost, set_up
from polarq_worker.runtimes.base import ExecResult, Runtime

MAX_REWARD_BYTES = 64 * 1024
STEP_S = 120.0
LOG = "eval/script"
NOT_RUN = frozenset({126, 127})
"""What bash answers where a command cannot be run, or is not there."""
_STOP_WHERE_NOTHING_RAN = """set -E
trap 'polarq_status=$?; case $polarq_status in 126|127) exit $polarq_status ;; esac' ERR
"""
"""`missing | tee log; echo done` ends well by its last command, and has judged nothing."""


class ScriptEvaluator(Evaluator):
    """See `ScriptConfig`."""

    name: ClassVar[str] = "script"

    def __init__(self, spec: EvaluatorSpec) -> None:
        super().__init__(spec)
        self._config = ScriptConfig.parse(spec.config, what="evaluator.config")
        if spec.refresh_runtime and self._config.repo_dir is None:
            raise InvalidTask(
                "evaluator", ["refresh_runtime: evaluator 'script' needs config.repo_dir to know what to take along"]
            )

    async def baseline(self, runtime: Runtime, env: Mapping[str, str], timeout_s: float) -> dict[str, Any]:
        if self._config.repo_dir is None:
            return {}
        taken = await snapshot.take(runtime, self._config.repo_dir, {**env, **self.spec.env}, timeout_s)
        return taken.model_dump()

    async def evaluate(self, context: EvaluationContext) -> Reward:
        config, env = self._config, {**context.env, **self.spec.env}
        if config.repo_dir is None:
            return await self._judged(context, context.runtime, env, {"graded_in": "live"})
        deadline = time.monotonic() + context.timeout_s
        try:
            graded = await self._set_up(context, config.repo_dir, env)
            # A tree in which nothing was changed is judged by the script as any other.
            reward = await self._judged(context, graded.runtime, env, graded.report)
            if not self.spec.refresh_runtime and await graded.put_back_again():
                rest = replace(context, timeout_s=max(deadline - time.monotonic(), 0.0))
                reward = await self._judged(rest, graded.runtime, env, graded.report)
        except WorkLost as exc:
            return self.verdict(config.min_reward, exc.report)
        return reward

    async def _judged(
        self, context: EvaluationContext, runtime: Runtime, env: Mapping[str, str], setting: dict[str, Any]
    ) -> Reward:
        """One run of the command. What the agent left running is over when it ends."""
        config = self._config
        reward_file = f"{runtime.layout.eval_log_dir}/reward-{secrets.token_hex(8)}"
        told = {"POLARQ_REWARD_FILE": reward_file}
        if config.reward_from != "exit_code":
            told["POLARQ_TRACES_FILE"] = await self._tell(runtime, context)
        result = await runtime.exec(
            _STOP_WHERE_NOTHING_RAN + config.command,
            cwd=config.cwd or config.repo_dir,
            env={**env, **told},
            timeout_s=min(config.timeout_s, context.timeout_s * 0.9),
            log=LOG,
            category=ExecCategory.VERIFIER,
        )
        report = {**setting, "exit_code": result.exit_code, "script_s": round(result.duration_s, 3), "log": LOG}
        self._blame(result, context)
        await runtime.end_background()
        if config.reward_from == "exit_code":
            return self.verdict(config.max_reward if result.ok else config.min_reward, report)
        if not result.ok:
            raise EvaluatorFault(f"the script failed before its reward counts: {result.why}; see log {LOG}")
        text = await self._said(runtime, result, reward_file)
        what = "the reward file" if config.reward_from == "file" else "the last line of the script's output"
        outcome, rest = reward_of(text, config.reward_key, config.min_reward, config.max_reward, what)
        if result.out_of_memory and outcome <= config.min_reward:
            raise OutOfMemory(f"the sandbox ran out of memory while it was graded ({result.why}); see log {LOG}")
        turns = [len(trace.turns) for trace in context.trajectory.traces]
        credit = credit_of(rest, turns, config.min_reward, config.max_reward, what)
        reward = self.verdict(outcome, report | ({"reward_json": rest} if rest else {}))
        return reward.model_copy(update=credit)

    async def _tell(self, runtime: Runtime, context: EvaluationContext) -> str:
        """Where a file lies that says what the model was asked and said."""
        known = {"index", "cause", "prompt_messages", "response_messages", "turns"}
        traces = [trace.model_dump(mode="json", include=known) for trace in context.trajectory.traces]
        path = f"{runtime.layout.eval_log_dir}/traces-{secrets.token_hex(8)}.json"
        await runtime.put_bytes(json.dumps(traces).encode(), path)
        return path

    async def _set_up(self, context: EvaluationContext, repo_dir: str, env: Mapping[str, str]) -> Graded:
        return await set_up(
            context,
            repo_dir,
            env,
            fresh=self.spec.refresh_runtime,
            exclude=self._config.exclude_patterns,
            keep_scaffolding=self._config.keep_agent_scaffolding,
            step_s=STEP_S,
        )

    async def _said(self, runtime: Runtime, result: ExecResult, reward_file: str) -> str:
        if self._config.reward_from == "output":
            line = (result.stdout_text.strip().splitlines() or [""])[-1]
            if len(line.encode()) > MAX_REWARD_BYTES:  # of which the beginning may be left out
                raise EvaluatorFault(f"the last line of the script's output has more than {MAX_REWARD_BYTES} bytes")
            return line
        try:
            data = await read_file(runtime, reward_file, MAX_REWARD_BYTES, links=False)
        except NoAnswer as exc:
            raise EvaluatorFault(str(exc)) from None
        if data is None:
            raise EvaluatorFault(f"the script wrote no file $POLARQ_REWARD_FILE; see log {LOG}")
        return data.decode("utf-8", "replace")

    def _blame(self, result: ExecResult, context: EvaluationContext) -> None:
        """Raises where the environment, or the budget, is to blame for how the command ended. That the agent's work
        makes it hang is the agent's doing."""
        if result.kind is ExecKind.SANDBOX_LOST:
            raise SandboxLost(f"the script could not be run: {result.why}")
        if result.out_of_memory and not result.ok:
            raise OutOfMemory(f"the sandbox ran out of memory while it was graded ({result.why}); see log {LOG}")
        if result.kind is ExecKind.COULD_NOT_START or result.exit_code in NOT_RUN:
            raise EvaluatorFault(f"the script ran nothing: {result.why}; see log {LOG}")
        if result.signal == 9 or result.exit_code == 128 + 9:
            raise EvaluatorFault(f"the script was killed from outside ({result.why}); see log {LOG}")
        if result.kind is ExecKind.TIMED_OUT and (
            self._config.reward_from != "exit_code" or self._config.timeout_s > context.timeout_s * 0.9
        ):
            raise EvaluationTimedOut(f"the script: {result.why}; see evaluator.config.timeout_s, timeouts.evaluate_s")
