"""The parts a task is made of, with Polar's field names (both of its lines) and polarq's additions."""

from __future__ import annotations

import math
import reprlib
from collections.abc import Callable
from enum import StrEnum
from typing import Annotated, Any, Literal, Self

from pydantic import Field, StringConstraints, field_validator, model_validator

from polarq.contracts.base import ID_PATTERN, Contract, JsonObject
from polarq.contracts.texts import check_texts
from polarq.hosts import AllowedHost

Name = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9][A-Za-z0-9_-]{0,63}$")]
NonBlank = Annotated[str, StringConstraints(strip_whitespace=True, min_length=1)]
Env = dict[str, str]


def _checked_env(env: Env) -> Env:
    for key, value in env.items():
        if not key or "=" in key or "\0" in key:
            raise ValueError(f"'{key}' is not a usable environment variable name")
        if "\0" in value:
            raise ValueError(f"the value of '{key}' has a NUL byte")
    return env


class ExecInput(Contract):
    """One shell command. It runs under `bash -o pipefail`, so that a failing part of a pipe fails the command."""

    command: NonBlank
    cwd: str | None = None
    env: Env = {}

    _env = field_validator("env")(_checked_env)


class PrepareAction(Contract):
    """One step of a sandbox's recipe: bring a file, bring a folder, or run a command."""

    type: Literal["upload_file", "upload_dir", "exec"]
    source: str | None = None
    """Path on the node's host (upload_*)."""
    target: str | None = None
    """Path inside the sandbox (upload_*)."""
    command: str | None = None
    cwd: str | None = None
    """None: the session directory, also where the runtime has a `workdir`."""
    env: Env | None = None
    max_attempts: int = Field(1, ge=1, le=10)
    retry_backoff_seconds: float = Field(0.0, ge=0, le=60)
    timeout_s: float | None = Field(None, gt=0)
    """polarq's addition: a limit for this action alone, inside the prepare budget."""

    @model_validator(mode="after")
    def _fields_of_the_type(self) -> Self:
        if self.type == "exec":
            if not (self.command or "").strip():
                raise ValueError("an exec action needs 'command'")
            if self.source is not None or self.target is not None:
                raise ValueError("an exec action takes no 'source' or 'target'")
        else:
            if not self.source or not self.target:
                raise ValueError(f"an {self.type} action needs 'source' and 'target'")
            if self.command is not None or self.cwd is not None or self.env is not None:
                raise ValueError(f"an {self.type} action takes no 'command', 'cwd' or 'env'")
            if self.max_attempts != 1 or self.retry_backoff_seconds != 0:
                raise ValueError("only exec actions can be retried")
        return self


class NetworkPolicy(StrEnum):
    """What a sandbox reaches while its harness runs and is graded."""

    NONE = "none"
    """The model's proxy, on the sandbox's own loopback; nothing else, and there is nobody to ask."""
    PROXY_ONLY = "proxy-only"
    """The same, and who asks for anything else is refused by name, which is recorded."""
    ALLOWLIST = "allowlist"
    """`allowed_hosts` too, through an HTTP proxy that the usual variables name."""
    FULL = "full"
    """Whatever the machine reaches."""


class RuntimeSpec(Contract):
    """The sandbox a rollout runs in."""

    backend: Name = "docker"
    image: str = ""
    prepare: list[PrepareAction] = []
    """Leaves files, never processes: a rollout starts from what its recipe left on disk."""
    eval_prepare: list[PrepareAction] | None = None
    env: Env = {}
    network: str | None = None
    """A network of the backend by its name (Docker's `host`, `bridge`, ...), with policy `full`."""
    network_policy: NetworkPolicy | None = None
    """None: `none` where `allow_internet` is false or `network` is none, `full` where `network` is named, else the
    topology's `security.default_network_policy`."""
    allowed_hosts: list[NonBlank] = []
    """With policy `allowlist`: host, host:port or *.domain (ports 80 and 443 where none is named)."""
    user: NonBlank | None = None
    """Who runs the harness, by name or number; None: as the image says."""
    max_processes: int | None = Field(None, gt=0)
    reuse: bool = False
    """Lets a sandbox that a rollout of the same recipe has used be used again, as that one left it."""
    scrub_history: bool | None = None
    """Take from the repository what lies after its checked-out commit (branches, tags, reflogs, loose objects) before
    the harness sees it. None: where the evaluator names a repository (`repo_dir`)."""
    workdir: NonBlank | None = None
    cpus: float | None = Field(None, gt=0)
    memory_mb: int | None = Field(None, gt=0)
    storage_mb: int | None = Field(None, gt=0)
    gpus: int = Field(0, ge=0)
    allow_internet: bool = True
    internet_volumes: list[str] = []
    direct_exec_init_command: NonBlank | None = None
    import_path: str | None = None
    kwargs: dict[str, Any] = {}

    _env = field_validator("env")(_checked_env)

    @field_validator("allowed_hosts")
    @classmethod
    def _hosts_that_there_can_be(cls, entries: list[str]) -> list[str]:
        for entry in entries:
            AllowedHost.parse(entry)
        return entries

    _texts = model_validator(mode="after")(check_texts)

    @model_validator(mode="after")
    def _image_where_one_is_needed(self) -> Self:
        if self.import_path is None and self.backend in {"docker", "apptainer"} and not self.image.strip():
            raise ValueError(f"backend '{self.backend}' needs 'image'")
        return self

    @model_validator(mode="after")
    def _one_word_about_the_network(self) -> Self:
        policy = self.network_policy
        if self.allowed_hosts and policy is not NetworkPolicy.ALLOWLIST:
            raise ValueError("'allowed_hosts' goes with network_policy 'allowlist'")
        if policy is NetworkPolicy.ALLOWLIST and not self.allowed_hosts:
            raise ValueError("network_policy 'allowlist' needs 'allowed_hosts'")
        if policy in {NetworkPolicy.ALLOWLIST, NetworkPolicy.FULL} and not self.allow_internet:
            raise ValueError(f"network_policy '{policy}' and 'allow_internet: false' contradict each other")
        if policy not in {None, NetworkPolicy.FULL} and self.network not in {None, "", "none"}:
            raise ValueError(f"'network' ({self.network}) goes with network_policy 'full'")
        return self

    def policy(self, default: NetworkPolicy) -> NetworkPolicy:
        """The policy that holds, where a topology's default is `default`."""
        if self.network_policy is not None:
            return self.network_policy
        if not self.allow_internet or self.network == "none":
            return NetworkPolicy.NONE
        return NetworkPolicy.FULL if self.network else default


