"""What the local runtime promises beyond the contract, without walls."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from polarq.contracts.rollout import ExecKind
from polarq.contracts.specs import RuntimeSpec
from polarq.errors import CannotBeKept, RuntimeFault
from polarq.testing.runtime_contract import appears
from polarq_worker.runtimes.base import Host
from polarq_worker.runtimes.capture import LOG_CAP_BYTES
from polarq_worker.runtimes.local import LocalRuntime

from ..needs import not_here
from .local_here import settings

LONG_S = 120.0


def processes_of(root: Path) -> list[int]:
    """Every process that was started in the sandbox, zombies left out."""
    found = []
    for folder in Path("/proc").iterdir():
        if folder.name.isdecimal():
            try:
                environment = (folder / "environ").read_bytes()
            except OSError:
                continue
            if os.fsencode(root) in environment:
                found.append(int(folder.name))
    return found


def marked_of(root: Path) -> list[int]:
    """Those that still have the environment that commands start with."""
    return [pid for pid in processes_of(root) if b"POLARQ_RUNTIME_ID=" in Path(f"/proc/{pid}/environ").read_bytes()]


def warden_of(root: Path) -> int:
    """The process whose standard error goes into the sandbox's folder and that leads its session."""
    for folder in Path("/proc").iterdir():
        try:
            leads = folder.name.isdecimal() and os.getsid(int(folder.name)) == int(folder.name)
            if leads and (folder / "fd/2").readlink() == root / "run/warden.stderr":
                return int(folder.name)
        except OSError:
            # It ended while we looked.
            continue
    raise AssertionError("no warden")


def nursery_of(root: Path) -> int:
    """The process that forked the sandbox's warden."""
    return int(Path(f"/proc/{warden_of(root)}/stat").read_text().rpartition(")")[2].split()[1])


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


async def until(condition: Callable[[], bool]) -> None:
    # Other processes send no events to wait for.
    while not condition():  # noqa: ASYNC110
        await asyncio.sleep(0.005)


async def started(root: Path, **spec: object) -> LocalRuntime:
    """One without walls: most of what is looked at here is on the machine."""
    host = Host(settings=settings("none"))
    runtime = LocalRuntime(RuntimeSpec.parse({"backend": "local", **spec}), runtime_id="r1", root=root, host=host)
    await runtime.start()
    return runtime


@pytest.fixture
async def runtime(tmp_path: Path) -> AsyncIterator[LocalRuntime]:
    runtime = await started(tmp_path / "root")
    yield runtime
    await runtime.stop()


async def test_the_folder_is_private_and_gone_after_stop(tmp_path: Path) -> None:
    runtime = await started(tmp_path / "deep/root")
    assert (tmp_path / "deep/root").stat().st_mode & 0o777 == 0o700
    await runtime.exec("mkdir -p ro/sub; touch ro/sub/f; chmod -R a-w ro; chmod 0 ro", timeout_s=LONG_S)
    await runtime.stop()
    assert list((tmp_path / "deep").iterdir()) == []


async def test_an_existing_folder_is_never_taken_over(tmp_path: Path) -> None:
    (tmp_path / "root").mkdir()
    (tmp_path / "root/precious").touch()
    runtime = LocalRuntime(RuntimeSpec(backend="local"), runtime_id="r1", root=tmp_path / "root")
    with pytest.raises(RuntimeFault, match="exists already"):
        await runtime.start()
    await runtime.stop()
    assert (tmp_path / "root/precious").exists()


async def test_home_and_temporary_folder_are_the_sandboxs_own(runtime: LocalRuntime) -> None:
    result = await runtime.exec('touch ~/f "$TMPDIR"/g && echo ~ && dirname "$(mktemp)"', timeout_s=LONG_S)
    assert result.stdout_text.split() == [str(runtime.root / "home"), str(runtime.root / "tmp")]


