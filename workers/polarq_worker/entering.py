"""A worker enters: it has a folder, a Redis that keeps what it is told, and its node's place in the ledger, where one
worker at a time lives."""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path

from polarq.errors import LedgerUnavailable, PolarqError
from polarq.ledger import AsyncLedger, without_password
from polarq.ledger.incarnations import Holder, enter
from polarq.ledger.server import server_facts
from polarq_worker.incarnation import Others

log = logging.getLogger("polarq.worker.node")

_LOOK_AGAIN_S = 0.1


class PlaceTaken(PolarqError):
    """Another worker of this node lives."""


def make_folders(state_dir: Path) -> None:
    """Raises `PolarqError`."""
    try:
        state_dir.mkdir(parents=True, exist_ok=True)
        (state_dir / "logs").mkdir(exist_ok=True)
        (state_dir / "rollouts").mkdir(mode=0o700, exist_ok=True)
    except OSError as exc:
        raise PolarqError(
            f"the state folder {state_dir} cannot be used ({exc.strerror}); set POLARQ_STATE_DIR to another"
        ) from None


async def check_redis(ledger: AsyncLedger) -> None:
    """Refuses a Redis that would lose rollouts, and says what is risky about it otherwise."""
    facts = await ledger.do(server_facts())
    where = f"Redis at {without_password(ledger.url)}"
    if facts.problem is not None:
        raise LedgerUnavailable(f"{where}: {facts.problem}")
    if facts.warning is not None:
        log.warning("%s: %s", where, facts.warning)


async def take_place(ledger: AsyncLedger, node_id: str, incarnation: str, others: Others, alive_s: float) -> None:
    """Returns when the place is this worker's for `alive_s` (0: when it could be). Raises `PlaceTaken`.

    At once, where nobody has it, or one who is stopping or known to be dead. Of one who may be dead the next word is
    waited for: it lives when it says so once more, and is gone when it has not in the time in which nodes have to.
    """
    call = enter(ledger.calls, node_id, incarnation, alive_s, dead=[one.incarnation for one in others.dead])
    before: Holder | None = None
    while (holder := await ledger.do(call)) is not None:
        same = before is not None and before.incarnation == holder.incarnation
        renewed = before is not None and same and holder.left_s > before.left_s
        if renewed or holder.incarnation in others.living:
            raise PlaceTaken(_taken(node_id, holder))
        if not same:
            log.warning("node %s: another worker had its place; waiting up to %.0f s for it", node_id, holder.left_s)
        before = holder
        await asyncio.sleep(_LOOK_AGAIN_S)


def _taken(node_id: str, holder: Holder) -> str:
    record = holder.record
    where = "" if record is None or not record.hostname else f" (host {record.hostname}, process {record.pid})"
    return (
        f"another worker of node '{node_id}' lives{where}, and a node id is one worker's: stop that one, or start this "
        "one as another node (-Q NODE)"
    )
