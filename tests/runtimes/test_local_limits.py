"""What a local sandbox behind bubblewrap may use of its machine: memory, files in memory, processors, processes."""

from __future__ import annotations

import asyncio
import os
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from polarq.contracts.rollout import ExecKind
from polarq.contracts.specs import RuntimeSpec
from polarq.errors import RuntimeFault
from polarq_worker.runtimes import cgroups
from polarq_worker.runtimes.base import Host
from polarq_worker.runtimes.local import LocalRuntime

from .local_here import LONG_S, groups_of, made, needs_bubblewrap, needs_groups, prints, settings, until


@pytest.fixture(autouse=True)
def _bubblewrap() -> None:
    needs_bubblewrap()


async def test_a_sandbox_that_runs_out_of_memory_is_told_so_and_goes_on(tmp_path: Path) -> None:
    needs_groups("memory")
    runtime = made(tmp_path, memory_mb=80)
    assert LocalRuntime.problems(runtime.spec, runtime.host) == []
    await runtime.start()
    try:
        result = await runtime.exec(["python", "-c", "x = bytearray(200_000_000)"], timeout_s=LONG_S)
        assert (result.kind, result.signal, result.out_of_memory) == (ExecKind.SIGNALLED, 9, True)
        assert "memory_mb" in result.message and "80 MB" in result.message
        after = await runtime.exec("echo on", timeout_s=LONG_S)
        assert (after.stdout, after.out_of_memory, after.message) == (b"on\n", False, "")
    finally:
        await runtime.stop()


@pytest.mark.parametrize(
    ("wishes", "megabytes"), [({}, 64), ({"kwargs": {"shm_mb": 3}}, 3), ({"memory_mb": 80}, 38)], ids=str
)
async def test_what_lies_in_memory_is_limited_and_leaves_room_for_a_grader(
    tmp_path: Path, wishes: dict[str, Any], megabytes: int
) -> None:
    if "memory_mb" in wishes:
        needs_groups("memory")
    runtime = made(tmp_path, **wishes)
    assert LocalRuntime.problems(runtime.spec, runtime.host) == []
    await runtime.start()
    try:
        # Everything that is in memory and may be written to, also under a name that nobody thought of.
        places = await prints(runtime, "awk '$3 == \"tmpfs\" { print $2 }' /proc/mounts")
        writable = [place for place in places.split() if (await runtime.exec(["test", "-w", place], timeout_s=9)).ok]
        assert writable == ["/dev/shm"]
        filled = await runtime.exec("head -c 1G /dev/zero > /dev/shm/full", timeout_s=LONG_S)
        assert (filled.ok, filled.out_of_memory) == (False, False)
        assert "No space left on device" in filled.stderr_text
        assert int(await prints(runtime, "stat -c %s /dev/shm/full")) >> 20 == megabytes
        assert await prints(runtime, "python -c 'print(len(bytearray(10_000_000)))'") == "10000000"
    finally:
        await runtime.stop()


@pytest.mark.parametrize("wish", [0, -1, True, "64", 1.5])
def test_a_size_of_shared_memory_that_is_none_is_refused(wish: object) -> None:
    host = Host(settings=settings("bubblewrap"))
    spec = RuntimeSpec.parse({"backend": "local", "kwargs": {"shm_mb": wish}})
    [problem] = LocalRuntime.problems(spec, host)
    assert problem.startswith("kwargs.shm_mb: ")


FILL = """
import os, time
count = 0
try:
    while True:
        if os.fork() == 0:
            time.sleep(1000)
            os._exit(0)
        count += 1
except OSError:
    with open("part", "w") as file:
        file.write(str(count))
    os.rename("part", "full")
time.sleep(1000)
"""