async def test_programs_beside_the_workers_python_are_found(
    runtime: LocalRuntime, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", "/usr/bin:/bin")
    result = await runtime.exec("command -v pytest", timeout_s=LONG_S)
    assert Path(result.stdout_text.strip()).parent == Path(sys.executable).parent


async def test_git_does_not_climb_into_a_repository_around_the_state_folder(tmp_path: Path) -> None:
    subprocess.run(["git", "init", "-q", str(tmp_path)], check=True)
    runtime = await started(tmp_path / "root")
    result = await runtime.exec("git rev-parse --git-dir", timeout_s=LONG_S)
    await runtime.stop()
    assert "not a git repository" in result.stderr_text


async def test_the_workdir_may_be_a_folder_of_the_host(tmp_path: Path) -> None:
    host = tmp_path / "testbed"
    host.mkdir()
    runtime = await started(tmp_path / "root", workdir=str(host))
    try:
        assert (await runtime.exec("pwd", timeout_s=LONG_S)).stdout_text.strip() == str(host)
        await runtime.put_bytes(b"x", "relative")
        await runtime.put_bytes(b"x", f"{host}/absolute")
        assert sorted(path.name for path in host.iterdir()) == ["absolute", "relative"]
        with pytest.raises(RuntimeFault, match="outside the sandbox"):
            await runtime.put_bytes(b"x", str(tmp_path / "elsewhere"))
    finally:
        await runtime.stop()
    assert host.is_dir()


async def test_a_workdir_in_the_session_is_made(tmp_path: Path) -> None:
    runtime = await started(tmp_path / "root", workdir="/polar/session/work/space")
    result = await runtime.exec("pwd", timeout_s=LONG_S)
    await runtime.stop()
    assert result.stdout_text.strip() == f"{runtime.layout.session_dir}/work/space"


async def test_a_sandbox_whose_folder_is_gone_is_lost(runtime: LocalRuntime) -> None:
    await runtime.exec(["rm", "-rf", str(runtime.root)], timeout_s=LONG_S)
    result = await runtime.exec("true", timeout_s=LONG_S)
    assert result.kind is ExecKind.SANDBOX_LOST
    assert str(runtime.root) in result.message


async def test_an_argument_list_that_is_too_long_is_named(runtime: LocalRuntime) -> None:
    result = await runtime.exec(["echo", "x" * 3_000_000], timeout_s=LONG_S)
    assert result.kind is ExecKind.COULD_NOT_START
    assert "file" in result.message


async def test_a_script_without_its_interpreter_is_named(runtime: LocalRuntime) -> None:
    await runtime.put_bytes(b"#!/no/such/interpreter\n", "tool", 0o755)
    result = await runtime.exec(["./tool"], timeout_s=LONG_S)
    assert (result.kind, "interpreter" in result.message) == (ExecKind.COULD_NOT_START, True)


async def test_a_hundred_megabytes_of_output_are_capped_in_memory_and_log(runtime: LocalRuntime) -> None:
    result = await runtime.exec(
        "echo first; head -c 100000000 /dev/zero | tr '\\0' x; echo; echo last", timeout_s=LONG_S, log="big"
    )
    assert (result.ok, result.truncated, result.stdout_bytes) == (True, True, 100_000_012)
    assert len(result.stdout) < 1_100_000
    log = runtime.host_log_dir / "big.stdout"
    assert LOG_CAP_BYTES < log.stat().st_size < LOG_CAP_BYTES + 1_100_000
    text = log.read_bytes()
    assert text.startswith(b"first\n") and text.endswith(b"last\n")
    assert b"log capped at 33554432 bytes" in text[LOG_CAP_BYTES : LOG_CAP_BYTES + 100]


async def test_what_a_left_behind_process_prints_later_reaches_the_log(runtime: LocalRuntime) -> None:
    await runtime.exec(
        "(until [ -e go ]; do sleep 0.01; done; echo late; echo x > said; sleep 1000) & echo soon",
        timeout_s=LONG_S,
        log="step",
    )
    await runtime.exec("touch go", timeout_s=LONG_S)
    await appears(runtime, "said")
    log = runtime.host_log_dir / "step.stdout"
    await until(lambda: log.read_text() == "soon\nlate\n")


async def test_a_process_that_replaces_itself_all_the_time_is_killed(runtime: LocalRuntime, tmp_path: Path) -> None:
    # Each copy starts the next in a session of its own and ends: no pid lives longer than milliseconds.
    await runtime.put_bytes(b'echo x > alive; setsid bash "$0" & exit', "hydra")
    assert (await runtime.exec("bash hydra", timeout_s=LONG_S)).ok
    await appears(runtime, "alive")
    # One look may fall between two copies: it is alive as long as some look finds one, and gone when none does.
    await until(lambda: bool(processes_of(runtime.root)))
    await runtime.stop()
    assert [processes_of(runtime.root) for _ in range(20)] == [[]] * 20


async def test_a_cancellation_at_any_moment_leaves_nothing_running(runtime: LocalRuntime) -> None:
    for steps in range(80):
        running = asyncio.ensure_future(runtime.exec("sleep 1000", stdin=b"x", timeout_s=LONG_S))
        for _ in range(steps):
            await asyncio.sleep(0)
        if steps > 60:
            await asyncio.sleep(0.001 * (steps - 60))
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running
    # A keeper that was never told a command's name ends it on its own when its socket closes.
    await until(lambda: not processes_of(runtime.root))
    assert list((runtime.root / "run").iterdir()) == [runtime.root / "run/warden.stderr"]


async def test_no_descriptor_is_left_open(runtime: LocalRuntime) -> None:
    await runtime.exec("true", timeout_s=LONG_S)
    before = len(list(Path("/proc/self/fd").iterdir()))
    for _ in range(5):
        await runtime.exec("echo x; echo y >&2", stdin=b"in", timeout_s=LONG_S, log="same")
        await runtime.exec("sleep 1000", timeout_s=0.05)
        await runtime.exec(["no-such-program"], timeout_s=LONG_S)
    assert len(list(Path("/proc/self/fd").iterdir())) <= before + 1


async def test_many_sandboxes_start_at_once(tmp_path: Path) -> None:
    runtimes = await asyncio.gather(*(started(tmp_path / str(number)) for number in range(40)))
    results = await asyncio.gather(*(runtime.exec(["pwd"], timeout_s=LONG_S) for runtime in runtimes for _ in range(3)))
    await asyncio.gather(*(runtime.stop() for runtime in runtimes))
    assert len({result.stdout for result in results}) == 40
    assert list(tmp_path.iterdir()) == []


async def test_a_sandbox_whose_warden_was_killed_is_lost_and_still_cleaned_up(runtime: LocalRuntime) -> None:
    await runtime.exec("setsid bash -c 'echo x > up; sleep 1000' &", timeout_s=LONG_S)
    running = asyncio.ensure_future(runtime.exec("echo x > down; sleep 1000", timeout_s=LONG_S))
    await appears(runtime, "down")
    await appears(runtime, "up")
    for pid in subprocess.run(
        ["pgrep", "-s", str(warden_of(runtime.root))], capture_output=True, text=True, check=True
    ).stdout.split():
        with suppress(ProcessLookupError):  # one of them ends with the other
            os.kill(int(pid), signal.SIGKILL)
    assert (await running).kind is ExecKind.SANDBOX_LOST
    assert (await runtime.exec("true", timeout_s=LONG_S)).kind is ExecKind.SANDBOX_LOST
    await runtime.stop()
    assert processes_of(runtime.root) == []
    assert not runtime.root.exists()


async def test_an_agent_that_kills_every_python_does_not_hit_the_warden(runtime: LocalRuntime) -> None:
    names = subprocess.run(["pgrep", "-f", "-l", "python"], capture_output=True, text=True, check=False).stdout
    pids = {int(line.split()[0]) for line in names.splitlines()}
    assert os.getpid() in pids
    ours = {warden_of(runtime.root), nursery_of(runtime.root)}
    assert os.getpid() not in ours
    assert not ours & pids
    by_name = subprocess.run(["pgrep", "python"], capture_output=True, text=True, check=False).stdout.split()
    assert not {str(pid) for pid in ours} & set(by_name)


async def test_a_killed_nursery_costs_no_sandbox_and_the_next_one_finds_another(
    runtime: LocalRuntime, tmp_path: Path
) -> None:
    running = asyncio.ensure_future(runtime.exec("echo x > up; until [ -e on ]; do sleep 0.05; done", timeout_s=LONG_S))
    await appears(runtime, "up")
    nursery = nursery_of(runtime.root)
    os.kill(nursery, signal.SIGKILL)
    another = await started(tmp_path / "another")
    assert nursery_of(another.root) != nursery
    assert (await another.exec("true", timeout_s=LONG_S)).ok
    await another.stop()
    await runtime.put_bytes(b"", "on")
    assert (await running).ok
    assert (await runtime.exec("sleep 1000 & echo still here", timeout_s=LONG_S)).stdout == b"still here\n"
    await runtime.stop()
    assert processes_of(runtime.root) == []


async def test_sandboxes_that_start_at_once_over_a_dying_nursery_all_start(tmp_path: Path) -> None:
    first = await started(tmp_path / "first")
    nursery = nursery_of(first.root)
    starting = [asyncio.ensure_future(started(tmp_path / str(number))) for number in range(20)]
    await asyncio.wait(starting, return_when=asyncio.FIRST_COMPLETED)
    os.kill(nursery, signal.SIGKILL)
    runtimes = [first, *await asyncio.gather(*starting)]
    assert all([(await runtime.exec(["true"], timeout_s=LONG_S)).ok for runtime in runtimes])
    await asyncio.gather(*(runtime.stop() for runtime in runtimes))


async def test_a_warden_that_ended_leaves_no_zombie(tmp_path: Path) -> None:
    runtime = await started(tmp_path / "root")
    nursery, warden = nursery_of(runtime.root), warden_of(runtime.root)
    await runtime.stop()
    await until(lambda: not Path(f"/proc/{warden}").exists())
    assert is_running(nursery)


WORKER = """
import asyncio, sys
from pathlib import Path
from polarq.contracts.specs import RuntimeSpec
from polarq.topology.runtimes import RuntimesSection
from polarq_worker.runtimes.base import Host
from polarq_worker.runtimes.local import LocalRuntime

async def main():
    settings = RuntimesSection.parse({"local": {"isolation": "none"}})
    host = Host("node0", "1", Path(sys.argv[1]).parent / "kept", settings)
    runtime = LocalRuntime(RuntimeSpec(backend="local"), runtime_id="r1", root=Path(sys.argv[1]), host=host)
    await runtime.start()
    await runtime.exec("setsid env -i bash -c 'exec sleep 1001' &", timeout_s=60)
    await runtime.exec("sleep 1002 & echo up; echo x > up; sleep 1003", timeout_s=1000)

asyncio.run(main())
"""


def test_a_worker_that_ends_leaves_nothing_to_be_told_by_the_interpreter(tmp_path: Path) -> None:
    short = WORKER.partition('    await runtime.exec("setsid')[0] + "    await runtime.stop()\n\nasyncio.run(main())\n"
    argv = [sys.executable, "-W", "always::ResourceWarning", "-c", short, str(tmp_path / "root")]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=LONG_S, check=True)
    assert done.stderr == ""


