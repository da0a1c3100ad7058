"""What the apptainer runtime promises beyond the contract, with the real program: images are converted once, limits
hold and are named, and nothing outlives a worker."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path

import pytest

from polarq.contracts.rollout import ExecKind
from polarq.contracts.sandbox import Reach, SandboxRecord
from polarq.contracts.specs import RuntimeSpec
from polarq.errors import RuntimeFault
from polarq.testing.runtime_contract import appears, lives
from polarq_worker.runtimes.apptainer.instance import Note, is_same, start_time
from polarq_worker.runtimes.apptainer.runtime import ApptainerRuntime
from polarq_worker.runtimes.base import Host

from .apptainer_here import IMAGE, PROGRAM, apptainer_host, builds, counted, needs_apptainer, small_archive

pytestmark = pytest.mark.apptainer
LONG_S = 120.0
New = Callable[..., ApptainerRuntime]


@pytest.fixture
def host(tmp_path: Path) -> Host:
    needs_apptainer()
    return apptainer_host(tmp_path / "kept", program=counted(tmp_path))


@pytest.fixture
async def new(tmp_path: Path, host: Host) -> AsyncIterator[New]:
    made: list[ApptainerRuntime] = []

    def make(name: str, *, image: str = str(IMAGE), at: Host = host, **spec: object) -> ApptainerRuntime:
        wanted = RuntimeSpec.model_validate({"backend": "apptainer", "image": image, **spec})
        assert ApptainerRuntime.problems(wanted, at) == []
        made.append(ApptainerRuntime(wanted, runtime_id=name, root=tmp_path / name, host=at))
        return made[-1]

    yield make
    for runtime in made:
        await runtime.stop()


@pytest.fixture
def archive(tmp_path: Path) -> Path:
    needs_apptainer()
    return small_archive(tmp_path)


async def until(condition: Callable[[], object], what: str) -> None:
    async with asyncio.timeout(LONG_S):
        while not condition():  # noqa: ASYNC110 (it looks at other processes)
            await asyncio.sleep(0.02)
    assert condition(), what


WORKER = """
import asyncio, sys
from pathlib import Path
from polarq.contracts.specs import RuntimeSpec
from polarq_worker.runtimes.apptainer.runtime import ApptainerRuntime
from tests.runtimes.apptainer_here import apptainer_host

async def main(folder, program, image, name):
    host = apptainer_host(Path(folder) / "kept", program=Path(program))
    spec = RuntimeSpec(backend="apptainer", image=image)
    runtime = ApptainerRuntime(spec, runtime_id=name, root=Path(folder) / name, host=host)
    await runtime.start()
    print("started", flush=True)
    await runtime.exec("echo $$ > pid; sleep 1000", timeout_s=1000)

