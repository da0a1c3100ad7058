"""The container program: where it is, and one call of it.

Each call runs under a warden of ours, which is what makes an instance end with its worker: the program leaves an
instance's processes behind as daemons, and the warden is whom they are handed to.
"""

from __future__ import annotations

import asyncio
import os
import re
import shutil
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Self

from polarq.errors import BackendAway, RuntimeFault
from polarq_worker.runtimes.base import Host
from polarq_worker.runtimes.capture import Capture
from polarq_worker.runtimes.folder import in_thread
from polarq_worker.runtimes.processes import CouldNotStart, Descriptors, ProcessTree, WardenLost, uninterrupted
from polarq_worker.runtimes.texts import could_not_start

COLOURS = re.compile(r"\x1b\[[0-9;]*m")
NAMES = ("apptainer", "singularity")
KEPT_BYTES = 1 << 20
DRAIN_S = 0.25
PASSED = (
    "PATH",
    "HOME",
    "USER",
    "LOGNAME",
    "XDG_RUNTIME_DIR",
    "DBUS_SESSION_BUS_ADDRESS",
    "SSL_CERT_FILE",
    "DOCKER_HOST",
)
PASSED_BELOW = ("APPTAINER_", "SINGULARITY_", "http_proxy", "https_proxy", "no_proxy", "HTTP_PROXY", "HTTPS_PROXY")
"""Of the worker's environment, for the program alone; APPTAINERENV_ would be for the sandbox and is not passed."""


@dataclass(frozen=True, slots=True)
class Said:
    """How a call ended."""

    code: int
    out: bytes
    err: str

    @property
    def why(self) -> str:
        """Its last line of complaint."""
        return complaint(self.err) or f"it ended with {self.code} and said nothing"


def complaint(text: str) -> str:
    """The last line that tells of an error, or the last one at all, without colours; empty when there is none."""
    lines = [line.strip() for line in COLOURS.sub("", text).split("\n") if line.strip()]
    told = [line for line in lines if line.startswith(("FATAL", "ERROR"))] or lines
    return " ".join(told[-1].split()) if told else ""


def find(host: Host) -> str | None:
    """The program's path, or None."""
    named = host.settings.apptainer.program
    if named is not None:
        return shutil.which(named)
    return next((path for name in NAMES if (path := shutil.which(name))), None)


def missing(host: Host) -> str:
    """One line: what to do about it."""
    named = host.settings.apptainer.program
    if named is not None:
        return f"there is no program '{named}' (runtimes.apptainer.program of the topology)"
    return "there is neither apptainer nor singularity on the worker's PATH; install one, or name it: " + (
        "runtimes.apptainer.program in the topology"
    )


class Program:
    """The program with a folder of its own for what it remembers, so that nobody else's instances are met."""

    def __init__(self, path: str, store: Path) -> None:
        self.path = path
        self.store = store

    @classmethod
    def of(cls, host: Host, store: Path) -> Program:
        """Raises `BackendAway`."""
        path = find(host)
        if path is None:
            raise BackendAway(missing(host))
        return cls(path, store)

    @property
    def config_dir(self) -> Path:
        return self.store / "config"

    def environment(self, temporary: Path) -> dict[str, str]:
        kept = {name: text for name, text in os.environ.items() if name in PASSED or name.startswith(PASSED_BELOW)}
        folders = {"CONFIGDIR": self.config_dir, "CACHEDIR": self.store / "cache", "TMPDIR": temporary}
        return {
            "PATH": os.defpath,
            **kept,
            "LANG": "C.UTF-8",
            **{f"APPTAINER_{name}": str(path) for name, path in folders.items()},
            **{f"SINGULARITY_{name}": str(path) for name, path in folders.items()},
        }

    async def call(self, *args: str, run_dir: Path) -> Said:
        """One call to its end, with all that it started. Killed when cancelled. Raises `RuntimeFault`."""
        async with Call(self, run_dir) as call:
            return await call.ended(*args)


class Call:
    """A warden with one call of the program under it; leaving the context ends whatever the call left behind."""

    def __init__(self, program: Program, run_dir: Path) -> None:
        self._program = program
        self._run_dir = run_dir
        self._tree = ProcessTree(run_dir / "program.stderr")

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.stop()

    async def start(self) -> None:
        """Raises `RuntimeFault`."""
        await in_thread(partial(self._run_dir.mkdir, parents=True, exist_ok=True))
        await self._tree.start()

    async def stop(self) -> bool:
        """Whether nothing is left."""
        return await self._tree.stop()

    async def ended(self, *args: str) -> Said:
        """Runs it; what it leaves behind as a daemon lives until `stop`. Raises `RuntimeFault`."""
        out, out_w = os.pipe()
        err, err_w = os.pipe()
        descriptors = Descriptors(os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC), out_w, err_w)
        captures = (Capture(out, KEPT_BYTES, None), Capture(err, KEPT_BYTES, None))
        argv = [self._program.path, *args]
        command = None
        try:
            environment = self._program.environment(self._run_dir)
            command = await self._tree.run(argv, "/", environment, descriptors)
            await command.started()
            code = await command.ended()
            try:
                async with asyncio.timeout(DRAIN_S):
                    await asyncio.gather(*(capture.finished.wait() for capture in captures))
            except TimeoutError:
                # A daemon of its holds the pipe.
                pass
            return Said(code, captures[0].value(), captures[1].value().decode("utf-8", "replace"))
        except CouldNotStart as exc:
            raise BackendAway(could_not_start(exc, argv[0], "/")) from None
        except WardenLost:
            raise RuntimeFault(f"{argv[0]} was killed with its first process: {self._tree.last_words()}") from None
        except asyncio.CancelledError:
            if command is not None:
                await uninterrupted(command.kill())
            raise
        finally:
            for capture in captures:
                capture.close()
