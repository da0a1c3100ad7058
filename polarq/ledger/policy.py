"""Which policy a run's trainer has published: staleness is that version now less the version at a rollout's claim."""

from __future__ import annotations

from polarq.contracts.base import check_id
from polarq.errors import InvalidInput
from polarq.ledger.calls import Call, Calls
from polarq.ledger.scripts import script

MOST = 10**12
"""Lua writes larger numbers with an exponent."""


def set_policy_version(calls: Calls, run_id: str, version: int) -> Call[None]:
    """From now on claims of the run's rollouts record `version`. It may also go down: a trainer that went back to a
    checkpoint. Kept as long as results are, from when it was set or something of the run was claimed last.

    Raises `InvalidInput`.
    """
    check_id("run", run_id)
    if not 0 <= version <= MOST:
        raise InvalidInput("policy version", [f"version: {version}; from 0 to {MOST}"])
    keys = (calls.keys.run(run_id), calls.keys.events)
    args = (run_id, version, calls.keep_s, calls.events_max)
    return Call(lambda _: None, script("policy_version"), keys, args)
