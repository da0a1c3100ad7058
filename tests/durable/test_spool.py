"""Results on a worker's own disk: from a rollout's end until the ledger has answered, whatever happens between."""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
import stat
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from polarq.contracts.rollout import Outcome, RolloutResult, RolloutState, RolloutSummary
from polarq.contracts.task import Task
from polarq.ledger import AsyncLedger, Calls, Claim, Keys, Refused
from polarq.store.payloads import get_payload
from polarq.testing.redis import EmbeddedRedis
from polarq_worker.commit import Finished, commit
from polarq_worker.patience import Patience
from polarq_worker.spool import Spool, commit_leftovers
from tests.http.rig import a_task

MB = 1024 * 1024

KEEP_S = 3600.0
LEASE_S = 60.0


@pytest.fixture
def server() -> Iterator[EmbeddedRedis]:
    with EmbeddedRedis(appendonly=True) as made:
        yield made


@pytest.fixture
async def ledger(server: EmbeddedRedis, keys: Keys) -> AsyncIterator[AsyncLedger]:
    async with AsyncLedger(server.url, Calls(keys)) as made:
        yield made


@pytest.fixture
def spool(tmp_path: Path) -> Spool:
    return Spool(tmp_path / "spool", KEEP_S)


async def claimed(ledger: AsyncLedger, task_id: str, lease_s: float = LEASE_S) -> Claim:
    await ledger.do(ledger.calls.submit(Task.load(a_task(task_id, 1)), task_id))
    return await claim_again(ledger, task_id, lease_s)


async def claim_again(ledger: AsyncLedger, task_id: str, lease_s: float = LEASE_S) -> Claim:
    """Claims the task's only rollout, as soon as its lease lets go of it."""
    while True:
        claim = await ledger.do(ledger.calls.claim(f"{task_id}.0", "node0", lease_s, "job"))
        if not isinstance(claim, Refused):
            return claim
        await asyncio.sleep(0.05)


