"""The task: what a trainer asks for. A superset of Polar's TaskRequest; a task file of Polar's runs unchanged."""

from __future__ import annotations

import hashlib
import json
import os
import re
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, ClassVar, Self
from urllib.parse import urlsplit

import yaml
from pydantic import Field, StringConstraints, field_validator, model_validator

from polarq.contracts.artifacts import ArtifactSpec
from polarq.contracts.base import ID_PATTERN, Contract, JsonObject
from polarq.contracts.endings import Ending, EndingRule, checked_rules
from polarq.contracts.evaluators import HOST_FOLDERS, check_evaluator
from polarq.contracts.require import Require
from polarq.contracts.specs import (
    AgentSpec,
    BuilderSpec,
    EvaluatorSpec,
    ModelRules,
    Placement,
    RuntimeSpec,
    Timeouts,
    finite_positive,
)
from polarq.errors import InvalidTask

Id = Annotated[str, StringConstraints(pattern=ID_PATTERN)]

MAX_SAMPLES = 4096
MAX_INSTRUCTION_BYTES = 16 * 1024 * 1024
MAX_TASK_BYTES = 32 * 1024 * 1024
MAX_SECONDS = 30 * 24 * 3600.0


def new_task_id() -> str:
    return f"task-{uuid.uuid4().hex[:20]}"


class StageBudgets(Contract):
    """The budgets that hold for one rollout, all in seconds, resolved from `Timeouts` and `timeout_seconds`."""

    queue_s: float | None
    prepare_s: float
    agent_s: float
    build_s: float
    evaluate_s: float
    teardown_s: float


