"""Brings files of a sandbox to where a trainer finds them: what the task declared, and the logs of commands.

Nothing here fails a rollout: what cannot be had is an entry with its problem.
"""

from __future__ import annotations

import asyncio
import glob
import hashlib
import itertools
import os
import shutil
import tarfile
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from polarq.contracts.artifacts import Artifact, ArtifactSpec, RefusedEntry
from polarq.contracts.sandbox import ExecCategory
from polarq.errors import ArtifactsUnavailable, RuntimeFault
from polarq.store.artifacts import CHUNK, ArtifactStore
from polarq.topology.artifacts import ArtifactsSection
from polarq_worker.artifact_names import Names
from polarq_worker.runtimes import confined
from polarq_worker.runtimes.base import SESSION_DIR, Runtime
from polarq_worker.runtimes.confined import Progress
from polarq_worker.runtimes.fetched import Fetched, TooLarge, TooMany, printable

T = TypeVar("T")

_threads = ThreadPoolExecutor(2, thread_name_prefix="polarq-artifacts")
"""Large files take long, and nothing else of the worker shall wait for them."""

LISTED = 500
"""Artefacts of one rollout, in its result."""
LOOK_S = 20.0
LISTING_BYTES = 1 << 20

_MATCHES = """
shopt -s nullglob dotglob globstar; IFS=
while read -r -d '' pattern; do
    count=0
    for path in $pattern; do
        printf '%s\\0' "$path"; count=$((count + 1)); [ $count -lt "$MOST" ] || break
    done
    printf '\\0'
done
"""
"""With nothing but bash itself: an image may have no more."""


