"""An export on its way: parts and a journal in a hidden folder beside the target, until the target is whole.

Each part is written under another name and renamed; then a line of the journal says which rollouts it holds and which
were left out. A killed export goes on after the journal's last whole line. The target appears by one rename.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import shutil
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Any, Self

from polarq.errors import InvalidInput
from polarq.export.base import Format, Record, cannot_write, whole_file

_JOURNAL = "journal.jsonl"


class Parts:
    """One export's hidden folder, locked while it is open."""

    def __init__(self, target: Path, form: Format, what: Mapping[str, Any], *, overwrite: bool = False) -> None:
        """`what` tells this export from another one with the same target.

        Raises `InvalidInput` when the target is there, is being written by another process, or was begun otherwise.
        """
        if os.path.lexists(target) and not overwrite:
            raise InvalidInput(str(target), ["is there already; choose another --to, or give --overwrite"])
        try:
            if target.is_dir():
                _replaceable(target, form)
        except OSError as exc:
            raise cannot_write(target, exc) from None
        self.target = target
        self.seen: set[str] = set()
        """Rollouts that are through."""
        self.skipped: Counter[str] = Counter()
        self.records = 0
        self.resumed = False
        self._form = form
        self._paths: list[Path] = []
        self._folder = target.parent / f".{target.name}.polarq-export"
        head = {"format": form.name, "settings": dict(form.settings), **what}
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            self._journal = (self._folder / _JOURNAL).open("a+b")
        except OSError as exc:
            raise cannot_write(target, exc) from None
        try:
            self._lock()
            self._take_up(json.loads(json.dumps(head)))
        except BaseException:
            _closed(self._journal)
            raise

    def _lock(self) -> None:
        try:
            fcntl.flock(self._journal, fcntl.LOCK_EX | fcntl.LOCK_NB)
            # One that ended between the opening and the lock has removed what was opened.
            mine = os.path.samestat(os.fstat(self._journal.fileno()), (self._folder / _JOURNAL).stat())
        except (BlockingIOError, FileNotFoundError):
            mine = False
        if not mine:
            raise InvalidInput(str(self.target), ["is being written by another export"])

    def _take_up(self, head: Record) -> None:
        self._journal.seek(0)
        lines = self._journal.read().splitlines(keepends=True)
        if lines and not lines[-1].endswith(b"\n"):
            self._journal.truncate(sum(map(len, lines[:-1])))  # the export was killed while it wrote this line
            lines.pop()
        if not lines:
            self._clear()
            self._note(head)
            return
        try:
            begun = dict(json.loads(lines[0]))
        except (TypeError, ValueError):
            raise self._damaged() from None
        if begun != head and len(lines) == 1:  # it came to nothing: a name that was mistyped, a task that was not there
            self._journal.truncate(0)
            self._clear()
            self._note(head)
            return
        if begun != head:
            other = ", ".join(sorted(key for key in {*begun, *head} if begun.get(key) != head.get(key)))
            told = f"was begun by another export ({other} differ); remove {self._folder}, or choose another --to"
            raise InvalidInput(str(self.target), [told])
        for line in lines[1:]:
            try:
                part = json.loads(line)
                self.seen.update(part["rollouts"])
                self.skipped.update(part["skipped"])
                self.records += part["records"]
                self._paths += [self._folder / name for name in part["files"]]
                self._form.remember(part["memory"])
            except (KeyError, TypeError, ValueError):
                raise self._damaged() from None
            self.resumed = True
        if not all(path.is_file() for path in self._paths):
            raise self._damaged()
        self._clear()

    def _damaged(self) -> InvalidInput:
        told = f"what an export before left in {self._folder} is damaged; remove it, and all is exported anew"
        return InvalidInput(str(self.target), [told])

    def _clear(self) -> None:
        """Removes what no line of the journal tells of: it was being written when the export was killed."""
        known = {self._folder / _JOURNAL, *self._paths}
        for path in self._folder.iterdir():
            if path not in known:
                path.unlink()

    def add(self, made: Mapping[str, Sequence[Record]], skipped: Mapping[str, str]) -> None:
        """Rollouts that are through: records by rollout id, and why others have none."""
        if not made and not skipped:
            return
        files = self._written(made)
        records = sum(map(len, made.values()))
        self._note(
            {
                "files": [path.name for path in files],
                "rollouts": [*made, *skipped],
                "skipped": Counter(skipped.values()),
                "records": records,
                "memory": self._form.memory(),
            }
        )
        self._paths += files
        self.seen.update(made, skipped)
        self.skipped.update(skipped.values())
        self.records += records

    def keep_images(self, images: Mapping[str, bytes]) -> None:
        """Pictures in the folder beside the target, each once; they are named by their content."""
        for name, data in images.items():
            path = self.target.with_name(f"{self.target.name}.images") / name
            if not path.exists():
                try:
                    path.parent.mkdir(exist_ok=True)
                except OSError as exc:
                    raise cannot_write(path.parent, exc) from None
                with whole_file(path) as file:
                    file.write(data)

    def _written(self, made: Mapping[str, Sequence[Record]]) -> list[Path]:
        if self._form.one_each:
            named = {f"{rollout_id}{self._form.suffix}": records for rollout_id, records in made.items() if records}
        else:
            together = [record for records in made.values() for record in records]
            named = {f"part-{len(self._paths):06d}{self._form.suffix}": together} if together else {}
        paths = []
        for name, records in named.items():
            path = self._folder / name
            with whole_file(path) as file:
                self._form.write(file, records)
            paths.append(path)
        return paths

    def _note(self, line: Record) -> None:
        try:
            self._journal.write(json.dumps(line).encode() + b"\n")
            self._journal.flush()
            os.fsync(self._journal.fileno())
        except OSError as exc:
            raise cannot_write(self.target, exc) from None

    def finish(self) -> None:
        """Puts the whole in its place, and removes the hidden folder. Raises `InvalidInput`."""
        if not self._form.one_each:
            with whole_file(self.target) as file:
                self._form.join(self._paths, file)
        try:
            # First of all, so that no later export goes on from what is half removed.
            (self._folder / _JOURNAL).unlink()
            if not self._form.one_each:
                shutil.rmtree(self._folder)
                return
            # Without its journal the folder is what the target shall be; killed here, the export begins anew.
            if self.target.is_dir() and not self.target.is_symlink():
                shutil.rmtree(self.target)
            else:
                self.target.unlink(missing_ok=True)
            self._folder.rename(self.target)
        except OSError as exc:
            raise cannot_write(self.target, exc) from None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if not self.seen and (self._folder / _JOURNAL).exists():  # it came to nothing, and nothing stays of it
            shutil.rmtree(self._folder, ignore_errors=True)
        _closed(self._journal)


def _closed(journal: IO[bytes]) -> None:
    """A line that a full disk did not take stays in the buffer: closing tries once more, and that it fails is known."""
    with contextlib.suppress(OSError):
        journal.close()


def _replaceable(folder: Path, form: Format) -> None:
    """Raises `InvalidInput` for a folder that is no export of this format: all in it would be deleted."""
    if not form.one_each:
        raise InvalidInput(str(folder), [f"is a folder; format {form.name} makes a file"])
    others = (path for path in folder.iterdir() if path.suffix != form.suffix or not path.is_file())
    if (other := next(others, None)) is not None:
        raise InvalidInput(str(folder), [f"holds {other.name}, which no export wrote; choose another --to"])
