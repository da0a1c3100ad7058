"""What presets of agent programs share: a program in a version, files, one command, what is kept, a verdict.

To add one:

1. a file `harnesses/<name>.py` with a class below `Preset`: its class variables say what the program is and takes, and
   `command` how it is started. `codex.py` is an example that uses all of it;
2. an entry point in the group `polarq.harnesses`: `<name> = "module:Class"`, in any package;
3. a scenario file `polarq/testing/conformance/<name>.yaml` (or, outside of polarq, the file that the class variable
   `conformance` names): the tool call that the scripted model makes in it, and what it is known to do on trouble.
   `polarq harness check <name>` then runs the program through the conformance suite.

What a program cannot be told is refused: a setting, a kind of MCP server or skills that a task asks for in vain would
be worse than an error. Sampling is set for any program by the task's `model.sampling`, at the proxy.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, ClassVar

from pydantic import ConfigDict

from polarq.contracts.artifacts import ArtifactSpec
from polarq.contracts.base import Contract
from polarq.contracts.rollout import HarnessReport, StepReport
from polarq.contracts.sandbox import ExecCategory
from polarq.contracts.specs import SAMPLING_PARAMETERS, AgentSpec, McpServerSpec, PrepareAction
from polarq.errors import HarnessFault, InvalidTask, UnknownPlugin
from polarq_worker.harnesses.base import Harness, HarnessContext, HarnessStep
from polarq_worker.harnesses.mcp import literal, misnamed
from polarq_worker.harnesses.programs.program import Installed, Program, home_of, installed
from polarq_worker.harnesses.verdicts import CallsSeen, Verdict, exit_code, verdict_of
from polarq_worker.runtimes.base import SCRATCH_DIR, Runtime, SandboxLayout

MODEL = "polarq"
"""What a program is told its model is called, where the task does not say."""
LIMITS = frozenset({"call_limit", "max_iterations", "max_session_turns", "max_steps", "max_turns", "step_limit"})
"""Words of one program or another for its `turn_limit`."""
SERVERS_S = 120.0
"""How long a program waits for the task's MCP servers before its first call, at most: on a busy node one starts slowly.
Tools that are late would join the others in the middle of the history, or never."""
_COPY_S = 120.0
_NO_SKILL = 3
# With what links lead to: where the copy lies, a link out of the folder would lead nowhere, and the skill be missing.
_COPY = f"""\
test -d "$1" && mkdir -p "$2" && cp -RL "$1/." "$2/" || exit 1
[ -n "$(find "$2" -mindepth 2 -name SKILL.md)" ] || exit {_NO_SKILL}
"""


class PresetSettings(Contract):
    """`agent.settings` that every preset has. A program's own class adds what that program can be told."""

    model_config = ConfigDict(use_attribute_docstrings=True)

    version: str | None = None
    """Release to run; None: one in the supported range that the image has, else the preset's default."""
    untested_version: bool = False
    """Lets `version` be outside of the supported range."""
    dialect: str | None = None
    """Which API the program speaks, where it speaks several; None: its first one."""
    workdir: str | None = None
    """Where the agent works; None: the runtime's workdir."""


