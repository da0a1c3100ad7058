"""Before a result is deleted or expires it is written where anybody can read it, without polarq."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from polarq.client import AsyncClient, Client
from polarq.client.acknowledging import archive_task
from polarq.client.steps import outcome_async
from polarq.errors import ArchiveFailed
from polarq.ledger import Keys
from polarq.ledger.retention import server_ms
from polarq.store.archive import Archive
from polarq_worker.upkeep import Upkeep
from tests.durable.hand import Hand, a_client
from tests.http.rig import settings_for, topology_for
from tests.needs import not_here

if sys.version_info >= (3, 14):
    from compression import zstd
else:
    from backports import zstd


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "archive"


@pytest.fixture
def client(redis_url: str, keys: Keys, folder: Path) -> Iterator[Client]:
    with a_client(redis_url, topology_for(keys, retention={"archive": str(folder)})) as made:
        yield made


@pytest.fixture
def hand(client: Client) -> Hand:
    return Hand(client.ledger)


def files(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())


def test_what_is_acknowledged_is_archived_first_and_whole(client: Client, hand: Hand, folder: Path) -> None:
    hand.submit("t", 3, metadata={"question": 7})
    expected = hand.end("t.0")
    hand.end("t.2")
    client.acknowledge(["t.0"])
    assert files(folder) == ["README.md", "t/0.json", "t/request.json"]
    hand.ledger.do(hand.calls.cancel("t"))
    client.acknowledge("t")
    assert files(folder) == ["README.md", "t/0.json", "t/1.json", "t/2.json", "t/request.json"]
    # Read by a program that knows nothing of polarq.
    code = (
        "import json, pathlib, sys; t = pathlib.Path(sys.argv[1]) / 't'\n"
        "a, b = (json.loads((t / name).read_text(encoding='utf-8')) for name in ('0.json', '1.json'))\n"
        "r = json.loads((t / 'request.json').read_text(encoding='utf-8'))\n"
        "trace = a['trajectory']['traces'][0]\n"
        "print(json.dumps([a['reward']['outcome'], trace['response_ids'], trace['logprobs'], a['metadata'],"
        " b['outcome']['state'], b['trajectory'], r['num_samples']]))"
    )
    done = subprocess.run([sys.executable, "-I", "-c", code, str(folder)], capture_output=True, text=True, check=True)
    assert expected.trajectory is not None
    trace = expected.trajectory.traces[0]
    assert json.loads(done.stdout) == [
        1.0, trace.response_ids, trace.logprobs, {"question": 7}, "cancelled", None, 3,
    ]  # fmt: skip
    assert "<index>.json" in (folder / "README.md").read_text(encoding="utf-8")


def test_an_archive_that_cannot_be_written_keeps_the_results_in_redis(client: Client, hand: Hand, folder: Path) -> None:
    folder.parent.mkdir(exist_ok=True)
    folder.write_text("a file where the folder should be")
    hand.submit("t")
    hand.end("t.0")
    with pytest.raises(ArchiveFailed, match=r"'t\.0' cannot be archived at .*nothing was deleted"):
        client.acknowledge("t")
    assert client.rollout("t.0").trajectory is not None
    assert client.record("t").rollouts[0].acknowledged_at is None
    folder.unlink()
    assert client.acknowledge("t") == 1
    assert files(folder) == ["README.md", "t/0.json", "t/request.json"]


def test_what_was_archived_whole_is_not_overwritten_by_less(client: Client, hand: Hand, folder: Path) -> None:
    hand.submit("t")
    hand.end("t.0")
    client.acknowledge("t")
    before = (folder / "t" / "0.json").read_bytes()
    request, archive = client.ledger.do(hand.calls.task("t", with_request=True)), Archive(str(folder))
    assert request is not None
    assert request.request is not None
    archive.keep(request.request, client.get("t").results[0])
    assert (folder / "t" / "0.json").read_bytes() == before


async def test_compressed_and_asynchronous_it_is_the_same(redis_url: str, keys: Keys, hand: Hand, folder: Path) -> None:
    topology = topology_for(keys, retention={"archive": str(folder), "archive_zstd": True})
    hand.submit("t", 2)
    hand.end("t.0", size=50_000)
    hand.end("t.1")
    async with AsyncClient(topology, settings_for(redis_url)) as client:
        assert await client.acknowledge(["t.0"]) == 1
        archive = Archive.of(topology)
        assert archive is not None
        assert await outcome_async(client.ledger, archive_task(client.calls, archive, "t")) == 1
        assert await client.acknowledge("t") == 1
    assert files(folder) == ["README.md", "t/0.json.zst", "t/1.json.zst", "t/request.json.zst"]
    first = json.loads(zstd.decompress((folder / "t" / "0.json.zst").read_bytes()))
    assert len(first["trajectory"]["traces"][0]["response_ids"]) == 50_000


def test_an_address_goes_through_fsspec(redis_url: str, keys: Keys) -> None:
    if importlib.util.find_spec("fsspec") is None:
        not_here("fsspec is not installed (polarq[archive])")
    fsspec = importlib.import_module("fsspec")
    root = f"memory://{uuid.uuid4().hex}/runs"
    with a_client(redis_url, topology_for(keys, retention={"archive": root})) as client:
        hand = Hand(client.ledger)
        hand.submit("t")
        hand.end("t.0")
        client.acknowledge("t")
    place, path = fsspec.core.url_to_fs(root)
    assert sorted(name.removeprefix(path) for name in place.find(path)) == [
        "/README.md", "/t/0.json", "/t/request.json",
    ]  # fmt: skip
    assert json.loads(place.cat(f"{path}/t/0.json"))["reward"]["outcome"] == 1.0


def test_without_fsspec_an_address_says_what_to_install(monkeypatch: pytest.MonkeyPatch, client: Client) -> None:
    monkeypatch.setitem(sys.modules, "fsspec", None)
    hand = Hand(client.ledger)
    hand.submit("t")
    hand.end("t.0")
    record = client.ledger.do(hand.calls.task("t", with_request=True))
    assert record is not None
    assert record.request is not None
    with pytest.raises(ArchiveFailed, match=r"pip install 'polarq\[archive\]'"):
        Archive("s3://bucket/runs").keep(record.request, client.rollout("t.0"))


async def test_a_worker_archives_what_nobody_acknowledged_before_it_expires(
    redis_url: str, keys: Keys, folder: Path
) -> None:
    """A task's time in Redis is an hour here; it is archived in the last quarter of it, by one of two workers."""
    topology = topology_for(keys, retention={"archive": str(folder), "result_s": 3600.0})
    with a_client(redis_url, topology) as client:
        hand = Hand(client.ledger)
        for task_id in ("old", "young", "running", "done"):
            hand.submit(task_id, 2)
            hand.end(f"{task_id}.0")
        for task_id in ("old", "young", "done"):
            hand.end(f"{task_id}.1")
        client.acknowledge("done")
        # As if these had ended 50 minutes ago.
        now = client.ledger.do(server_ms())
        for task_id in ("old", "running", "done"):
            client.ledger.redis.zadd(keys.tasks, {task_id: now - 50 * 60 * 1000})
    before = files(folder)
    async with AsyncClient(topology, settings_for(redis_url)) as client:
        first, second = Upkeep(client.ledger, topology), Upkeep(client.ledger, topology)
        await first.archive_step()
        assert sorted(set(files(folder)) - set(before)) == ["old/0.json", "old/1.json", "old/request.json"]
        (folder / "old" / "0.json").unlink()
        await second.archive_step()
        await first.archive_step()
        assert not (folder / "old" / "0.json").exists()  # once is enough


async def test_an_archive_that_is_away_is_tried_again_until_the_task_expires(
    redis_url: str, keys: Keys, folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    topology = topology_for(keys, retention={"archive": str(folder), "result_s": 3600.0})
    folder.write_text("in the way")
    with a_client(redis_url, topology) as client:
        hand = Hand(client.ledger)
        hand.submit("t")
        hand.end("t.0")
        client.ledger.redis.zadd(keys.tasks, {"t": client.ledger.do(server_ms()) - 50 * 60 * 1000})
    async with AsyncClient(topology, settings_for(redis_url)) as client:
        upkeep = Upkeep(client.ledger, topology)
        await upkeep.archive_step()
        assert "task t expires soon" in caplog.text
        folder.unlink()
        await upkeep.archive_step()
    assert files(folder) == ["README.md", "t/0.json", "t/request.json"]
