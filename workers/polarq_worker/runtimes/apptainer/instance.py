"""An instance of the program: noted on disk, started under a warden of ours, ended by whatever remains of it."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import os
import secrets
import select
import signal
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from polarq.errors import RuntimeFault
from polarq_worker.runtimes.apptainer.inside import cgroup_folders
from polarq_worker.runtimes.apptainer.program import Call, Program, complaint
from polarq_worker.runtimes.folder import in_thread, remove_tree
from polarq_worker.runtimes.texts import cannot

STOP_S = 20.0
CAPABILITIES = (
    "CHOWN", "DAC_OVERRIDE", "FOWNER", "FSETID", "KILL", "SETGID", "SETUID", "SETPCAP", "NET_BIND_SERVICE",
    "SYS_CHROOT", "AUDIT_WRITE", "SETFCAP",
)  # fmt: skip
"""What root may do in a sandbox of a worker that is root; no device nodes, no mounts, no packets of its own making."""


def name_of(node_id: str, runtime_id: str) -> str:
    """An instance's name: short, and its own for every sandbox of every node."""
    node, own = (hashlib.sha256(text.encode()).hexdigest() for text in (node_id, runtime_id))
    return f"pq-{node[:6]}-{own[:16]}"


@dataclass(frozen=True, slots=True)
class Note:
    """What a dead worker's instance is found and stopped by. A file, `instances/<name>.json`, from before its start
    until it is gone."""

    name: str
    runtime_id: str
    node_id: str
    program: str
    pid: int = 0
    started: str = ""
    """Start time of its first process, in clock ticks of the kernel; tells it from a later one with its number."""
    cgroups: tuple[str, ...] = ()
    """Folders that the program made for this instance alone."""

    def write(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        part = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
        part.write_text(json.dumps(asdict(self)))
        part.rename(path)

    @classmethod
    def read(cls, path: Path) -> Note | None:
        try:
            known = json.loads(path.read_text())
            return cls(**{**known, "cgroups": tuple(known.get("cgroups", ()))})
        except (OSError, ValueError, TypeError, AttributeError):
            return None


class Instance:
    """One of this worker's."""

    def __init__(self, program: Program, note: Note, path: Path, run_dir: Path) -> None:
        self._program = program
        self._note = note
        self._path = path
        self._run_dir = run_dir
        self._call = Call(program, run_dir)
        self.pid = 0

    async def start(self, image: Path, options: list[str]) -> None:
        """Raises `RuntimeFault`."""
        await in_thread(self._note.write, self._path)
        await self._call.start()
        pid_file = self._run_dir / "pid"
        said = await self._call.ended(
            "instance", "start", "--pid-file", str(pid_file), *options, str(image), self._note.name
        )
        if said.code != 0:
            own = await asyncio.to_thread(_own_words, self._program.store, self._note.name)
            raise RuntimeFault(f"the instance cannot be started: {own or said.why}")
        try:
            self.pid = int(pid_file.read_text())
            started = start_time(self.pid)
            cgroups = await asyncio.to_thread(_own_cgroups, self.pid)
        except (OSError, ValueError) as exc:
            raise RuntimeFault(f"the instance ended at once: {said.why}") from exc
        self._note = replace(self._note, pid=self.pid, started=started, cgroups=cgroups)
        await in_thread(self._note.write, self._path)

    @property
    def alive(self) -> bool:
        return bool(self.pid) and is_same(self._note)

    async def stop(self) -> bool:
        """Whether nothing of it is left."""
        await asyncio.to_thread(kill, self._note)
        clean = await self._call.stop()
        await asyncio.to_thread(forget, self._program.store, self._note, self._path)
        return clean


def start_time(pid: int) -> str:
    """Field 22 of /proc/PID/stat (proc(5)). Raises `OSError`."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]


def _own_cgroups(pid: int) -> tuple[str, ...]:
    """Those named after the instance's process; a session of systemd clears up its own."""
    lines = Path(f"/proc/{pid}/cgroup").read_text(encoding="utf-8").splitlines()
    return tuple(folder for folder in cgroup_folders(lines) if folder.endswith(f"/{pid}"))


def is_same(note: Note) -> bool:
    try:
        return bool(note.pid) and start_time(note.pid) == note.started
    except OSError:
        return False


def kill(note: Note) -> None:
    """Kills an instance's first process, and with it all in its process namespace; waits until it is gone (blocks)."""
    if not note.pid:
        return
    with contextlib.suppress(ProcessLookupError):
        handle = os.pidfd_open(note.pid)
        try:
            if is_same(note):
                signal.pidfd_send_signal(handle, signal.SIGKILL)
                _wait(handle)
        finally:
            os.close(handle)


def _wait(handle: int) -> None:
    poll = select.poll()
    poll.register(handle, select.POLLIN)
    poll.poll(STOP_S * 1000)


def kill_within(pid: int, spared: set[int]) -> bool:
    """Kills all in the process namespace of an instance but its first process and `spared`, until nothing of it is left
    (blocks); whether it came to that."""
    deadline = time.monotonic() + STOP_S
    clean = 0
    while clean < 2 and time.monotonic() < deadline:
        found = _others(pid, spared)
        clean = 0 if found else clean + 1
        # All stand still before any dies, so that none is born meanwhile.
        for number in (signal.SIGSTOP, signal.SIGKILL):
            for process in found:
                with contextlib.suppress(OSError):
                    signal.pidfd_send_signal(process, number)
        for process in found:
            os.close(process)
    return clean == 2


def _others(pid: int, spared: set[int]) -> list[int]:
    """Open handles of the processes, zombies left out."""
    found = []
    try:
        namespace = Path(f"/proc/{pid}/ns/pid").readlink()
    except OSError:
        return []
    for folder in Path("/proc").iterdir():
        if not folder.name.isdecimal() or int(folder.name) in {pid, *spared}:
            continue
        try:
            handle = os.pidfd_open(int(folder.name))
        except OSError:
            continue
        try:
            # Read after it was opened: the handle means this process, whoever has its number later.
            inside = (folder / "ns/pid").readlink() == namespace
            zombie = (folder / "stat").read_text().rpartition(")")[2].split()[0] == "Z"
        except OSError:
            inside, zombie = False, True
        if inside and not zombie:
            found.append(handle)
        else:
            os.close(handle)
    return found


def forget(store: Path, note: Note, path: Path) -> None:
    """Removes what the program and we noted of an instance that is gone (blocks). Raises `RuntimeFault`."""
    try:
        for found in list(_remembered(store, note.name)):
            if found.is_dir():
                remove_tree(found)
            else:
                found.unlink(missing_ok=True)
        for folder in note.cgroups:
            # The program removes them only where it set limits.
            with contextlib.suppress(OSError):
                Path(folder).rmdir()
        path.unlink(missing_ok=True)
    except OSError as exc:
        raise RuntimeFault(cannot("what is noted of the instance cannot be removed", exc)) from exc


def _remembered(store: Path, name: str) -> Iterator[Path]:
    """config/instances/app/<host>/<user>/<name>/, and logs/ with its .out and .err."""
    instances = store / "config" / "instances"
    yield from instances.glob(f"app/*/*/{name}")
    yield from instances.glob(f"logs/*/*/{name}.*")


def _own_words(store: Path, name: str) -> str:
    """What an instance that could not start says of it itself, which the program does not pass on."""
    logs = (store / "config" / "instances" / "logs").glob(f"*/*/{name}.err")
    return next((words for path in logs if (words := complaint(path.read_text(errors="replace")))), "")


async def stop_noted(path: Path) -> Note | None:
    """Stops the instance that a note tells of, if it still runs; None where there is no note. Raises `RuntimeFault`."""
    note = await asyncio.to_thread(Note.read, path)
    if note is None:
        return None
    store = path.parents[1]
    program = Program(note.program, store)
    # By name first, for one that was noted before its number was known.
    run_dir = store / "tmp" / note.name
    try:
        if any(_remembered(store, note.name)):
            await program.call("instance", "stop", "--signal", "KILL", note.name, run_dir=run_dir)
    finally:
        await asyncio.to_thread(remove_tree, run_dir)
    await asyncio.to_thread(kill, note)
    if is_same(note):
        raise RuntimeFault(f"instance {note.name} (process {note.pid}) does not die")
    await asyncio.to_thread(forget, store, note, path)
    return note
