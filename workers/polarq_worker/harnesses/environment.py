"""The environment a harness lives in: Polar's contract, the task's own variables, and exceptions from any proxy."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from urllib.parse import urlsplit

from polarq.contracts.specs import RuntimeSpec
from polarq.contracts.task import Task
from polarq_worker.network.way_out import OPEN, PROXY_VARIABLES, WayOut, excepted, exceptions
from polarq_worker.runtimes.base import SandboxLayout

LOOPBACK = ("127.0.0.1", "::1", "localhost")
LITELLM = {"LITELLM_LOCAL_MODEL_COST_MAP": "True", "LITELLM_MODE": "PRODUCTION"}
"""For what calls models with LiteLLM: else it asks the network for a price list at every start, for up to 15 s where
there is none, and takes variables of a `.env`."""


def model_env(base_url: str, api_key: str) -> dict[str, str]:
    """How each dialect's clients are told where the model is.

    No task can override these: what a harness asks of another address would be neither recorded nor the policy's.
    """
    return {
        "OPENAI_BASE_URL": f"{base_url}/v1",
        "OPENAI_API_BASE": f"{base_url}/v1",
        "OPENAI_API_KEY": api_key,
        "ANTHROPIC_BASE_URL": base_url,
        # LiteLLM's own word, which it takes before the other.
        "ANTHROPIC_API_BASE": base_url,
        "ANTHROPIC_API_KEY": api_key,
        "GOOGLE_API_URL": base_url,
        "GOOGLE_GEMINI_BASE_URL": base_url,
        "GOOGLE_API_KEY": api_key,
        "GEMINI_API_KEY": api_key,
    }


def held(env: Mapping[str, str]) -> dict[str, str]:
    """Of a harness's variables those by which its model calls find their way, empty where it has none: no file of a
    repository may change them."""
    names = (*model_env("", ""), *exceptions(()), *PROXY_VARIABLES)
    return {name: env.get(name, "") for name in names}


def harness_env(
    task: Task,
    *,
    rollout_id: str,
    fencing_token: int,
    base_url: str,
    api_key: str,
    layout: SandboxLayout,
    way_out: WayOut = OPEN,
) -> dict[str, str]:
    """The variables of a harness, lowest first: session's, `runtime.env`, `agent.env`, the model's addresses and keys.

    `fencing_token` grows with each attempt of the rollout: a harness that writes anywhere outside its sandbox can tell
    by FENCING_TOKEN which of two attempts is the later one.

    `base_url` is the rollout's own (`http://host:port/s/<grant>`). NO_PROXY and no_proxy get the literal hosts that a
    model call may name, beside what the task lists itself: patterns such as `127.*` are not understood by most clients.
    """
    runtime_env = task.runtime.env if task.runtime is not None else {}
    session = {**session_env(task, rollout_id=rollout_id, layout=layout), "FENCING_TOKEN": str(fencing_token)}
    env = way_out.applied({**session, **runtime_env, **task.agent.env})
    env.update(model_env(base_url, api_key))
    env.update(_no_proxy([runtime_env, task.agent.env], urlsplit(base_url).hostname))
    return env


def sandbox_env(task: Task, *, rollout_id: str, layout: SandboxLayout, way_out: WayOut = OPEN) -> dict[str, str]:
    """The variables of evaluation: the session's, then `runtime.env`. No model, no secret."""
    runtime_env = task.runtime.env if task.runtime is not None else {}
    env = way_out.applied({**session_env(task, rollout_id=rollout_id, layout=layout), **runtime_env})
    env.update(_no_proxy([runtime_env], None))
    return env


def prepare_env(spec: RuntimeSpec, layout: SandboxLayout) -> dict[str, str]:
    """The variables of prepare actions. They name no rollout: what is prepared serves any of the same recipe."""
    return {**layout_env(layout), **spec.env, **_no_proxy([spec.env], None)}


def step_env(own: Mapping[str, str], harness: Mapping[str, str], way_out: WayOut = OPEN) -> dict[str, str]:
    """What a task may add for one command on top of its harness's variables: not the model's addresses and keys, and no
    proxy that cannot be reached."""
    env = {name: value for name, value in way_out.stripped(own).items() if name not in model_env("", "")}
    if "NO_PROXY" in env or "no_proxy" in env:
        env.update(_no_proxy([env, harness], None))
    return env


def session_env(task: Task, *, rollout_id: str, layout: SandboxLayout) -> dict[str, str]:
    return {
        "SESSION_ID": rollout_id,
        "TASK_ID": task.task_id,
        **layout_env(layout),
    }


def layout_env(layout: SandboxLayout) -> dict[str, str]:
    return {
        "SESSION_DIR": layout.session_dir,
        "ARTIFACTS_DIR": layout.artifacts_dir,
        "LOGS_DIR": layout.logs_dir,
        "AGENT_LOG_DIR": layout.agent_log_dir,
    }


def _no_proxy(envs: Iterable[Mapping[str, str]], host: str | None) -> dict[str, str]:
    return exceptions([*excepted(envs), *LOOPBACK, *([host] if host else [])])
