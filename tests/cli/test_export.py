"""`polarq export`, `import` and `rebuild`, from Redis, from an archive and from a file."""

from __future__ import annotations

import asyncio
import importlib.util
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from polarq.cli.fidelity import fidelity_lines
from polarq.client import Client
from polarq.contracts import Boundary, Break, Outcome, RolloutState
from polarq.contracts.rollout import RolloutSummary
from polarq.contracts.task import Task
from polarq.export.formats import read_rows
from polarq.ledger import Claim
from polarq.store.archive import Archive
from polarq.store.completions import CompletionLog
from polarq.store.grants import GrantSpec, open_grant
from polarq.store.payloads import encode_result, put_payload
from polarq.trainers.rows import rows
from polarq_proxy.serve import connect
from tests.cli.conftest import POLARQ, Cli
from tests.cli.driving import claim, failed, finish, record, task
from tests.cli.terminals import Terminal
from tests.export.samples import FAILED, result, session
from tests.needs import not_here


def kept(folder: Path, *indices: int) -> Archive:
    """An archive with task `t`, whose rollout 1 failed."""
    archive = Archive(str(folder))
    for index in indices:
        request = Task.load({**task("t", 4).model_dump(mode="json"), "run_id": "run"})
        archive.keep(request, result(index, outcome=FAILED if index == 1 else None))
    return archive


def test_a_task_and_a_rollout_and_a_run_are_exported(client: Client, cli: Cli, tmp_path: Path) -> None:
    record(client, task("a", 3, run_id="r"))
    record(client, task("b", 1, run_id="r"))
    done = [finish(client, "a.0"), finish(client, "b.0", reward=0.5)]
    finish(client, "a.1", failed("boom"), None)
    ran = cli("export", "a", "--to", str(tmp_path / "a.jsonl"))
    assert (ran.code, ran.err) == (0, "")
    assert ran.out == (
        f"1 records of 1 rollouts in {tmp_path / 'a.jsonl'}\n"
        "  left out: 1 not trainable: harness/exit_code\n"
        "  left out: 1 not ended\n"
    )
    assert list(read_rows(tmp_path / "a.jsonl")) == rows(done[0])
    assert cli("export", "a.0", "b", "--to", str(tmp_path / "ab.jsonl")).code == 0
    assert [row.rollout_id for row in read_rows(tmp_path / "ab.jsonl")] == ["a.0", "b.0"]
    told = cli("export", "--run", "r", "--to", str(tmp_path / "run.jsonl"), "--json").json
    assert told == {
        "file": str(tmp_path / "run.jsonl"),
        "format": "jsonl",
        "rollouts": 2,
        "records": 2,
        "skipped": {"not trainable: harness/exit_code": 1, "not ended": 1},
        "traces_left_out": {},
    }
    assert {row.rollout_id for row in read_rows(tmp_path / "run.jsonl")} == {"a.0", "b.0"}


def test_what_was_acknowledged_is_counted(client: Client, cli: Cli, tmp_path: Path) -> None:
    record(client, task("t", 2))
    finish(client, "t.0")
    finish(client, "t.1")
    client.acknowledge(["t.0"])
    assert cli("export", "t", "--to", str(tmp_path / "o.jsonl")).out.endswith(
        "  left out: 1 no trajectory in the store\n"
    )


