"""Task directories of Harbor (instruction.md, task.toml, environment/, tests/), and the evaluators that use them."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from polarq.contracts.base import problems_of
from polarq.contracts.judging import JudgeConfig
from polarq.contracts.specs import Env, NonBlank
from polarq.contracts.verifiers import RewardRange
from polarq.errors import InvalidTask

VERIFIER_S = 120.0
AGENT_S = 600.0
_UNITS = {"K": 1 / 1024, "M": 1, "G": 1024, "T": 1024 * 1024}


class HarborConfig(RewardRange):
    """`harbor`: the reward that a task directory's verifier writes."""

    task_dir: NonBlank | None = None
    """A task directory on the node's host; its tests/ and the verifier's settings in its task.toml are used."""
    tests_dir: NonBlank | None = None
    """Only the folder with test.sh."""
    verifier_timeout: float | None = Field(None, gt=0)
    """Seconds; None: as task.toml says, else 120."""
    tests_target: NonBlank = "/tests"
    verifier_dir: NonBlank = "/logs/verifier"
    """Where the verifier writes reward.txt (a number) or reward.json (a number, or a map of them: `reward`, else their
    mean)."""
    test_command: NonBlank | None = None
    """None: `bash <tests_target>/test.sh`."""
    verifier_user: NonBlank | None = None
    """Who runs the verifier; None: as task.toml says, else the sandbox's own user."""
    reward_channel: Literal["descriptor", "file"] = "descriptor"
    """descriptor: what the verifier writes goes where only processes of its own have an open file. file: into a plain
    file, for verifiers that put a finished file in its place."""
    require_exit_0: bool = False
    """Whether a verifier that does not exit with 0 has come to no verdict."""
    upload_attempts: int = Field(3, ge=1, le=10)
    repo_dir: NonBlank | None = None
    """The folder that the agent works in, as `script` has it: what the agent put there to steer a test runner, and test
    files that it changed, are as they were when the verifier runs. None: a task's work is the whole sandbox."""
    keep_agent_scaffolding: bool = False

    @model_validator(mode="after")
    def _one_source(self) -> Self:
        if (self.task_dir is None) == (self.tests_dir is None):
            raise ValueError("give exactly one of 'task_dir' and 'tests_dir'")
        return self


class HarborRubricConfig(HarborConfig, JudgeConfig):
    """`harbor_rubric`: the verifier's reward, and a judge's score of each trace by a rubric on top:
    `outcome + rubric_coefficient * score / 5`, with whole scores from -5 to 5."""

    rubric_file: NonBlank = "rubric.md"
    """In the tests' folder."""
    rubric_coefficient: float = Field(0.2, ge=0)
    judge_include_tool_outputs: bool = True
    """Whether the judge sees what tools answered."""
    judge_max_traces_per_call: int = Field(32, ge=1)
    on_judge_failure: Literal["fail", "outcome_only"] = "fail"
    """fail: no reward. outcome_only: the verifier's reward alone, which the report says."""


class _Toml(BaseModel):
    """A foreign format: what is not needed here may be anything."""

    model_config = ConfigDict(extra="ignore", frozen=True)


class HarborVerifier(_Toml):
    timeout_sec: float = Field(VERIFIER_S, gt=0)
    user: str | None = None
    env: Env = {}


class HarborAgent(_Toml):
    timeout_sec: float = Field(AGENT_S, gt=0)
    user: str | None = None


class HarborEnvironment(_Toml):
    docker_image: str | None = None
    cpus: float | None = Field(None, gt=0)
    memory_mb: int | None = Field(None, gt=0)
    storage_mb: int | None = Field(None, gt=0)
    gpus: int = 0
    allow_internet: bool = True
    workdir: str | None = None
    env: Env = {}

    @model_validator(mode="before")
    @classmethod
    def _older_spelling(cls, data: Any) -> Any:
        """`memory = "2G"` of earlier versions."""
        if not isinstance(data, dict):
            return data
        values = dict(data)
        for name in ("memory", "storage"):
            text = values.pop(name, None)
            if isinstance(text, str) and f"{name}_mb" not in values:
                values[f"{name}_mb"] = _megabytes(name, text)
        return values


class HarborToml(_Toml):
    """task.toml"""

    verifier: HarborVerifier = HarborVerifier()
    agent: HarborAgent = HarborAgent()
    environment: HarborEnvironment = HarborEnvironment()

    @classmethod
    def load(cls, folder: Path) -> HarborToml:
        """Of a task directory; all defaults where it has none. Raises `InvalidTask`."""
        what = f"Harbor task {folder}"
        file = folder / "task.toml"
        if not file.is_file():
            return cls()
        try:
            return cls.model_validate(tomllib.loads(file.read_text(encoding="utf-8")))
        except ValidationError as exc:
            raise InvalidTask(what, [f"task.toml: {line}" for line in problems_of(exc)]) from None
        except (OSError, ValueError) as exc:
            raise InvalidTask(what, [f"task.toml: {exc}"]) from None


def task_fields(folder: Path, *, backend: str, image: str | None = None) -> dict[str, Any]:
    """A task directory as fields of a `Task`, without `agent`; `image` is what its environment/ was built to, where
    task.toml names no `docker_image`. Raises `InvalidTask`."""
    toml = HarborToml.load(folder)
    try:
        instruction = (folder / "instruction.md").read_text(encoding="utf-8")
    except (OSError, ValueError) as exc:
        raise InvalidTask(f"Harbor task {folder}", [f"instruction.md: {exc}"]) from None
    if not (folder / "tests" / "test.sh").is_file():
        raise InvalidTask(f"Harbor task {folder}", ["there is no tests/test.sh"])
    environment = toml.environment
    runtime = {
        "backend": backend,
        "image": image or environment.docker_image or "",
        "user": toml.agent.user,
        **environment.model_dump(
            include={"cpus", "memory_mb", "storage_mb", "gpus", "allow_internet", "workdir", "env"}
        ),
    }
    return {
        "instruction": instruction,
        "runtime": {key: value for key, value in runtime.items() if value is not None},
        "timeouts": {"agent_s": toml.agent.timeout_sec, "evaluate_s": toml.verifier.timeout_sec + VERIFIER_S},
        "evaluator": {"strategy": "harbor", "config": {"task_dir": str(folder.resolve())}},
    }


def _megabytes(name: str, text: str) -> int:
    number, unit = text.strip().upper().removesuffix("B")[:-1], text.strip().upper().removesuffix("B")[-1:]
    if unit not in _UNITS or not number.strip().replace(".", "", 1).isdecimal():
        raise ValueError(f"{name}: '{text}' is no size such as 512M or 2G")
    return max(int(float(number) * _UNITS[unit]), 1)