class Task(Contract):
    """One request for `num_samples` rollouts of the same instruction (a group).

    `task_id` is the caller's idempotency key: the same request under the same id is the same task, a different
    request under the same id is refused.
    """

    renamed_keys: ClassVar[Mapping[str, str]] = {"num_rollouts": "num_samples"}

    task_id: Id = Field(default_factory=new_task_id)
    instruction: str = Field(min_length=1)
    num_samples: int = Field(1, ge=1, le=MAX_SAMPLES)
    timeout_seconds: float = Field(600.0, gt=0, le=MAX_SECONDS)
    runtime: RuntimeSpec | None = None
    """None: the node's `default_runtime`."""
    agent: AgentSpec
    builder: BuilderSpec = BuilderSpec()
    evaluator: EvaluatorSpec | None = None
    callback_url: str | None = None
    metadata: JsonObject = {}
    dispatch_priority: int = Field(0, ge=0, le=100)
    """Higher goes first among what has not started; nothing that runs is interrupted."""
    early_stop_min_usable_sessions: int | None = Field(None, ge=1)

    run_id: Id = "default"
    """polarq's additions from here on: which training run this belongs to."""
    priority_class: Id | None = None
    timeouts: Timeouts = Timeouts()
    placement: Placement = Placement()
    model: ModelRules = ModelRules()
    """Limits and sampling parameters of the rollout's model calls."""
    artifacts: list[ArtifactSpec] = Field([], max_length=100)
    """Files of the sandbox that come back with the result."""
    endings: dict[Ending, EndingRule] = {}
    """What is done with a rollout by the way it ended, where that is not the default."""
    max_replacements: int = Field(0, ge=0, le=10)
    """How often a rollout that ended in a way whose rule is `replace` is run again."""
    require: Require = Require()
    """How faithful a rollout's trajectory must be for it to count."""

    @field_validator("instruction")
    @classmethod
    def _instruction_size(cls, value: str) -> str:
        size = len(value.encode("utf-8", "surrogatepass"))
        if size > MAX_INSTRUCTION_BYTES:
            raise ValueError(
                f"{size} bytes; at most {MAX_INSTRUCTION_BYTES} (bring larger inputs with runtime.prepare)"
            )
        if "\0" in value:
            raise ValueError("has a NUL byte")
        try:
            value.encode("utf-8")
        except UnicodeEncodeError as exc:
            raise ValueError(f"is not valid Unicode text (lone surrogate at {exc.start})") from None
        return value

    @field_validator("callback_url")
    @classmethod
    def _callback_is_http(cls, value: str | None) -> str | None:
        if value is not None:
            parts = urlsplit(value)
            if parts.scheme not in {"http", "https"} or not parts.hostname:
                raise ValueError("must be an http or https address")
            if parts.username is not None or parts.password is not None:
                raise ValueError("must not hold a user name or password")
        return value

    @field_validator("endings")
    @classmethod
    def _endings_make_sense(cls, value: dict[Ending, EndingRule]) -> dict[Ending, EndingRule]:
        checked_rules(value)
        return value

    @field_validator("evaluator")
    @classmethod
    def _evaluator_can_judge(cls, value: EvaluatorSpec | None) -> EvaluatorSpec | None:
        if value is not None:
            check_evaluator(value)
        return value

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        stop = self.early_stop_min_usable_sessions
        if stop is not None and stop > self.num_samples:
            raise ValueError(f"early_stop_min_usable_sessions ({stop}) is more than num_samples ({self.num_samples})")
        if "agent_timeout" in self.metadata:
            finite_positive(self.metadata["agent_timeout"], "metadata.agent_timeout")
        seed = self.metadata.get("eval_sampling_seed_base")
        if seed is not None and (isinstance(seed, bool) or not isinstance(seed, int) or seed < 0):
            raise ValueError("'metadata.eval_sampling_seed_base' must be a whole number, 0 or more")
        return self

    @classmethod
    def load(cls, source: Task | Mapping[str, Any] | str | os.PathLike[str]) -> Task:
        """A task from a model, a mapping, or the path of a YAML or JSON file. Raises `InvalidTask`.

        Relative `source` paths of upload actions in a file are taken relative to that file.
        """
        if isinstance(source, Task):
            return source
        if isinstance(source, Mapping):
            return cls.parse(_own_strings(source), what="task")
        if isinstance(source, (str, os.PathLike)):
            return cls._from_file(Path(source))
        raise InvalidTask("task", [f"expected a mapping, a Task or a path, got {type(source).__name__}"])

    @classmethod
    def _from_file(cls, path: Path) -> Task:
        what = f"task file {path}"
        try:
            with path.open("rb") as file:
                data = file.read(MAX_TASK_BYTES + 1)
            if len(data) > MAX_TASK_BYTES:
                raise InvalidTask(what, [f"is larger than {MAX_TASK_BYTES} bytes"])
            text = data.decode("utf-8")
        except FileNotFoundError:
            raise InvalidTask(what, ["there is no such file"]) from None
        except OSError as exc:
            raise InvalidTask(what, [f"cannot be read: {exc.strerror}"]) from None
        except UnicodeDecodeError as exc:
            raise InvalidTask(what, [f"is not UTF-8 text (byte {exc.start}); save it as UTF-8"]) from None
        try:
            fields = json.loads(text) if path.suffix == ".json" else yaml.safe_load(text)
        except (yaml.YAMLError, ValueError, RecursionError) as exc:
            raise InvalidTask(what, [f"cannot be parsed: {' '.join(str(exc).split())}"]) from None
        if not isinstance(fields, Mapping):
            raise InvalidTask(what, ["must hold a mapping of task fields at its top level"])
        return cls.parse(_with_absolute_sources(_own_strings(fields), path.resolve().parent), what=what)

    def canonical_json(self) -> str:
        """The request as one canonical JSON text: equal requests have equal texts."""
        return json.dumps(self.model_dump(mode="json"), sort_keys=True, separators=(",", ":"), ensure_ascii=False)

    def digest(self) -> str:
        """SHA-256 over the canonical request; tells the same request from a different one under the same id."""
        return hashlib.sha256(self.canonical_json().encode()).hexdigest()

    def budgets(self) -> StageBudgets:
        """The stage budgets in seconds. Each stage has its own, so that a slow queue or a slow agent never eats the
        time in which the partial trajectory is built and scored."""
        whole = self.timeout_seconds
        agent = self.timeouts.agent_s or float(self.metadata.get("agent_timeout", whole))
        return StageBudgets(
            queue_s=self.timeouts.queue_s,
            prepare_s=self.timeouts.prepare_s or whole,
            agent_s=agent,
            build_s=self.timeouts.build_s or max(60.0, whole / 4),
            evaluate_s=self.timeouts.evaluate_s or whole,
            teardown_s=self.timeouts.teardown_s or 30.0,
        )

    def rollout_id(self, index: int) -> str:
        """`<task_id>.<index>`: public, stable, and not a secret."""
        return f"{self.task_id}.{index}"


