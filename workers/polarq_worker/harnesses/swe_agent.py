"""Harness `swe_agent`: SWE-agent, over chat completions or Anthropic's messages; never streamed.

No registry ships it (the package of that name is a stub): the image has its source, installed from it (`pip install
-e`), at `settings.home`. Its own place is a container: it writes to /root, to /root/tools and to /root/model.patch.

It works on the runtime's workdir as it stands, which has to be a git repository; nothing is reset or copied. Its edit
tool installs packages at every start, so that it is left out unless `bundles` names it. Built from its documentation
and a recorded run of 1.1.0 (no network, cost limits off, the edit tool left out); not run in this project's own tests.

It exits with 0 where the context overflowed or the model failed: it hands in what there is (`exit_status` says so).
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Literal

from pydantic import Field

from polarq.contracts.rollout import HarnessReport, StepReport
from polarq.contracts.sandbox import ExecCategory
from polarq.errors import HarnessFault
from polarq_worker.harnesses.base import HarnessContext, HarnessStep
from polarq_worker.harnesses.configs import as_yaml, given
from polarq_worker.harnesses.environment import LITELLM
from polarq_worker.harnesses.preset import Preset, PresetSettings
from polarq_worker.harnesses.programs.program import PythonSource
from polarq_worker.harnesses.programs.versions import Versions
from polarq_worker.harnesses.results import fetched_json
from polarq_worker.harnesses.verdicts import CallsSeen
from polarq_worker.runtimes.base import Runtime

PROBLEM = "rollout"
"""Its id of the one problem; it names files by it."""
MAX_TRAJECTORY_BYTES = 64 * 1024 * 1024
LIMITS = {"exit_cost", "exit_total_execution_time"}
"""What it says when it stopped at a limit of calls or cost, or of time for all commands."""
_LOOK_S = 60.0
_EDIT_TOOL = "tools/edit_anthropic"


class SweAgentSettings(PresetSettings):
    """`agent.settings` of harness `swe_agent`. Limits of 0 mean: none."""

    home: str = "/opt/SWE-agent"
    """Where its source is in the sandbox: the folder that has `config` and `tools`."""
    config: list[str] = ["config/default.yaml"]
    """Its configuration files, below `home` or absolute; polarq's own comes last."""
    bundles: list[str] = ["tools/registry", "tools/review_on_submit_m"]
    """Its tools beside bash: folders below `home`, or absolute."""
    parse_function: Literal["function_calling", "thought_action", "xml_thought_action", "json"] = "function_calling"
    call_limit: int = Field(0, ge=0)
    """Model calls at most."""
    cost_limit: float = Field(0.0, ge=0)
    """Dollars at most, by the program's own price list."""
    context_window: int = Field(0, ge=0)
    """Tokens of a prompt at most; 0: it does not look."""
    max_requeries: int | None = Field(None, ge=0)
    """Times that it asks again after an answer it cannot use; None: the program's own (3)."""
    command_timeout_s: int | None = Field(None, gt=0)
    """For each command of the agent; None: the program's own (30 s)."""
    total_command_timeout_s: int | None = Field(None, gt=0)
    """For all of them; None: the program's own (1800 s)."""
    retries: int = Field(5, ge=1)
    """Tries of a failing model call."""
    retry_min_wait_s: float = Field(4.0, ge=0)
    retry_max_wait_s: float = Field(30.0, ge=0)