class McpServerSpec(Contract):
    """A Model Context Protocol server that the harness shall use."""

    name: NonBlank
    transport: Literal["stdio", "sse", "streamable-http"] = "stdio"
    command: str | None = None
    args: list[str] = []
    url: str | None = None

    @model_validator(mode="after")
    def _address(self) -> Self:
        if self.transport == "stdio" and not self.command:
            raise ValueError("transport 'stdio' needs 'command'")
        if self.transport != "stdio" and not self.url:
            raise ValueError(f"transport '{self.transport}' needs 'url'")
        return self


class AgentSpec(Contract):
    """The agent program: a preset by name (`harness`) or an import path, and its settings."""

    harness: Name | None = None
    import_path: str | None = None
    model_name: str | None = None
    """What the harness is told its model is called. The proxy serves the node's model whatever this says."""
    settings: dict[str, Any] = {}
    env: Env = {}
    mcp_servers: list[McpServerSpec] = []
    skills_path: str | None = None
    custom_shell: ExecInput | None = None

    _env = field_validator("env")(_checked_env)

    _texts = model_validator(mode="after")(check_texts)

    @model_validator(mode="after")
    def _names_servers_apart(self) -> Self:
        names = [server.name for server in self.mcp_servers]
        if twice := next((name for name in names if names.count(name) > 1), None):
            raise ValueError(f"mcp_servers: two are called '{twice}'")
        return self

    @model_validator(mode="after")
    def _one_harness(self) -> Self:
        if (self.harness is None) == (self.import_path is None):
            raise ValueError("give exactly one of 'harness' and 'import_path'")
        if self.harness == "shell":
            if self.custom_shell is None:
                raise ValueError("harness 'shell' needs 'custom_shell'")
            if self.mcp_servers or self.skills_path:
                raise ValueError("harness 'shell' takes no 'mcp_servers' or 'skills_path'")
        elif self.custom_shell is not None:
            raise ValueError("'custom_shell' goes with harness 'shell' only")
        return self