def test_a_damaged_result_is_counted_and_told_by_the_exit_code(client: Client, cli: Cli, tmp_path: Path) -> None:
    record(client, task("t", 2))
    finish(client, "t.0")
    finish(client, "t.1")
    ref = client.record("t").rollouts[0].summary
    assert ref is not None
    assert ref.payload is not None
    client.ledger.redis.setrange(f"{ref.payload.key}:0", 20, b"damaged")
    ran = cli("export", "t", "--to", str(tmp_path / "o.jsonl"))
    assert (ran.code, "left out: 1 damaged in the store" in ran.out) == (1, True)
    assert [row.rollout_id for row in read_rows(tmp_path / "o.jsonl")] == ["t.1"]


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (("t", "--to", "x"), "give --format, one of parquet, jsonl, sft, polar, atif, completions"),
        (("t", "--to", "x", "--format", "csv"), "give --format, one of"),
        (("--to", "x.jsonl"), "name tasks or rollouts, or give --run RUN or --archive FOLDER"),
        (("t", "--run", "r", "--to", "x.jsonl"), "not both"),
        (("t", "--to", "x", "--format", "atif", "--all"), "--all is for parquet and jsonl"),
        (("t", "--to", "x.jsonl", "--min-reward", "1"), "are for --format sft"),
        (("--archive", "a", "--to", "x", "--format", "completions"), "an archive has no captured calls"),
        (("none", "--to", "x.jsonl"), "no task 'none' in the ledger"),
        (("--run", "none", "--to", "x.jsonl"), "no task of run 'none' in the ledger"),
        (("--archive", "none", "--to", "x.jsonl"), "archive none: there are no rollouts in it"),
        (("t", "--to", "x", "--format", "sft", "--min-reward", "nan"), "--min-reward nan is no number"),
    ],
)
def test_bad_usage_is_one_line(
    cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: tuple[str, ...], problem: str
) -> None:
    monkeypatch.chdir(tmp_path)
    ran = cli("export", *arguments)
    assert (ran.code, ran.out, ran.err.count("\n")) == (2, "", 1)
    assert problem in ran.err
    assert [path.name for path in tmp_path.iterdir() if "x" in path.name] == []


@pytest.mark.parametrize("compress", [False, True])
def test_an_archive_is_a_source_too(cli: Cli, tmp_path: Path, compress: bool) -> None:
    archive = Archive(str(tmp_path / "kept"), compress=compress)
    for one in (result(0), result(1, outcome=FAILED), result(0, task_id="u")):
        request = Task.load({**task(one.task_id, 2).model_dump(mode="json"), "run_id": f"run-{one.task_id}"})
        archive.keep(request, one)
    place = ("--archive", str(tmp_path / "kept"))
    ran = cli("export", *place, "--to", str(tmp_path / "all.jsonl"))
    assert (ran.code, ran.out.splitlines()[1]) == (0, "  left out: 1 not trainable: runtime/sandbox_lost")
    assert list(read_rows(tmp_path / "all.jsonl")) == [*rows(result(0)), *rows(result(0, task_id="u"))]
    for name, target in (("task", ("u",)), ("rollout", ("u.0",)), ("run", ("--run", "run-u"))):
        assert cli("export", *target, *place, "--to", str(tmp_path / f"{name}.jsonl")).code == 0
        assert list(read_rows(tmp_path / f"{name}.jsonl")) == rows(result(0, task_id="u"))
    ran = cli("export", "v", *place, "--to", str(tmp_path / "v.jsonl"))
    assert (ran.code, "v: is no task and no rollout of the archive" in ran.err) == (2, True)
    ran = cli("export", "--run", "run-v", *place, "--to", str(tmp_path / "v.jsonl"))
    assert (ran.code, "there are no rollouts of run 'run-v' in it" in ran.err) == (2, True)


@pytest.mark.parametrize("form", ["jsonl", "polar", "parquet", "atif"])
def test_what_is_imported_is_exported_as_the_same_rows(cli: Cli, tmp_path: Path, form: str) -> None:
    if importlib.util.find_spec({"parquet": "pyarrow", "atif": "atif"}.get(form, "json")) is None:
        not_here(f"{form} needs a package that is not installed")
    kept(tmp_path / "kept", 0, 1, 2)
    made = tmp_path / f"out.{ {'parquet': 'parquet', 'atif': 'd'}.get(form, 'jsonl') }"
    assert cli("export", "--archive", str(tmp_path / "kept"), "--format", form, "--to", str(made)).code == 0
    ran = cli("import", str(made), "--to", str(tmp_path / "back"))
    traces, whole = (2, 2) if form in {"jsonl", "parquet"} else (6, 3)
    assert (ran.code, ran.out) == (0, f"{traces} traces of {whole} rollouts in {tmp_path / 'back'}\n")
    for name in ("kept", "back"):
        assert cli("export", "--archive", str(tmp_path / name), "--to", str(tmp_path / f"{name}.jsonl")).code == 0
    assert list(read_rows(tmp_path / "back.jsonl")) == list(read_rows(tmp_path / "kept.jsonl"))
    again = cli("import", str(made), "--to", str(tmp_path / "back"))
    assert (again.code, again.out) == (0, f"0 traces of 0 rollouts in {tmp_path / 'back'}; {whole} were there\n")
    kept(tmp_path / "back", 0).put(result(0, reward=0.25))
    ran = cli("import", str(made), "--to", str(tmp_path / "back"))
    assert (ran.code, "t.0: another one is in the archive" in ran.err) == (2, True)


