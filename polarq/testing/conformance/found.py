"""What a check says, and what most of them look at: how a rollout ended, its reward, its steps, its record."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from polarq.contracts.rollout import Boundary, RolloutState
from polarq.errors import PolarqError
from polarq.testing.conformance.bench import Ran
from polarq.testing.conformance.scenario import CheckName, Expected


class Broken(PolarqError):
    """A check does not hold; the message says what was found."""


class NeverRan(Broken):
    """The program did not come so far as to be started: no other check will tell more."""


@dataclass(frozen=True)
class Finding:
    """How one check came out."""

    check: CheckName
    ok: bool
    detail: str = ""
    """What broke, how it differs from most programs, or why a task is refused; blank: nothing to say."""
    version: str = ""
    refused: bool = False
    """The program does not support it, and a task that asks for it is refused."""


def ended(ran: Ran, state: RolloutState, boundary: Boundary, reason: str) -> None:
    outcome = ran.result.outcome
    if (outcome.state, outcome.boundary, outcome.reason) != (state, boundary, reason):
        raise Broken(
            f"it ended as {outcome.state}/{outcome.boundary}/{outcome.reason}, not {state}/{boundary}/{reason}:"
            f" {outcome.message}"
        )


def started(ran: Ran) -> None:
    """Raises `NeverRan`."""
    outcome = ran.result.outcome
    if ran.result.harness is None and outcome.state is not RolloutState.CANCELLED:
        raise NeverRan(f"it was never started, so the other checks are left out: {outcome.message}")


def solved(ran: Ran) -> None:
    reward = ran.result.reward
    if reward is None or reward.outcome != 1.0:
        raise Broken(f"the work tree is not solved: {'no reward' if reward is None else reward.outcome}")


def steps(ran: Ran, turns: Collection[object], expected: Expected) -> None:
    want = len(turns) if expected.calls is None else expected.calls
    if len(ran.whole) != want:
        raise Broken(f"{len(ran.whole)} whole steps of the task are recorded, not {want}")


def done(ran: Ran, turns: Collection[object], expected: Expected) -> None:
    """The task was done in so many steps, and may be trained on."""
    ended(ran, RolloutState.COMPLETED, Boundary.NONE, expected.reason or "ok")
    solved(ran)
    steps(ran, turns, expected)
    recorded_what_was_sampled(ran)
    if not ran.result.outcome.trainable:
        raise Broken("the rollout is not trainable")


def recorded_what_was_sampled(ran: Ran) -> None:
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
