"""Finished results on this node's disk until the ledger has answered for them.

A worker that is killed between a rollout's end and its commit has done the whole work; its next start commits what it
finds here, if the ledger still takes it. The ledger stays the truth: an entry is a memory of this node, nothing reads
it but this node's worker, and a disk that is full or broken costs no more than that memory.

An entry is one file, `<rollout_id>-<token>`: a line of JSON (`_Header`), then the stored bytes of the payload.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import os
import time
from pathlib import Path

from pydantic import ValidationError

from polarq.contracts.base import Contract
from polarq.contracts.rollout import RolloutSummary
from polarq.errors import LedgerUnavailable
from polarq.ledger import AsyncLedger
from polarq_worker.commit import Finished, commit
from polarq_worker.patience import Patience

log = logging.getLogger("polarq.worker.spool")

_UNFINISHED = ".part"
_HEADER_BYTES = 1 << 20
"""A header is a summary: a few hundred bytes, whose message is one line."""


class _Header(Contract):
    rollout_id: str
    task_id: str
    attempt: int
    token: int
    summary: RolloutSummary
    raw_bytes: int
    stored_bytes: int
    sha256: str


class Spool:
    """The folder `folder` (0700), of one living worker. Its methods block; call them in a thread."""

    def __init__(self, folder: Path, keep_s: float) -> None:
        self.folder = folder
        self.keep_s = keep_s

    def keep(self, finished: Finished) -> Path | None:
        """Writes an entry for good (fsync, then renamed into place). None, with a warning, when the disk refuses it."""
        path = self.folder / f"{finished.rollout_id}-{finished.token}"
        part = path.with_name(path.name + _UNFINISHED)
        header = _Header(
            rollout_id=finished.rollout_id,
            task_id=finished.task_id,
            attempt=finished.attempt,
            token=finished.token,
            summary=finished.summary,
            raw_bytes=finished.raw_bytes,
            stored_bytes=len(finished.data),
            sha256=hashlib.sha256(finished.data).hexdigest(),
        )
        try:
            self.folder.mkdir(mode=0o700, exist_ok=True)
            part.unlink(missing_ok=True)
            with os.fdopen(os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600), "wb") as file:
                file.write(header.model_dump_json().encode() + b"\n")
                file.write(finished.data)
                file.flush()
                os.fsync(file.fileno())
            part.rename(path)
            self._settle()
        except OSError as exc:
            log.warning(
                "rollout %s: its result cannot be kept on disk until it is committed (%s); a crash of this worker now "
                "would lose this attempt. Make room in %s",
                finished.rollout_id,
                exc.strerror or exc,
                self.folder,
            )
            self.drop(part)
            return None
        return path

    def drop(self, path: Path) -> None:
        """Removes an entry. One that cannot be removed is found stale at the next start."""
        try:
            path.unlink(missing_ok=True)
        except OSError as exc:
            log.warning("%s cannot be removed (%s)", path, exc.strerror or exc)

    def entries(self) -> list[Path]:
        """What an earlier worker left, oldest first. What is older than the retention, or was never finished, goes."""
        try:
            found = sorted((path.stat().st_mtime, path) for path in self.folder.iterdir() if path.is_file())
        except FileNotFoundError:
            return []
        except OSError as exc:
            log.error("the spool %s cannot be read (%s)", self.folder, exc.strerror or exc)
            return []
        kept = []
        for written_at, path in found:
            if path.name.endswith(_UNFINISHED):
                self.drop(path)
            elif time.time() - written_at > self.keep_s:
                log.warning("spool entry %s is older than what is kept; dropped", path.name)
                self.drop(path)
            else:
                kept.append(path)
        return kept

    def read(self, path: Path) -> Finished | None:
        """An entry, whole; None when it is damaged or of a version unknown here."""
        with path.open("rb") as file:
            line = file.readline(_HEADER_BYTES)
            data = file.read()
        try:
            header = _Header.stored(line)
        except ValidationError:
            return None
        if len(data) != header.stored_bytes or hashlib.sha256(data).hexdigest() != header.sha256:
            return None
        return Finished(
            rollout_id=header.rollout_id,
            task_id=header.task_id,
            attempt=header.attempt,
            token=header.token,
            summary=header.summary,
            data=data,
            raw_bytes=header.raw_bytes,
        )

    def _settle(self) -> None:
        """Makes the rename itself outlive a power cut."""
        handle = os.open(self.folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


async def commit_leftovers(spool: Spool, ledger: AsyncLedger, lease_s: float) -> list[str]:
    """Commits what an earlier worker of this node finished and could not hand in. Returns the tasks it did so for.

    Only where its token is still the current one (nobody has claimed the rollout since, and it has not ended); else the
    entry is dropped. While the ledger is away entries stay for the next start.
    """
    committed = []
    for path in await asyncio.to_thread(spool.entries):
        try:
            finished = await asyncio.to_thread(spool.read, path)
            if finished is None:
                log.error("spool entry %s is damaged; dropped", path.name)
            elif await _hand_in(finished, ledger, lease_s):
                committed.append(finished.task_id)
        except LedgerUnavailable as exc:
            log.warning("spool entry %s stays until the next start: %s", path.name, exc)
            continue
        except OSError as exc:
            log.error("spool entry %s cannot be read (%s)", path.name, exc.strerror or exc)
            continue
        await asyncio.to_thread(spool.drop, path)
    return committed


async def _hand_in(finished: Finished, ledger: AsyncLedger, lease_s: float) -> bool:
    """Whether the ledger took it. Its lease is renewed first: it tells whose the rollout is, and keeps it meanwhile."""
    rollout_id, token = finished.rollout_id, finished.token
    answers = await ledger.do(ledger.calls.renew([(rollout_id, token)], lease_s))
    if answers == ["lost"]:
        log.warning("rollout %s: the result of attempt %d is out of date; dropped", rollout_id, finished.attempt)
        return False
    impatient = Patience()
    impatient.over = True
    done = await commit(finished, ledger, impatient)
    if done.won:
        state = finished.summary.outcome.state.value
        log.info("rollout %s: %s, from the spool of a worker that was killed", rollout_id, state)
    return done.won
