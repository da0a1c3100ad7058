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

In all of them: what was recorded is what was sampled; and but for the first rollout, nothing is installed any more.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any, get_args

from polarq.contracts.rollout import Boundary, RolloutState
from polarq.errors import PolarqError
from polarq.testing.conformance.bench import Bench, Ran
from polarq.testing.conformance.scenario import CheckName, Expected

CHECKS: tuple[CheckName, ...] = get_args(CheckName)

OF_POLARQ = ("logs/agent/step.", "logs/eval/", "logs/setup.", "logs/prepare.")
"""Files that are there whatever the program does."""

PATIENCE_S = 10.0
"""Beside three times what the plain task took here: the budget in which the first turn must be over."""


class Broken(PolarqError):
    """A check does not hold; the message says what was found."""


@dataclass(frozen=True)
class Finding:
    """How one check came out."""

    check: CheckName
    ok: bool
    detail: str = ""
    """What broke, or how it differs from most programs; blank: nothing to say."""
    version: str = ""


class Suite:
    """All checks of one bench, which has been started."""

    def __init__(self, bench: Bench) -> None:
        self._bench = bench
        self._plain: Ran | None = None
        self.version = ""
        """Of the program that was run, once it was."""
        self._looks: Mapping[CheckName, Callable[[Expected], None]] = {
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
        }

    def run(self, wanted: Collection[CheckName] = CHECKS) -> Iterator[Finding]:
        for check in CHECKS:
            if check in wanted:
                yield self.one(check)

    def one(self, check: CheckName) -> Finding:
        expected = self._bench.scenario.expected(check)
        if expected.skip:
            return Finding(check, True, f"nothing of the kind: {expected.why}", self.version)
        try:
            self._looks[check](expected)
        except Broken as exc:
            return Finding(check, False, str(exc), self.version)
        return Finding(check, True, expected.why, self.version)

    def _run(self, name: str, script: str, agent_s: float | None = None, **more: Any) -> Ran:
        self._bench.submit(self._bench.task(name, script, agent_s, **more))
        return self._ended(name)

    def _ended(self, name: str) -> Ran:
        ran = self._bench.ended(name)
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
        self._done(self.plain, expected)

    def _unstreamed(self, expected: Expected) -> None:
        self._done(self._run("unstreamed", "works", model={"stream": False}), expected)

    def _done(self, ran: Ran, expected: Expected) -> None:
        _ended(ran, RolloutState.COMPLETED, Boundary.NONE, expected.reason or "ok")
        _solved(ran)
        _steps(ran, self._bench.scenario.turns, expected)
        _recorded_what_was_sampled(ran)
        if not ran.result.outcome.trainable:
            raise Broken("the rollout is not trainable")

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
        _ended(ran, RolloutState.FAILED, Boundary.MODEL, expected.reason or "model_failed")
        if ran.result.reward is not None:
            raise Broken(f"a model that fails was rewarded: {ran.result.reward.outcome}")
        if ran.recorded:
            raise Broken(f"{len(ran.recorded)} calls were recorded, and none was sampled")

    def _overflow(self, expected: Expected) -> None:
        ran = self._run("overflow", "overflow")
        if expected.reason == "ok":
            _ended(ran, RolloutState.COMPLETED, Boundary.NONE, "ok")
        else:
            _ended(ran, RolloutState.FAILED, Boundary.HARNESS, expected.reason or "context_overflow")
        _solved(ran)
        _steps(ran, self._bench.scenario.turns[:-1], expected)
        _recorded_what_was_sampled(ran)

    def _busy(self, expected: Expected) -> None:
        self._recovered(self._run("busy", "busy"), expected)

    def _cut(self, expected: Expected) -> None:
        self._recovered(self._run("cut", "cut"), expected)

    def _recovered(self, ran: Ran, expected: Expected) -> None:
        """After a retry; or, where the program gives up at once, it is the model's fault."""
        if expected.reason in {None, "ok"}:
            self._done(ran, expected)
            return
        _ended(ran, RolloutState.FAILED, Boundary.MODEL, expected.reason or "")
        if ran.result.reward is not None:
            raise Broken("a model that failed was rewarded")
        _steps(ran, self._bench.scenario.turns[:-1], expected)
        _recorded_what_was_sampled(ran)

    def _cancelled(self, expected: Expected) -> None:
        self._bench.submit(self._bench.task("cancelled", "hang"))
        self._bench.cancel_at("cancelled", tokens=1)
        ran = self._ended("cancelled")
        _ended(ran, RolloutState.CANCELLED, Boundary.CONTROL, expected.reason or "cancelled")
        _steps(ran, self._bench.scenario.turns[:-1], expected)
        _recorded_what_was_sampled(ran)

    def _timed_out(self, expected: Expected) -> None:
        ran = self._run("timed_out", "hang", PATIENCE_S + 3 * (self.plain.result.timing.agent_s or 0.0))
        _ended(ran, RolloutState.TIMED_OUT, Boundary.HARNESS, expected.reason or "agent_timeout")
        _solved(ran)
        _steps(ran, self._bench.scenario.turns[:-1], expected)
        _recorded_what_was_sampled(ran)
        files = [one.name for one in ran.result.artifacts if one.where]
        if all(name.startswith(OF_POLARQ) for name in files):
            raise Broken(f"of the program's own files nothing came back, only {', '.join(files) or 'nothing at all'}")


def _ended(ran: Ran, state: RolloutState, boundary: Boundary, reason: str) -> None:
    outcome = ran.result.outcome
    if (outcome.state, outcome.boundary, outcome.reason) != (state, boundary, reason):
        raise Broken(
            f"it ended as {outcome.state}/{outcome.boundary}/{outcome.reason}, not {state}/{boundary}/{reason}:"
            f" {outcome.message}"
        )


def _solved(ran: Ran) -> None:
    reward = ran.result.reward
    if reward is None or reward.outcome != 1.0:
        raise Broken(f"the work tree is not solved: {'no reward' if reward is None else reward.outcome}")


def _steps(ran: Ran, turns: Collection[object], expected: Expected) -> None:
    want = len(turns) if expected.calls is None else expected.calls
    if len(ran.whole) != want:
        raise Broken(f"{len(ran.whole)} whole steps of the task are recorded, not {want}")


def _recorded_what_was_sampled(ran: Ran) -> None:
    """Each sampled answer that reached the proxy is recorded once, with its ids; of a broken one, as far as it came."""
    by_id = {call["request_id"].rpartition("-")[2]: call for call in ran.sampled if call["sampled_ids"]}
    for call in ran.recorded:
        if not call.sampled_ids:
            continue
        truth = by_id.pop(call.completion_id, None)
        if truth is None:
            raise Broken(f"call {call.seq} is recorded, and was not sampled")
        ids = truth["sampled_ids"]
        if call.sampled_ids != (ids[: len(call.sampled_ids)] if call.incomplete else ids):
            raise Broken(f"call {call.seq} is recorded with other ids than were sampled")
    if lost := [call for call in by_id.values() if call["delivered"]]:
        raise Broken(f"{len(lost)} answers were sampled and delivered, and are not recorded")
