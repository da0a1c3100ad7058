"""Evaluator `self_distillation`: another evaluator's verdict, and what a teacher that knows it thinks of each token.

The student's ids stay as they are; only the feedback's are put in, before the first answer that a trace is trained on.
So a target belongs to exactly one sampled token, beside the log-probability it was sampled at.
"""

from __future__ import annotations

import json
import time
import zlib
from collections.abc import Sequence
from contextlib import aclosing
from dataclasses import replace
from typing import Any, ClassVar

from polarq.contracts.distillation import FEEDBACK, SelfDistillationConfig
from polarq.contracts.rollout import Reward
from polarq.contracts.specs import EvaluatorSpec
from polarq.contracts.trajectory import Trace
from polarq.errors import EvaluatorFault
from polarq.trainers.rows import written_out
from polarq_worker.evaluators.asking import Asking, Tally, allowed_key
from polarq_worker.evaluators.base import EngineAddress, EvaluationContext, Evaluator
from polarq_worker.evaluators.create import create_evaluator
from polarq_worker.evaluators.judge import DEFAULT_KEY_ENV
from polarq_worker.evaluators.llm_judge import SHARE_OF_BUDGET
from polarq_worker.evaluators.teacher import TEACHERS, Message, Teacher, TooLong, with_message
from polarq_worker.runtimes.base import Runtime

LISTED = 50


class SelfDistillationEvaluator(Evaluator):
    """See `SelfDistillationConfig`."""

    name: ClassVar[str] = "self_distillation"

    def __init__(self, spec: EvaluatorSpec) -> None:
        super().__init__(spec)
        self._config = SelfDistillationConfig.parse(spec.config, what="evaluator.config")
        inner = self._config.evaluator
        self._inner = create_evaluator(
            inner.model_copy(update={"refresh_runtime": inner.refresh_runtime or spec.refresh_runtime}), []
        )

    async def baseline(self, runtime: Runtime, env: Any, timeout_s: float) -> dict[str, Any]:
        return await self._inner.baseline(runtime, {**env, **self.spec.env}, timeout_s)

    async def evaluate(self, context: EvaluationContext) -> Reward:
        deadline = time.monotonic() + context.timeout_s * SHARE_OF_BUDGET
        runtimes = [context.runtime]

        async def fresh() -> Runtime:
            runtimes.insert(0, await context.fresh_runtime())
            return runtimes[0]

        scored = await self._inner.evaluate(replace(context, env={**context.env, **self.spec.env}, fresh_runtime=fresh))
        whole = {**scored.report, "scored_by": scored.evaluator}
        feedback = self._feedback(scored, runtimes)
        if self._config.has_feedback and not feedback:
            return self._reward(scored, {**whole, "teacher": {"why_not": "there was no feedback"}}, None)
        taught: dict[str, Any] = {"feedback": feedback}
        try:
            targets = await self._targets(context, feedback, deadline, taught)
        except EvaluatorFault as exc:
            if self._config.on_teacher_failure == "fail":
                raise
            return self._reward(scored, {**whole, "teacher": {**taught, "failed": str(exc)}}, None)
        return self._reward(scored, {**whole, "teacher": taught}, targets)

    def _reward(self, scored: Reward, report: dict[str, Any], targets: list[list[float] | None] | None) -> Reward:
        kept = self.verdict(scored.outcome, report).report
        return scored.model_copy(update={"evaluator": self.name, "report": kept, "teacher_logprobs": targets})

    def _feedback(self, scored: Reward, runtimes: Sequence[Runtime]) -> str:
        """What there is of it, the hint first; blank: nothing."""
        config = self._config
        found = [config.hint or "", *(_entry(scored.report, key) for key in config.report_keys)]
        if config.log_chars:
            found.append(_log_end(scored.report.get("log"), runtimes, config.log_chars))
        text = "\n\n".join(part.strip() for part in found if part.strip())
        most = config.max_feedback_chars
        if len(text) > most:
            cut = f"\n[... {len(text) - most} characters left out ...]\n"
            text = f"{text[: most // 2]}{cut}{text[-(most - most // 2) :]}"
        return text

    async def _targets(
        self, context: EvaluationContext, feedback: str, deadline: float, taught: dict[str, Any]
    ) -> list[list[float] | None]:
        address, tally = self._address(context), Tally()
        asking = Asking(
            "the teacher's server",
            key=address.key,
            call_timeout_s=self._config.teacher_timeout,
            retries=self._config.teacher_max_retries,
            deadline=deadline,
            tally=tally,
        )
        traces = written_out(context.trajectory).traces
        left_out: dict[str, str] = {}
        targets: list[list[float] | None] = []
        async with aclosing(asking):
            teacher = TEACHERS[address.engine](address, asking)
            await teacher.look()
            message = None
            if feedback:
                message = await teacher.message(self._config.template.replace(FEEDBACK, feedback))
            for trace in traces:
                try:
                    targets.append(await _target(teacher, trace, message))
                except TooLong as exc:
                    targets.append(None)
                    left_out[str(trace.index)] = str(exc)
        taught |= {"model": teacher.model, "calls": tally.calls, "repeated": tally.refused[:LISTED]}
        taught |= {"gap": [_gap(trace, target) for trace, target in zip(traces, targets, strict=True)][:LISTED]}
        if left_out:
            taught["left_out"] = dict(list(left_out.items())[:LISTED])
        return targets

    def _address(self, context: EvaluationContext) -> EngineAddress:
        config, rules = self._config, context.rules
        if config.teacher_base_url is not None:
            url, key_env = config.teacher_base_url, config.teacher_api_key_env
            key = allowed_key(rules, url=url, key="teacher", key_env=key_env, default=DEFAULT_KEY_ENV)
            return EngineAddress(config.teacher_engine or "vllm", url, config.teacher_model or "", key)
        if not rules.engines:
            raise EvaluatorFault("this node names no inference of its own; give teacher_base_url")
        # Rollouts spread over the replicas, each on the same one at every attempt.
        return rules.engines[zlib.crc32(context.rollout_id.encode()) % len(rules.engines)]