@pytest.fixture(params=["a control group", "a user namespace"])
def counted_by(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """What limits processes: as root, where there are no groups, users of the sandbox's own."""
    if request.param == "a user namespace":
        others = {name: place for name, place in cgroups.usable().items() if name != "pids"}
        monkeypatch.setattr(cgroups, "usable", lambda: others)
    elif os.geteuid() == 0:
        needs_groups("pids")


@pytest.mark.usefixtures("counted_by")
async def test_a_sandbox_full_of_processes_starts_no_more_and_goes_on(tmp_path: Path) -> None:
    runtime = made(tmp_path, max_processes=40)
    assert runtime.isolation == "bubblewrap"
    assert LocalRuntime.problems(runtime.spec, runtime.host) == []
    await runtime.start()
    try:
        filling = asyncio.ensure_future(runtime.exec(["python", "-c", FILL], timeout_s=LONG_S))
        full = tmp_path / "full"
        while not full.exists():
            assert not filling.done(), await filling
            with suppress(RuntimeFault):
                await runtime.get_file("full", tmp_path / "got", 100)
                (tmp_path / "got").rename(full)
        assert 30 <= int(full.read_text()) <= 60
        result = await runtime.exec("sleep 0 | sleep 0", timeout_s=5.0)
        if "pids" in cgroups.usable():
            assert result.kind is ExecKind.COULD_NOT_START
            assert "max_processes: 40" in result.message
        else:
            # Those that watch over it are not counted: the first one comes to be, and none that it wants.
            assert not result.ok
        assert await runtime.alive()
        filling.cancel()
        with pytest.raises(asyncio.CancelledError):
            await filling
        assert await prints(runtime, "echo on | cat") == "on"
    finally:
        await runtime.stop()


@pytest.mark.usefixtures("counted_by")
async def test_two_sandboxes_do_not_count_each_others_processes(tmp_path: Path) -> None:
    full, other = made(tmp_path, "full", max_processes=40), made(tmp_path, "other", max_processes=40)
    await asyncio.gather(full.start(), other.start())
    try:
        filling = asyncio.ensure_future(full.exec(["python", "-c", FILL], timeout_s=LONG_S))
        await until(lambda: filling.done() or (full.root / "session/full").exists())
        assert not filling.done(), await filling
        assert await prints(other, "for i in {1..20}; do sleep 1000 & done; jobs -p | wc -l") == "20"
    finally:
        await asyncio.gather(full.stop(), other.stop())


@pytest.mark.usefixtures("counted_by")
async def test_a_counted_sandbox_starts_from_a_snapshot_with_everybody_who_he_is(tmp_path: Path) -> None:
    prepared = made(tmp_path, "prepared", max_processes=40)
    await prepared.start()
    await prints(prepared, "echo one > file; chmod 600 file")
    kept = await prepared.snapshot("recipe")
    await prepared.stop()
    copy = made(tmp_path, "copy", max_processes=40)
    await copy.start(snapshot=kept.reference)
    assert await prints(copy, "cat file; stat -c %U file; echo two >> file; cat file") == "one\nagent\none\ntwo"
    assert not (await copy.exec("cat /etc/shadow", timeout_s=LONG_S)).ok
    if os.geteuid() == 0:
        assert (await copy.exec("id -u", user="4321", timeout_s=LONG_S)).stdout == b"4321\n"
    await copy.stop()


@pytest.mark.usefixtures("counted_by")
async def test_a_fork_bomb_ends_with_its_time(tmp_path: Path) -> None:
    runtime = made(tmp_path, max_processes=40)
    await runtime.start()
    try:
        bomb = "bomb() { bomb | bomb & }; bomb; sleep 1000"
        assert (await runtime.exec(bomb, timeout_s=2.0)).kind in {ExecKind.TIMED_OUT, ExecKind.EXITED}
        assert await runtime.end_background()
        assert await prints(runtime, "echo on | cat") == "on"
    finally:
        await runtime.stop()


async def test_processors_are_limited(tmp_path: Path) -> None:
    needs_groups("cpu")
    runtime = made(tmp_path, cpus=0.5)
    assert LocalRuntime.problems(runtime.spec, runtime.host) == []
    others = groups_of("r1")
    await runtime.start()
    made_now = groups_of("r1") - others
    [quota] = [
        file for group in made_now for name in ("cpu.max", "cpu.cfs_quota_us") if (file := group / name).exists()
    ]
    group = quota.parent
    assert quota.read_text().split()[0] == "50000"
    pids = (group / "cgroup.procs").read_text().split()
    assert runtime._tree is not None and str(runtime._tree.warden_pid) in pids
    await runtime.stop()
    assert not group.exists()


@pytest.mark.parametrize("key", ["memory_mb", "cpus", "max_processes"])
def test_a_limit_that_cannot_be_kept_is_refused(key: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cgroups, "usable", dict)
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    host = Host(settings=settings("none"))
    [problem] = LocalRuntime.problems(RuntimeSpec.parse({"backend": "local", key: 100}), host)
    assert problem.startswith(f"{key}: ") and "control groups" in problem