class SweAgentHarness(Preset):
    """See the module's text."""

    name: ClassVar[str] = "swe_agent"
    title: ClassVar[str] = "SWE-agent"
    program: ClassVar[PythonSource] = PythonSource("sweagent", "sweagent", Versions("1.1.0", "1.1.0", "1.2.0"))
    dialects: ClassVar[tuple[str, ...]] = ("openai_chat", "anthropic_messages")
    settings_class: ClassVar[type[PresetSettings]] = SweAgentSettings
    turn_limit: ClassVar[str] = "call_limit"
    kept: ClassVar[tuple[str, ...]] = ("output",)
    settings: SweAgentSettings
    _repository: str = ""
    """Where it works, known once it is set up."""

    async def setup(self, runtime: Runtime, context: HarnessContext) -> None:
        looking = ["git", "rev-parse", "--show-toplevel"]
        found = await runtime.exec(
            looking, cwd=self.settings.workdir, env=context.env, timeout_s=_LOOK_S, category=ExecCategory.SETUP
        )
        if not found.ok:
            raise HarnessFault(f"SWE-agent works on a git repository, and runtime.workdir is in none ({found.why})")
        self._repository = found.stdout_text.rstrip("\n")
        await super().setup(runtime, context)

    def steps(self, context: HarnessContext) -> list[HarnessStep]:
        # A `.env` of the folder it is started in would be read.
        cwd = self.folder(context.layout)
        command = shlex.join([self.run(context), *self.command(context)])
        return [HarnessStep(command, cwd=cwd, env=self.environment(context))]

    def command(self, context: HarnessContext) -> Sequence[str]:
        files = [*(self._absolute(name) for name in self.settings.config), self._path(context, "polarq.yaml")]
        return ["run", *(f"--config={file}" for file in files)]

    def environment(self, context: HarnessContext) -> Mapping[str, str]:
        return {
            "SWE_AGENT_CONFIG_ROOT": self.settings.home,
            **LITELLM,
        }

    def files(self, context: HarnessContext) -> Mapping[str, bytes]:
        return {self._path(context, "polarq.yaml"): as_yaml(self.config(context))}

    def config(self, context: HarnessContext) -> dict[str, Any]:
        """The last configuration file."""
        wanted = self.settings
        # Without its edit tool nothing tells the prompt where the repository is.
        told = {} if _EDIT_TOOL in wanted.bundles else {"working_dir": self._repository}
        tools = {
            "bundles": [{"path": self._absolute(name)} for name in wanted.bundles],
            "parse_function": {"type": wanted.parse_function},
            "execution_timeout": wanted.command_timeout_s,
            "total_execution_timeout": wanted.total_command_timeout_s,
        }
        agent = {"model": self._model(context), "tools": given(tools), "max_requeries": wanted.max_requeries}
        return {
            "output_dir": self._path(context, "output"),
            "problem_statement": {
                "type": "text_file",
                "path": context.instruction_path,
                "id": PROBLEM,
                "extra_fields": told,
            },
            "env": {
                "deployment": {"type": "local"},
                "repo": {"type": "preexisting", "repo_name": self._repository.lstrip("/"), "reset": False},
            },
            "agent": given(agent),
        }

    async def results(self, runtime: Runtime, context: HarnessContext, steps: list[StepReport]) -> Mapping[str, Any]:
        """The program's own verdict: `exit_status` (`submitted`, or why not), model calls, cost."""
        source = self._path(context, f"output/{PROBLEM}/{PROBLEM}.traj")
        trajectory = await fetched_json(runtime, source, "swe_agent.traj.json", MAX_TRAJECTORY_BYTES)
        info = trajectory["info"]
        stats = info.get("model_stats", {})
        return {
            "exit_status": info.get("exit_status"),
            "model_calls": stats.get("api_calls"),
            "cost": stats.get("instance_cost"),
            "trajectory": "agent/swe_agent.traj.json",
        }

    def at_limit(self, report: HarnessReport, seen: CallsSeen) -> str:
        # What it hands in at a limit of its own: "submitted (exit_cost)".
        status = str(report.metadata.get("exit_status")).removeprefix("submitted (").removesuffix(")")
        return status if status in LIMITS else ""

    def _model(self, context: HarnessContext) -> dict[str, Any]:
        anthropic, wanted = self.dialect == "anthropic_messages", self.settings
        return {
            "name": f"{'anthropic' if anthropic else 'openai'}/{self.model}",
            "api_base": context.base_url if anthropic else f"{context.base_url}/v1",
            "api_key": context.api_key,
            "per_instance_call_limit": wanted.call_limit,
            "per_instance_cost_limit": wanted.cost_limit,
            "total_cost_limit": 0,
            "max_input_tokens": wanted.context_window,
            "retry": {
                "retries": wanted.retries,
                "min_wait": wanted.retry_min_wait_s,
                "max_wait": wanted.retry_max_wait_s,
            },
        }

    def _absolute(self, name: str) -> str:
        return name if name.startswith("/") else f"{self.settings.home}/{name}"

    def _path(self, context: HarnessContext, name: str) -> str:
        return f"{self.folder(context.layout)}/{name}"