asyncio.run(main(*sys.argv[1:]))
"""


@pytest.fixture
def worker(tmp_path: Path) -> Iterator[Callable[[str, str], subprocess.Popen[str]]]:
    """Another worker process that starts a sandbox of an image under a name and runs a command in it."""
    started: list[subprocess.Popen[str]] = []

    def start(image: str, name: str) -> subprocess.Popen[str]:
        command = [sys.executable, "-c", WORKER, str(tmp_path), str(tmp_path / "program"), image, name]
        started.append(subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=Path(__file__).parents[2]))
        return started[-1]

    yield start
    for process in started:
        process.kill()
        process.communicate()


async def test_a_worker_killed_half_way_leaves_no_half_image(
    host: Host, archive: Path, tmp_path: Path, worker: Callable[[str, str], subprocess.Popen[str]]
) -> None:
    images = tmp_path / "kept/apptainer/images"
    killed = worker(f"docker-archive:{archive}", "killed")
    await until(lambda: list(images.glob(".*.part/run")) and builds(tmp_path), "a conversion has begun")
    killed.kill()
    killed.wait()
    await until(lambda: not processes_with(str(images)), "the conversion ends with its worker")
    assert list(images.glob("*.sif")) == []
    spec = RuntimeSpec(backend="apptainer", image=f"docker-archive:{archive}")
    await ApptainerRuntime.resolve_image(spec, host)
    assert builds(tmp_path) == 2
    assert [path for path in images.iterdir() if path.name.startswith(".")] == []


async def test_two_workers_that_share_a_folder_convert_once(
    new: New, archive: Path, tmp_path: Path, worker: Callable[[str, str], subprocess.Popen[str]]
) -> None:
    other = worker(f"docker-archive:{archive}", "other")
    runtime = new("mine", image=f"docker-archive:{archive}")
    await runtime.start()
    assert other.stdout is not None
    assert await asyncio.to_thread(other.stdout.readline) == "started\n"
    assert builds(tmp_path) == 1


async def test_a_worker_that_is_killed_takes_its_sandboxes_with_it(
    host: Host, tmp_path: Path, worker: Callable[[str, str], subprocess.Popen[str]]
) -> None:
    other = worker(str(IMAGE), "other")
    assert other.stdout is not None
    assert await asyncio.to_thread(other.stdout.readline) == "started\n"
    [path] = (tmp_path / "kept/apptainer/instances").glob("*.json")
    note = Note.read(path)
    assert note is not None and is_same(note)
    cgroups = [Path(folder) for folder in note.cgroups]
    other.kill()
    other.wait()
    await until(lambda: not is_same(note), "the instance ends")
    assert await ApptainerRuntime.sweep(host, ()) == ["other"]
    assert not path.exists()
    assert list((tmp_path / "kept/apptainer/config").rglob(f"{note.name}*")) == []
    assert cgroups
    assert not any(folder.exists() for folder in cgroups)


@pytest.mark.parametrize("noted", [True, False])
async def test_an_instance_that_hangs_under_nobody_is_stopped_by_its_record(
    host: Host, tmp_path: Path, noted: bool
) -> None:
    runtime = ApptainerRuntime(
        RuntimeSpec(backend="apptainer", image=str(IMAGE)), runtime_id="x", root=tmp_path / "x", host=host
    )
    record = SandboxRecord(
        runtime="apptainer", runtime_id="x", handle=runtime.handle, reach=Reach.NODE, node_id="node0",
        incarnation="1", hostname="here",
    )  # fmt: skip
    await ApptainerRuntime.stop_orphan(record)
    path = Path(runtime.handle)
    (tmp_path / "overlay").mkdir()
    environment = {**os.environ, "APPTAINER_CONFIGDIR": str(tmp_path / "kept/apptainer/config")}
    command = [str(PROGRAM), "instance", "start", "--contain", "--no-privs", "--pid-file", str(tmp_path / "pid")]
    command += ["--overlay", str(tmp_path / "overlay"), str(IMAGE), path.stem]
    done = subprocess.run(command, env=environment, check=False, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    pid = int((tmp_path / "pid").read_text())
    started = start_time(pid)
    # A worker may die before it has noted the number.
    Note(path.stem, "x", "node0", str(PROGRAM), *((pid, started) if noted else ())).write(path)
    await ApptainerRuntime.stop_orphan(record)
    await until(lambda: not is_same(Note("", "", "", "", pid, started)), "it is stopped")
    assert not path.exists()
    await ApptainerRuntime.stop_orphan(record)


async def test_a_command_runs_as_the_user_that_the_task_names(new: New) -> None:
    runtime = new("user", user="agent", env={"A": "b"})
    await runtime.start()
    result = await runtime.exec('id -u; id -g; id -G; echo $HOME; echo x > file && echo "wrote"', timeout_s=LONG_S)
    assert result.stdout_text.split() == ["1000", "1001", "1001", "100", "/home/agent", "wrote"], result
    assert (await runtime.exec("id -u", user="0", timeout_s=LONG_S)).stdout == b"0\n"
    unknown = await runtime.exec("true", user="stranger", timeout_s=LONG_S)
    assert "stranger" in unknown.message


async def test_used_up_memory_is_said(new: New) -> None:
    runtime = new("memory", memory_mb=100)
    await runtime.start()
    result = await runtime.exec(["python3", "-c", "x = b'x' * 400_000_000"], timeout_s=LONG_S)
    assert (result.ok, result.out_of_memory) == (False, True)
    assert "memory" in result.message
    assert (await runtime.exec("echo on", timeout_s=LONG_S)).stdout == b"on\n"


async def test_what_lies_in_memory_is_limited_and_leaves_room_for_a_grader(new: New) -> None:
    runtime = new("filled", memory_mb=120, kwargs={"shm_mb": 20})
    guest = new("guest", kwargs={"volumes": ["/dev/shm:/dev/shm:ro"]})
    room = os.statvfs("/dev/shm").f_blocks
    await asyncio.gather(runtime.start(), guest.start())
    # What is the machine's, and only mounted, keeps its size.
    assert os.statvfs("/dev/shm").f_blocks == room
    look = "grep ' tmpfs ' /proc/mounts | cut -d ' ' -f 2"
    places = (await runtime.exec(look, timeout_s=LONG_S)).stdout_text.split()
    assert {"/dev", "/dev/shm"} <= set(places)
    for place in places:
        target = f"{place}/full" if place in {"/dev", "/dev/shm"} else place
        filled = await runtime.exec(f"head -c 1G /dev/zero >> {target}", timeout_s=LONG_S)
        assert (filled.ok, filled.out_of_memory) == (False, False), place
        assert "No space left on device" in filled.stderr_text
    sizes = await runtime.exec("stat -c %s /dev/shm/full", timeout_s=LONG_S)
    assert int(sizes.stdout_text) >> 20 == 20
    graded = await runtime.exec(["python3", "-c", "print(len(bytearray(10_000_000)))"], timeout_s=LONG_S)
    assert graded.stdout == b"10000000\n", graded


async def test_a_limit_of_processes_holds_and_is_named(new: New) -> None:
    runtime = new("processes", max_processes=40)
    await runtime.start()
    fork = """import os, signal
