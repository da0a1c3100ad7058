"""What a local sandbox behind bubblewrap sees of its machine, what it may use of it, and what it cannot do."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import stat
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import suppress
from pathlib import Path

import pytest

from polarq import bubblewrap
from polarq.contracts.rollout import ExecKind
from polarq.contracts.specs import RuntimeSpec
from polarq.errors import RuntimeFault
from polarq.testing.runtime_contract import appears, lives
from polarq_worker.runtimes import cgroups, strays
from polarq_worker.runtimes.base import Host
from polarq_worker.runtimes.beginning import Beginning
from polarq_worker.runtimes.local import LocalRuntime
from polarq_worker.runtimes.walls import SANDBOX_UID

from ..needs import not_here
from .local_here import LONG_S, groups_of, made, needs_bubblewrap, prints, settings, until


@pytest.fixture(autouse=True)
def _bubblewrap() -> None:
    needs_bubblewrap()


@pytest.fixture
async def runtime(tmp_path: Path) -> AsyncIterator[LocalRuntime]:
    runtime = made(tmp_path)
    await runtime.start()
    yield runtime
    await runtime.stop()


# --- what it sees


async def test_it_says_what_keeps_it_apart(runtime: LocalRuntime) -> None:
    assert runtime.isolation == "bubblewrap"
    assert runtime.layout.session_dir == "/polar/session"
    assert await prints(runtime, "pwd; echo ~; echo $TMPDIR") == "/polar/session\n/polar/home\n/tmp"


async def test_nothing_of_the_system_can_be_written(runtime: LocalRuntime) -> None:
    for path in ("/new", "/usr/new", "/etc/new", "/var/new", "/root/new", "/home/new", "/polar/new", "/polar/run/new"):
        assert not (await runtime.exec(["touch", path], timeout_s=LONG_S)).ok, path
    assert await prints(runtime, "touch /tmp/f /dev/shm/f ~/f f; ls /tmp/f ~/f f | wc -l") == "3"


async def test_homes_and_polarqs_own_files_are_not_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    secrets = [tmp_path / "state/spool/secret", tmp_path / "home/.ssh/id_ed25519", tmp_path / "cwd/.env"]
    for secret in secrets:
        secret.parent.mkdir(parents=True)
        secret.write_text("secret")
        secret.chmod(0o644)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path / "cwd")
    runtime, other = made(tmp_path), made(tmp_path, "other")
    await asyncio.gather(runtime.start(), other.start())
    try:
        await prints(other, "echo secret > mine; chmod 777 . mine")
        for path in [*map(str, secrets), f"{other.root}/session/mine", f"{runtime.root}/logs"]:
            assert not (await runtime.exec(["cat", path], timeout_s=LONG_S)).ok, path
        seen = await prints(runtime, "ls -A /root /home /run 2> /dev/null | grep -v : ; true")
        assert ".ssh" not in seen and ".docker" not in seen and ".bashrc" not in seen
    finally:
        await asyncio.gather(runtime.stop(), other.stop())


async def test_what_is_private_is_so_wherever_it_lies(monkeypatch: pytest.MonkeyPatch) -> None:
    # Not below a temporary or home folder, where nothing is seen anyway.
    if os.geteuid() != 0:
        not_here("a folder outside of home and temporary folders takes root")
    place = Path("/srv/polarq-test-cwd")
    place.mkdir()
    try:
        secrets = (".env", "topology.yaml", "home/.netrc", "state/topology")
        for secret in secrets:
            (place / secret).parent.mkdir(exist_ok=True)
            (place / secret).write_text("TOKEN=secret")
        monkeypatch.setenv("HOME", str(place / "home"))
        (place / "README").write_text("open")
        monkeypatch.chdir(place)
        runtime = made(place)
        await runtime.start()
        assert await prints(runtime, f"cat {place}/README") == "open"
        for secret in secrets:
            assert not (await runtime.exec(["cat", f"{place}/{secret}"], timeout_s=LONG_S)).ok
        await runtime.stop()
    finally:
        subprocess.run(["rm", "-rf", str(place)], check=True)


async def test_what_the_topology_names_is_seen_but_not_written(tmp_path: Path) -> None:
    data = tmp_path / "data/set"
    data.mkdir(parents=True)
    (data / "file").write_text("here\n")
    (tmp_path / "data/beside").write_text("not here")
    runtime = made(tmp_path, "r1", str(data), str(tmp_path / "state"))
    await runtime.start()
    try:
        # But what is polarq's own is not shown, whatever it lies in.
        (tmp_path / "state/secret").touch()
        assert await prints(runtime, f"find {tmp_path}/state ! -type d") == ""
        assert await prints(runtime, f"cat {data}/file; ls {data.parent}") == "here\nset"
        assert not (await runtime.exec(["touch", f"{data}/new"], timeout_s=LONG_S)).ok
    finally:
        await runtime.stop()


async def test_the_workers_python_and_what_is_on_its_path_work(runtime: LocalRuntime) -> None:
    assert await prints(runtime, "python -c 'import sys, pydantic, polarq; print(sys.prefix)'") == sys.prefix
    assert await prints(runtime, "command -v pytest") == f"{Path(sys.executable).parent}/pytest"
    script = "import multiprocessing as m; m.Lock(); import pty; pty.openpty(); print('ok')"
    assert await prints(runtime, f'python -c "{script}"') == "ok"


async def test_a_link_on_the_path_into_a_home_leads_to_its_program(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tool = tmp_path / "home/.local/share/tools/one/bin/tool"
    (tool.parent.parent / "lib").mkdir(parents=True)
    (tool.parent.parent / "lib/part").write_text("part")
    tool.parent.mkdir()
    tool.write_text('#!/bin/sh\ncat "$(dirname "$(readlink -f "$0")")/../lib/part"')
    tool.chmod(0o755)
    (tmp_path / "home/.local/bin").mkdir()
    (tmp_path / "home/.local/bin/tool").symlink_to(tool)
    (tmp_path / "home/.local/share/keyring").write_text("secret")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("PATH", f"{tmp_path}/home/.local/bin:{os.environ['PATH']}")
    runtime = made(tmp_path)
    await runtime.start()
    try:
        assert await prints(runtime, "tool") == "part"
        assert not (await runtime.exec(["cat", f"{tmp_path}/home/.local/share/keyring"], timeout_s=LONG_S)).ok
    finally:
        await runtime.stop()


async def test_it_sees_its_own_processes_only_and_none_of_the_workers(runtime: LocalRuntime) -> None:
    assert await prints(runtime, "grep -l pytest /proc/[0-9]*/cmdline || echo none") == "none"
    assert await prints(runtime, "cat /proc/1/comm") == "polarq-sandbox"
    for hidden in ("/proc/1/environ", "/proc/1/fd", "/proc/1/mem"):
        assert not (await runtime.exec(f"cat {hidden}/. {hidden}", timeout_s=LONG_S)).ok, hidden


# --- who it is


async def test_it_has_no_privilege_and_gains_none(runtime: LocalRuntime) -> None:
    uid = SANDBOX_UID if os.geteuid() == 0 else os.geteuid()
    assert await prints(runtime, "id -u; id -un; whoami") == f"{uid}\nagent\nagent"
    status = dict(line.split(":\t") for line in (await prints(runtime, "cat /proc/self/status")).splitlines())
    assert {status[key].strip("0") for key in ("CapPrm", "CapEff", "CapBnd", "CapAmb")} == {""}
    assert status["NoNewPrivs"] == "1"
    hidden = "cp /usr/bin/id hidden && chmod 4755 hidden && ./hidden -u"
    result = await runtime.exec(f"{hidden}; su -c id < /dev/null", timeout_s=LONG_S)
    assert result.stdout_text.split()[0] == str(uid)
    assert "uid=0" not in result.stdout_text
    assert not (await runtime.exec("mount -t tmpfs none /tmp", timeout_s=LONG_S)).ok
    assert not (await runtime.exec("mknod dev c 1 5", timeout_s=LONG_S)).ok


@pytest.mark.parametrize("user", ["root", "0", "daemon", "1", "4294967295", "x"])
async def test_a_user_of_the_machine_is_nobody_to_run_as(runtime: LocalRuntime, user: str) -> None:
    result = await runtime.exec("id", user=user, timeout_s=LONG_S)
    assert (result.kind, result.stdout) == (ExecKind.COULD_NOT_START, b"")
    assert result.message.startswith("user: ")
    assert LocalRuntime.problems(RuntimeSpec(backend="local", user=user), runtime.host) == [result.message]


async def test_whom_the_task_names_runs_its_commands(tmp_path: Path) -> None:
    if os.geteuid() != 0:
        not_here("running commands as another user takes root")
    runtime = made(tmp_path, user="4321")
    await runtime.start()
    assert await prints(runtime, "id -u; id -G") == "4321\n4321"
    assert (await runtime.exec(["id", "-un"], user="agent", timeout_s=LONG_S)).stdout == b"agent\n"
    await runtime.stop()


async def test_what_is_brought_in_is_its_own(runtime: LocalRuntime, tmp_path: Path) -> None:
    (tmp_path / "folder/sub").mkdir(parents=True)
    (tmp_path / "folder/sub/file").write_text("x")
    (tmp_path / "folder/link").symlink_to("sub")
    await runtime.put_dir(tmp_path / "folder", "deep/er/folder")
    await runtime.put_file(tmp_path / "folder/sub/file", "~file")
    await runtime.put_bytes(b"x", "/polar/home/.config/tool/settings")
    await runtime.put_bytes(b"x", "/tmp/sub/file")
    # On one file system: what is seen of the machine's own /tmp is mounted there, and somebody else's.
    assert await prints(runtime, "find . ~ /tmp/sub -xdev -not -user agent") == ""
    await prints(runtime, "echo y >> deep/er/folder/sub/file; rm -r deep ~/.config /tmp/sub ./~file")


# --- its processes


async def test_killing_all_that_it_can_kill_harms_only_itself(runtime: LocalRuntime) -> None:
    script = "kill -9 -1; kill -9 1; kill -INT 1; kill -STOP 1; pkill -9 python; pkill -9 -f polarq; true"
    await runtime.put_bytes(script.encode(), "script")
    for _ in range(3):
        result = await runtime.exec("bash script", timeout_s=LONG_S)
        assert result.kind in {ExecKind.EXITED, ExecKind.SIGNALLED}
        if os.geteuid() == 0:
            # Those who watch over it are another user's.
            assert await prints(runtime, "echo on") == "on"
    assert await runtime.alive()
    assert await prints(runtime, "echo on") == "on"


async def test_a_killed_first_process_takes_all_others_with_it(runtime: LocalRuntime) -> None:
    running = asyncio.ensure_future(runtime.exec("setsid sleep 4242 & echo x > up; sleep 1000", timeout_s=LONG_S))
    await appears(runtime, "up")
    assert runtime._tree is not None
    os.kill(runtime._tree.warden_pid, signal.SIGKILL)
    assert (await running).kind is ExecKind.SANDBOX_LOST
    await until(lambda: "sleep\x004242" not in _command_lines())
    assert (await runtime.exec("true", timeout_s=LONG_S)).kind is ExecKind.SANDBOX_LOST
    assert not await runtime.alive()
    with pytest.raises(RuntimeFault, match="lost"):
        await runtime.put_bytes(b"x", "file")


def _command_lines() -> str:
    found = []
    for folder in Path("/proc").iterdir():
        try:
            found.append((folder / "cmdline").read_text(errors="replace") if folder.name.isdecimal() else "")
        except OSError:
            continue
    return "\n".join(found)


WORKER = """
import asyncio, sys
from pathlib import Path
from polarq.contracts.specs import RuntimeSpec
from polarq.topology.runtimes import RuntimesSection
from polarq_worker.runtimes.base import Host
from polarq_worker.runtimes.beginning import Beginning
from polarq_worker.runtimes.local import LocalRuntime

