"""Recipes are carried out as Polar's are: uploads, commands with retries, and one clear line for what failed."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from polarq.contracts.rollout import ExecKind, StepReport
from polarq.contracts.specs import PrepareAction, RuntimeSpec
from polarq.errors import RuntimeFault
from polarq.topology.runtimes import LocalRuntimeSection, RuntimesSection
from polarq_worker.runtimes.base import Host
from polarq_worker.runtimes.local import LocalRuntime
from polarq_worker.stages.prepare import PrepareFailed, prepare


@pytest.fixture
async def runtime(tmp_path: Path) -> AsyncIterator[LocalRuntime]:
    host = Host(settings=RuntimesSection(local=LocalRuntimeSection(isolation="none")))
    spec = RuntimeSpec(backend="local", workdir="/polar/session/repo")
    runtime = LocalRuntime(spec, runtime_id="r1", root=tmp_path / "root", host=host)
    await runtime.start()
    yield runtime
    await runtime.stop()


async def do(runtime: LocalRuntime, *actions: dict[str, Any], **options: Any) -> list[StepReport]:
    settings: dict[str, Any] = {"env": {"WHO": "engine"}, "timeout_s": 60.0, "upload_roots": ["*"], **options}
    return await prepare(runtime, [PrepareAction.parse(action) for action in actions], **settings)


def run(command: str, **fields: Any) -> dict[str, Any]:
    return {"type": "exec", "command": command, **fields}


async def test_a_recipe_brings_files_and_runs_commands_in_order(runtime: LocalRuntime, tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    (tmp_path / "data/a.txt").write_text("text")
    reports = await do(
        runtime,
        {"type": "upload_dir", "source": str(tmp_path / "data"), "target": "/polar/session/repo/data"},
        {"type": "upload_file", "source": str(tmp_path / "data/a.txt"), "target": "/polar/session/b.txt"},
        run('pwd; cat repo/data/a.txt b.txt; echo " $WHO $MORE"', env={"MORE": "action"}),
        run("pwd", cwd="/polar/session/repo"),
    )
    session = runtime.layout.session_dir
    assert [report.kind for report in reports] == [ExecKind.EXITED] * 4
    assert reports[2].stdout_tail == f"{session}\ntexttext engine action\n"
    assert reports[3].stdout_tail == f"{session}/repo\n"
    assert (runtime.host_log_dir / "prepare.02.stdout").read_text() == reports[2].stdout_tail


async def test_a_failing_command_is_named_with_its_last_line(runtime: LocalRuntime) -> None:
    with pytest.raises(PrepareFailed) as failure:
        await do(runtime, run("true"), run("echo first >&2; echo 'no such package' >&2; exit 4"), run("touch never"))
    assert str(failure.value) == (
        "prepare action 1 (exec: echo first >&2; echo 'no such package' >&2; exit 4): exit code 4: no such package"
    )
    assert isinstance(failure.value, RuntimeFault)
    assert (failure.value.index, len(failure.value.reports), failure.value.timed_out) == (1, 2, False)
    assert not (Path(runtime.workdir) / "never").exists()


async def test_a_command_is_tried_as_often_as_it_may(runtime: LocalRuntime) -> None:
    flaky = "echo x >> tries; [ $(wc -l < tries) -ge 3 ]"
    reports = await do(runtime, run(flaky, max_attempts=3, retry_backoff_seconds=0.01))
    assert reports[0].exit_code == 0
    with pytest.raises(PrepareFailed):
        await do(runtime, run("echo x >> other; false", max_attempts=2))
    assert (Path(runtime.layout.session_dir) / "other").read_text() == "x\nx\n"


async def test_waiting_for_a_retry_never_passes_the_budget(runtime: LocalRuntime) -> None:
    with pytest.raises(PrepareFailed) as failure:
        await do(runtime, run("exit 7", max_attempts=10, retry_backoff_seconds=60), timeout_s=30.0)
    assert "exit code 7" in str(failure.value)


async def test_an_action_has_its_own_limit_within_the_budget(runtime: LocalRuntime) -> None:
    with pytest.raises(PrepareFailed, match="timed out after 0") as failure:
        await do(runtime, run("sleep 1000", timeout_s=0.3))
    assert failure.value.timed_out
    with pytest.raises(PrepareFailed, match="timed out") as failure:
        await do(runtime, run("sleep 1000"), timeout_s=0.3)
    assert failure.value.timed_out


async def test_an_upload_is_limited_too(runtime: LocalRuntime, tmp_path: Path) -> None:
    for number in range(3000):
        (tmp_path / "many" / str(number // 100)).mkdir(parents=True, exist_ok=True)
        (tmp_path / "many" / str(number // 100) / str(number)).touch()
    upload = {"type": "upload_dir", "source": str(tmp_path / "many"), "target": "many", "timeout_s": 0.01}
    with pytest.raises(PrepareFailed, match="timed out") as failure:
        await do(runtime, upload)
    assert failure.value.timed_out
    assert list(Path(runtime.workdir).iterdir()) == []


@pytest.mark.parametrize(("kind", "noun"), [("upload_file", "file"), ("upload_dir", "folder")])
async def test_a_missing_source_is_named(runtime: LocalRuntime, tmp_path: Path, kind: str, noun: str) -> None:
    with pytest.raises(PrepareFailed, match=rf"action 0 .*there is no {noun} '.*/nothing' on this node"):
        await do(runtime, {"type": kind, "source": str(tmp_path / "nothing"), "target": "x"})


async def test_a_source_outside_the_upload_roots_is_refused(runtime: LocalRuntime, tmp_path: Path) -> None:
    (tmp_path / "allowed").mkdir()
    (tmp_path / "allowed/link").symlink_to("/etc/hostname")
    for source in ("/etc/hostname", str(tmp_path / "allowed/link"), str(tmp_path / "allowed/../file")):
        with pytest.raises(PrepareFailed, match=r"security\.upload_roots"):
            await do(
                runtime,
                {"type": "upload_file", "source": source, "target": "x"},
                upload_roots=[str(tmp_path / "allowed")],
            )


async def test_a_target_outside_the_sandbox_is_refused(runtime: LocalRuntime, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    for target in ("/etc/polarq-test", "../../file", "/polar/session/../../file"):
        with pytest.raises(PrepareFailed):
            await do(runtime, {"type": "upload_file", "source": str(tmp_path / "file"), "target": target})


async def test_cancelling_stops_the_recipe(runtime: LocalRuntime) -> None:
    running = asyncio.ensure_future(do(runtime, run("echo x > begun; sleep 1000"), run("touch never")))
    while not (Path(runtime.layout.session_dir) / "begun").exists():  # noqa: ASYNC110
        await asyncio.sleep(0.005)
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert not (Path(runtime.layout.session_dir) / "never").exists()