while True:
    try:
        if os.fork() == 0:
            os.setsid()
            signal.pause()
    except BlockingIOError:
        break"""
    assert (await runtime.exec(["python3", "-c", fork], timeout_s=LONG_S)).ok
    full = await runtime.exec("true", timeout_s=LONG_S)
    assert full.kind is ExecKind.COULD_NOT_START
    assert "process" in full.message, full


async def test_root_in_a_sandbox_may_not_mount_nor_make_devices(new: New) -> None:
    runtime = new("root")
    await runtime.start()
    tried = """import ctypes, os
print(ctypes.CDLL(None).mount(b'none', b'/mnt', b'tmpfs', 0, None))
os.mknod('/d', 0o20600, 0x103)"""
    result = await runtime.exec(["python3", "-c", tried], timeout_s=LONG_S)
    assert result.stdout == b"-1\n"
    assert "PermissionError" in result.stderr_text
    for path in ("/proc/sys/kernel/core_pattern", "/sys/kernel/rcu_expedited"):
        written = await runtime.exec(f"echo 0 > {path}", timeout_s=LONG_S)
        assert "Read-only file system" in written.stderr_text, written
    with pytest.raises(RuntimeFault, match="the kernel's"):
        await runtime.put_bytes(b"x", "/dev/shm/x")


async def test_the_warden_of_a_sandbox_cannot_be_looked_into(new: New) -> None:
    runtime = new("warden")
    await runtime.start()
    script = """for pid in /proc/[0-9]*; do
        case "$(cat $pid/comm)" in polarq-sandbox) echo found; readlink $pid/fd/*; cat $pid/environ; esac
    done"""
    result = await runtime.exec(script, timeout_s=LONG_S)
    # The warden and this command's keeper.
    assert result.stdout == b"found\nfound\n", result


async def test_what_was_left_behind_can_be_ended_and_the_sandbox_goes_on(new: New) -> None:
    runtime = new("left")
    await runtime.start()
    script = "setsid bash -c 'echo $$ > one; sleep 1000' & (setsid env -i bash -c 'echo $$ > two; sleep 1000' &)"
    await runtime.exec(f"{script}; sleep 1000 & echo $! > three", timeout_s=LONG_S)
    pids = [await appears(runtime, name) for name in ("one", "two", "three")]
    running = asyncio.ensure_future(runtime.exec("echo x > up; sleep 1000", timeout_s=LONG_S))
    await appears(runtime, "up")
    assert await runtime.end_background()
    assert (await running).kind is ExecKind.SIGNALLED
    assert not any([await lives(runtime, pid) for pid in pids])


def processes_with(text: str) -> list[int]:
    found = []
    for folder in Path("/proc").iterdir():
        if folder.name.isdecimal() and int(folder.name) != os.getpid():
            try:
                if text.encode() in (folder / "cmdline").read_bytes():
                    found.append(int(folder.name))
            except OSError:
                continue
    return found
