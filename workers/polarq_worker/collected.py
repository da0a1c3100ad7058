"""Files of sandboxes whose result is not there yet, or never will be.

An attempt's scratch folder lies in `collecting` from before its first file is stored until the ledger has said whether
its result was taken. What a killed worker left there is settled at the next start of its node.
"""

from __future__ import annotations

import asyncio
import logging
import re
import shutil
from pathlib import Path

from polarq.contracts.task import split_rollout_id
from polarq.errors import ArtifactsUnavailable
from polarq.ledger import AsyncLedger
from polarq.store.artifacts import ArtifactStore

log = logging.getLogger("polarq.worker.artifacts")

_NAME = re.compile(r"(.+)-([0-9]+)")


def settle(scratch: Path, store: ArtifactStore, rollout_id: str, token: int, *, taken: bool) -> None:
    """The attempt's result was taken, or it never will be: then its files go. Blocks.

    Raises `ArtifactsUnavailable`; then it is tried again at the node's next start."""
    if not scratch.exists():
        return
    if not taken:
        store.drop(rollout_id, token)
    shutil.rmtree(scratch, ignore_errors=True)


async def settle_leftovers(collecting: Path, store: ArtifactStore, ledger: AsyncLedger) -> int:
    """What earlier workers of the node left, after their finished results were handed in; how many attempts' files were
    dropped. Raises `LedgerUnavailable`."""
    dropped = 0
    for scratch in await asyncio.to_thread(_entries, collecting):
        found = _NAME.fullmatch(scratch.name)
        if found is None:
            continue
        rollout_id, token = found[1], int(found[2])
        taken = await _taken(ledger, rollout_id, token)
        try:
            await asyncio.to_thread(settle, scratch, store, rollout_id, token, taken=taken)
        except ArtifactsUnavailable as exc:
            log.warning("rollout %s: files of a result that was not taken stay: %s", rollout_id, exc)
        else:
            dropped += not taken
    return dropped


async def _taken(ledger: AsyncLedger, rollout_id: str, token: int) -> bool:
    task_id, index = split_rollout_id(rollout_id)
    record = await ledger.do(ledger.calls.task(task_id))
    rollout = None if record is None or index >= len(record.rollouts) else record.rollouts[index]
    if rollout is None or rollout.token != token or not rollout.state.terminal:
        return False
    return rollout.summary is not None and rollout.summary.payload is not None


def _entries(folder: Path) -> list[Path]:
    return sorted(folder.iterdir()) if folder.is_dir() else []
