"""What the built-in evaluators are told in a task, light enough that a bad config is refused at submit.

A plug-in evaluator checks its own config on the node.
"""

from __future__ import annotations

import json
from enum import StrEnum
from typing import Annotated, Any, ClassVar

from pydantic import Field, StringConstraints, ValidationError, field_validator

from polarq.contracts.answers import ExactMatchConfig, JsonSchemaConfig, MathVerifyConfig
from polarq.contracts.base import Contract, problems_of
from polarq.contracts.composite import CompositeConfig
from polarq.contracts.distillation import SelfDistillationConfig
from polarq.contracts.harbor import HarborConfig, HarborRubricConfig
from polarq.contracts.judging import LlmJudgeConfig
from polarq.contracts.specs import EvaluatorSpec
from polarq.contracts.swebench import SwebenchConfig
from polarq.contracts.verifiers import ScriptConfig

NonBlank = Annotated[str, StringConstraints(strip_whitespace=True, min_length=1)]


class TestStatus(StrEnum):
    """How a test ended, in pytest's words."""

    __test__ = False  # not one of pytest's own test classes

    PASSED = "PASSED"
    FAILED = "FAILED"
    ERROR = "ERROR"
    SKIPPED = "SKIPPED"
    XFAIL = "XFAIL"
    XPASS = "XPASS"


class SessionCompletedConfig(Contract):
    """`session_completed`: 1.0 when the harness ended well, else 0.0. Takes no keys."""


class TestOnOutputConfig(Contract):
    """`test_on_output`: 1.0 when every expected test has the expected status, else 0.0."""

    __test__: ClassVar[bool] = False

    test_command: NonBlank
    """Run in `repo_dir`; a line per test says how it ended (pytest, unittest -v, or `PASSED <id>`)."""
    expected_output_json: dict[str, TestStatus]
    """Full test id -> status; a mapping, or a JSON text of one. Tests beside these do not count."""
    repo_dir: NonBlank = "/testbed"
    patch_command: NonBlank | None = None
    """Prints the agent's patch; without it, the patch is the difference to the tree before the agent."""
    apply_timeout: float = Field(60.0, gt=0)
    """Seconds for finding the agent's changes, and for applying them to a fresh sandbox."""
    test_timeout: float = Field(1200.0, gt=0)
    """Seconds for the test command."""
    exclude_patterns: list[str] = []
    """Paths that are no part of the patch, as file name patterns, beside byte code and caches."""
    keep_agent_scaffolding: bool = False
    """Grade with the agent's own conftest.py, pytest.ini and changed tests, too."""
    report_path: NonBlank | None = None
    """A JUnit XML or JSON report that the test command writes (relative to `repo_dir`); it counts, not the output. In
    the agent's own sandbox a test that the output tells of as failed has failed, whatever stands in the report."""

    @field_validator("expected_output_json", mode="before")
    @classmethod
    def _from_text(cls, value: Any) -> Any:
        if isinstance(value, str):
            try:
                value = json.loads(value)
            except ValueError as exc:
                raise ValueError(f"is a text but not JSON ({exc}); give a mapping of test id to status") from None
        if isinstance(value, dict):
            return {key: status.upper() if isinstance(status, str) else status for key, status in value.items()}
        return value

    @field_validator("expected_output_json")
    @classmethod
    def _something_is_tested(cls, value: dict[str, TestStatus]) -> dict[str, TestStatus]:
        if not value:
            raise ValueError("is empty: with no expected test, every rollout would pass; name at least one")
        if all(status is TestStatus.SKIPPED for status in value.values()):
            raise ValueError("expects nothing but skipped tests; name at least one that runs")
        if any(not test_id.strip() for test_id in value):
            raise ValueError("has an empty test id")
        return value


_CONFIGS: dict[str, type[Contract]] = {
    "composite": CompositeConfig,
    "exact_match": ExactMatchConfig,
    "harbor": HarborConfig,
    "harbor_rubric": HarborRubricConfig,
    "json_schema": JsonSchemaConfig,
    "llm_judge": LlmJudgeConfig,
    "math_verify": MathVerifyConfig,
    "script": ScriptConfig,
    "self_distillation": SelfDistillationConfig,
    "session_completed": SessionCompletedConfig,
    "swebench_harness": SwebenchConfig,
    "test_on_output": TestOnOutputConfig,
}


BUILT_IN = frozenset(_CONFIGS)


def check_evaluator(spec: EvaluatorSpec) -> None:
    """Raises ValueError, naming every key that a built-in evaluator cannot use."""
    config = _CONFIGS.get(spec.strategy)
    if config is None:
        return
    try:
        made = config.model_validate(spec.config)
    except ValidationError as exc:
        at_the_top = [not error["loc"] for error in exc.errors(include_url=False)]
        lines = [f"config{': ' if top else '.'}{line}" for top, line in zip(at_the_top, problems_of(exc), strict=True)]
        raise ValueError("; ".join(lines)) from None
    for place, inner in _inner(made):
        try:
            check_evaluator(inner)
        except ValueError as exc:
            raise ValueError(f"config.{place}: {exc}") from None


def _inner(config: Contract) -> list[tuple[str, EvaluatorSpec]]:
    """The evaluators within one, by where they stand in its config."""
    if isinstance(config, CompositeConfig):
        return [(f"parts.{part.name}", part.spec()) for part in config.parts]
    return [("evaluator", config.evaluator)] if isinstance(config, SelfDistillationConfig) else []


def all_of(spec: EvaluatorSpec) -> list[EvaluatorSpec]:
    """A built-in evaluator of a task that was checked, and all within it, those that come first in it first."""
    config = _CONFIGS.get(spec.strategy)
    within = _inner(config.model_validate(spec.config)) if config in {CompositeConfig, SelfDistillationConfig} else []
    return [spec, *(one for _, inner in within for one in all_of(inner))]


HOST_FOLDERS = ("task_dir", "tests_dir")
"""Keys of configs that name a folder on the node's host."""
REPOSITORY = {"test_on_output": "/testbed", "swebench_harness": "/testbed"}
"""Where evaluators that always look at a repository do so when their config does not say."""


def repository_of(spec: EvaluatorSpec) -> str | None:
    """The folder that the agent works in, where the evaluator names one, or one within it does."""
    named = [one.config.get("repo_dir") or REPOSITORY.get(one.strategy) for one in all_of(spec)]
    return next((found for found in named if isinstance(found, str)), None)


def servers_of(spec: EvaluatorSpec) -> list[tuple[str, str]]:
    """(key of the config, address) of the servers that a built-in evaluator, or one within it, asks."""
    keys = ("judge_base_url", "teacher_base_url")
    return [
        (key, str(one.config[key]))
        for one in all_of(spec)
        for key in keys
        if key in _CONFIGS.get(one.strategy, Contract).model_fields and one.config.get(key) is not None
    ]


def folders_of(spec: EvaluatorSpec) -> list[str]:
    """Folders on the node's host that a built-in evaluator, or one within it, brings into sandboxes."""
    return [
        str(one.config[key])
        for one in all_of(spec)
        if issubclass(_CONFIGS.get(one.strategy, Contract), HarborConfig)
        for key in HOST_FOLDERS
        if one.config.get(key) is not None
    ]


def grades_fresh(spec: EvaluatorSpec) -> bool:
    """Whether it, or one within it, grades in a sandbox that the agent never saw."""
    return any(one.refresh_runtime for one in all_of(spec))
