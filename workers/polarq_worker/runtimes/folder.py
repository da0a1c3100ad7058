"""The private folder of a `local` sandbox: where its parts lie, which paths lead into it, what goes in and out."""

from __future__ import annotations

import asyncio
import errno
import os
import subprocess
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path, PurePosixPath
from typing import Any

from polarq.errors import RuntimeFault
from polarq_worker.runtimes import confined
from polarq_worker.runtimes.base import SESSION_DIR, SandboxLayout
from polarq_worker.runtimes.processes import uninterrupted
from polarq_worker.runtimes.texts import cannot, fault

HOME_DIR = "/polar/home"
RUN_DIR = "/polar/run"
TMP_DIR = "/tmp"
_copiers = ThreadPoolExecutor(8, thread_name_prefix="polarq-copy")


class PrivateFolder:
    """`root` with session/, home/, tmp/, run/ and logs/ in it. `workdir` is as the task names it, or None.

    With an `owner` (user, group) programs see it behind walls: session/ as /polar/session, home/ as /polar/home, tmp/
    as /tmp, run/ as /polar/run; and what is brought in belongs to that owner.
    """

    def __init__(self, root: Path, workdir: str | None, owner: tuple[int, int] | None = None) -> None:
        # Programs see resolved paths (pwd -P); ours must be the same.
        self.root = root = Path(os.path.realpath(root))
        self._made = False
        self.owner = owner
        self.session = root / "session"
        self.home = root / "home"
        self.tmp = root / "tmp"
        self.run = root / "run"
        self.logs = root / "logs"
        walled = owner is not None
        self.seen_home = HOME_DIR if walled else str(self.home)
        self.seen_tmp = TMP_DIR if walled else str(self.tmp)
        self.seen_run = RUN_DIR if walled else str(self.run)
        self.layout = SandboxLayout.below(SESSION_DIR if walled else str(self.session))
        self.named_workdir = workdir
        self._walled = walled
        self.workdir = PurePosixPath(self.layout.session_dir) / self._mapped(workdir or SESSION_DIR)
        self.inside: int | None = None
        """An open folder: the root that programs see, where that is more than this folder shows."""

    async def make(self) -> None:
        """Raises `RuntimeFault`, above all when the folder exists: it is never shared."""
        try:
            await in_thread(self._make)
        except FileExistsError:
            raise RuntimeFault(f"{self.root} exists already; a sandbox's folder is never shared") from None
        except OSError as exc:
            raise fault(f"the sandbox's folder {self.root} cannot be made", exc) from exc

    async def remove(self) -> None:
        """Removes all of it, if it was made here; no harm when it is gone already. Raises `RuntimeFault`."""
        if not self._made:
            return
        try:
            await in_thread(remove_tree, self.root)
        except OSError as exc:
            raise RuntimeFault(cannot(f"the sandbox's folder {self.root} cannot be removed", exc)) from exc

    def cwd(self, named: str | None) -> str:
        """Where a command runs, as it sees it. Raises `RuntimeFault` where the path climbs."""
        return str(self.workdir / self._mapped(named)) if named else str(self.workdir)

    def place(self, path: str) -> tuple[Path, list[str]]:
        """(folder on the host, components below it) for a path inside the sandbox. Raises `RuntimeFault`."""
        whole = self.workdir / self._mapped(path)
        for seen, base in self._places():
            if whole.is_relative_to(seen):
                return base, confined.parts_of(str(whole.relative_to(seen)))
        named = f" or {self.workdir}" if self.named_workdir and not self._walled else ""
        raise RuntimeFault(f"'{path}' is outside the sandbox; use a path below {SESSION_DIR}{named}")

    def parts(self) -> list[Path]:
        """Session, home and temporary folder as programs left them, by paths that other processes of ours may use."""
        if self.inside is None:
            return [self.session, self.home, self.tmp]
        return [Path(f"/proc/{os.getpid()}/fd/{self.inside}{seen}") for seen in (SESSION_DIR, HOME_DIR, TMP_DIR)]

    def _places(self) -> list[tuple[str | PurePosixPath, Path]]:
        if not self._walled:
            return [(str(self.session), self.session), (str(self.root), self.root), (self.workdir, Path(self.workdir))]
        places = {SESSION_DIR: self.session, HOME_DIR: self.home, TMP_DIR: self.tmp}
        if self.inside is not None:
            places = {seen: Path(f"/proc/self/fd/{self.inside}{seen}") for seen in places}
        return list(places.items())

    async def transfer(
        self, what: str, progress: confined.Progress, function: Callable[..., Any], path: str, *args: Any
    ) -> Any:
        """Runs one of `confined`'s functions in a thread. When cancelled it stops, and only then lets go."""
        base, parts = self.place(path)
        if self.owner is not None and os.geteuid() == 0:
            function = partial(confined.as_owner, self.owner, function)
        work = asyncio.ensure_future(in_thread(function, base, parts, *args))
        try:
            return await asyncio.shield(work)
        except asyncio.CancelledError:
            progress.stop()
            await uninterrupted(_settled(work))
            raise
        except RuntimeFault as exc:
            raise type(exc)(f"{what} {path}: {exc}") from None
        except OSError as exc:
            raise fault(f"{what} {path}", exc) from exc

    def _make(self) -> None:
        self.root.mkdir(mode=0o700, parents=True)
        self._made = True
        for folder in (self.session, self.home, self.tmp, self.run, self.logs):
            folder.mkdir(mode=0o700)
        # Another user of the sandbox, if it has some, works in these too.
        for folder in (self.session, self.home, self.run):
            folder.chmod(0o755)
        self.tmp.chmod(0o1777)
        for folder in (self.session, self.home, self.tmp):
            self._give(folder)

    def furnish(self) -> None:
        """The folders of a session that starts from nothing (blocks)."""
        layout = self.layout
        for path in (layout.artifacts_dir, layout.agent_log_dir, layout.eval_log_dir, str(self.workdir)):
            seen, base = self._places()[0]
            if PurePosixPath(path).is_relative_to(seen):
                for part in PurePosixPath(path).relative_to(seen).parts:
                    base = base / part
                    if not base.exists():
                        base.mkdir()
                        self._give(base)

    def _give(self, folder: Path) -> None:
        if self.owner is not None and os.geteuid() == 0:
            os.chown(folder, *self.owner, follow_symlinks=False)

    def _mapped(self, path: str) -> str:
        """What the contract calls /polar/session/... as programs see it; any other path as it is."""
        if self._walled:
            confined.parts_of(path.removeprefix("/"))
        elif path == SESSION_DIR or path.startswith(f"{SESSION_DIR}/"):
            return str(self.session.joinpath(*confined.parts_of(path[len(SESSION_DIR) :])))
        return path


