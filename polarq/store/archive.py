"""Results outside Redis, as plain JSON that needs no polarq to be read: one folder per task.

A file is there whole or not at all. Writing the same task again writes the same files again.
"""

from __future__ import annotations

import importlib
import json
import os
import re
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

from pydantic import ValidationError

from polarq.contracts.base import ID_PATTERN, check_id
from polarq.contracts.rollout import RolloutResult
from polarq.contracts.task import Task
from polarq.errors import ArchiveFailed, InvalidInput, PayloadCorrupt, PayloadMissing, PolarqError
from polarq.topology.models import Topology

if sys.version_info >= (3, 14):
    from compression import zstd
else:
    from backports import zstd

README = """# Archived rollouts

    <task_id>/request.json   the task as it was submitted
    <task_id>/<index>.json   one rollout: outcome, reward, timing, and the trajectory with its traces

Everything is JSON in UTF-8, one object per file. A name that ends in `.zst` is the same, compressed with zstd
(`zstd -d 0.json.zst`).

In a rollout, `outcome.state` says how it ended, `outcome.boundary` which part failed, and `reward.outcome` is the
verdict (no `reward`: there was none). `trajectory.traces` are the token sequences: `prompt_ids`, then `response_ids`
with one entry of `loss_mask` (1: sampled by the policy) and of `logprobs` (null: unknown) each. Times are UTC.
A rollout that ended before the model was asked has no trajectory.
"""


_ROLLOUT = re.compile(r"([0-9]{1,6})\.json(\.zst)?")


class _Place(Protocol):
    """Where files go. Paths are relative, with slashes. Raises OSError and what else the place's library raises."""

    def exists(self, path: str) -> bool: ...

    def names(self, path: str) -> list[str]:
        """What a folder holds, in no order; nothing where there is no such folder."""
        ...

    def read(self, path: str) -> bytes: ...

    def write(self, path: str, data: bytes) -> None:
        """Whole or not at all."""
        ...


class Archive:
    """One archive. Its methods block."""

    def __init__(self, root: str, *, compress: bool = False) -> None:
        self.root = root
        self._compress = compress
        self._place: _Place | None = None

    @classmethod
    def of(cls, topology: Topology) -> Archive | None:
        """The deployment's archive, if it has one."""
        keep = topology.retention
        return None if keep.archive is None else cls(keep.archive, compress=keep.archive_zstd)

    def keep(self, request: Task, result: RolloutResult) -> None:
        """Writes a rollout, and its task's request. Raises `ArchiveFailed`.

        A result without a trajectory never takes the place of one that was written before.
        """
        try:
            place = self._opened()
            name = self._name(f"{request.task_id}/request.json")
            if not place.exists(name):
                place.write(name, self._encoded(_pretty(request.model_dump(mode="json"))))
            self._put(place, result)
        except ArchiveFailed:
            raise
        except Exception as exc:  # whatever a storage library raises
            text = " ".join(f"{type(exc).__name__}: {exc}".split())
            raise ArchiveFailed(
                f"rollout '{result.rollout_id}' cannot be archived at {self.root} ({text}); nothing was deleted. Make "
                "retention.archive writable, or leave it out of the topology"
            ) from exc

    def put(self, result: RolloutResult) -> None:
        """Writes a rollout whose request is not known. Raises `ArchiveFailed`, and `InvalidInput` for a task id that
        is none (it may come of a file of others, and name a place outside) and an index that nobody would find."""
        check_id("task_id", result.task_id)
        if not _ROLLOUT.fullmatch(f"{result.index}.json"):
            raise InvalidInput(result.rollout_id, ["an archive has rollouts 0 to 999999 of a task"])
        try:
            self._put(self._opened(), result)
        except ArchiveFailed:
            raise
        except Exception as exc:  # whatever a storage library raises
            text = " ".join(f"{type(exc).__name__}: {exc}".split())
            raise ArchiveFailed(f"rollout '{result.rollout_id}' cannot be written to {self.root} ({text})") from exc

    def _opened(self) -> _Place:
        place = self._found()
        if not place.exists("README.md"):
            place.write("README.md", README.encode())
        return place

    def _found(self) -> _Place:
        if self._place is None:
            self._place = _place(self.root)
        return self._place

    def _put(self, place: _Place, result: RolloutResult) -> None:
        name = self._name(f"{result.task_id}/{result.index}.json")
        if result.trajectory is not None or not place.exists(name):
            place.write(name, self._encoded(result.model_dump_json(exclude={"payload"}).encode()))

    # --- reading

    def task_ids(self) -> list[str]:
        """Tasks of which something is in it, sorted. Raises `ArchiveFailed`."""
        with self._reading():
            names = self._found().names("")
            return sorted(name for name in names if re.fullmatch(ID_PATTERN, name) and self._indices(name))

    def indices(self, task_id: str) -> list[int]:
        """The task's rollouts that are in it, sorted. Raises `ArchiveFailed`."""
        with self._reading():
            return self._indices(task_id)

    def has(self, task_id: str, index: int) -> bool:
        """Raises `ArchiveFailed`."""
        name = f"{task_id}/{index}.json"
        with self._reading():
            return any(self._found().exists(one) for one in (name, f"{name}.zst"))

    def _indices(self, task_id: str) -> list[int]:
        matches = (_ROLLOUT.fullmatch(name) for name in self._found().names(task_id))
        return sorted({int(match[1]) for match in matches if match})

    def run_of(self, task_id: str) -> str | None:
        """The task's run; None where its request is not in it. Raises `ArchiveFailed`, `PayloadCorrupt`."""
        data = self._data(f"{task_id}/request.json")
        if data is None:
            return None
        try:
            return str(json.loads(data)["run_id"])
        except (KeyError, TypeError, ValueError) as exc:
            raise PayloadCorrupt(f"{self.root}/{task_id}/request.json is no task: {exc}") from exc

    def result(self, task_id: str, index: int) -> RolloutResult:
        """Raises `ArchiveFailed`, `PayloadMissing` and `PayloadCorrupt`."""
        name = f"{task_id}/{index}.json"
        data = self._data(name)
        if data is None:
            raise PayloadMissing(f"there is no {name} in {self.root}")
        try:
            return RolloutResult.stored(data)
        except ValidationError as exc:
            raise PayloadCorrupt(f"{self.root}/{name} is no rollout: {exc.errors()[0]['msg']}") from exc

    def _data(self, name: str) -> bytes | None:
        """A file's content, compressed or not."""
        with self._reading():
            place = self._found()
            if place.exists(name):
                return place.read(name)
            if not place.exists(f"{name}.zst"):
                return None
            data = place.read(f"{name}.zst")
        try:
            return zstd.decompress(data)
        except zstd.ZstdError as exc:
            raise PayloadCorrupt(f"{self.root}/{name}.zst cannot be decoded: {exc}") from exc

    @contextmanager
    def _reading(self) -> Iterator[None]:
        try:
            yield
        except PolarqError:
            raise
        except Exception as exc:  # whatever a storage library raises
            text = " ".join(f"{type(exc).__name__}: {exc}".split())
            raise ArchiveFailed(f"{self.root} cannot be read ({text})") from exc

    def _name(self, name: str) -> str:
        return f"{name}.zst" if self._compress else name

    def _encoded(self, data: bytes) -> bytes:
        return zstd.compress(data) if self._compress else data


