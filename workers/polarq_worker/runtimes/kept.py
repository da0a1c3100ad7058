# ruff: noqa: PTH114, PTH115, PTH118
"""What backend `local` keeps on disk: records of its sandboxes, and snapshots to start from.

<folder>/local/sandboxes/<runtime_id>.json    from before a sandbox starts until it is gone
<folder>/local/snapshots/<name>~<token>/      session/, home/, tmp/; whole, or under a name with a dot in front
"""

from __future__ import annotations

import json
import os
import re
import secrets
import subprocess
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

from polarq.errors import CannotBeKept, DiskFull, RuntimeFault
from polarq_worker.runtimes import cgroups, strays
from polarq_worker.runtimes.base import Snapshot
from polarq_worker.runtimes.folder import remove_tree

PARTS = ("session", "home", "tmp")
LOOK_S = 60.0
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")
_DROPPED, _MAKING = ".dropped-", ".making-"


@dataclass(frozen=True, slots=True)
class Record:
    """A sandbox, for whoever comes when its worker is dead."""

    runtime_id: str
    root: str
    incarnation: str
    cgroups: list[str] = field(default_factory=list)
    snapshot: str = ""
    """What it started from, and may still read."""


class Kept:
    """All methods block. Raise `OSError` where nothing else is said."""

    def __init__(self, folder: Path) -> None:
        self._sandboxes = folder / "local" / "sandboxes"
        self._snapshots = folder / "local" / "snapshots"

    # --- sandboxes

    def note(self, record: Record) -> None:
        self._sandboxes.mkdir(parents=True, exist_ok=True)
        self._sandboxes.parent.chmod(0o700)
        temporary = self._sandboxes / f".{secrets.token_hex(8)}"
        temporary.write_text(json.dumps(asdict(record)), encoding="utf-8")
        temporary.rename(self._file(record.runtime_id))

    def forget(self, record: Record) -> None:
        self._file(record.runtime_id).unlink(missing_ok=True)
        if record.snapshot:
            self._clear(record.snapshot)

    def records(self) -> list[Record]:
        found = []
        for file in sorted(self._sandboxes.glob("[!.]*.json")):
            try:
                found.append(Record(**json.loads(file.read_text(encoding="utf-8"))))
            except (FileNotFoundError, ValueError, TypeError):
                # Gone meanwhile; or cut short when its machine stopped, before what it tells of had begun.
                continue
        return found

    def bury(self, record: Record) -> bool:
        """Ends and removes what is left of a dead worker's sandbox; whether all of it is gone."""
        over = strays.kill((f"POLARQ_RUNTIME_ID={record.runtime_id}\0".encode(), os.fsencode(record.root)))
        over = cgroups.remove(record.cgroups, kill=True) and over
        remove_tree(Path(record.root))
        if over:
            self.forget(record)
        return over

    # --- snapshots

    def find(self, reference: str) -> Path:
        """Raises `RuntimeFault`."""
        folder = self._snapshots / reference
        if not reference or "/" in reference or reference.startswith(".") or not folder.is_dir():
            raise RuntimeFault(f"there is no snapshot '{reference}' here any more")
        return folder

    def all(self) -> list[Snapshot]:
        if not self._snapshots.is_dir():
            return []
        names = sorted(folder.name for folder in self._snapshots.iterdir() if not folder.name.startswith("."))
        return [Snapshot(name.rpartition("~")[0], name, self._size(name)) for name in names]

    def save(self, name: str, parts: Sequence[Path], unmoved: str | None) -> Snapshot:
        """Copies the folders, which nobody writes to meanwhile. `unmoved`: a path that must not be named in them, for
        it will not be there. Raises `RuntimeFault` too."""
        if not _NAME.fullmatch(name):
            raise RuntimeFault(f"'{name}' is no name for a snapshot; use letters, digits, dots and dashes")
        if unmoved is not None and _mentions(parts, unmoved):
            raise CannotBeKept(
                "its files name their own folder, which is another one in each sandbox; isolated sandboxes can be kept"
            )
        reference = f"{name}~{secrets.token_hex(4)}"
        making = self._snapshots / f"{_MAKING}{_maker(os.getpid())}-{reference}"
        try:
            for part, source in zip(PARTS, parts, strict=True):
                (making / part).mkdir(parents=True)
                copy_tree(source, making / part)
            (making / "size").write_text(str(_bytes_of(making)), encoding="utf-8")
            _run("sync", "-f", str(making))
            making.rename(self._snapshots / reference)
        except BaseException:
            remove_tree(making)
            raise
        for other in self.all():
            if other.name == name and other.reference != reference:
                self.drop(other.reference)
        return Snapshot(name, reference, self._size(reference))

    def drop(self, reference: str) -> None:
        try:
            self.find(reference).rename(self._snapshots / f"{_DROPPED}{reference}")
        except (RuntimeFault, FileNotFoundError):
            return
        self._clear(reference)

    def tidy(self) -> None:
        """Removes what was dropped while in use, and what dead workers were making."""
        for folder in self._snapshots.glob(".*") if self._snapshots.is_dir() else ():
            if folder.name.startswith(_DROPPED):
                self._clear(folder.name.removeprefix(_DROPPED))
            elif not _is_maker(folder.name.removeprefix(_MAKING).partition("-")[0]):
                remove_tree(folder)

    def _clear(self, reference: str) -> None:
        dropped = self._snapshots / f"{_DROPPED}{reference}"
        if dropped.exists() and all(record.snapshot != reference for record in self.records()):
            remove_tree(dropped)

    def _size(self, reference: str) -> int:
        try:
            return int((self._snapshots / reference / "size").read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return 0

    def _file(self, runtime_id: str) -> Path:
        return self._sandboxes / f"{runtime_id}.json"


def _maker(pid: int) -> str:
    """A process, and not one that has its number later: a worker in a container has the same one each time."""
    return f"{pid}.{strays.start_time(Path(f'/proc/{pid}'))}"


def _is_maker(name: str) -> bool:
    try:
        return _maker(int(name.partition(".")[0])) == name
    except (OSError, ValueError):
        return False


def copy_tree(source: Path, target: Path) -> None:
    """All that is in a folder, into one that is there: sharing blocks where the file system can. Raises
    `RuntimeFault`."""
    _run("cp", "-a", "--reflink=auto", "--", f"{source}/.", str(target))


def _run(*command: str) -> None:
    done = subprocess.run(
        command, stdin=subprocess.DEVNULL, capture_output=True, check=False, env={**os.environ, "LC_ALL": "C"}
    )
    if done.returncode != 0:
        lines = done.stderr.decode("utf-8", "replace").strip().splitlines() or [f"exit code {done.returncode}"]
        full = any("No space left" in line or "quota exceeded" in line for line in lines)
        raise (DiskFull if full else RuntimeFault)(f"the snapshot cannot be copied: {lines[0]}")


def _mentions(folders: Sequence[Path], path: str) -> bool:
    """Whether a file's bytes, or where a link leads, have the path in them."""
    named = [str(folder) for folder in folders]
    try:
        found = subprocess.run(
            ["grep", "-rqF", "-D", "skip", "-e", path, "--", *named],
            stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, check=False, timeout=LOOK_S,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        return True
    return found.returncode == 0 or any(path in link for folder in folders for link in _links(folder))


def _links(folder: Path) -> Iterator[str]:
    for at, folders, files in os.walk(folder):
        for name in (*folders, *files):
            one = os.path.join(at, name)
            if os.path.islink(one):
                yield os.readlink(one)


def _bytes_of(folder: Path) -> int:
    total = 0
    for at, folders, files in os.walk(folder):
        total += sum(os.lstat(os.path.join(at, name)).st_blocks * 512 for name in (*folders, *files))
    return total
