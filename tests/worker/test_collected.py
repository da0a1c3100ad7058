"""Files of sandboxes belong to a result that was taken, or go."""

from __future__ import annotations

import asyncio
import os
import tarfile
import tempfile
from pathlib import Path

import pytest

from polarq.client import Client
from polarq.contracts import Boundary, Outcome, RolloutState
from polarq.contracts.artifacts import ArtifactSpec
from polarq.contracts.specs import RuntimeSpec
from polarq.ledger import AsyncLedger, Keys
from polarq.settings import Settings
from polarq.store.artifacts import ArtifactStore
from polarq.topology import Topology
from polarq.topology.artifacts import ArtifactsSection
from polarq_worker.artifact_names import Names
from polarq_worker.artifacts import LISTED, Collector
from polarq_worker.collected import settle_leftovers
from polarq_worker.runtimes.base import Host
from polarq_worker.runtimes.local import LocalRuntime
from tests.cli.driving import claim, finish, record, task
from tests.runtimes.local_here import needs_bubblewrap, settings

LONG_S = 170.0


@pytest.fixture
def store(tmp_path: Path) -> ArtifactStore:
    return ArtifactStore(str(tmp_path / "store"))


async def test_a_killed_workers_files_stay_where_their_result_was_taken_and_go_elsewhere(
    tmp_path: Path, store: ArtifactStore, redis_url: str, keys: Keys
) -> None:
    topology = Topology.model_validate({"redis": {"prefix": keys.prefix}})
    collecting = tmp_path / "collecting"
    with Client(topology, Settings.from_env({"POLARQ_REDIS_URL": redis_url})) as client:

        def ledger_says() -> dict[str, int]:
            record(client, task("t", 3))
            finish(client, "t.0")
            gone = Outcome(state=RolloutState.FAILED, boundary=Boundary.NODE, reason="gone")
            finish(client, "t.1", gone, None)
            return {"t.0": 1, "t.1": 99, "t.2": claim(client, "t.2").token, "never.0": 1}

        tokens = await asyncio.to_thread(ledger_says)
        tokens["t.0"] = (await asyncio.to_thread(client.record, "t")).rollouts[0].token
        files = {}
        for rollout_id, token in tokens.items():
            (collecting / f"{rollout_id}-{token}").mkdir(parents=True)
            made = tmp_path / "made"
            made.write_bytes(b"x")
            files[rollout_id] = Path(store.put(rollout_id, token, "a", made))
        (collecting / "what is this").mkdir()
        ledger = AsyncLedger(redis_url, client.ledger.calls)
        assert await settle_leftovers(collecting, store, ledger) == 3
        await ledger.aclose()
    assert {rollout_id for rollout_id, file in files.items() if file.exists()} == {"t.0"}
    assert [entry.name for entry in collecting.iterdir()] == ["what is this"]
    assert await settle_leftovers(tmp_path / "none", store, ledger) == 0


async def collected(
    tmp_path: Path,
    store: ArtifactStore,
    script: str,
    *specs: ArtifactSpec,
    limits: ArtifactsSection | None = None,
    isolation: str = "auto",
    root: Path | None = None,
) -> Collector:
    host = Host(settings=settings(isolation))
    root = root or tmp_path / "root"
    runtime = LocalRuntime(RuntimeSpec(backend="local"), runtime_id="collected", root=root, host=host)
    await runtime.start()
    try:
        result = await runtime.exec(script, timeout_s=LONG_S)
        assert result.ok, result.why
        made = Collector(store, limits or ArtifactsSection(), scratch=tmp_path / "scratch", rollout_id="t.0", token=1)
        await made.take(runtime, specs)
        return made
    finally:
        await runtime.stop()


async def test_tiny_files_without_end_end_at_the_limit(tmp_path: Path, store: ArtifactStore) -> None:
    script = "mkdir many; cd many; seq 300000 | xargs -n 5000 touch"
    limits = ArtifactsSection(max_files=200)
    # In memory, where it takes seconds; on a busy disk, minutes.
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        specs = [ArtifactSpec(path="many")]
        made = await collected(tmp_path, store, script, *specs, limits=limits, root=Path(folder) / "root")
    (many,) = made.artifacts
    assert (many.name, many.files) == ("many.tar", 200)
    assert "more than the 200 files" in many.problem


async def test_no_two_files_share_the_name_that_they_are_stored_under(tmp_path: Path, store: ArtifactStore) -> None:
    script = r"mkdir out; echo in > out/in; echo mine > out.tar; echo x > $'q\nb'; echo y > 'q\nb'"
    specs = [ArtifactSpec(path=path) for path in ("out", "out.tar", "*.tar", "q*")]
    made = await collected(tmp_path, store, script, *specs)
    names = [one.name for one in made.artifacts]
    assert names == ["out.tar", "out~2.tar", "q\\nb", "q\\nb~2"]
    assert len({one.where for one in made.artifacts}) == len(names)
    with tarfile.open(made.artifacts[0].where) as archive:
        assert "./in" in archive.getnames()
    assert [Path(one.where).read_text() for one in made.artifacts[1:]] == ["mine\n", "x\n", "y\n"]


