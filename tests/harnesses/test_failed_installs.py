"""What comes of installing a program when it goes wrong: one line that says so, nothing half-installed that is taken
for whole, and the next try installs it."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from polarq.errors import HarnessFault
from polarq.testing.ports import free_port
from polarq_worker.harnesses.environment import prepare_env
from polarq_worker.harnesses.programs.program import Installed, NpmProgram, installed
from polarq_worker.harnesses.programs.registries import Registries
from polarq_worker.harnesses.programs.versions import Versions
from polarq_worker.runtimes.local import LocalRuntime
from polarq_worker.stages.prepare import PrepareFailed, prepare

from ..needs import not_here
from .package_registry import TOKEN, registry

NPM = NpmProgram("pocket-agent", "pocket", Versions("1.2.0", "1.1", "1.3"))
NAME = "pocket-failing"
ENDED = f"harness {NAME}: bringing pocket-agent 1.2.0 had not ended; put it in the image, or let preparing reach"


@pytest.fixture(autouse=True)
def _npm() -> None:
    if shutil.which("npm") is None:
        not_here("there is no npm")


async def install(runtime: LocalRuntime, port: int, home: Path, timeout_s: float = 60) -> Installed:
    """From a registry at that port."""
    home.mkdir(exist_ok=True)
    at = f"127.0.0.1:{port}"
    (home / ".npmrc").write_text(f"registry=http://{at}/npm/\n//{at}/npm/:_authToken={TOKEN}\nfetch-retries=0\n")
    async with Registries.of({"PATH": os.environ["PATH"]}, home).lent(runtime) as lent:
        action = NPM.install(NAME, "1.2.0", exact=False)
        env = {**lent, **prepare_env(runtime.spec, runtime.layout)}
        await prepare(runtime, [action], env=env, timeout_s=timeout_s, upload_roots=[])
    return await installed(runtime, NAME)


async def is_installed_the_next_time(runtime: LocalRuntime, home: Path) -> None:
    with pytest.raises(HarnessFault, match="is not in the sandbox"):
        await installed(runtime, NAME)
    with registry("1.2.0") as port:
        found = await install(runtime, port, home)
    assert (found.origin, found.version) == ("npm", "1.2.0")


@asynccontextmanager
async def silent_registry() -> AsyncIterator[tuple[int, asyncio.Event]]:
    """One that takes connections and says nothing; its port, and whether somebody has come."""
    asked, gone = asyncio.Event(), asyncio.Event()

    async def taken(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        asked.set()
        await gone.wait()
        writer.close()

    server = await asyncio.start_server(taken, "127.0.0.1", 0)
    try:
        port: int = server.sockets[0].getsockname()[1]
        yield port, asked
    finally:
        gone.set()
        server.close()


def installers(runtime: LocalRuntime) -> list[int]:
    """The processes that install in a sandbox, by their environment."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            env = (folder / "environ").read_bytes().split(b"\0")
        except OSError:
            continue
        if f"POLARQ_HARNESS={NAME}".encode() in env and f"SESSION_DIR={runtime.layout.session_dir}".encode() in env:
            found.append(int(folder.name))
    return found


async def test_a_registry_that_is_not_there_is_one_line(runtime: LocalRuntime, tmp_path: Path) -> None:
    with pytest.raises(PrepareFailed) as failed:
        await install(runtime, free_port(), tmp_path / "home")
    text = str(failed.value)
    assert f"harness {NAME}: pocket-agent 1.2.0 cannot be installed: " in text
    assert "put it in the image, or let preparing reach the registry" in text
    assert "\n" not in text
    assert not failed.value.timed_out
    await is_installed_the_next_time(runtime, tmp_path / "home")


async def test_a_registry_that_says_nothing_takes_the_budget_and_is_one_line(
    runtime: LocalRuntime, tmp_path: Path
) -> None:
    async with silent_registry() as (port, _):
        with pytest.raises(PrepareFailed) as failed:
            await install(runtime, port, tmp_path / "home", timeout_s=2)
    assert failed.value.timed_out
    assert ENDED in str(failed.value)
    assert "\n" not in str(failed.value)
    assert installers(runtime) == []
    await is_installed_the_next_time(runtime, tmp_path / "home")


async def test_an_installer_that_is_killed_is_one_line_and_what_it_left_is_taken_for_nothing(
    runtime: LocalRuntime, tmp_path: Path
) -> None:
    async with silent_registry() as (port, asked):
        installing = asyncio.ensure_future(install(runtime, port, tmp_path / "home"))
        async with asyncio.timeout(60):
            await asked.wait()
        for pid in installers(runtime):
            os.kill(pid, signal.SIGKILL)
        with pytest.raises(PrepareFailed, match="killed by signal 9") as failed:
            await installing
    assert ENDED in str(failed.value)
    home = f"{runtime.layout.session_dir}/.polarq/programs/{NAME}"
    left = await runtime.exec(["test", "-d", f"{home}/.work"], timeout_s=60)
    assert left.ok, "it was killed in the middle"
    await is_installed_the_next_time(runtime, tmp_path / "home")