def _pretty(value: Any) -> bytes:
    return json.dumps(value, indent=2, ensure_ascii=False).encode()


def _place(root: str) -> _Place:
    if "://" not in root:
        return _Folder(Path(root))
    try:
        fsspec: Any = importlib.import_module("fsspec")
    except ImportError:
        raise ArchiveFailed(
            f"retention.archive {root} needs fsspec, which is not installed; nothing was deleted. pip install "
            "'polarq[archive]' and the library of that storage (s3fs, gcsfs, ...), or give a folder"
        ) from None
    return _Remote(*fsspec.core.url_to_fs(root))


class _Folder:
    """A directory of this machine, or one that is mounted."""

    def __init__(self, root: Path) -> None:
        self._root = root

    def exists(self, path: str) -> bool:
        return (self._root / path).exists()

    def names(self, path: str) -> list[str]:
        folder = self._root / path
        return [entry.name for entry in folder.iterdir()] if folder.is_dir() else []

    def read(self, path: str) -> bytes:
        return (self._root / path).read_bytes()

    def write(self, path: str, data: bytes) -> None:
        target = self._root / path
        target.parent.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(prefix=".", suffix=".part", dir=target.parent)
        try:
            with os.fdopen(handle, "wb") as file:
                file.write(data)
                file.flush()
                # What follows deletes the only other copy.
                os.fsync(file.fileno())
            Path(name).chmod(0o644)
            Path(name).replace(target)
        except BaseException:
            Path(name).unlink(missing_ok=True)
            raise


class _Remote:
    """Whatever fsspec can write. An object store shows an object when it is whole."""

    def __init__(self, filesystem: Any, root: str) -> None:
        self._files = filesystem
        self._root = root.rstrip("/")

    def exists(self, path: str) -> bool:
        return bool(self._files.exists(f"{self._root}/{path}"))

    def names(self, path: str) -> list[str]:
        folder = f"{self._root}/{path}".rstrip("/")
        found = self._files.ls(folder, detail=False) if self._files.isdir(folder) else []
        return [name.rstrip("/").rpartition("/")[2] for name in found]

    def read(self, path: str) -> bytes:
        return bytes(self._files.cat_file(f"{self._root}/{path}"))

    def write(self, path: str, data: bytes) -> None:
        target = f"{self._root}/{path}"
        self._files.makedirs(target.rpartition("/")[0], exist_ok=True)
        self._files.pipe_file(target, data)