async def main():
    state = Path(sys.argv[1])
    settings = RuntimesSection.parse({"local": {"isolation": "bubblewrap"}})
    host = Host("node0", "1", state / "runtimes", settings, (state,))
    spec = RuntimeSpec.parse({"backend": "local", **({"max_processes": 50} if sys.argv[2] == "limited" else {})})
    first = LocalRuntime(spec, runtime_id="first", root=state / "first", host=host)
    await first.start()
    kept = await first.snapshot("recipe")
    second = LocalRuntime(spec, runtime_id="second", root=state / "second", host=host)
    await second.start(snapshot=kept.reference)
    await second.exec("setsid env -i bash -c 'exec sleep 54321' &", timeout_s=60)
    await second.exec("until pgrep -f 'sleep 54321'; do sleep 0.01; done", timeout_s=60)
    await LocalRuntime.drop_snapshot(kept.reference, host)
    (state / "up").touch()
    await second.exec("sleep 1000", timeout_s=1000)

asyncio.run(main())
"""


async def test_a_killed_worker_leaves_nothing_that_its_successor_does_not_find(tmp_path: Path) -> None:
    state = tmp_path / "state"
    state.mkdir()
    limited = "limited" if "pids" in cgroups.usable() else "not"
    others = groups_of("second")
    worker = subprocess.Popen([sys.executable, "-c", WORKER, str(state), limited])
    try:
        await until(lambda: (state / "up").exists() or worker.poll() is not None)
        assert worker.poll() is None
    finally:
        worker.kill()
        worker.wait()
    await until(lambda: "sleep\x0054321" not in _command_lines())
    host = Host("node0", "2", state / "runtimes", settings("bubblewrap"), (state,))
    groups = groups_of("second") - others
    assert bool(groups) == (limited == "limited")
    assert sorted(await LocalRuntime.sweep(host, ())) == ["first", "second"]
    assert await LocalRuntime.sweep(host, ()) == []
    assert sorted(path.name for path in state.iterdir()) == ["runtimes", "up"]
    assert [path for path in (state / "runtimes").rglob("*") if path.is_file()] == []
    assert not any(group.exists() for group in groups)


@pytest.mark.parametrize("turns", [0, 1, 2, 3, 5, 8, 12])
async def test_a_start_that_its_stop_overtakes_leaves_no_process_no_group_and_no_note(
    tmp_path: Path, turns: int
) -> None:
    prepared = made(tmp_path, "prepared")
    await prepared.start()
    kept = await prepared.snapshot("recipe")
    await prepared.stop()
    limits = {"memory_mb": 100, "cpus": 1.0} if {"memory", "cpu"} <= set(cgroups.usable()) else {}
    # A name that no other test has: their sandboxes start and stop beside this one.
    name = f"overtaken-{turns}"
    overtaken = made(tmp_path, name, **limits)
    starting = asyncio.ensure_future(overtaken.start(snapshot=kept.reference))
    for _ in range(turns):
        # Something of it has gone on.
        await asyncio.sleep(0.002)
    await overtaken.stop()
    with suppress(RuntimeFault):
        await starting
    assert not overtaken.root.exists()
    assert groups_of(name) == set()
    # On a busy machine the kernel shows one that was killed for a moment more.
    await until(lambda: str(overtaken.root) not in _command_lines())
    assert [path.name for path in (tmp_path / "state/runtimes/local/sandboxes").iterdir()] == []


# --- its network, its place


async def test_an_offline_sandbox_reaches_no_socket_of_the_machine(tmp_path: Path) -> None:
    abstract = socket.socket(socket.AF_UNIX)
    abstract.bind(f"\0polarq-test-{os.getpid()}")
    abstract.listen()
    runtime = made(tmp_path, network="none")
    assert LocalRuntime.problems(runtime.spec, runtime.host) == []
    await runtime.start(online=False)
    script = f"import socket; socket.socket(socket.AF_UNIX).connect('\\\\0polarq-test-{os.getpid()}')"
    result = await runtime.exec(["python", "-c", script.replace("\\\\", "\\")], timeout_s=LONG_S)
    await runtime.stop()
    abstract.close()
    assert "ConnectionRefusedError" in result.stderr_text


async def test_no_door_can_be_where_somebody_listens_or_where_the_network_is_the_machines(
    runtime: LocalRuntime, tmp_path: Path
) -> None:
    with pytest.raises(RuntimeFault, match="with the network"):
        await runtime.open_door(18080)
    offline = made(tmp_path, "offline")
    await offline.start(online=False)
    door = await offline.open_door(18080)
    with pytest.raises(RuntimeFault, match="18080"):
        await offline.open_door(18080)
    door.close()
    await offline.stop()


async def test_a_folder_whose_name_is_longer_than_a_sockets_may_be_is_no_problem(tmp_path: Path) -> None:
    deep = tmp_path / ("d" * 140)
    deep.mkdir()
    runtime = made(deep, "r" * 64)
    await runtime.start(online=False)
    door = await runtime.open_door(18080)
    assert await prints(runtime, "pwd") == "/polar/session"
    door.close()
    await runtime.stop()


def test_a_workdir_of_the_machine_is_refused(tmp_path: Path) -> None:
    host = Host(settings=settings("bubblewrap"))
    [problem] = LocalRuntime.problems(RuntimeSpec(backend="local", workdir="/srv/data"), host)
    assert problem.startswith("workdir: ") and "/polar/session" in problem
    for workdir in ("/polar/session/repo", "repo", "/tmp/x", "/polar/home/x"):
        assert LocalRuntime.problems(RuntimeSpec(backend="local", workdir=workdir), host) == []


async def test_walls_that_are_asked_for_and_missing_are_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bubblewrap, "why_not", lambda: "it is not there")
    asked = made(tmp_path)
    [problem] = LocalRuntime.problems(asked.spec, asked.host)
    assert "runtimes.local.isolation" in problem and "it is not there" in problem
    with pytest.raises(RuntimeFault, match="it is not there"):
        await asked.start()
    assert LocalRuntime.problems(asked.spec, Host(settings=settings("auto"))) == []
    assert made(tmp_path, "other").isolation == "none"


async def test_without_walls_no_sandbox_can_be_cut_off(tmp_path: Path) -> None:
    host = Host(settings=settings("none"))
    assert not LocalRuntime.keeps_offline(host)
    runtime = LocalRuntime(RuntimeSpec(backend="local"), runtime_id="r1", root=tmp_path / "r1", host=host)
    with pytest.raises(RuntimeFault, match="cannot cut"):
        await runtime.start(online=False)
    await runtime.stop()


async def test_where_nothing_can_be_laid_over_a_snapshot_it_is_copied(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Beginning, "_overlays", True)
    monkeypatch.setattr(Beginning, "_over", lambda self, base: [(str(tmp_path / "missing"), "lowerdir=/no/such")])
    prepared = made(tmp_path, "prepared")
    await prepared.start()
    await prints(prepared, "echo one > file; chmod 600 file")
    kept = await prepared.snapshot("recipe")
    await prepared.stop()
    copy = made(tmp_path, "copy")
    await copy.start(snapshot=kept.reference)
    assert await prints(copy, "cat file; stat -c '%a %U' file; echo two >> file") == "one\n600 agent"
    assert not Beginning._overlays
    await copy.stop()
    again = made(tmp_path, "again")
    await again.start(snapshot=kept.reference)
    assert await prints(again, "cat file") == "one"
    await again.stop()


async def test_a_snapshot_that_is_cut_short_is_none(tmp_path: Path) -> None:
    prepared = made(tmp_path)
    await prepared.start()
    await prints(prepared, "echo one > file")
    with pytest.raises(RuntimeFault, match="no name"):
        await prepared.snapshot("../x")
    making = tmp_path / "state/runtimes/local/snapshots"
    ours = f"{os.getpid()}.{strays.start_time(Path('/proc/self'))}"
    # As a worker leaves it that was killed meanwhile: of a process that there is not, of one that had our number before
    # us (in a container all have the same), and ours.
    for maker in ("999999999.1", f"{os.getpid()}.1", ours):
        (making / f".making-{maker}-recipe~0/session").mkdir(parents=True)
    assert await LocalRuntime.snapshots(prepared.host) == []
    await LocalRuntime.sweep(prepared.host, {"r1"})
    assert [path.name for path in making.iterdir()] == [f".making-{ours}-recipe~0"]
    first, second = await prepared.snapshot("recipe"), await prepared.snapshot("recipe")
    assert [one.reference for one in await LocalRuntime.snapshots(prepared.host)] == [second.reference]
    assert first.reference != second.reference
    await prepared.stop()


async def test_nothing_writes_while_a_snapshot_is_taken(tmp_path: Path) -> None:
    runtime = made(tmp_path)
    await runtime.start()
    running = asyncio.ensure_future(runtime.exec("echo $$ > pid; while :; do date >> log; done", timeout_s=LONG_S))
    await runtime.exec("setsid bash -c 'echo $$ > other; sleep 1000' &", timeout_s=LONG_S)
    pids = [await appears(runtime, name) for name in ("pid", "other")]
    await runtime.snapshot("recipe")
    assert (await running).kind is ExecKind.SIGNALLED
    assert not any([await lives(runtime, pid) for pid in pids])
    await runtime.stop()


async def test_sockets_and_devices_are_refused_by_name(runtime: LocalRuntime, tmp_path: Path) -> None:
    script = "import socket; socket.socket(socket.AF_UNIX).bind('out/socket')"
    await prints(runtime, f'mkdir out && echo a > out/a && python -c "{script}"')
    if os.geteuid() == 0:
        # What no program in it can make; whoever else could is not the sandbox.
        os.mknod(runtime.root / "session/out/device", 0o600 | stat.S_IFCHR, os.makedev(1, 5))
    fetched = await runtime.get_dir("out", tmp_path / "got", max_bytes=1000, max_files=10)
    assert [path.name for path in (tmp_path / "got").iterdir()] == ["a"]
    refused = {entry.path: entry.reason for entry in fetched.refused}
    assert refused == {"socket": "a socket", **({"device": "a device"} if os.geteuid() == 0 else {})}
    with pytest.raises(RuntimeFault, match="regular file"):
        await runtime.get_file("out/socket", tmp_path / "one", 1000)