def test_only_what_holds_results_is_imported(cli: Cli, tmp_path: Path) -> None:
    (tmp_path / "x.jsonl").write_text('{"messages": []}\n')
    for name, problem in (("x.jsonl", "of no format that can be read back"), ("none.jsonl", "there is no such file")):
        ran = cli("import", str(tmp_path / name), "--to", str(tmp_path / "back"))
        assert (ran.code, problem in ran.err, ran.err.count("\n")) == (2, True, 1)


def captured(client: Client, redis_url: str, rollout_id: str) -> None:
    """Records the calls of `session` as a proxy does, for an attempt that is claimed here and then committed."""
    granted = claim(client, rollout_id)
    spec = GrantSpec(
        rollout_id=rollout_id, task_id=granted.task.task_id, attempt=granted.attempt, token=granted.token,
        node_id="node0", model="m",
    )  # fmt: skip

    async def write() -> None:
        redis, keys = connect(redis_url), client.ledger.calls.keys
        secret = await open_grant(redis, keys, spec, ttl_s=60)
        await CompletionLog(redis, keys).extend(session(), spec, secret)
        await redis.aclose()

    asyncio.run(write())
    finish_claimed(client, granted)


def finish_claimed(client: Client, granted: Claim) -> None:
    made = result(0, task_id=granted.task.task_id)
    data, raw = encode_result(made)
    keys = client.ledger.calls.keys
    ref, writes = put_payload(keys, granted.rollout_id, granted.attempt, granted.token, data, raw_bytes=raw, keep_s=600)
    for write in writes:
        client.ledger.do(write)
    summary = RolloutSummary(outcome=made.outcome, reward=1.0, calls=3, payload=ref)
    assert client.ledger.do(client.ledger.calls.commit(granted.rollout_id, granted.token, summary)).won


def test_captured_calls_are_rebuilt_from_redis_and_from_a_file(
    client: Client, cli: Cli, redis_url: str, tmp_path: Path
) -> None:
    record(client, task("t", 2))
    captured(client, redis_url, "t.0")
    ran = cli("rebuild", "t.0", "--builder", "per_request", "--to", str(tmp_path / "one"))
    assert (ran.code, ran.err) == (0, "")
    assert ran.out.splitlines()[:2] == [
        "t.0",
        "  trajectory by per_request: 3 calls, 3 traces, 5 sampled tokens, 4 trainable (80.0% of those of its steps)",
    ]
    assert "call 2 is not trainable: log-probability 0 is missing" in ran.out
    back = Archive(str(tmp_path / "one")).result("t", 0)
    assert back.trajectory is not None
    assert [trace.response_ids for trace in back.trajectory.traces] == [[3, 9], [6, 7], [8]]
    assert [row.reward for row in rows(back)] == [1.0, 1.0]
    file = tmp_path / "calls.jsonl"
    told = cli("export", "t", "--format", "completions", "--to", str(file))
    assert told.out.splitlines() == [f"4 records of 1 rollouts in {file}", "  left out: 1 not ended"]
    ran = cli("rebuild", "--from", str(file), "--set", "emit=last_path", "--json")
    assert [one["fidelity"]["traces"] for one in ran.json] == [1]
    # Without --to nothing is written; the same file again gives the same trajectory as the worker's.
    assert cli("rebuild", "--from", str(file), "--to", str(tmp_path / "same")).code == 0
    same = Archive(str(tmp_path / "same")).result("t", 0)
    assert same.trajectory is not None
    assert same.trajectory.traces == client.rollout("t.0").trajectory.traces  # type: ignore[union-attr]


