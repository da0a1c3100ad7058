"""One task that cannot be archived costs the others nothing: what is not archived in time is lost."""

from __future__ import annotations

import json
from pathlib import Path

from polarq.client import AsyncClient
from polarq.ledger import Keys
from polarq.ledger.retention import server_ms
from polarq.settings import Settings
from polarq_worker.upkeep import Upkeep
from tests.durable.hand import Hand, a_client
from tests.http.rig import topology_for

TASKS = ("t0", "t1", "t2", "t3", "t4", "t5")


async def test_tasks_that_cannot_be_archived_hold_up_no_other(redis_url: str, keys: Keys, tmp_path: Path) -> None:
    folder = tmp_path / "archive"
    folder.mkdir()
    topology = topology_for(keys, retention={"archive": str(folder), "result_s": 3600.0})
    with a_client(redis_url, topology) as client:
        hand, store = Hand(client.ledger), client.ledger.redis
        for task_id in TASKS:
            hand.submit(task_id)
            hand.end(f"{task_id}.0")
        # As if they had ended 50 minutes ago, in their order.
        now = client.ledger.do(server_ms())
        store.zadd(keys.tasks, {task_id: now - 50 * 60 * 1000 + n for n, task_id in enumerate(TASKS)})
        request = json.loads(store.hget(keys.task("t1"), "request") or b"")
        store.hset(keys.task("t1"), "request", json.dumps({**request, "of_next_year": 1}))
    # Somebody's files lie where two of them belong.
    (folder / "t0").write_text("in the way")
    (folder / "t3").write_text("in the way")
    async with AsyncClient(topology, Settings.from_env({"POLARQ_REDIS_URL": redis_url})) as other:
        upkeep = Upkeep(other.ledger, topology)
        await upkeep.archive_step()
        (folder / "t0").unlink()
        await upkeep.archive_step()
    archived = sorted(path.parent.name for path in folder.glob("*/0.json"))
    assert archived == ["t0", "t2", "t4", "t5"]
