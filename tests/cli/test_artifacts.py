"""`polarq artifacts`: what came back from a sandbox, listed and copied."""

from __future__ import annotations

import hashlib
from pathlib import Path

from polarq.client import Client
from polarq.contracts.artifacts import Artifact, RefusedEntry
from polarq.contracts.sandbox import Denied, SandboxReport, ScrubbedHistory
from polarq.contracts.specs import NetworkPolicy
from polarq.store.artifacts import ArtifactStore
from tests.cli.conftest import Cli
from tests.cli.driving import finish, record, task


def stored(folder: Path, name: str, data: bytes) -> Artifact:
    made = folder / "made"
    made.write_bytes(data)
    where = ArtifactStore(str(folder / "store")).put("t.0", 1, name, made)
    return Artifact(name=name, size=len(data), sha256=hashlib.sha256(data).hexdigest(), where=where)


def test_files_are_listed_with_what_was_left_out_and_copied(client: Client, cli: Cli, tmp_path: Path) -> None:
    record(client, task("t"))
    good, gone = stored(tmp_path, "out/report [red].txt", b"fine"), stored(tmp_path, "gone", b"x")
    bad = stored(tmp_path, "bad", b"stored")
    Path(gone.where).unlink()
    Path(bad.where).write_bytes(b"changed")
    refused = good.model_copy(update={"refused": [RefusedEntry(path="p\\n", reason="a named pipe")]})
    missing = Artifact(name="must", problem="there is nothing that it names")
    finish(client, "t.0", artifacts=[refused, gone, bad, missing])
    told = cli("artifacts", "t.0")
    assert told.code == 0
    for text in ("out/report [red].txt", "left out: p\\n (a named pipe)", "there is nothing that it names", good.where):
        assert text in told.out
    assert "out/report [red].txt" in cli("show", "t.0").out
    copied = cli("artifacts", "t.0", "--to", str(tmp_path / "here"), "--json")
    assert copied.code == 1
    assert set(copied.json["not_copied"]) == {"gone", "bad"}
    files = {path.relative_to(tmp_path / "here"): path.read_bytes() for path in (tmp_path / "here").rglob("*.txt")}
    assert files == {Path("out/report%20%5Bred%5D.txt"): b"fine"}
    assert not (tmp_path / "here" / "bad").exists()


def test_a_task_or_a_rollout_that_runs_has_no_files_yet(client: Client, cli: Cli) -> None:
    record(client, task("t"))
    assert "name one of its rollouts" in cli("artifacts", "t").err
    assert "has not ended" in cli("artifacts", "t.0").err
    assert cli("artifacts", "t.0").code == 2


def test_a_rollouts_sandbox_is_shown_with_what_was_refused_and_taken_away(client: Client, cli: Cli) -> None:
    record(client, task("t"))
    history = [
        ScrubbedHistory(repository="/testbed", head="1", refs_removed=3, commits_removed=41),
        ScrubbedHistory(repository="/other", head="", problem="it is a partial clone"),
    ]
    sandbox = SandboxReport(
        backend="docker", isolation="container", origin="snapshot", network=NetworkPolicy.PROXY_ONLY,
        denied=[Denied(target="example.org:443", count=2)], history=history,
    )  # fmt: skip
    finish(client, "t.0", sandbox=sandbox)
    told = cli("show", "t.0").out
    for text in (
        "sandbox docker (container), snapshot, network proxy-only",
        "refused: example.org:443 (2)",
        "history of /testbed: 3 refs and 41 commits taken away",
        "history of /other: it is a partial clone",
    ):
        assert text in told