def test_rebuild_says_what_it_cannot_do(client: Client, cli: Cli, tmp_path: Path) -> None:
    record(client, task("t", 2))
    finish(client, "t.0")
    for arguments, problem in (
        ((), "name a task or rollout, or give --from FILE"),
        (("t", "--from", "x"), "name a task or rollout, or give --from FILE"),
        (("t.1",), "nothing of 't.1' has ended"),
        (("t.0",), "what rollout 't.0' captured is not in Redis any more"),
        (("t.0", "--set", "x"), "--set takes KEY=VALUE, not 'x'"),
        (("t.0", "--builder", "x"), "builder 'x' is not installed here"),
        (("--from", str(tmp_path / "none")), "there is no file"),
    ):
        ran = cli("rebuild", *arguments)
        assert (ran.code, ran.out, ran.err.count("\n")) == (2, "", 1), arguments
        assert problem in ran.err


def test_a_killed_export_goes_on(client: Client, tmp_path: Path) -> None:
    """The real program, killed while its second part waits for a Redis that is slow to answer."""
    archive = kept(tmp_path / "kept", 0, 2, 3)
    target = tmp_path / "out.jsonl"
    # A rollout that nobody can read until somebody writes it: the export stands there.
    pipe = tmp_path / "kept" / "t" / "4.json"
    os.mkfifo(pipe)
    code = "import polarq.export.run as r; r.PART_ROLLOUTS = 2; from polarq.cli.main import run; run()"
    arguments = ["export", "--archive", archive.root, "--to", str(target)]
    process = subprocess.Popen([sys.executable, "-c", code, *arguments])
    with pipe.open("wb"):  # opens when the export reads
        process.send_signal(signal.SIGKILL)
        assert process.wait(60) == -signal.SIGKILL
    assert not target.exists()
    pipe.unlink()
    pipe.write_bytes(result(4).model_dump_json().encode())
    ran = subprocess.run([*POLARQ, *arguments], capture_output=True, text=True, timeout=60, check=False)
    assert ran.stdout == f"going on: 2 rollouts were through\n4 records of 4 rollouts in {target}\n"
    assert [row.rollout_id for row in read_rows(target)] == ["t.0", "t.2", "t.3", "t.4"]
    assert sorted(path.name for path in tmp_path.iterdir() if "out" in path.name) == ["out.jsonl"]


def test_show_tells_the_fidelity_with_breaks_and_their_causes(client: Client, cli: Cli) -> None:
    record(client, task("t", 1))
    refused = Outcome(state=RolloutState.FAILED, boundary=Boundary.BUILDER, reason="fidelity", message="breaks is 1")
    made = finish(client, "t.0", refused, None)
    assert made.trajectory is not None
    fidelity = made.trajectory.fidelity.model_copy(
        update={"breaks": [Break(seq=4, position=1234, cause="prompt re-rendered", continues=3)], "side_calls": 2}
        | {"images": 3, "unplaced_images": 1}
    )
    lines = [line.plain for line in fidelity_lines(made.trajectory.model_copy(update={"fidelity": fidelity}))]
    assert lines == [
        "  trajectory by per_request: 1 calls, 1 traces, 3 sampled tokens, 3 trainable",
        "    2 side calls, 3 pictures, 1 pictures without a place (the topology's image_token_id tells it)",
        "    break: call 4 leaves the ids of call 3 at position 1,234: prompt re-rendered",
    ]
    out = cli("show", "t.0").out
    assert "builder/fidelity" in out
    assert "trajectory by per_request: 1 calls, 1 traces, 3 sampled tokens, 3 trainable" in out


def test_progress_is_drawn_on_a_terminal_alone(deployment: Path, tmp_path: Path) -> None:
    archive = kept(tmp_path / "kept", 0, 2)
    arguments = [*POLARQ, "export", "--archive", archive.root, "--to"]
    plain = subprocess.run([*arguments, str(tmp_path / "a.jsonl")], capture_output=True, text=True, check=True)
    assert plain.stdout == f"2 records of 2 rollouts in {tmp_path / 'a.jsonl'}\n"
    pipe = tmp_path / "kept" / "t" / "3.json"
    os.mkfifo(pipe)
    terminal = Terminal([*arguments, str(tmp_path / "b.jsonl")], columns=100)
    with pipe.open("wb") as late:  # opens when the export reads
        terminal.read_until(b"of 1 tasks")
        late.write(result(3).model_dump_json().encode())
    drawn = terminal.end()
    assert drawn.code == 0
    assert "3 records of 3 rollouts in" in drawn.text
