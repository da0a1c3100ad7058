"""The checks of the conformance suite. Each is a rollout, or a look at one, and what must be true of it.

| check | the model | must be true |
| --- | --- | --- |
| works, unstreamed | answers; the engine streams, or not | completed, reward 1, two steps |
| continues | (the same rollout) | the second prompt begins with the first and what was sampled for it |
| side | (the same rollout) | what is no step of the task is labelled, with its kind |
| quiet | (the same rollout) | the program asked for no host beside the model |
| model_error | fails at every call | the model's fault, no reward, nothing recorded |
| overflow | refuses the second call: too long | said so, whatever the exit code; the work tree is scored |
| busy | answers the second call with 429, once | completed after a retry |
| cut | breaks off at the second answer, once | completed after a retry; what was cut is marked |
| cancelled | falls silent at the second call | cancelled, with what was sampled |
| timed_out | falls silent at the second call | timed out, scored, with the program's own files |
| mcp, mcp_http | calls a tool of the task's MCP server | it was offered; its result is in the next request |
| skills | reads the task's skill | its description was in the first request; then its text is in the next |
| limits | never ends | over after two calls, as the program is told; else as `model.max_calls` says |
| sampling | answers | the task's sampling reached the engine, and so did the program's own; the model's name too |

In all of them: what was recorded is what was sampled; and but for the first rollout, nothing is installed any more.
What a program does not support has to be refused when the task is submitted, in one line that says so: that is what the
check then finds.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from fnmatch import fnmatchcase
from typing import Any, get_args

from polarq.contracts.rollout import Boundary, RolloutState
from polarq.testing.conformance.asked import Asked
from polarq.testing.conformance.bench import Bench, Ran
from polarq.testing.conformance.found import (
    Broken,
    Finding,
    NeverRan,
    done,
    ended,
    recorded_what_was_sampled,
    solved,
    started,
    steps,
)
from polarq.testing.conformance.scenario import CheckName, Expected

CHECKS: tuple[CheckName, ...] = get_args(CheckName)

OF_POLARQ = ("logs/agent/step.", "logs/eval/", "logs/setup.", "logs/prepare.")
"""Files that are there whatever the program does."""

PATIENCE_S = 10.0
"""Beside three times what the plain task took here: the budget in which the first turn must be over."""


class Suite:
    """All checks of one bench, which has been started."""

    def __init__(self, bench: Bench) -> None:
        self._bench = bench
        self._plain: Ran | None = None
        self.version = ""
        """Of the program that was run, once it was."""
        self.runs = True
        """False: it could not be installed or started."""
        asked = Asked(bench, self._run)
        self._looks: Mapping[CheckName, Callable[[Expected], str | None]] = {
            "works": self._works,
            "unstreamed": self._unstreamed,
            "continues": self._continues,
            "side": self._side,
            "quiet": self._quiet,
            "model_error": self._model_error,
            "overflow": self._overflow,
            "busy": self._busy,
            "cut": self._cut,
            "cancelled": self._cancelled,
            "timed_out": self._timed_out,
            "mcp": asked.mcp,
            "mcp_http": asked.mcp_http,
            "skills": asked.skills,
            "limits": asked.limits,
            "sampling": asked.sampling,
        }

    def run(self, wanted: Collection[CheckName] = CHECKS) -> Iterator[Finding]:
        """Up to one in which the program did not run at all."""
        for check in CHECKS:
            if check in wanted and self.runs:
                yield self.one(check)

    def one(self, check: CheckName) -> Finding:
        expected = self._bench.scenario.expected(check)
        if expected.skip:
            return Finding(check, True, f"nothing of the kind: {expected.why}", self.version)
        try:
            refused = self._looks[check](expected)
        except Broken as exc:
            self.runs = not isinstance(exc, NeverRan)
            return Finding(check, False, str(exc), self.version)
        if refused:
            return Finding(check, True, refused, self.version, refused=True)
        return Finding(check, True, expected.why, self.version)

    def _run(self, name: str, script: str, agent_s: float | None = None, **more: Any) -> Ran:
        self._bench.submit(self._bench.task(name, script, agent_s, **more))
        return self._ended(name)

    def _ended(self, name: str) -> Ran:
        ran = self._bench.ended(name)
        started(ran)
        report, sandbox = ran.result.harness, ran.result.sandbox
        if report is not None and (program := report.metadata.get("program")):
            if self.version and sandbox is not None and sandbox.origin == "cold":
                raise Broken("the program was installed again, where an earlier rollout had left it")
            self.version = program["version"]
        return ran

    # --- the plain task

    @property
    def plain(self) -> Ran:
        if self._plain is None:
            self._plain = self._run("works", "works")
        return self._plain

    @property
    def walked(self) -> Ran:
        """The plain task, of which there is something to look at."""
        if not self.plain.whole:
            raise Broken("no step of the task is recorded: nothing can be said of it")
        return self.plain

    def _works(self, expected: Expected) -> None:
        done(self.plain, self._bench.scenario.turns, expected)

    def _unstreamed(self, expected: Expected) -> None:
        ran = self._run("unstreamed", "works", model={"stream": False})
        done(ran, self._bench.scenario.turns, expected)

    def _continues(self, expected: Expected) -> None:
        if len(self.plain.whole) < 2:
            raise Broken(f"there are {len(self.plain.whole)} steps of the task, not two")
        first, second = self.plain.whole[:2]
        known = [*first.prompt_ids, *first.sampled_ids]
        if second.parent != first.seq or second.prompt_ids[: len(known)] != known:
            at = next((n for n, (a, b) in enumerate(zip(known, second.prompt_ids, strict=False)) if a != b), len(known))
            raise Broken(
                f"the second prompt is no continuation: parent {second.parent}, other from token {at} of {len(known)}"
                f" on ({second.exact_missed or 'no reason given'})"
            )

    def _side(self, expected: Expected) -> None:
        found = sorted(call.side_kind or "" for call in self.walked.side)
        if found != sorted(map(str, self._bench.scenario.side)):
            raise Broken(f"side traffic: {', '.join(found) or 'none'}")

    def _quiet(self, expected: Expected) -> None:
        sandbox = self.walked.result.sandbox
        asked = {one.target for one in (sandbox.denied if sandbox is not None else [])}
        known = self._bench.scenario.denied
        if more := sorted(target for target in asked if not any(fnmatchcase(target, one) for one in known)):
            raise Broken(f"it asked for {', '.join(more)}")

    # --- trouble

    def _model_error(self, expected: Expected) -> None:
        ran = self._run("model_error", "model_error")
        ended(ran, RolloutState.FAILED, Boundary.MODEL, expected.reason or "model_failed")
        if ran.result.reward is not None:
            raise Broken(f"a model that fails was rewarded: {ran.result.reward.outcome}")
        if ran.recorded:
            raise Broken(f"{len(ran.recorded)} calls were recorded, and none was sampled")

    def _overflow(self, expected: Expected) -> None:
        ran = self._run("overflow", "overflow")
        if expected.reason == "ok":
            ended(ran, RolloutState.COMPLETED, Boundary.NONE, "ok")
        else:
            ended(ran, RolloutState.FAILED, Boundary.HARNESS, expected.reason or "context_overflow")
        solved(ran)
        steps(ran, self._bench.scenario.turns[:-1], expected)
        recorded_what_was_sampled(ran)

    def _busy(self, expected: Expected) -> None:
        self._recovered(self._run("busy", "busy"), expected)

    def _cut(self, expected: Expected) -> None:
        self._recovered(self._run("cut", "cut"), expected)

    def _recovered(self, ran: Ran, expected: Expected) -> None:
        """After a retry; or, where the program gives up at once, it is the model's fault."""
        if expected.reason in {None, "ok"}:
            done(ran, self._bench.scenario.turns, expected)
            return
        ended(ran, RolloutState.FAILED, Boundary.MODEL, expected.reason or "")
        if ran.result.reward is not None:
            raise Broken("a model that failed was rewarded")
        steps(ran, self._bench.scenario.turns[:-1], expected)
        recorded_what_was_sampled(ran)

    def _cancelled(self, expected: Expected) -> None:
        self._bench.submit(self._bench.task("cancelled", "hang"))
        self._bench.cancel_at("cancelled", tokens=1)
        ran = self._ended("cancelled")
        ended(ran, RolloutState.CANCELLED, Boundary.CONTROL, expected.reason or "cancelled")
        steps(ran, self._bench.scenario.turns[:-1], expected)
        recorded_what_was_sampled(ran)

    def _timed_out(self, expected: Expected) -> None:
        ran = self._run("timed_out", "hang", PATIENCE_S + 3 * (self.plain.result.timing.agent_s or 0.0))
        ended(ran, RolloutState.TIMED_OUT, Boundary.HARNESS, expected.reason or "agent_timeout")
        solved(ran)
        steps(ran, self._bench.scenario.turns[:-1], expected)
        recorded_what_was_sampled(ran)
        files = [one.name for one in ran.result.artifacts if one.where]
        if not own_files(files):
            raise Broken(f"of the program's own files nothing came back, only {', '.join(files) or 'nothing at all'}")


def own_files(names: Iterable[str]) -> list[str]:
    """Of collected files, those that the program wrote: sessions, its trajectory, its logs."""
    return [name for name in names if not name.startswith(OF_POLARQ)]