def ended(claim: Claim, size: int = 10) -> Finished:
    """A finished attempt whose payload does not get smaller by compression."""
    result = RolloutResult(
        rollout_id=claim.rollout_id,
        task_id=claim.task.task_id,
        run_id=claim.task.run_id,
        index=0,
        attempt=claim.attempt,
        outcome=Outcome(state=RolloutState.COMPLETED),
        metadata={"noise": secrets.token_urlsafe(size * 4 // 3)},
    )
    return Finished.encode(claim, result)


async def visible(ledger: AsyncLedger, task_id: str) -> RolloutResult:
    record = await ledger.do(ledger.calls.task(task_id))
    assert record is not None
    summary = record.rollouts[0].summary
    assert summary is not None
    assert summary.payload is not None
    return await ledger.do(get_payload(summary.payload))


async def test_an_entry_comes_back_whole_and_only_its_owner_may_read_it(ledger: AsyncLedger, spool: Spool) -> None:
    finished = ended(await claimed(ledger, "whole"))
    path = spool.keep(finished)
    assert path is not None
    assert spool.read(path) == finished
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE(spool.folder.stat().st_mode) == 0o700
    assert spool.entries() == [path]
    spool.drop(path)
    assert spool.entries() == []


async def test_what_a_killed_worker_had_finished_is_committed_at_the_next_start(
    ledger: AsyncLedger, spool: Spool
) -> None:
    finished = ended(await claimed(ledger, "killed"))
    spool.keep(finished)
    assert await commit_leftovers(spool, ledger, LEASE_S) == ["killed"]
    assert (await visible(ledger, "killed")).attempt == 1
    assert spool.entries() == []
    assert await commit_leftovers(spool, ledger, LEASE_S) == []


async def test_a_result_whose_rollout_went_to_another_worker_is_dropped_and_changes_nothing(
    ledger: AsyncLedger, spool: Spool, caplog: pytest.LogCaptureFixture
) -> None:
    first = await claimed(ledger, "stale", lease_s=1)
    spool.keep(ended(first))
    second = await claim_again(ledger, "stale")
    assert await commit_leftovers(spool, ledger, LEASE_S) == []
    assert "rollout stale.0: the result of attempt 1 is out of date; dropped" in caplog.text
    assert spool.entries() == []
    assert not [key async for key in ledger.redis.scan_iter("*payload*")]
    assert (await commit(ended(second), ledger, Patience())).won
    assert (await visible(ledger, "stale")).attempt == 2


async def test_a_late_commit_is_refused_and_its_payload_removed(ledger: AsyncLedger) -> None:
    first = await claimed(ledger, "late", lease_s=1)
    second = await claim_again(ledger, "late")
    assert not (await commit(ended(first), ledger, Patience())).won
    assert not [key async for key in ledger.redis.scan_iter("*payload*")]
    assert (await commit(ended(second), ledger, Patience())).won
    assert not (await commit(ended(first), ledger, Patience())).won
    assert (await visible(ledger, "late")).attempt == 2


async def test_a_result_of_45_mb_is_kept_while_redis_is_away_and_committed_when_it_is_back(
    server: EmbeddedRedis, ledger: AsyncLedger, spool: Spool
) -> None:
    finished = ended(await claimed(ledger, "large"), 45 * MB)
    assert len(finished.data) > 40 * MB
    path = spool.keep(finished)
    assert path is not None
    server.kill()
    committing = asyncio.create_task(commit(finished, ledger, Patience()))
    done, _ = await asyncio.wait({committing}, timeout=0.5)
    assert not done, "there is nobody to answer"
    assert spool.read(path) == finished
    await asyncio.to_thread(server.start)
    assert (await committing).won
    result = await visible(ledger, "large")
    assert len(result.metadata["noise"]) >= 45 * MB


async def test_a_large_leftover_is_committed_too(ledger: AsyncLedger, spool: Spool) -> None:
    spool.keep(ended(await claimed(ledger, "leftover"), 45 * MB))
    assert await commit_leftovers(spool, ledger, LEASE_S) == ["leftover"]
    assert len((await visible(ledger, "leftover")).metadata["noise"]) >= 45 * MB


async def test_while_redis_is_away_entries_stay_for_the_next_start(
    server: EmbeddedRedis, ledger: AsyncLedger, spool: Spool
) -> None:
    spool.keep(ended(await claimed(ledger, "away")))
    server.kill()
    assert await commit_leftovers(spool, ledger, LEASE_S) == []
    assert len(spool.entries()) == 1
    await asyncio.to_thread(server.start)
    assert await commit_leftovers(spool, ledger, LEASE_S) == ["away"]


async def test_a_damaged_or_unfinished_entry_is_dropped_with_a_line(
    ledger: AsyncLedger, spool: Spool, caplog: pytest.LogCaptureFixture
) -> None:
    kept = []
    for name in ("cut", "bent", "empty"):
        path = spool.keep(ended(await claimed(ledger, name)))
        assert path is not None
        whole = path.read_bytes()
        damaged = {"cut": whole[:-1], "bent": whole[:-1] + bytes([whole[-1] ^ 1]), "empty": b""}
        path.write_bytes(damaged[name])
        kept.append(path.name)
    (spool.folder / "half.0-1.part").write_bytes(b"half")
    assert await commit_leftovers(spool, ledger, LEASE_S) == []
    assert all(f"{name} is damaged" in caplog.text for name in kept)
    assert list(spool.folder.iterdir()) == []


async def test_an_entry_older_than_the_retention_is_deleted(
    ledger: AsyncLedger, spool: Spool, caplog: pytest.LogCaptureFixture
) -> None:
    path = spool.keep(ended(await claimed(ledger, "old")))
    assert path is not None
    os.utime(path, (time.time() - KEEP_S - 1,) * 2)
    assert await commit_leftovers(spool, ledger, LEASE_S) == []
    assert f"{path.name} is older than what is kept" in caplog.text
    assert not path.exists()


FULL = """
import resource, sys
from pathlib import Path
from polarq.contracts.rollout import Outcome, RolloutState, RolloutSummary
from polarq_worker.commit import Finished
from polarq_worker.spool import Spool
resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))
summary = RolloutSummary(outcome=Outcome(state=RolloutState.COMPLETED))
finished = Finished("full.0", "full", 1, 1, summary, b"x" * 10_000, 10_000)
assert Spool(Path(sys.argv[1]), 60).keep(finished) is None
"""


def test_a_disk_that_takes_no_more_leaves_no_half_entry(tmp_path: Path) -> None:
    # The limit makes write() itself fail, as a full disk does.
    command = [sys.executable, "-c", FULL, str(tmp_path / "spool")]
    ran = subprocess.run(command, check=False, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr
    assert "cannot be kept on disk" in ran.stderr
    assert list((tmp_path / "spool").iterdir()) == []


def test_a_spool_folder_that_cannot_be_made_is_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "file").touch()
    summary = RolloutSummary(outcome=Outcome(state=RolloutState.COMPLETED))
    finished = Finished("none.0", "none", 1, 1, summary, b"x", 1)
    with caplog.at_level(logging.WARNING):
        assert Spool(tmp_path / "file" / "spool", KEEP_S).keep(finished) is None
    assert "Make room in" in caplog.text
    assert Spool(tmp_path / "nowhere", KEEP_S).entries() == []
