"""`rollout.save_dir`: Polar's file layout, written by the shim from the ledger."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest

from polarq.contracts.rollout import RolloutState
from polarq.http import session_files
from polarq.ledger import Keys
from tests.http.rig import a_task, running_shim, said


async def appears(path: Path) -> dict[str, Any]:
    """The file once it is there: it is renamed into place, so what is there is whole."""
    async with asyncio.timeout(30):
        while not path.exists():  # noqa: ASYNC110 - a file says nothing when it appears
            await asyncio.sleep(0.01)
    made: dict[str, Any] = json.loads(path.read_bytes())
    return made


async def test_each_ended_session_becomes_one_file(redis_url: str, keys: Keys, tmp_path: Path) -> None:
    async with running_shim(redis_url, keys, save_dir=tmp_path) as shim:
        await shim.submit(a_task(samples=2))
        await shim.end("t.1", state=RolloutState.FAILED, reward=None)
        saved = await appears(tmp_path / "task_t" / "ses_t.1.json")
        assert (saved["session_id"], saved["status"]) == ("t.1", "ERROR")
        assert saved["trajectory"]["traces"][0]["response_ids"] == [7, 8, 9]
        assert set(saved["trajectory"]) == {"metadata", "traces"}
        task = (await shim.http.get("/rollout/task/t")).json()
        assert task["result_paths"] == [str(tmp_path / "task_t" / "ses_t.1.json")]
        await shim.http.delete("/rollout/task/t")
        cancelled = await appears(tmp_path / "task_t" / "ses_t.0.json")
        assert cancelled["outcome"]["reason"] == "cancelled"
        assert sorted(p.name for p in (tmp_path / "task_t").iterdir()) == ["ses_t.0.json", "ses_t.1.json"]


async def test_a_shim_that_was_down_catches_up_and_rewrites_nothing(redis_url: str, keys: Keys, tmp_path: Path) -> None:
    there = tmp_path / "task_a" / "ses_a.0.json"
    there.parent.mkdir()
    there.write_text("mine")
    async with running_shim(redis_url, keys) as shim:
        for task_id in ("a", "b"):
            await shim.submit(a_task(task_id))
            await shim.end(f"{task_id}.0")
    async with running_shim(redis_url, keys, save_dir=tmp_path) as shim:
        assert (await appears(tmp_path / "task_b" / "ses_b.0.json"))["session_id"] == "b.0"
        await shim.submit(a_task("c"))
        await shim.end("c.0")
        await appears(tmp_path / "task_c" / "ses_c.0.json")
    assert there.read_text() == "mine"


async def test_a_folder_that_cannot_be_written_loses_nothing(
    redis_url: str, keys: Keys, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(session_files, "_RETRY_S", 0.05)
    folder = tmp_path / "results"
    folder.write_text("a file where the folder should be")
    async with running_shim(redis_url, keys, save_dir=folder) as shim:
        await shim.submit(a_task(samples=2))
        with said(session_files.__name__, "trying again") as refused:
            await shim.end("t.0")
            await refused.wait()
        assert (await shim.http.get("/rollout/task/t")).json()["result_paths"] == []
        folder.unlink()
        await shim.end("t.1")
        await appears(folder / "task_t" / "ses_t.0.json")
        await appears(folder / "task_t" / "ses_t.1.json")


@pytest.fixture
async def nothing_outside(tmp_path: Path) -> AsyncIterator[Callable[[], list[Path]]]:
    outside = tmp_path / "outside"
    outside.mkdir()
    yield lambda: list(outside.iterdir())


async def test_an_event_with_a_path_for_an_id_writes_nothing(
    redis_url: str, keys: Keys, tmp_path: Path, nothing_outside: Callable[[], list[Path]]
) -> None:
    async with running_shim(redis_url, keys, save_dir=tmp_path / "in") as shim:
        ledger, evil = shim.client.ledger, "../../../outside/x"
        await shim.submit(a_task("copied"))
        await shim.end("copied.0")
        keys = ledger.calls.keys
        await ledger.redis.copy(keys.task("copied"), keys.task(evil))
        await ledger.redis.copy(keys.rollout("copied.0"), keys.rollout(f"{evil}.0"))
        data = json.dumps({"task_id": evil, "session_id": f"{evil}.0", "status": "completed"})
        await ledger.redis.xadd(ledger.calls.keys.events, {"type": "session.state_changed", "data": data})
        await shim.submit(a_task())
        await shim.end("t.0")
        await appears(tmp_path / "in" / "task_t" / "ses_t.0.json")
    assert nothing_outside() == []