class Collector:
    """Of one attempt. `artifacts` grows while it collects, so that what was got in time is there when time is over.

    `scratch` is a folder on the host. As long as it is there, nobody has said that the result was taken.
    """

    def __init__(
        self, store: ArtifactStore, limits: ArtifactsSection, *, scratch: Path, rollout_id: str, token: int
    ) -> None:
        self.artifacts: list[Artifact] = []
        self._store = store
        self._limits = limits
        self._scratch = scratch
        self._rollout_id = rollout_id
        self._token = token
        self._bytes_left = limits.max_bytes
        self._files_left = limits.max_files
        self._numbers = itertools.count()
        self._names = Names()
        self._stored: set[str] = set()
        """Paths in the sandbox, as they were asked for: a file that two patterns name comes once."""
        self._waiting: list[ArtifactSpec] = []
        self._session = SESSION_DIR
        """Where the session directory lies, as programs in the sandbox see it."""

    async def take(self, runtime: Runtime, specs: Sequence[ArtifactSpec]) -> None:
        """Collects what the task declared."""
        if not specs:
            return
        self._waiting = list(specs)
        self._session = runtime.layout.session_dir
        lost = not await runtime.alive()
        patterns = [spec for spec in specs if spec.is_pattern]
        matches = dict(zip(map(id, patterns), await self._matches(runtime, patterns), strict=True))
        for spec in specs:
            await self._take(runtime, spec, matches.get(id(spec), [spec.path]), lost=lost)
            self._waiting.pop(0)

    def say_rest(self, problem: str) -> None:
        """What was declared and not collected, and why."""
        for spec in self._waiting:
            self._say(Artifact(name=self._name(spec.path), problem=problem))
        self._waiting = []

    async def take_logs(self, folder: Path, name: str) -> None:
        """Collects the files of a folder of this host that a sandbox may have written to."""
        if not self._limits.logs or not await _in_thread(folder.is_dir):
            return
        copy = await self._new_scratch()
        progress = Progress(max_bytes=min(self._bytes_left, self._limits.max_bytes_each), max_files=self._files_left)
        problem = ""
        try:
            await _stoppable(progress, confined.get_dir, folder, [], copy, progress)
        except (RuntimeFault, OSError) as exc:
            problem = " ".join(str(exc).split())
        for path in sorted(await _in_thread(_files_in, copy)):
            relative = os.fsdecode(os.path.relpath(path, copy))
            await self._keep(path, f"{name}/{relative}", "", kind="log")
        if problem:
            self._say(Artifact(name=name, kind="log", problem=problem))

    # --- one of what was declared

    async def _take(self, runtime: Runtime, spec: ArtifactSpec, paths: Sequence[str], *, lost: bool) -> None:
        bytes_left, files_left = self._bytes_left, self._files_left
        most = spec.max_bytes or self._limits.max_bytes_each
        if spec.required and not paths:
            self._say(Artifact(name=self._name(spec.path), problem="there is nothing that it names"))
        for number, path in enumerate(paths):
            left = min(most - (bytes_left - self._bytes_left), self._limits.max_bytes_each, self._bytes_left)
            files = min(spec.max_files or self._files_left, files_left) - (files_left - self._files_left)
            if left <= 0 or files <= 0 or len(self.artifacts) >= LISTED:
                what = "bytes" if left <= 0 else "files"
                more = len(paths) - number
                self._say(
                    Artifact(name=self._name(spec.path), problem=f"the limit of {what} was reached; {more} left out")
                )
                return
            await self._take_path(runtime, path, left, files, named=spec.required or spec.is_pattern or lost)

    async def _take_path(self, runtime: Runtime, path: str, max_bytes: int, max_files: int, *, named: bool) -> None:
        if path in self._stored:
            return
        name, copy = self._name(path), await self._new_scratch()
        try:
            await runtime.get_file(path, copy, max_bytes)
        except TooLarge as exc:
            self._say(Artifact(name=name, problem=_line(exc)))
        except RuntimeFault as why_no_file:
            await _in_thread(_unlink, copy)
            await self._take_folder(runtime, path, max_bytes, max_files, why_no_file if named else None)
        else:
            await self._keep(copy, name, path)

    async def _take_folder(
        self, runtime: Runtime, path: str, max_bytes: int, max_files: int, otherwise: RuntimeFault | None
    ) -> None:
        """As a tar archive. `otherwise` is what to say when it is no folder; None: nothing."""
        name, copy, archive = self._name(path), await self._new_scratch(), await self._new_scratch()
        fetched, problem = Fetched(), ""
        try:
            fetched = await runtime.get_dir(path, copy, max_bytes, max_files)
        except TooMany as exc:
            problem = _line(exc)
        except RuntimeFault:
            if otherwise is not None:
                self._say(Artifact(name=name, problem=_line(otherwise)))
            return
        try:
            files = await _in_thread(_pack, copy, archive)
        except OSError as exc:
            self._say(Artifact(name=name, kind="folder", problem=exc.strerror or str(exc)))
            return
        finally:
            await _in_thread(shutil.rmtree, copy, ignore_errors=True)
        refused = [RefusedEntry(path=entry.path, reason=entry.reason) for entry in fetched.refused]
        await self._keep(
            archive,
            f"{name}.tar",
            path,
            kind="folder",
            files=files,
            refused=refused,
            refused_more=fetched.refused_more,
            problem=problem,
        )

    async def _keep(self, file: Path, name: str, path: str, **facts: Any) -> None:
        """Stores a file of ours, that or the archive of what the sandbox has at `path`."""
        name = self._names.take(name)
        try:
            size, sha256 = await _in_thread(_sum, file)
            where = await _in_thread(self._store.put, self._rollout_id, self._token, name, file)
        except (ArtifactsUnavailable, OSError) as exc:
            self._say(Artifact(**{**facts, "name": printable(name), "problem": _line(exc)}))
            return
        self._stored.add(path)
        self._bytes_left -= size
        self._files_left -= max(1, facts.get("files", 1))
        self._say(Artifact(name=printable(name), size=size, sha256=sha256, where=where, **facts))

    # --- small parts

    async def _matches(self, runtime: Runtime, specs: Sequence[ArtifactSpec]) -> list[list[str]]:
        """What each pattern names in the sandbox, in order of names."""
        if not specs:
            return []
        result = await runtime.exec(
            ["bash", "-c", _MATCHES],
            env={"BASH_ENV": "", "ENV": "", "MOST": str(LISTED + 1)},
            stdin="".join(f"{self._seen(spec.path)}\0" for spec in specs).encode("utf-8", "surrogateescape"),
            timeout_s=LOOK_S,
            max_output_bytes=2 * LISTING_BYTES,
            category=ExecCategory.ARTIFACTS,
        )
        if not result.ok or result.truncated:
            why = "it names too much" if result.truncated else f"it could not be looked up: {result.why}"
            for spec in specs:
                self._say(Artifact(name=self._name(spec.path), problem=why))
            return [[] for _ in specs]
        found: list[list[str]] = [[]]
        for path in result.stdout.decode("utf-8", "surrogateescape").split("\0")[:-1]:
            if path:
                found[-1].append(path)
            else:
                found.append([])
        return (found + [[] for _ in specs])[: len(specs)]

    def _seen(self, pattern: str) -> str:
        """A pattern below the session directory, as the sandbox's own shell has to be asked for it."""
        below = _below(pattern, SESSION_DIR)
        return pattern if below is None else f"{glob.escape(self._session)}{below}"

    def _name(self, path: str) -> str:
        for session in (SESSION_DIR, self._session):
            below = _below(path, session)
            path = path if below is None else below
        return printable("/".join(part for part in path.split("/") if part not in {"", "."})) or "."

    async def _new_scratch(self) -> Path:
        await _in_thread(self._scratch.mkdir, 0o700, True, True)
        return self._scratch / str(next(self._numbers))

    def _say(self, artifact: Artifact) -> None:
        if len(self.artifacts) < LISTED:
            self.artifacts.append(artifact)


