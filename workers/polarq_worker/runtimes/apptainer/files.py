"""The files of an instance, by its open root folder: nothing in it, whatever it links to, leads out."""

from __future__ import annotations

import asyncio
import contextlib
import os

from polarq.errors import RuntimeFault, SandboxLost
from polarq_worker.runtimes import confined
from polarq_worker.runtimes.apptainer.users import User, look_up
from polarq_worker.runtimes.base import SandboxLayout
from polarq_worker.runtimes.confined import Progress
from polarq_worker.runtimes.folder import in_thread
from polarq_worker.runtimes.processes import uninterrupted
from polarq_worker.runtimes.texts import cannot

SCRIPTS_DIR = "/polar/run"
NOT_FILES = ("proc", "sys", "dev")
"""Kernel interfaces: the worker may be root, and what a sandbox's root may not write there, an upload must not."""


class InsideFiles:
    """Those of the instance whose first process is `pid`. Opening blocks, and raises `OSError`."""

    def __init__(self, pid: int) -> None:
        self._root = os.open(f"/proc/{pid}/root", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        self._closed = False

    def close(self) -> None:
        if not self._closed:
            self._closed = True
            os.close(self._root)

    def make(self, layout: SandboxLayout, workdir: str, owner: str | None) -> None:
        """The session's folders, for the user who is to write there (blocks). Raises `RuntimeFault`, `OSError`."""
        own = (layout.session_dir, layout.artifacts_dir, layout.agent_log_dir, layout.eval_log_dir)
        for path in (SCRIPTS_DIR, *own, workdir):
            confined.make_dir(self._root, confined.parts_of(path))
        if owner is not None:
            user = self.user(owner)
            for path in (*own, layout.logs_dir):
                confined.give(self._root, confined.parts_of(path), user.uid, user.gid)

    def user(self, named: str) -> User:
        """Raises `RuntimeFault` (blocks)."""
        return look_up(self._root, named)

    async def script(self, number: int, text: str) -> list[str]:
        """Brings a command's text in as a file, which its size does not matter for; its argv."""
        path = f"{SCRIPTS_DIR}/{number}.sh"
        data = text.encode("utf-8", "surrogateescape")
        await in_thread(confined.put_bytes, self._root, confined.parts_of(path), data, 0o644)
        return ["bash", "-o", "pipefail", path]

    async def remove_script(self, number: int) -> None:
        if not self._closed:
            with contextlib.suppress(OSError, RuntimeFault):
                await in_thread(confined.remove, self._root, confined.parts_of(f"{SCRIPTS_DIR}/{number}.sh"))

    async def move(
        self, what: str, progress: Progress, function: confined.Transfer, path: str, *args: object
    ) -> object:
        """One of `confined`'s functions at an absolute path. When cancelled it stops, and only then lets go. Raises
        `RuntimeFault`."""
        parts = confined.parts_of(path)
        if parts[:1] and parts[0] in NOT_FILES:
            raise RuntimeFault(f"{what} {path}: /{parts[0]} is the kernel's; name a file elsewhere")
        if self._closed:
            raise SandboxLost(f"{what} {path}: the sandbox was stopped")
        # A handle of its own: the sandbox may be stopped while threads are at it.
        root = os.dup(self._root)
        work = asyncio.ensure_future(in_thread(function, root, parts, *args))
        work.add_done_callback(lambda _: os.close(root))
        try:
            return await asyncio.shield(work)
        except asyncio.CancelledError:
            progress.stop()
            await uninterrupted(_settled(work))
            raise
        except RuntimeFault as exc:
            raise type(exc)(f"{what} {path}: {exc}") from None
        except OSError as exc:
            raise RuntimeFault(cannot(f"{what} {path}", exc)) from exc


async def _settled(work: asyncio.Future[object]) -> None:
    await asyncio.wait([work])
    work.exception()
