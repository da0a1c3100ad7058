"""Files that came back from sandboxes, where a trainer or a person finds them.

    <place>/<task_id>/<index>-<token>/<name>

One folder per attempt, so that one whose result was not taken goes as a whole. Names are those of the sandbox, with
every byte quoted (%0A) that is not plain in a file name or an address.
"""

from __future__ import annotations

import hashlib
import importlib
import os
import re
import shutil
import time
from pathlib import Path
from typing import Any
from urllib.parse import quote

from polarq.contracts.task import split_rollout_id
from polarq.errors import ArtifactsUnavailable

LONGEST_NAME = 200
"""Bytes of one part of a stored name; a file system takes 255."""
CHUNK = 1 << 20
_ATTEMPT = re.compile(r"[0-9]+-[0-9]+")


class ArtifactStore:
    """`place` is a folder or an fsspec address. Its methods block, and raise `ArtifactsUnavailable`."""

    def __init__(self, place: str) -> None:
        self.place = place.rstrip("/") if "://" in place else place

    @property
    def is_folder(self) -> bool:
        return "://" not in self.place

    def put(self, rollout_id: str, token: int, name: str, source: Path) -> str:
        """Takes a file (moves it, where that is possible) and answers where it lies now."""
        where = f"{self._attempt(rollout_id, token)}/{stored_name(name)}"
        try:
            if self.is_folder:
                target = Path(where)
                target.parent.mkdir(parents=True, exist_ok=True)
                shutil.move(source, target)
                target.chmod(0o644)
            else:
                files, path = _remote(where)
                files.makedirs(path.rpartition("/")[0], exist_ok=True)
                files.put_file(str(source), path)
        except ArtifactsUnavailable:
            raise
        except Exception as exc:  # whatever a storage library raises
            raise ArtifactsUnavailable(f"cannot be put to {where}: {_words(exc)}") from exc
        return where

    def drop(self, rollout_id: str, token: int) -> None:
        """Removes all files of an attempt; no harm when there are none."""
        where = self._attempt(rollout_id, token)
        try:
            if self.is_folder:
                folder = Path(where)
                if folder.exists():
                    shutil.rmtree(folder)
                if folder.parent.is_dir() and not any(folder.parent.iterdir()):
                    folder.parent.rmdir()
            else:
                files, path = _remote(where)
                if files.exists(path):
                    files.rm(path, recursive=True)
        except ArtifactsUnavailable:
            raise
        except Exception as exc:
            raise ArtifactsUnavailable(f"{where} cannot be removed: {_words(exc)}") from exc

    def sweep(self, keep_s: float) -> int:
        """Removes attempts that are older than `keep_s`, in a folder; how many. What else lies there is somebody's."""
        root = Path(self.place)
        if not self.is_folder or not root.is_dir():
            return 0
        gone = 0
        try:
            for task in root.iterdir():
                before = gone
                for attempt in task.iterdir() if _is_folder(task) else ():
                    ours = _ATTEMPT.fullmatch(attempt.name) and _is_folder(attempt)
                    if ours and time.time() - attempt.stat().st_mtime > keep_s:
                        shutil.rmtree(attempt)
                        gone += 1
                if gone > before and not any(task.iterdir()):
                    task.rmdir()
        except FileNotFoundError:
            # Another worker sweeps the same folder.
            return gone
        except OSError as exc:
            raise ArtifactsUnavailable(f"{root} cannot be swept: {_words(exc)}") from exc
        return gone

    def _attempt(self, rollout_id: str, token: int) -> str:
        task_id, index = split_rollout_id(rollout_id)
        return f"{self.place}/{task_id}/{index}-{token}"


def _is_folder(path: Path) -> bool:
    return path.is_dir() and not path.is_symlink()


def fetch(where: str, target: Path, sha256: str) -> None:
    """Copies a stored file to a new file. Raises `ArtifactsUnavailable`, also when it is not what was stored."""
    seen = hashlib.sha256()
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with _opened(where) as source, target.open("xb") as out:
            while data := source.read(CHUNK):
                seen.update(data)
                out.write(data)
    except ArtifactsUnavailable:
        raise
    except FileExistsError:
        raise ArtifactsUnavailable(f"{target} exists already; choose another folder") from None
    except FileNotFoundError:
        raise ArtifactsUnavailable(f"{where} is not there (deleted since, or on another machine)") from None
    except Exception as exc:
        raise ArtifactsUnavailable(f"{where} cannot be read: {_words(exc)}") from exc
    if seen.hexdigest() != sha256:
        target.unlink(missing_ok=True)
        raise ArtifactsUnavailable(f"{where} has changed since it was stored")


def stored_name(name: str) -> str:
    """A relative path of plain names, another one for every other `name`."""
    return "/".join(_stored_part(part) for part in name.split("/") if part not in {"", "."})


def _stored_part(part: str) -> str:
    plain = quote(os.fsencode(part), safe="").replace("..", "%2E%2E")
    if len(plain) <= LONGEST_NAME:
        return plain
    return f"{plain[: LONGEST_NAME - 20].rstrip('%')}-{hashlib.sha256(os.fsencode(part)).hexdigest()[:16]}"


def _opened(where: str) -> Any:
    if "://" not in where:
        return Path(where).open("rb")
    files, path = _remote(where)
    return files.open(path, "rb")


def _remote(where: str) -> tuple[Any, str]:
    try:
        fsspec: Any = importlib.import_module("fsspec")
    except ImportError:
        raise ArtifactsUnavailable(
            f"artifacts.place {where} needs fsspec, which is not installed: pip install 'polarq[archive]' and the "
            "library of that storage (s3fs, gcsfs, ...), or give a folder"
        ) from None
    files, path = fsspec.core.url_to_fs(where)
    return files, str(path)


def _words(exc: Exception) -> str:
    return " ".join(str(getattr(exc, "strerror", None) or f"{type(exc).__name__}: {exc}").split())
