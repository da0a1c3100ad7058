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
from polarq.contracts.specs import EvaluatorSpec
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
    "exact_match": ExactMatchConfig,
    "json_schema": JsonSchemaConfig,
    "math_verify": MathVerifyConfig,
    "script": ScriptConfig,
    "session_completed": SessionCompletedConfig,
    "test_on_output": TestOnOutputConfig,
}


def check_evaluator(spec: EvaluatorSpec) -> None:
    """Raises ValueError, naming every key that a built-in evaluator cannot use."""
    config = _CONFIGS.get(spec.strategy)
    if config is None:
        return
    try:
        config.model_validate(spec.config)
    except ValidationError as exc:
        at_the_top = [not error["loc"] for error in exc.errors(include_url=False)]
        lines = [f"config{': ' if top else '.'}{line}" for top, line in zip(at_the_top, problems_of(exc), strict=True)]
        raise ValueError("; ".join(lines)) from None
