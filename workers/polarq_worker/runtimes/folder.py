"""The private folder of a `local` sandbox: where its parts lie, which paths lead into it, what goes in and out."""

from __future__ import annotations

import asyncio
import os
import shutil
import stat
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path, PurePosixPath
from typing import Any

from polarq.errors import RuntimeFault
from polarq_worker.runtimes import confined
from polarq_worker.runtimes.base import SESSION_DIR, SandboxLayout
from polarq_worker.runtimes.processes import uninterrupted
from polarq_worker.runtimes.texts import cannot

_copiers = ThreadPoolExecutor(8, thread_name_prefix="polarq-copy")


class PrivateFolder:
    """`root` with session/, home/, tmp/, run/ and logs/ in it. `workdir` is as the task names it, or None."""

    def __init__(self, root: Path, workdir: str | None) -> None:
        # Programs see resolved paths (pwd -P); ours must be the same.
        self.root = root = Path(os.path.realpath(root))
        self._made = False
        self.session = root / "session"
        self.home = root / "home"
        self.tmp = root / "tmp"
        self.run = root / "run"
        self.logs = root / "logs"
        self.layout = SandboxLayout.below(str(self.session))
        self.named_workdir = workdir
        self.workdir = self.session / self._mapped(workdir or SESSION_DIR)

    async def make(self) -> None:
        """Raises `RuntimeFault`, above all when the folder exists: it is never shared."""
        try:
            await in_thread(self._make)
        except FileExistsError:
            raise RuntimeFault(f"{self.root} exists already; a sandbox's folder is never shared") from None
        except OSError as exc:
            raise RuntimeFault(cannot(f"the sandbox's folder {self.root} cannot be made", exc)) from exc

    async def remove(self) -> None:
        """Removes all of it, if it was made here; no harm when it is gone already. Raises `RuntimeFault`."""
        if not self._made:
            return
        try:
            await in_thread(remove_tree, self.root)
        except OSError as exc:
            raise RuntimeFault(cannot(f"the sandbox's folder {self.root} cannot be removed", exc)) from exc

    def cwd(self, named: str | None) -> str:
        """The folder on the host in which a command runs. Raises `RuntimeFault` where the path climbs."""
        return str(self.workdir / self._mapped(named)) if named else str(self.workdir)

    def place(self, path: str) -> tuple[Path, list[str]]:
        """(folder that may be written to, components below it) for a path inside the sandbox. Raises `RuntimeFault`."""
        whole = PurePosixPath(self.workdir / self._mapped(path))
        for base in (self.session, self.root, self.workdir):
            if whole.is_relative_to(base):
                return base, confined.parts_of(str(whole.relative_to(base)))
        named = f" or {self.workdir}" if self.named_workdir else ""
        raise RuntimeFault(f"'{path}' is outside the sandbox; use a path below {SESSION_DIR}{named}")

    async def transfer(
        self, what: str, progress: confined.Progress, function: Callable[..., None], path: str, *args: Any
    ) -> None:
        """Runs one of `confined`'s functions in a thread. When cancelled it stops, and only then lets go."""
        base, parts = self.place(path)
        work = asyncio.ensure_future(in_thread(function, base, parts, *args))
        try:
            await asyncio.shield(work)
        except asyncio.CancelledError:
            progress.stop()
            await uninterrupted(_settled(work))
            raise
        except RuntimeFault as exc:
            raise RuntimeFault(f"{what} {path}: {exc}") from None
        except OSError as exc:
            raise RuntimeFault(cannot(f"{what} {path}", exc)) from exc

    def _make(self) -> None:
        self.root.mkdir(mode=0o700, parents=True)
        self._made = True
        for name in (self.layout.artifacts_dir, self.layout.agent_log_dir, self.layout.eval_log_dir):
            Path(name).mkdir(parents=True)
        for folder in (self.run, self.logs, self.home, self.tmp):
            folder.mkdir(mode=0o700)
        if self.workdir.is_relative_to(self.session):
            self.workdir.mkdir(parents=True, exist_ok=True)

    def _mapped(self, path: str) -> str:
        """What the contract calls /polar/session/... as a path on the host; any other path as it is."""
        if path == SESSION_DIR or path.startswith(f"{SESSION_DIR}/"):
            return str(self.session.joinpath(*confined.parts_of(path[len(SESSION_DIR) :])))
        return path


async def in_thread(function: Callable[..., Any], *args: Any) -> Any:
    return await asyncio.get_running_loop().run_in_executor(_copiers, function, *args)


async def _settled(work: asyncio.Future[Any]) -> None:
    await asyncio.wait([work])
    work.exception()


def write_private(path: Path, data: bytes) -> None:
    """A new file that only its owner may read."""
    handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    with os.fdopen(handle, "wb") as file:
        file.write(data)


def remove_tree(root: Path) -> None:
    """Removes a folder that programs wrote to; no harm when it is gone. Raises `OSError`."""
    if not root.exists():
        return
    try:
        shutil.rmtree(root)
    except OSError:
        # Folders that a program made unwritable (module caches do) hold their files against their owner.
        for folder, names, _ in os.walk(root):
            for name in names:
                path = Path(folder) / name
                if not path.is_symlink():
                    path.chmod(stat.S_IRWXU)
        shutil.rmtree(root)
