"""What polarq says of a node's snapshots: beside a backend's own lies a note, `<folder>/recipes/<key>.json`.

By its time stamp it tells when the snapshot was last used. It is written first, so that a snapshot always has one.
"""

from __future__ import annotations

import logging
import os
from pathlib import Path

from pydantic import ValidationError

from polarq.contracts.base import Contract
from polarq.contracts.sandbox import ScrubbedHistory
from polarq_worker.runtimes.texts import fault

log = logging.getLogger("polarq.worker.warm")


class Note(Contract):
    """Of one snapshot."""

    runtime: str = ""
    """Its backend, as a task names it."""
    history: list[ScrubbedHistory] = []
    """What results shall say of it."""


class Notes:
    """One node's; without a folder none are kept. All methods block."""

    def __init__(self, folder: Path | None) -> None:
        self._folder = None if folder is None else folder / "recipes"

    def write(self, key: str, note: Note) -> None:
        """Raises `RuntimeFault`."""
        if self._folder is None:
            return
        part = self._path(self._folder, key).with_suffix(".part")
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            part.write_text(note.model_dump_json(), encoding="utf-8")
            part.replace(part.with_suffix(".json"))
        except OSError as exc:
            raise fault(f"the note of snapshot {key} cannot be written", exc) from exc

    def read(self, key: str) -> tuple[Note, float]:
        """And when the snapshot was last used; 0: that is not known."""
        if self._folder is not None:
            path = self._path(self._folder, key)
            try:
                return Note.model_validate_json(path.read_bytes()), path.stat().st_mtime
            except FileNotFoundError:
                pass
            except ValidationError as exc:
                log.warning("%s cannot be read: %s", path, exc.errors()[0]["msg"])
        return Note(), 0.0

    def used(self, key: str) -> None:
        """Its snapshot is, now."""
        if self._folder is not None and (path := self._path(self._folder, key)).exists():
            os.utime(path)

    def drop(self, key: str) -> None:
        if self._folder is not None:
            self._path(self._folder, key).unlink(missing_ok=True)

    def all(self) -> dict[str, Note]:
        """By key. Half a note of a killed worker goes."""
        if self._folder is None or not self._folder.is_dir():
            return {}
        for part in self._folder.glob("*.part"):
            part.unlink(missing_ok=True)
        return {path.stem: self.read(path.stem)[0] for path in sorted(self._folder.glob("*.json"))}

    @staticmethod
    def _path(folder: Path, key: str) -> Path:
        return folder / f"{key}.json"