class Preset(Harness):
    """See the module."""

    title: ClassVar[str]
    """The program's own name."""
    program: ClassVar[Program]
    dialects: ClassVar[tuple[str, ...]]
    """Names of the proxy's dialects that it speaks, the default first."""
    settings_class: ClassVar[type[PresetSettings]] = PresetSettings
    mcp_transports: ClassVar[frozenset[str]] = frozenset()
    """Kinds of MCP servers that it can be told of."""
    mcp_names: ClassVar[str] = ".+"
    """The pattern of what it lets one be called."""
    commands: ClassVar[str] = ""
    """What a command of its own begins with, where it looks for one in the instruction: one character or another."""
    takes_skills: ClassVar[bool] = False
    """Whether `agent.skills_path` (a folder in the sandbox, with a folder per skill) can be given to it."""
    turn_limit: ClassVar[str] = ""
    """Its setting for the most turns, or model calls, of the agent; empty: it has no such limit."""
    kept: ClassVar[tuple[str, ...]] = ()
    """What is collected of its own files: paths or patterns below its folder."""
    conformance: ClassVar[Path | None] = None
    """Its scenario file, where that does not ship with polarq."""

    settings: PresetSettings

    def __init__(self, spec: AgentSpec) -> None:
        super().__init__(spec)
        if unsaid := self.unsaid():
            raise UnknownPlugin(f"harness class {type(self).__name__} does not say {', '.join(unsaid)}")
        self.settings = self._settings(spec)
        self.version = self.program.versions.chosen(
            self.settings.version, untested=self.settings.untested_version, what=self.title
        )
        self.installed: Installed | None = None
        """Known once it is set up."""
        self._check()

    # --- what a preset says of its program

    @classmethod
    def unsaid(cls) -> list[str]:
        """What the class lacks that each has to say."""
        return [name for name in ("name", "title", "program", "dialects") if not hasattr(cls, name)]

    def command(self, context: HarnessContext) -> Sequence[str]:
        """Its arguments, without itself. What may be long (the instruction) comes by `stdin` or a file."""
        raise NotImplementedError

    def environment(self, context: HarnessContext) -> Mapping[str, str]:
        """Beside `context.env`."""
        return {}

    def stdin(self, context: HarnessContext) -> bytes | None:
        """None: it reads end-of-file at once."""
        return None

    def files(self, context: HarnessContext) -> Mapping[str, bytes]:
        """Its configuration: content by path in the sandbox (see `folder` and `polarq_worker.harnesses.configs`)."""
        return {}

    def skills_target(self, context: HarnessContext) -> str:
        """Where it looks for skills, with `takes_skills`."""
        return f"{self.folder(context.layout)}/skills"

    def literal(self, text: str) -> str:
        """A text as its configuration has to have it: some programs put variables in for `$NAME` there."""
        return text

    async def results(self, runtime: Runtime, context: HarnessContext, steps: list[StepReport]) -> Mapping[str, Any]:
        """What it says of itself, for the report's metadata: small JSON. Runs however the steps ended."""
        return {}

    def at_limit(self, report: HarnessReport, seen: CallsSeen) -> str:
        """Which limit of its own (turns, calls, cost, time) it says that it stopped at; empty: none. `report.metadata`
        has what `results` found. Some programs say it by their exit code, and by nothing else."""
        limit = getattr(self.settings, self.turn_limit) if self.turn_limit else None
        if not limit or seen.sampled < limit or exit_code(report) in {None, 0}:
            return ""
        return f"{self.turn_limit}: {limit}"

    # --- what they all have

    @property
    def dialect(self) -> str:
        return self.settings.dialect or self.dialects[0]

    @property
    def model(self) -> str:
        return self.spec.model_name or MODEL

    @property
    def servers(self) -> dict[str, McpServerSpec]:
        """The task's MCP servers by name, for its configuration."""
        return {server.name: literal(server, self.literal) for server in self.spec.mcp_servers}

    def instruction(self, context: HarnessContext) -> str:
        """The task's, behind a line break where the program would take it for a command of its own."""
        text = context.task.instruction
        return f"\n{text}" if text[0] in self.commands else text

    def folder(self, layout: SandboxLayout) -> str:
        """Its own in the sandbox: configuration, sessions. No evaluator takes it for the agent's work."""
        return f"{layout.session_dir}/{SCRATCH_DIR}/{self.name}"

    def run(self, context: HarnessContext) -> str:
        """The program's path."""
        return f"{home_of(self.name, context.layout)}/bin/{self.program.bin}"

    def recipe(self) -> Sequence[PrepareAction]:
        return (self.program.install(self.name, self.version, exact=self.settings.version is not None),)

    async def setup(self, runtime: Runtime, context: HarnessContext) -> None:
        self.installed = await installed(runtime, self.name)
        for path, data in self.files(context).items():
            await runtime.put_bytes(data, path)
        if self.spec.skills_path:
            await _copied(runtime, self.spec.skills_path, self.skills_target(context))

    def steps(self, context: HarnessContext) -> list[HarnessStep]:
        return [
            HarnessStep(
                [self.run(context), *self.command(context)],
                cwd=self.settings.workdir,
                env=self.environment(context),
                stdin=self.stdin(context),
            )
        ]

    def artifacts(self, layout: SandboxLayout) -> Sequence[ArtifactSpec]:
        return [ArtifactSpec(path=f"{self.folder(layout)}/{name}") for name in self.kept]

    async def postprocess(self, runtime: Runtime, context: HarnessContext, steps: list[StepReport]) -> dict[str, Any]:
        program = {"program": None if self.installed is None else asdict(self.installed), "dialect": self.dialect}
        return {**program, **await self.results(runtime, context, steps)}

    def judge(self, report: HarnessReport, seen: CallsSeen) -> Verdict | None:
        return verdict_of(report, seen, self.at_limit(report, seen))

    # --- what a task may ask

    @classmethod
    def _settings(cls, spec: AgentSpec) -> PresetSettings:
        limit = f"its limit is {cls.turn_limit}" if cls.turn_limit else "set the task's model.max_calls"
        instead = {
            **dict.fromkeys(SAMPLING_PARAMETERS, "set it in the task's model.sampling"),
            **dict.fromkeys(LIMITS, limit),
        }
        wanted = sorted(set(spec.settings) & set(instead) - set(cls.settings_class.model_fields))
        if wanted:
            raise InvalidTask(
                "agent.settings", [f"{key}: {cls.title} cannot be told; {instead[key]}" for key in wanted]
            )
        return cls.settings_class.parse(spec.settings, what="agent.settings")

    def _check(self) -> None:
        problems = []
        if self.dialect not in self.dialects:
            known = ", ".join(self.dialects)
            problems.append(f"settings.dialect: {self.title} does not speak '{self.dialect}' (it speaks {known})")
        for server in self.spec.mcp_servers:
            if server.transport not in self.mcp_transports:
                known = ", ".join(sorted(self.mcp_transports)) or "none"
                text = f"mcp_servers: {self.title} takes no server of transport '{server.transport}' ({server.name})"
                problems.append(f"{text}; it takes: {known}")
        problems += misnamed(self.spec.mcp_servers, self.mcp_names, self.title)
        if self.spec.skills_path and not self.takes_skills:
            problems.append(f"skills_path: {self.title} has no skills; leave it out")
        if problems:
            raise InvalidTask("agent", problems)


async def _copied(runtime: Runtime, source: str, target: str) -> None:
    argv = ["sh", "-c", _COPY, "sh", source, target]
    done = await runtime.exec(argv, timeout_s=_COPY_S, category=ExecCategory.SETUP)
    if done.exit_code == _NO_SKILL:
        raise HarnessFault(f"agent.skills_path: there is no skill in '{source}': each is a folder with a SKILL.md")
    if not done.ok:
        raise HarnessFault(f"agent.skills_path: '{source}' is no folder in the sandbox that can be copied ({done.why})")
