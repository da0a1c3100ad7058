"""Harness `shell`: any command line (`agent.custom_shell: {command, cwd, env}`), told its task where it wants it.

- `{{INSTRUCTION}}` in the command stands for the whole instruction as one word; see `placeholder`;
- `$POLARQ_INSTRUCTION_FILE` is a file with it;
- `$POLARQ_INSTRUCTION` holds it, up to 64 KiB;
- `settings: {instruction_on_stdin: true}` feeds it to the command's standard input, which otherwise is at its end.

Its exit code is its verdict, unless the last that the proxy saw of it was an overflow, a failed call, or an answer that
was cut or could not be read. It may do its task without the model.
"""

from __future__ import annotations

from typing import ClassVar

from polarq.contracts.base import Contract
from polarq.contracts.rollout import HarnessReport
from polarq.contracts.specs import AgentSpec
from polarq.errors import InvalidTask
from polarq_worker.harnesses.base import Harness, HarnessContext, HarnessStep
from polarq_worker.harnesses.environment import step_env
from polarq_worker.harnesses.placeholder import with_instruction
from polarq_worker.harnesses.verdicts import CallsSeen, Verdict, verdict_of


class ShellSettings(Contract):
    """`agent.settings` of harness `shell`."""

    instruction_on_stdin: bool = False


class ShellHarness(Harness):
    """See the module's text."""

    name: ClassVar[str] = "shell"

    def __init__(self, spec: AgentSpec) -> None:
        super().__init__(spec)
        self._settings = ShellSettings.parse(spec.settings, what="agent.settings")
        if spec.custom_shell is None:
            raise InvalidTask("agent", ["harness 'shell' needs 'custom_shell'"])
        self._shell = spec.custom_shell
        self._script = with_instruction(self._shell.command)

    def steps(self, context: HarnessContext) -> list[HarnessStep]:
        stdin = context.task.instruction.encode() if self._settings.instruction_on_stdin else None
        env = step_env(self._shell.env, context.env, context.way_out)
        return [HarnessStep(self._script, cwd=self._shell.cwd, env=env, stdin=stdin)]

    def judge(self, report: HarnessReport, seen: CallsSeen) -> Verdict | None:
        return verdict_of(report, seen, asks=False)