def _is_number(value: Any, low: float = -math.inf, high: float = math.inf) -> bool:
    """Whether it is a finite number in the range. A boolean is none."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    return (isinstance(value, int) or math.isfinite(value)) and low <= value <= high


def _is_whole(value: Any, low: float = -math.inf) -> bool:
    return isinstance(value, int) and _is_number(value, low)


def _is_list(value: Any, fits: Callable[[Any], bool]) -> bool:
    return isinstance(value, list | tuple) and all(fits(item) for item in value)


def _is_text(value: Any) -> bool:
    return isinstance(value, str)


def _are_tokens(value: Any) -> bool:
    return _is_list(value, lambda item: _is_whole(item, 0))


_PENALTY: tuple[Callable[[Any], bool], str] = (lambda value: _is_number(value, -2, 2), "a number from -2 to 2")
_TOKENS: tuple[Callable[[Any], bool], str] = (_are_tokens, "a list of token ids (whole numbers, 0 or more)")
_SWITCH: tuple[Callable[[Any], bool], str] = (lambda value: isinstance(value, bool), "true or false")
_COUNT: tuple[Callable[[Any], bool], str] = (lambda value: _is_whole(value, 0), "a whole number, 0 or more")

SAMPLING_PARAMETERS: dict[str, tuple[Callable[[Any], bool], str]] = {
    "temperature": (lambda value: _is_number(value, 0), "a finite number, 0 or more"),
    "top_p": (lambda value: _is_number(value, 0, 1) and value > 0, "a number above 0, and 1 at most"),
    "top_k": (lambda value: _is_whole(value, -1), "a whole number, -1 (all) or more"),
    "min_p": (lambda value: _is_number(value, 0, 1), "a number from 0 to 1"),
    "seed": (_is_whole, "a whole number"),
    "stop": (lambda value: _is_text(value) or _is_list(value, _is_text), "a text or a list of texts"),
    "stop_token_ids": _TOKENS,
    "min_tokens": _COUNT,
    "bad_words": (lambda value: _is_list(value, _is_text), "a list of texts"),
    "presence_penalty": _PENALTY,
    "frequency_penalty": _PENALTY,
    "repetition_penalty": (lambda value: _is_number(value, 0) and value > 0, "a finite number above 0"),
    "logit_bias": (
        lambda value: isinstance(value, dict) and all(map(_is_number, value.values())),
        "an object of token ids and finite numbers",
    ),
    "allowed_token_ids": _TOKENS,
    "ignore_eos": _SWITCH,
    "reasoning_effort": (_is_text, "a text"),
    "thinking_token_budget": _COUNT,
    "chat_template_kwargs": (lambda value: isinstance(value, dict), "an object"),
    "skip_special_tokens": _SWITCH,
}
"""What `ModelRules.sampling` may set (what decides about tokens, and nothing of what makes them recordable): whether a
value will do, and what one must be."""


class ModelRules(Contract):
    """What a rollout may ask of the model, and how. None: not limited, or as the harness asks."""

    max_calls: int | None = Field(None, ge=1)
    max_sampled_tokens: int | None = Field(None, ge=1)
    """Tokens sampled over all its calls."""
    max_calls_per_minute: int | None = Field(None, ge=1)
    """Faster calls are held back; nothing is lost."""
    max_tokens: int | None = Field(None, ge=1)
    """Tokens per answer at most, whatever the harness asks."""
    sampling: dict[str, Any] = {}
    """Sampling parameters (chat-completions names) that replace the harness's own; the record says which."""
    stream: bool | None = None
    """Whether the engine is asked to stream when the harness streams; None: as the node's topology says."""

    @field_validator("sampling")
    @classmethod
    def _only_sampling(cls, value: dict[str, Any]) -> dict[str, Any]:
        for name, given in value.items():
            if name not in SAMPLING_PARAMETERS:
                known = ", ".join(sorted(SAMPLING_PARAMETERS))
                raise ValueError(f"'{name}' is no sampling parameter that a task may set (these are: {known})")
            will_do, words = SAMPLING_PARAMETERS[name]
            if not will_do(given):
                raise ValueError(f"'{name}' must be {words}, not {reprlib.repr(given)}")
        return value


class BuilderSpec(Contract):
    """How completions become a trajectory."""

    strategy: Name = "per_request"
    config: JsonObject = {}


class EvaluatorSpec(Contract):
    """How a rollout is scored."""

    strategy: str = Field(min_length=1)
    config: JsonObject = {}
    env: Env = {}
    refresh_runtime: bool = False
    """Grade in a fresh sandbox that saw none of the agent's processes."""

    _env = field_validator("env")(_checked_env)

    _texts = model_validator(mode="after")(check_texts)


class Timeouts(Contract):
    """One budget per stage, in seconds. None: derived from the task's `timeout_seconds`."""

    queue_s: float | None = Field(None, gt=0)
    """From submission to claim. None: waiting in the queue never fails a rollout."""
    prepare_s: float | None = Field(None, gt=0)
    agent_s: float | None = Field(None, gt=0)
    build_s: float | None = Field(None, gt=0)
    evaluate_s: float | None = Field(None, gt=0)
    teardown_s: float | None = Field(None, gt=0)


class Placement(Contract):
    """Which node queue a rollout goes to."""

    policy: Literal["spread", "together", "pinned"] = "spread"
    node_id: Annotated[str, StringConstraints(pattern=ID_PATTERN)] | None = None
    """With `pinned`: the node."""
    labels: dict[str, str] = {}
    """Only nodes that carry all of these labels."""
    model: NonBlank | None = None
    """Only nodes whose engine serves this model; what a harness calls its model (`agent.model_name`) selects none."""

    @model_validator(mode="after")
    def _pinned_to_something(self) -> Self:
        if (self.policy == "pinned") != (self.node_id is not None):
            raise ValueError("'node_id' goes with policy 'pinned', and 'pinned' needs it")
        return self


def finite_positive(value: Any, name: str) -> float:
    """A positive finite number that is not a boolean (Polar's rule for `metadata.agent_timeout`)."""
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value) or value <= 0:
        raise ValueError(f"'{name}' must be a positive finite number of seconds")
    return float(value)