async def test_a_killed_worker_leaves_nothing_running(tmp_path: Path) -> None:
    root = tmp_path / "root"
    worker = subprocess.Popen([sys.executable, "-c", WORKER, str(root)])
    try:
        await until((root / "session/up").exists)
        warden, nursery = warden_of(root), nursery_of(root)
        tree = subprocess.run(["ps", "-e", "-o", "ppid,args"], capture_output=True, text=True, check=True).stdout
        assert "sleep 1001" in tree
    finally:
        worker.kill()
        worker.wait()
    await until(lambda: not is_running(warden) and not is_running(nursery))
    assert processes_of(root) == []
    tree = subprocess.run(["ps", "-e", "-o", "args"], capture_output=True, text=True, check=True).stdout
    assert [line for line in tree.splitlines() if line in {"sleep 1001", "sleep 1002", "sleep 1003"}] == []


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of one megabyte."""
    disk = tmp_path / "disk"
    disk.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(disk)], check=False, capture_output=True
    )
    if mounted.returncode != 0:
        not_here("mounting a small disk needs root")
    yield disk
    subprocess.run(["umount", str(disk)], check=True)


async def test_a_full_disk_is_said_as_such(small_disk: Path) -> None:
    runtime = await started(small_disk / "root")
    try:
        filled = await runtime.exec("head -c 5000000 /dev/zero > fill", timeout_s=LONG_S)
        assert (filled.kind, "No space left" in filled.stderr_text) == (ExecKind.EXITED, True)
        with pytest.raises(RuntimeFault, match=r"No space left.*POLARQ_STATE_DIR"):
            await runtime.put_bytes(b"x" * 100_000, "more")
        result = await runtime.exec("true #" + "x" * 100_000, timeout_s=LONG_S)
        assert result.kind is ExecKind.COULD_NOT_START
        assert "No space left" in result.message and "POLARQ_STATE_DIR" in result.message
        # A command that fits still runs; that its log does not is said beside its result.
        loud = await runtime.exec(["seq", "100000"], timeout_s=LONG_S, log="loud")
        assert loud.ok
        assert loud.stdout_bytes == 588_895
        assert "incomplete: No space left" in loud.message
    finally:
        await runtime.stop()


@pytest.mark.parametrize(
    "spec",
    [
        {"image": "python:3.12"},
        {"storage_mb": 512},
        {"gpus": 1},
        {"user": "root"},
        {"allow_internet": False},
        {"network": "bridge"},
        {"internet_volumes": ["/a:/b"]},
        {"direct_exec_init_command": "true"},
        {"kwargs": {"volumes": ["/a:/b"]}},
        {"workdir": "/polar/session/../x"},
    ],
)
def test_what_local_cannot_give_is_said_with_its_key(spec: dict[str, object]) -> None:
    problems = LocalRuntime.problems(RuntimeSpec.parse({"backend": "local", **spec}), Host(settings=settings("none")))
    assert len(problems) == 1
    assert problems[0].startswith(next(iter(spec)))


@pytest.mark.parametrize("isolation", ["none", "auto"])
def test_a_plain_spec_has_no_problems(isolation: str) -> None:
    host = Host(settings=settings(isolation))
    assert (
        LocalRuntime.problems(RuntimeSpec(backend="local", network="host", workdir="/polar/session/repo"), host) == []
    )


async def test_files_that_name_their_own_folder_make_no_snapshot_without_walls(tmp_path: Path) -> None:
    host = Host("node0", "1", tmp_path / "kept", settings("none"))
    for number, script in enumerate(
        ["python -m venv --without-pip venv", 'ln -s "$PWD/file" link', "echo plain > file"]
    ):
        runtime = LocalRuntime(
            RuntimeSpec(backend="local"), runtime_id=f"r{number}", root=tmp_path / f"r{number}", host=host
        )
        await runtime.start()
        assert (await runtime.exec(script, timeout_s=LONG_S)).ok
        if number == 2:
            assert (await runtime.snapshot("recipe")).name == "recipe"
        else:
            with pytest.raises(CannotBeKept, match="isolated"):
                await runtime.snapshot("recipe")
        await runtime.stop()
    assert len(await LocalRuntime.snapshots(host)) == 1


async def test_what_was_left_behind_can_be_ended_and_the_sandbox_goes_on(runtime: LocalRuntime) -> None:
    await runtime.exec("setsid bash -c 'echo $$ > one; sleep 1000' & sleep 1000 & echo $! > two", timeout_s=LONG_S)
    pids = [int(await appears(runtime, name)) for name in ("one", "two")]
    running = asyncio.ensure_future(runtime.exec("echo x > up; sleep 1000", timeout_s=LONG_S))
    await appears(runtime, "up")
    assert await runtime.end_background()
    assert not any(is_running(pid) for pid in pids)
    assert (await running).kind is ExecKind.SIGNALLED
    assert (await runtime.exec("echo on", timeout_s=LONG_S)).stdout == b"on\n"


async def test_what_outlived_its_worker_and_its_warden_is_found_by_its_record(tmp_path: Path) -> None:
    root = tmp_path / "root"
    worker = subprocess.Popen([sys.executable, "-c", WORKER, str(root)])
    try:
        await until((root / "session/up").exists)
        session = str(warden_of(root))
        for pid in subprocess.run(["pgrep", "-s", session], capture_output=True, text=True, check=True).stdout.split():
            with suppress(ProcessLookupError):  # one of them ends with the other
                os.kill(int(pid), signal.SIGKILL)
    finally:
        worker.kill()
        worker.wait()
    try:
        # One that has thrown its environment away is told from nobody's.
        assert marked_of(root)
        host = Host("node0", "2", tmp_path / "kept", settings("none"))
        assert await LocalRuntime.sweep(host, {"r1"}) == []
        assert marked_of(root)
        assert await LocalRuntime.sweep(host, ()) == ["r1"]
        assert marked_of(root) == []
    finally:
        for left in processes_of(root):
            os.kill(left, signal.SIGKILL)
    assert not root.exists()


async def test_what_was_prepared_with_programs_of_other_folders_is_not_the_same_image(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # A recipe may link to a program that it found on PATH: in another worker's, that link may lead nowhere.
    spec, host = RuntimeSpec(backend="local"), Host(settings=settings("none"))
    images = []
    for path in ("/usr/bin", "/opt/venv/bin:/usr/bin"):
        monkeypatch.setenv("PATH", path)
        images.append(await LocalRuntime.resolve_image(spec, host))
    assert len(set(images)) == 2