def test_a_name_is_changed_where_it_is_taken_and_nowhere_else() -> None:
    names = Names()
    taken = ["a", "a", "a/b", "a/c", "c/d.txt", "c", "c/d.txt", "c/d~2.txt", ".env", ".env"]
    assert [names.take(name) for name in taken] == [
        "a", "a~2", "a~3/b", "a~3/c", "c/d.txt", "c~2", "c/d~2.txt", "c/d~2~2.txt", ".env", ".env~2",
    ]  # fmt: skip


async def test_a_pattern_of_odd_names_brings_each_and_runs_nothing(tmp_path: Path, store: ArtifactStore) -> None:
    script = r"""mkdir d; cd d; touch -- $'a\nb' '$(touch ran)' '-rf' "$(printf 'x%.0s' $(seq 255))" $'\xff\xfe' '*'
    mkfifo fifo; ln -s /etc/passwd link; mkdir sub; echo in > sub/in"""
    made = await collected(tmp_path, store, script, ArtifactSpec(path="d/*"))
    kept = {one.name for one in made.artifacts if one.where}
    assert kept == {"d/a\\nb", "d/$(touch ran)", "d/-rf", "d/" + "x" * 255, "d/\\xff\\xfe", "d/*", "d/sub.tar"}
    refused = {one.name: one.problem for one in made.artifacts if not one.where}
    assert set(refused) == {"d/fifo", "d/link"}
    assert all("not a regular file" in problem for problem in refused.values())


@pytest.mark.parametrize("isolation", ["none", "bubblewrap"])
async def test_the_session_directory_has_one_name_whatever_the_sandbox_calls_it(
    tmp_path: Path, store: ArtifactStore, isolation: str
) -> None:
    if isolation == "bubblewrap":
        needs_bubblewrap()
    specs = [ArtifactSpec(path=f"/polar/session/out/{name}") for name in ("a.txt", "*.log", "deep")]
    script = "mkdir -p out/deep; echo a > out/a.txt; echo b > out/b.log; echo c > out/deep/c"
    made = await collected(tmp_path, store, script, *specs, isolation=isolation)
    assert [(one.name, one.problem) for one in made.artifacts] == [
        ("out/a.txt", ""),
        ("out/b.log", ""),
        ("out/deep.tar", ""),
    ]


async def test_what_names_too_much_is_cut_and_the_rest_still_comes(tmp_path: Path, store: ArtifactStore) -> None:
    script = f"mkdir many; cd many; seq {2 * LISTED} | xargs touch; cd ..; echo last > last"
    specs = (ArtifactSpec(path="last"), ArtifactSpec(path="many/*"), ArtifactSpec(path="none/*", required=True))
    made = await collected(tmp_path, store, script, *specs)
    assert len(made.artifacts) == LISTED
    assert made.artifacts[0].name == "last"


async def test_a_full_place_is_said_and_costs_nothing_else(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    made = await collected(tmp_path, ArtifactStore(str(tmp_path / "file")), "echo a > a", ArtifactSpec(path="a"))
    (entry,) = made.artifacts
    assert (entry.where, entry.name) == ("", "a")
    assert entry.problem


async def test_a_sandbox_that_is_gone_is_said(tmp_path: Path, store: ArtifactStore) -> None:
    runtime = LocalRuntime(RuntimeSpec(backend="local"), runtime_id="gone", root=tmp_path / "root")
    await runtime.start()
    await runtime.stop()
    made = Collector(store, ArtifactsSection(), scratch=tmp_path / "scratch", rollout_id="t.0", token=1)
    await made.take(runtime, [ArtifactSpec(path="a"), ArtifactSpec(path="b*")])
    assert [one.where for one in made.artifacts] == ["", ""]
    assert all("stopped" in one.problem for one in made.artifacts)


async def test_logs_that_a_sandbox_planted_links_among_are_files_only(tmp_path: Path, store: ArtifactStore) -> None:
    logs = tmp_path / "logs"
    (logs / "agent").mkdir(parents=True)
    (logs / "agent" / "step.00.stdout").write_text("printed")
    (logs / "agent" / "empty").touch()
    (logs / "agent" / "stolen").symlink_to("/etc/passwd")
    (logs / "all").symlink_to("/")
    os.mkfifo(logs / "pipe")
    made = Collector(store, ArtifactsSection(), scratch=tmp_path / "scratch", rollout_id="t.0", token=1)
    await made.take_logs(logs, "logs")
    assert [(one.name, one.kind) for one in made.artifacts] == [("logs/agent/step.00.stdout", "log")]
    off = Collector(store, ArtifactsSection(logs=False), scratch=tmp_path / "s", rollout_id="t.0", token=1)
    await off.take_logs(logs, "logs")
    assert off.artifacts == []
