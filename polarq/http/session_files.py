"""Polar's file layout: each ended session as `<save_dir>/task_<task_id>/ses_<session_id>.json`.

The shim writes it, following the event stream; the ledger stays the truth. A shim that was down catches up when it
starts: every ended session that the ledger still has and the folder lacks is written. What expired from the ledger
meanwhile (`retention.result_s`) is not. Files are written beside their name and renamed, so that a reader sees a whole
file or none; several shims may share a folder. While the folder cannot be written, the writer waits and tries again.
"""

from __future__ import annotations

import asyncio
import logging
import os
import re
import secrets
from pathlib import Path

import msgspec

from polarq.contracts.base import ID_PATTERN
from polarq.contracts.rollout import RolloutState
from polarq.contracts.task import split_rollout_id
from polarq.errors import LedgerUnavailable
from polarq.http.feed import Feed
from polarq.http.task_body import ended, session_json
from polarq.ledger import AsyncLedger, RolloutRecord, TaskRecord

log = logging.getLogger(__name__)

_RETRY_S = 2.0
_LONGEST_RETRY_S = 60.0
_PAGE = 500
_ID = re.compile(ID_PATTERN)
_ENDS = frozenset(state.value for state in RolloutState if state.terminal)


class SessionFiles:
    """Writes one folder. Runs as one asyncio task."""

    def __init__(self, ledger: AsyncLedger, feed: Feed, folder: str) -> None:
        self._ledger = ledger
        self._feed = feed
        self.folder = Path(folder)

    def path(self, rollout_id: str) -> Path:
        """Ids are safe as file names: their pattern has no separator and no leading dot."""
        task_id, _ = split_rollout_id(rollout_id)
        return self.folder / f"task_{task_id}" / f"ses_{rollout_id}.json"

    async def paths(self, record: TaskRecord) -> list[str]:
        """Files of a task's ended sessions that are there, in sample order."""
        wanted = [self.path(rollout.rollout_id) for rollout in ended(record)]
        return await asyncio.to_thread(lambda: [str(path) for path in wanted if path.is_file()])

    async def run(self) -> None:
        """Catches up, then follows until the feed is closed; waits out a Redis or a disk that is away."""
        delay = _RETRY_S
        cursor: str | None = None
        while not self._feed.closed:
            try:
                if cursor is None:
                    newest = await self._feed.newest()
                    await self.catch_up()
                    cursor = newest
                cursor = await self._follow(cursor)
                delay = _RETRY_S
            except (LedgerUnavailable, OSError) as exc:
                log.warning("session files: trying again in %.0f s: %s", delay, exc)
                await asyncio.sleep(delay)
                delay = min(2 * delay, _LONGEST_RETRY_S)

    async def catch_up(self) -> None:
        """Writes every ended session of the ledger that has no file yet."""
        calls = self._ledger.calls
        for task_id in await self._ledger.do(calls.recent_task_ids(limit=1_000_000)):
            await self._write_task(task_id)

    async def _follow(self, cursor: str) -> str | None:
        """Handles the events after a cursor; the cursor after them, or None when some are no longer kept."""
        if await self._feed.missed(cursor):
            return None
        if not await self._feed.news(cursor, 60.0):
            return cursor
        events = await self._feed.after(cursor, _PAGE)
        ends: dict[str, set[str]] = {}
        for event in events:
            if event.type == "session.state_changed" and event.data.get("status") in _ENDS:
                ends.setdefault(str(event.data.get("task_id")), set()).add(str(event.data.get("session_id")))
        for task_id, session_ids in ends.items():
            await self._write_task(task_id, session_ids)
        return events[-1].event_id if events else cursor

    async def _write_task(self, task_id: str, only: set[str] | None = None) -> None:
        if not _ID.fullmatch(task_id):
            log.warning("session files: '%s' is not a task id; somebody else writes to this Redis", task_id)
            return
        record = await self._ledger.do(self._ledger.calls.task(task_id, with_request=True))
        if record is None:
            return
        for rollout in ended(record):
            if only is None or rollout.rollout_id in only:
                await self._write(record, rollout)

    async def _write(self, record: TaskRecord, rollout: RolloutRecord) -> None:
        path = self.path(rollout.rollout_id)
        if await asyncio.to_thread(path.exists):
            return
        data = await session_json(self._ledger, record, rollout)
        await asyncio.to_thread(_replace, path, data)


def _replace(path: Path, data: bytes) -> None:
    """Polar's files leave out the trajectory's own status and error: they are the session's."""
    body = msgspec.json.decode(data)
    for key in ("status", "error"):
        body["trajectory"].pop(key, None)
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f".{path.name}.{secrets.token_hex(4)}.part")
    try:
        with part.open("wb") as file:
            file.write(msgspec.json.encode(body))
            file.flush()
            os.fsync(file.fileno())
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)
