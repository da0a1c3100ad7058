"""Settings of the evaluators that ask another model: `llm_judge`, and the judge of `harbor_rubric`."""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self
from urllib.parse import urlsplit

from pydantic import AfterValidator, Field, model_validator

from polarq.contracts.answers import AnswerConfig
from polarq.contracts.base import Contract
from polarq.contracts.specs import NonBlank


def _http(value: str) -> str:
    parts = urlsplit(value)
    if parts.scheme not in {"http", "https"} or not parts.hostname:
        raise ValueError("must be an http or https address")
    if parts.username is not None or parts.password is not None or parts.query or parts.fragment:
        raise ValueError("must be an address without a user, password or query")
    return value.rstrip("/")


HttpAddress = Annotated[NonBlank, AfterValidator(_http)]
"""Of a server that an evaluator asks."""


class JudgeConfig(Contract):
    """A judge behind an OpenAI-compatible server."""

    judge_base_url: HttpAddress
    """With or without /v1. Its host must be among the node's `security.judge_hosts`."""
    judge_model: NonBlank
    judge_api_key_env: NonBlank | None = None
    """Name of the variable on the node that holds the key, one of the node's `security.judge_key_envs`. None:
    `JUDGE_API_KEY` where the node has it."""
    judge_timeout: float = Field(60.0, gt=0)
    """Seconds for one call, until the whole answer is there."""
    judge_max_retries: int = Field(4, ge=0, le=20)
    """Calls that may be repeated because the server was busy (429, 5xx; the pause is as long as it asks for), broke
    off, did not answer, or answered no JSON object."""
    judge_max_asks: int = Field(3, ge=1, le=20)
    """How often a verdict is asked for at most: an answer that is none is asked for again."""
    judge_max_tokens: int = Field(200_000, gt=0)
    """Tokens that one evaluation may cost, by the server's own count; past it nothing more is asked."""
    judge_max_output_tokens: int = Field(2048, gt=0)
    judge_temperature: float = Field(0.0, ge=0)
    judge_cache: bool = True
    """The same question is asked once on a node; only verdicts are kept."""
    judge_response_format: Literal["json_schema", "json_object", "none"] = "json_schema"
    """How the server is told what to answer."""
    max_section_chars: int = Field(40_000, ge=100)
    """Most characters of a text in a question; of a longer one the middle is left out, which the judge is told."""


class LlmJudgeConfig(AnswerConfig, JudgeConfig):
    """`llm_judge`: the score that a judge gives the answer."""

    mode: Literal["rubric", "reference", "pairwise"] = "rubric"
    """rubric: by `rubric`. reference: by how well it agrees with `reference`. pairwise: against `opponent`, asked in
    both orders: 1 for a win, 0.5 for a tie, 0 for a loss, and their mean."""
    judged: Literal["answer", "conversation"] = "answer"
    rubric: NonBlank | None = None
    reference: NonBlank | None = None
    opponent: NonBlank | None = None
    min_score: float = 0.0
    max_score: float = 1.0
    """The judge's scale. A score outside is asked for again, and never clamped; the reward is the score's place on the
    scale, 0 to 1."""

    @model_validator(mode="after")
    def _what_the_mode_needs(self) -> Self:
        needs = {"rubric": "rubric", "reference": "reference", "pairwise": "opponent"}[self.mode]
        if getattr(self, needs) is None:
            raise ValueError(f"mode '{self.mode}' needs '{needs}'")
        for name in {"reference", "opponent"} - {needs}:
            if getattr(self, name) is not None:
                raise ValueError(f"'{name}' does not go with mode '{self.mode}'")
        if self.min_score >= self.max_score:
            raise ValueError(f"min_score ({self.min_score:g}) must be below max_score ({self.max_score:g})")
        aside: list[Any] = [self.answer_file, self.answer_after, self.answer_before]
        if self.judged == "conversation" and any(one is not None for one in aside):
            raise ValueError("judged 'conversation' takes no 'answer_file', 'answer_after' or 'answer_before'")
        return self