async def _stoppable(progress: Progress, function: Callable[..., T], *args: Any) -> T:
    """Runs a copy in a thread; when cancelled, it is stopped first."""
    work = asyncio.ensure_future(_in_thread(function, *args))
    try:
        return await asyncio.shield(work)
    except asyncio.CancelledError:
        progress.stop()
        await asyncio.wait([work])
        work.exception()
        raise


async def _in_thread(function: Callable[..., T], *args: Any, **named: Any) -> T:
    return await asyncio.get_running_loop().run_in_executor(_threads, partial(function, *args, **named))


def _below(path: str, folder: str) -> str | None:
    """What of a path comes after the folder, with its slash; None: it lies elsewhere."""
    return path[len(folder) :] if path == folder or path.startswith(f"{folder}/") else None


def _line(exc: BaseException) -> str:
    return " ".join(str(getattr(exc, "strerror", None) or exc).split())


def _sum(file: Path) -> tuple[int, str]:
    seen, size = hashlib.sha256(), 0
    with file.open("rb") as source:
        while data := source.read(CHUNK):
            seen.update(data)
            size += len(data)
    return size, seen.hexdigest()


def _pack(folder: Path, target: Path) -> int:
    """Writes a folder of ours as a tar archive, without owners; how many files are in it."""
    count = 0

    def plain(info: tarfile.TarInfo) -> tarfile.TarInfo:
        nonlocal count
        count += not info.isdir()
        info.uid = info.gid = 0
        info.uname = info.gname = ""
        return info

    with tarfile.open(target, "w", format=tarfile.PAX_FORMAT) as archive:
        archive.add(folder, arcname=".", filter=plain)
    return count


def _files_in(folder: Path) -> list[Path]:
    """Regular files with something in them."""
    return [
        Path(above) / name
        for above, _, names in os.walk(folder)
        for name in names
        if not (Path(above) / name).is_symlink() and (Path(above) / name).stat().st_size
    ]


def _unlink(path: Path) -> None:
    path.unlink(missing_ok=True)
