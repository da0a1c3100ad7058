"""How faithful a run's trajectories are, added up over its rollouts: the commit counts, `/metrics` tells."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from polarq.ledger.calls import Call
from polarq.ledger.keys import Keys
from polarq.ledger.records import decode, text_fields


def run_fidelity(keys: Keys, run_ids: Sequence[str]) -> Call[list[dict[str, int]]]:
    """The counters of each of the runs, by name (see `Fidelity.counts`). Kept as long as the run's results."""

    def read(replies: list[Any]) -> list[dict[str, int]]:
        rows = [reply if isinstance(reply, dict) else text_fields(reply) for reply in replies]
        return [{decode(name): int(count) for name, count in row.items()} for row in rows]

    return Call(read, commands=tuple(("HGETALL", keys.run_fidelity(run_id)) for run_id in run_ids))
