"""Harness `mini_swe_agent`: the `mini` program of the package mini-swe-agent, unmodified, over HTTP.

The task text and the settings go into a configuration file (the text as `run.task`), never into an argument list.
"""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import yaml
from pydantic import Field

from polarq.contracts.rollout import HarnessReport, StepReport
from polarq.contracts.specs import Env
from polarq_worker.harnesses.base import HarnessContext
from polarq_worker.harnesses.configs import given
from polarq_worker.harnesses.environment import LITELLM
from polarq_worker.harnesses.preset import Preset, PresetSettings
from polarq_worker.harnesses.programs.program import PythonProgram
from polarq_worker.harnesses.programs.versions import Versions
from polarq_worker.harnesses.verdicts import CallsSeen
from polarq_worker.runtimes.base import Runtime

TRAJECTORY = "mini-swe-agent.traj.json"
MAX_TRAJECTORY_BYTES = 64 * 1024 * 1024
PROVIDERS = {"openai_chat": "openai", "openai_responses": "openai", "anthropic_messages": "anthropic"}
"""By which the program chooses its client."""
LIMITS = {"LimitsExceeded", "TimeExceeded", "RepeatedFormatError"}
"""What it says when it stopped at a limit of calls, cost, time or answers that it could not read. It exits with 0."""
_NOT_PLAIN = re.compile(r"[^\x20-\x7e]")


class MiniSweAgentSettings(PresetSettings):
    """`agent.settings` of harness `mini_swe_agent`. Limits of 0 mean: none."""

    step_limit: int = Field(0, ge=0)
    """Model calls at most."""
    cost_limit: float = Field(0.0, ge=0)
    """Dollars at most, by the program's own price list."""
    wall_time_limit_s: int = Field(0, ge=0)
    max_consecutive_format_errors: int | None = Field(None, ge=0)
    command_timeout_s: int | None = Field(None, gt=0)
    """For each command of the agent; None: the program's own (30 s)."""
    config: list[str] = ["mini.yaml"]
    """What `-c` takes: built-in names, files inside the sandbox, or `key=value`. polarq's own comes last."""
    model_kwargs: dict[str, Any] = {}
    """Sampling parameters, sent with every call."""
    model_class: str | None = None
    model_retry_attempts: int = Field(3, ge=1)
    """Tries of a failing model call; the program waits 4 to 60 s between them."""
    command_env: Env = {}
    """More environment for the agent's commands."""


class MiniSweAgentHarness(Preset):
    """See the module's text."""

    name: ClassVar[str] = "mini_swe_agent"
    title: ClassVar[str] = "mini-swe-agent"
    program: ClassVar[PythonProgram] = PythonProgram(
        "mini-swe-agent", "mini", Versions("2.4.6", "2.4.0", "2.5.0"), python="3.10"
    )
    dialects: ClassVar[tuple[str, ...]] = ("openai_chat", "anthropic_messages", "openai_responses")
    settings_class: ClassVar[type[PresetSettings]] = MiniSweAgentSettings
    turn_limit: ClassVar[str] = "step_limit"
    settings: MiniSweAgentSettings

    @property
    def dialect(self) -> str:
        named = "anthropic_messages" if (self.spec.model_name or "").startswith("anthropic/") else None
        return self.settings.dialect or named or self.dialects[0]

    @property
    def model(self) -> str:
        """With its provider in front."""
        name = super().model
        return name if name.startswith(("openai/", "anthropic/")) else f"{PROVIDERS[self.dialect]}/{name}"

    def command(self, context: HarnessContext) -> Sequence[str]:
        return [
            f"--model={self.model}",
            "--yolo",
            "--exit-immediately",
            *(f"--config={config}" for config in [*self.settings.config, self._config_path(context)]),
            f"--output={self._trajectory_path(context)}",
        ]

    def files(self, context: HarnessContext) -> Mapping[str, bytes]:
        return {self._config_path(context): self.config(context).encode()}

    async def results(self, runtime: Runtime, context: HarnessContext, steps: list[StepReport]) -> Mapping[str, Any]:
        """The program's own verdict: exit status, model calls, cost. Its whole trajectory is kept with the logs."""
        kept = runtime.host_log_dir / "agent" / TRAJECTORY
        kept.parent.mkdir(parents=True, exist_ok=True)
        await runtime.get_file(self._trajectory_path(context), kept, MAX_TRAJECTORY_BYTES)
        return await asyncio.to_thread(_verdict, kept)

    def at_limit(self, report: HarnessReport, seen: CallsSeen) -> str:
        status = str(report.metadata.get("exit_status"))
        return status if status in LIMITS else ""

    def config(self, context: HarnessContext) -> str:
        """The last configuration file: the task and the settings, as YAML."""
        wanted = self.settings
        agent = {
            "step_limit": wanted.step_limit,
            "cost_limit": wanted.cost_limit,
            "wall_time_limit_seconds": wanted.wall_time_limit_s,
            "max_consecutive_format_errors": wanted.max_consecutive_format_errors,
        }
        environment = {"timeout": wanted.command_timeout_s, "env": context.way_out.stripped(wanted.command_env) or None}
        responses = "litellm_response" if self.dialect == "openai_responses" else None
        model = {"model_kwargs": wanted.model_kwargs or None, "model_class": wanted.model_class or responses}
        sections = {"agent": given(agent), "environment": given(environment), "model": given(model)}
        head = yaml.safe_dump({key: section for key, section in sections.items() if section}, allow_unicode=False)
        return f"{head}run:\n  task: {yaml_string(context.task.instruction)}\n"

    def environment(self, context: HarnessContext) -> Mapping[str, str]:
        return {
            "MSWEA_CONFIGURED": "true",
            "MSWEA_SILENT_STARTUP": "1",
            "MSWEA_COST_TRACKING": "ignore_errors",
            "MSWEA_GLOBAL_CONFIG_DIR": self.folder(context.layout),
            "MSWEA_MODEL_RETRY_STOP_AFTER_ATTEMPT": str(self.settings.model_retry_attempts),
            # A plain traceback ends with the error in one line, and takes milliseconds where a framed one takes longer.
            "TYPER_STANDARD_TRACEBACK": "1",
            **LITELLM,
        }

    def _config_path(self, context: HarnessContext) -> str:
        return f"{self.folder(context.layout)}/polarq.yaml"

    def _trajectory_path(self, context: HarnessContext) -> str:
        return f"{context.layout.agent_log_dir}/{TRAJECTORY}"


def _verdict(trajectory: Path) -> dict[str, Any]:
    info = json.loads(trajectory.read_bytes())["info"]
    stats = info.get("model_stats", {})
    return {
        "exit_status": info.get("exit_status"),
        "model_calls": stats.get("api_calls"),
        "cost": stats.get("instance_cost"),
        "mini_version": info.get("mini_version"),
        "trajectory": f"agent/{TRAJECTORY}",
    }


def yaml_string(text: str) -> str:
    """A double-quoted YAML scalar of printable ASCII.

    JSON's escapes are YAML's too; of the rest of Unicode, YAML folds or refuses some characters.
    """
    return _NOT_PLAIN.sub(_escaped, json.dumps(text, ensure_ascii=False))


def _escaped(match: re.Match[str]) -> str:
    number = ord(match.group())
    return f"\\x{number:02x}" if number < 0x100 else f"\\u{number:04x}" if number < 0x10000 else f"\\U{number:08x}"