_INDEX = re.compile("[0-9]{1,6}")


def split_rollout_id(rollout_id: str) -> tuple[str, int]:
    """(task_id, index) of a rollout id; raises ValueError when it is not one."""
    task_id, dot, index = rollout_id.rpartition(".")
    if not dot or not _INDEX.fullmatch(index):
        shown = f"{rollout_id[:200]}..." if len(rollout_id) > 200 else rollout_id
        raise ValueError(f"'{shown}' is not a rollout id (<task_id>.<index>)")
    return task_id, int(index)


def maybe_rollout_id(any_id: str) -> tuple[str, int] | None:
    """(task_id, index) where the id may be a rollout's: a task's own id may end in a number too."""
    try:
        return split_rollout_id(any_id)
    except ValueError:
        return None


def _own_strings(data: Mapping[Any, Any]) -> dict[str, Any]:
    """YAML turns an unquoted id such as 2026 or 1.5 into a number; ids are texts."""
    values = {str(key): value for key, value in data.items()}
    for key in ("task_id", "run_id"):
        if isinstance(values.get(key), (int, float)) and not isinstance(values[key], bool):
            values[key] = str(values[key])
    return values


def _with_absolute_sources(data: dict[str, Any], base: Path) -> dict[str, Any]:
    evaluator = data.get("evaluator")
    if isinstance(evaluator, Mapping):
        data = {**data, "evaluator": _with_absolute_folders(evaluator, base)}
    runtime = data.get("runtime")
    if not isinstance(runtime, Mapping):
        return data
    runtime = dict(runtime)
    for key in ("prepare", "eval_prepare"):
        actions = runtime.get(key)
        if isinstance(actions, list):
            runtime[key] = [_absolute(action, base) for action in actions]
    return {**data, "runtime": runtime}


def _absolute(action: Any, base: Path) -> Any:
    if isinstance(action, Mapping) and isinstance(action.get("source"), str):
        return {**action, "source": str(base / Path(action["source"]).expanduser())}
    return action


def _with_absolute_folders(evaluator: Mapping[str, Any], base: Path) -> Mapping[str, Any]:
    """The same for folders of a built-in evaluator's, and of the parts of a composite one."""
    config = evaluator.get("config")
    if not isinstance(config, Mapping):
        return evaluator
    config = dict(config)
    if str(evaluator.get("strategy", "")).startswith("harbor"):
        for key in HOST_FOLDERS:
            if isinstance(config.get(key), str):
                config[key] = str(base / Path(config[key]).expanduser())
    parts = config.get("parts")
    if evaluator.get("strategy") == "composite" and isinstance(parts, list):
        config["parts"] = [_with_absolute_folders(part, base) if isinstance(part, Mapping) else part for part in parts]
    inner = config.get("evaluator")
    if evaluator.get("strategy") == "self_distillation" and isinstance(inner, Mapping):
        config["evaluator"] = _with_absolute_folders(inner, base)
    return {**evaluator, "config": config}
