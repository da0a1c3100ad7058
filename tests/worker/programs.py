"""A harness for tests of whole workers."""

from __future__ import annotations

from polarq.contracts import HarnessReport
from polarq_worker.harnesses.base import Harness, HarnessContext, HarnessStep
from polarq_worker.harnesses.environment import step_env
from polarq_worker.harnesses.verdicts import CallsSeen, Verdict, verdict_of


class Judged(Harness):
    """`settings.command`; its end is judged as that of an agent program, by its exit code and by what the proxy saw."""

    name = "judged"

    def steps(self, context: HarnessContext) -> list[HarnessStep]:
        return [HarnessStep(self.spec.settings["command"], env=step_env({}, context.env, context.way_out))]

    def judge(self, report: HarnessReport, seen: CallsSeen) -> Verdict | None:
        return verdict_of(report, seen)
