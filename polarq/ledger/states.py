"""The one transition table of a rollout. The Lua scripts carry it, so Redis itself refuses every other step."""

from __future__ import annotations

from collections.abc import Mapping

from polarq.contracts.rollout import TERMINAL, RolloutState

S = RolloutState

ACTIVE = (S.PREPARING, S.READY, S.RUNNING, S.BUILDING, S.EVALUATING)
"""States in which a node holds the rollout under a lease."""

_ENDS = frozenset(TERMINAL)

TRANSITIONS: Mapping[RolloutState, frozenset[RolloutState]] = {
    # A claim starts work; a cancel ends what nobody has started.
    S.QUEUED: frozenset({S.PREPARING, S.CANCELLED}),
    # The stages in order. Each may end the rollout; each may be given back (drain, node loss), which queues it again.
    S.PREPARING: frozenset({S.READY, S.QUEUED}) | _ENDS,
    S.READY: frozenset({S.RUNNING, S.QUEUED}) | _ENDS,
    S.RUNNING: frozenset({S.BUILDING, S.QUEUED}) | _ENDS,
    S.BUILDING: frozenset({S.EVALUATING, S.QUEUED}) | _ENDS,
    S.EVALUATING: frozenset({S.QUEUED}) | _ENDS,
    # An end is an end.
    S.COMPLETED: frozenset(),
    S.FAILED: frozenset(),
    S.TIMED_OUT: frozenset(),
    S.CANCELLED: frozenset(),
}


def allowed(before: RolloutState, after: RolloutState) -> bool:
    return after in TRANSITIONS[before]


def lua_table() -> str:
    """The table as Lua source, put in front of every script that changes a state."""
    rows = [
        f"{before.value}={{{','.join(sorted(f'{after.value}=true' for after in afters))}}}"
        for before, afters in TRANSITIONS.items()
    ]
    ends = ",".join(sorted(f"{state.value}=true" for state in TERMINAL))
    return f"local MAY={{{','.join(rows)}}}\nlocal ENDS={{{ends}}}\n"