async def _target(teacher: Teacher, trace: Trace, message: Message | None) -> list[float] | None:
    """One value per response token, 0.0 under mask 0; None: nothing of the trace is trained on. Raises `TooLong`."""
    prompt = trace.prompt_ids if message is None else with_message(trace.prompt_ids, message)
    wanted = [len(prompt) + at for at, bit in enumerate(trace.loss_mask) if bit]
    if not wanted:
        return None
    values = iter(await teacher.score([*prompt, *trace.response_ids], wanted))
    return [next(values) if bit else 0.0 for bit in trace.loss_mask]


def _gap(trace: Trace, target: Sequence[float] | None) -> float | None:
    """The teacher's log-probability less the student's, on average over the trained tokens."""
    if target is None:
        return None
    return round((sum(target) - sum(trace.logprobs)) / trace.trainable_tokens, 6)


def _entry(report: Any, path: str) -> str:
    """An entry of a report as text; blank where there is none."""
    found = report
    for name in path.split("."):
        found = found.get(name) if isinstance(found, dict) else None
    if found is None or isinstance(found, str):
        return found or ""
    return json.dumps(found, ensure_ascii=False)


def _log_end(name: Any, runtimes: Sequence[Runtime], chars: int) -> str:
    """The end of what the evaluator's command said, in the sandbox where it was run."""
    for runtime in runtimes:
        files = [runtime.host_log_dir / f"{name}.{stream}" for stream in ("stdout", "stderr")]
        if any(file.is_file() for file in files):
            texts = [file.read_text("utf-8", "replace") for file in files if file.is_file()]
            return "\n".join(text.strip() for text in texts if text.strip())[-chars:]
    return ""