async def in_thread(function: Callable[..., Any], *args: Any) -> Any:
    """Cancelled, it waits for the end: a thread goes on, and whoever undoes what it does must not come before it."""
    return await uninterrupted(_in_thread(function, *args))


async def _in_thread(function: Callable[..., Any], *args: Any) -> Any:
    return await asyncio.get_running_loop().run_in_executor(_copiers, function, *args)


async def _settled(work: asyncio.Future[Any]) -> None:
    await asyncio.wait([work])
    work.exception()


def write_private(path: Path, data: bytes, mode: int = 0o600) -> None:
    """A new file that only its owner may read, or, by `mode`, others too."""
    handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, mode)
    with os.fdopen(handle, "wb") as file:
        file.write(data)


def remove_tree(root: Path) -> None:
    """Removes a folder that programs wrote to, however deep; no harm when it is gone. Raises `OSError`."""
    if not root.exists():
        return
    # Python's own would keep a descriptor, and go down a call, for each level.
    done = _rm(root)
    if done.returncode != 0:
        # Folders that a program made unwritable (module caches do) hold their files against their owner.
        subprocess.run(["chmod", "-R", "u+rwX", "--", str(root)], check=False, capture_output=True)
        done = _rm(root)
    if done.returncode != 0:
        said = done.stderr.decode("utf-8", "replace").strip().splitlines()
        raise OSError(errno.EIO, said[-1] if said else f"rm ended with {done.returncode}", str(root))


def _rm(root: Path) -> subprocess.CompletedProcess[bytes]:
    return subprocess.run(
        ["rm", "-rf", "--one-file-system", "--", str(root)], stdin=subprocess.DEVNULL, capture_output=True, check=False
    )
