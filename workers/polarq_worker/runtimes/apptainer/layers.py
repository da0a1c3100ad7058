"""Snapshots: what an instance wrote, kept as a read-only layer for others to start over.

    layers/<id>/upper      as an overlay wants it
    layers/<id>/lock       held (shared) by whoever uses the layer
    snapshots/<name>.json  the layers of a snapshot, from the lowest, and its size

A layer that no snapshot names goes when nobody uses it any more: a snapshot can be dropped under a running sandbox.
All functions block; run them in a thread.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import secrets
import subprocess
from pathlib import Path

from polarq.errors import DiskFull, RuntimeFault
from polarq_worker.runtimes.base import Snapshot
from polarq_worker.runtimes.folder import remove_tree
from polarq_worker.runtimes.texts import cannot


class Layers:
    """Those of one node."""

    def __init__(self, store: Path) -> None:
        self._layers = store / "layers"
        self._snapshots = store / "snapshots"

    def use(self, reference: str) -> tuple[list[Path], list[int]]:
        """(the layers of a snapshot from the lowest, descriptors that hold them). Raises `RuntimeFault`."""
        ids = self._ids(reference)
        held: list[int] = []
        try:
            held.extend(self._hold(layer) for layer in ids)
            # It may have been dropped before all were held.
            self._ids(reference)
        except BaseException:
            for handle in held:
                os.close(handle)
            raise
        return [self._layers / layer for layer in ids], held

    def keep(self, name: str, upper: Path, below: list[Path]) -> Snapshot:
        """Copies what lies in `upper`, whole or not at all. Raises `RuntimeFault`."""
        layer = secrets.token_hex(8)
        part = self._layers / f".{layer}.part"
        try:
            self._snapshots.mkdir(parents=True, exist_ok=True)
            part.mkdir(parents=True)
            # Held until a snapshot names the layer: nobody's sweep takes it for something left behind.
            with (part / "lock").open("w") as lock:
                fcntl.flock(lock, fcntl.LOCK_SH)
                _copy(upper, part / "upper")
                size = _size(part / "upper")
                part.rename(self._layers / layer)
                self._write(name, {"layers": [*(path.name for path in below), layer], "size": size})
        except OSError as exc:
            kind = DiskFull if exc.errno in {errno.ENOSPC, errno.EDQUOT} else RuntimeFault
            raise kind(cannot(f"snapshot {name} cannot be kept in {self._layers}", exc)) from exc
        finally:
            remove_tree(part)
        self.sweep()
        return Snapshot(name, name, size)

    def all(self) -> list[Snapshot]:
        found = []
        for path in sorted(self._snapshots.glob("*.json")):
            with contextlib.suppress(OSError, ValueError, KeyError):
                found.append(Snapshot(path.stem, path.stem, int(json.loads(path.read_text())["size"])))
        return found

    def drop(self, reference: str) -> None:
        self._path(reference).unlink(missing_ok=True)
        self.sweep()

    def sweep(self) -> None:
        """Removes the layers that no snapshot names and nobody holds, and what a killed worker left half-made."""
        named: set[str] = set()
        for path in self._snapshots.glob("*.json"):
            with contextlib.suppress(OSError, ValueError, KeyError):
                named.update(json.loads(path.read_text())["layers"])
        if not self._layers.is_dir():
            return
        for folder in self._layers.iterdir():
            if folder.name not in named:
                self._remove_unused(folder)

    def _remove_unused(self, folder: Path) -> None:
        try:
            handle = os.open(folder / "lock", os.O_RDWR | os.O_CLOEXEC)
        except OSError:
            return
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            remove_tree(folder)
        except BlockingIOError:
            return
        finally:
            os.close(handle)

    def _hold(self, layer: str) -> int:
        try:
            handle = os.open(self._layers / layer / "lock", os.O_RDWR | os.O_CLOEXEC)
            fcntl.flock(handle, fcntl.LOCK_SH)
        except OSError as exc:
            raise RuntimeFault(cannot("the snapshot cannot be used", exc)) from exc
        return handle

    def _ids(self, reference: str) -> list[str]:
        try:
            return list(json.loads(self._path(reference).read_text())["layers"])
        except FileNotFoundError:
            raise RuntimeFault(f"there is no snapshot '{reference}' on this node") from None
        except (OSError, ValueError, KeyError) as exc:
            raise RuntimeFault(f"snapshot '{reference}' cannot be read: {exc}") from exc

    def _path(self, reference: str) -> Path:
        if not reference or "/" in reference or reference.startswith("."):
            raise RuntimeFault(f"'{reference}' is no name of a snapshot")
        return self._snapshots / f"{reference}.json"

    def _write(self, name: str, content: dict[str, object]) -> None:
        path = self._path(name)
        part = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
        part.write_text(json.dumps(content))
        part.rename(path)


def _copy(source: Path, target: Path) -> None:
    """A copy that shares blocks where the file system can, with owners, times, attributes and whiteouts as they are."""
    done = subprocess.run(
        ["cp", "--archive", "--reflink=auto", "--", str(source), str(target)],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        check=False,
    )
    if done.returncode != 0:
        disk = os.statvfs(target.parent)
        full = disk.f_bavail * disk.f_frsize < 1 << 20 or disk.f_favail == 0
        lines = done.stderr.decode("utf-8", "replace").strip().splitlines()
        raise OSError(
            errno.ENOSPC if full else errno.EIO, lines[-1] if lines and not full else os.strerror(errno.ENOSPC)
        )


def _size(folder: Path) -> int:
    total = 0
    for base, _, names in os.walk(folder):
        for name in names:
            with contextlib.suppress(OSError):
                total += os.lstat(Path(base) / name).st_blocks * 512
    return total
