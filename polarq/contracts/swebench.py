"""Settings of the evaluator `swebench_harness`: an instance of SWE-bench or of a data set of that kind."""

from __future__ import annotations

import json
from typing import Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from polarq.contracts.base import Contract
from polarq.contracts.specs import NonBlank

DEFAULT_PARSER = "parse_log_pytest"


def _from_text(value: Any) -> Any:
    """Data sets hold lists as JSON texts."""
    if isinstance(value, str):
        try:
            return json.loads(value)
        except ValueError as exc:
            raise ValueError(f"is a text but not JSON ({exc})") from None
    return value


class SweInstance(BaseModel):
    """A data set's row; what is not needed here may be anything."""

    model_config = ConfigDict(extra="allow", frozen=True)

    instance_id: NonBlank
    repo: str = ""
    version: str = ""
    base_commit: str = ""
    test_patch: str = ""
    FAIL_TO_PASS: list[NonBlank] = []
    PASS_TO_PASS: list[NonBlank] = []
    eval_script: str = ""
    log_parser: str = ""
    eval_type: str = ""

    @model_validator(mode="before")
    @classmethod
    def _multi_swe(cls, data: Any) -> Any:
        """A row of Multi-SWE-bench: tests as maps by how they went before and after, and the commit in `base`."""
        if not isinstance(data, dict) or "FAIL_TO_PASS" in data or "f2p_tests" not in data:
            return data
        tests = {kind: list(data.get(f"{kind}2p_tests") or {}) for kind in ("f", "s", "n", "p")}
        org, repo, base = data.get("org", ""), data.get("repo", ""), data.get("base")
        name = f"{org}/{repo}" if org and "/" not in repo else repo
        return {
            "instance_id": f"{name.replace('/', '__')}-{data.get('number', '')}",
            **data,
            "repo": name,
            "base_commit": base.get("sha", "") if isinstance(base, dict) else data.get("base_commit", ""),
            "FAIL_TO_PASS": [*tests["f"], *tests["s"], *tests["n"]],
            "PASS_TO_PASS": tests["p"],
        }

    _lists = field_validator("FAIL_TO_PASS", "PASS_TO_PASS", mode="before")(_from_text)

    @field_validator("version", mode="before")
    @classmethod
    def _a_text(cls, value: Any) -> Any:
        return str(value) if isinstance(value, int | float) else value

    @model_validator(mode="after")
    def _something_is_tested(self) -> Self:
        if not self.FAIL_TO_PASS and not self.PASS_TO_PASS:
            raise ValueError("FAIL_TO_PASS and PASS_TO_PASS are both empty: every rollout would pass")
        return self


class SwebenchConfig(Contract):
    """`swebench_harness`: 1.0 when the package `swebench` calls the instance resolved, else 0.0. What the agent left
    running is ended before its work is looked at."""

    instance: SweInstance
    """A mapping, or a JSON text of one. Rows with `eval_script` and `log_parser` (SWE-bench as of swebench 5) say how
    they are tested; others (SWE-Gym, SWE-bench of before, Multi-SWE) need `test_command`."""
    test_command: NonBlank | None = None
    """Where the instance has no `eval_script`: runs its tests in `repo_dir`, after `test_patch` was applied."""
    log_parser: NonBlank | None = None
    """A name in `swebench.harness.log_parsers`; None: the instance's, else that of pytest."""
    eval_type: Literal["pass_and_fail", "fail_only"] | None = None
    """fail_only: a test that the log does not name has passed (some JavaScript runners). None: as the instance says."""
    repo_dir: NonBlank = "/testbed"
    apply_timeout: float = Field(120.0, gt=0)
    """Seconds for finding the agent's changes, and for applying them to a fresh sandbox."""
    test_timeout: float = Field(1800.0, gt=0)
    exclude_patterns: list[str] = []
    """Paths that are no part of the patch, as file name patterns, beside byte code and caches."""
    keep_agent_scaffolding: bool = False

    _instance = field_validator("instance", mode="before")(_from_text)

    @model_validator(mode="after")
    def _a_way_to_test(self) -> Self:
        if not self.instance.eval_script and self.test_command is None:
            raise ValueError("instance has no eval_script; give test_command")
        if self.instance.eval_script and ">>>>> Start Test Output" not in self.instance.eval_script:
            raise ValueError("instance.eval_script does not mark where the tests' output begins and ends")
        return self

    @property
    def parser(self) -> str:
        return self.log_parser or self.instance.log_parser or DEFAULT_PARSER

    @property
    def kind(self) -> str:
        return self.eval_type or self.instance.eval_type or "pass_and_fail"
