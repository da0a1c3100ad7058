"""Settings of the evaluator `self_distillation`: another evaluator's verdict, and a teacher's log-probabilities."""

from __future__ import annotations

from typing import Literal, Self

from pydantic import Field, field_validator, model_validator

from polarq.contracts.base import Contract
from polarq.contracts.judging import HttpAddress
from polarq.contracts.specs import EvaluatorSpec, NonBlank

FEEDBACK = "{feedback}"
TEMPLATE = f"Feedback on an earlier attempt at this task:\n\n{FEEDBACK}\n\nSolve the task with this in mind."


class SelfDistillationConfig(Contract):
    """`self_distillation`: the reward of `evaluator`, and for each sampled token of a trace the log-probability that a
    teacher gives it (`Trace.teacher_logprobs`). The teacher reads the trace's own ids, into which the feedback was put
    as a user's message before the first answer that is trained on.

    The teacher is the model that was sampled, as it is now, unless `teacher_base_url` names another one; that must have
    the same tokenizer. Without any kind of feedback it reads the trace as it is.
    """

    evaluator: EvaluatorSpec
    """What the rollout is scored by, and what feedback comes from."""
    hint: NonBlank | None = None
    """Feedback that is known before: a reference solution, say."""
    report_keys: list[NonBlank] = []
    """Entries of the evaluator's report that are feedback; `part_tests.otherwise` is one within another."""
    log_chars: int = Field(0, ge=0)
    """How much of the end of the evaluator's own log is feedback."""
    template: NonBlank = TEMPLATE
    """The message; `{feedback}` in it is replaced. A trace of a rollout without any feedback gets no target."""
    max_feedback_chars: int = Field(8000, ge=100)
    """Of longer feedback the middle is left out."""
    teacher_base_url: HttpAddress | None = None
    """Without /v1. Its host must be among the node's `security.judge_hosts`. None: the node's own inference."""
    teacher_engine: Literal["vllm", "sglang"] | None = None
    """What runs at `teacher_base_url`; None: vllm."""
    teacher_model: NonBlank | None = None
    """None: the only one that is served there."""
    teacher_api_key_env: NonBlank | None = None
    """As `judge_api_key_env`, for `teacher_base_url`."""
    teacher_timeout: float = Field(300.0, gt=0)
    """Seconds for one call, which is one trace."""
    teacher_max_retries: int = Field(4, ge=0, le=20)
    """Calls that may be repeated because the engine was paused, busy or away."""
    on_teacher_failure: Literal["fail", "outcome_only"] = "fail"
    """fail: no reward. outcome_only: the evaluator's reward alone, which the report says."""

    @field_validator("evaluator")
    @classmethod
    def _a_named_one(cls, value: EvaluatorSpec) -> EvaluatorSpec:
        if value.strategy == "self_distillation":
            raise ValueError("is a self_distillation itself; name what scores the rollout")
        if ":" in value.strategy or "." in value.strategy:
            raise ValueError("an import path cannot be used here; name an installed evaluator")
        return value

    @field_validator("template")
    @classmethod
    def _has_a_place(cls, value: str) -> str:
        if value.count(FEEDBACK) != 1:
            raise ValueError(f"must have {FEEDBACK} in it, once")
        return value

    @model_validator(mode="after")
    def _another_than_the_student(self) -> Self:
        of_another = ("teacher_engine", "teacher_model", "teacher_api_key_env")
        if self.teacher_base_url is None:
            for name in of_another:
                if getattr(self, name) is not None:
                    raise ValueError(f"'{name}' goes with 'teacher_base_url'")
            if not self.has_feedback:
                raise ValueError(
                    "the teacher would be the student itself: give feedback (hint, report_keys, log_chars), or another"
                    " model (teacher_base_url)"
                )
        return self

    @property
    def has_feedback(self) -> bool:
        """Whether the teacher is to read any; what a rollout's evaluator then gives may still be blank."""
        return self.hint is not None or bool(self.report_keys) or self.log_chars > 0
