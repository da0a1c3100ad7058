"""Files in and out of a container, as tar streams through the daemon. Works over any connection, with any user."""

from __future__ import annotations

import asyncio
import errno
import json
import os
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, contextmanager, suppress
from pathlib import Path
from typing import Any

import aiohttp
from aiodocker import Docker, DockerError

from polarq.errors import DiskFull, RuntimeFault
from polarq_worker.runtimes.archives.tar import Entry, Kind, TarReader
from polarq_worker.runtimes.archives.unpack import TooLong, Unpacker
from polarq_worker.runtimes.docker.daemon import asking
from polarq_worker.runtimes.fetched import TooLarge
from polarq_worker.runtimes.texts import cannot

READ_BYTES = 1 << 20
_files = ThreadPoolExecutor(8, thread_name_prefix="polarq-docker")


class Archive:
    """One container's."""

    def __init__(self, docker: Docker, container: str) -> None:
        self._docker = docker
        self._container = container

    async def put(self, what: str, parts: Iterator[bytes], *, replace_folders: bool = False) -> None:
        """Unpacks a tar stream at the container's root. What is in the way is removed, a link and not its target; a
        folder only with `replace_folders`. Raises `RuntimeFault`."""
        wrong: list[BaseException] = []

        async def body() -> AsyncIterator[bytes]:
            try:
                while (part := await in_thread(next, parts, None)) is not None:
                    yield part
            except (OSError, RuntimeFault) as exc:
                # The request fails of it, with an error that no longer says why.
                wrong.append(exc)
                raise

        try:
            async with asking(what, None):
                url, timeout = self._url(), aiohttp.ClientTimeout()
                params = {"path": "/", "noOverwriteDirNonDir": "false" if replace_folders else "true"}
                async with self._docker.session.put(url, params=params, data=body(), timeout=timeout) as answer:
                    await _refused(answer)
        except (OSError, RuntimeFault):
            if wrong:
                raise _ours(what, wrong[0]) from wrong[0]
            raise

    async def get_file(self, what: str, path: str, target: Path, max_bytes: int) -> None:
        """Raises `RuntimeFault`; what was written of a file that is too large is removed."""
        reader = TarReader()
        handle: int | None = None
        try:
            async with asking(what, None), self._stream(path) as content:
                while not reader.ended and (data := await content.read(READ_BYTES)):
                    for item in reader.feed(data):
                        if isinstance(item, Entry):
                            if handle is not None or item.kind is not Kind.FILE:
                                raise RuntimeFault(f"{what}: it is not a regular file")
                            if item.size > max_bytes:
                                raise TooLarge(f"{what}: larger than the {max_bytes} bytes that may be fetched")
                            handle = os.open(target, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o644)
                        elif handle is not None:
                            await in_thread(_write, handle, item)
                if handle is None or not reader.ended:
                    raise RuntimeFault(f"{what}: the archive breaks off")
        except BaseException as exc:
            if handle is not None:
                target.unlink(missing_ok=True)
            if isinstance(exc, OSError):
                raise _ours(what, exc) from exc
            raise
        finally:
            if handle is not None:
                os.close(handle)

    async def get_folder(self, what: str, path: str, unpacker: Unpacker, base: str = "") -> str | None:
        """Unpacks what lies at `path`. Answers the path of what was too much to be read past, where it gave up; None:
        all was read. Raises `RuntimeFault`."""
        unpacker.begin(base)
        try:
            async with asking(what, None), self._stream(path) as content:
                while data := await content.read(READ_BYTES):
                    with _named(what):
                        await _settled(in_thread(unpacker.feed, data), unpacker.stop)
                with _named(what):
                    unpacker.end()
        except TooLong as exc:
            return exc.path
        except OSError as exc:
            raise _ours(what, exc) from exc
        finally:
            unpacker.close()
        return None

    async def get_bytes(self, path: str, max_bytes: int) -> bytes:
        """A small file; empty where there is none. Raises `RuntimeFault` where the daemon does not answer."""
        reader, found = TarReader(), bytearray()
        async with asking(f"read {path}"):
            try:
                async with self._stream(path) as content:
                    while not reader.ended and (data := await content.read(READ_BYTES)):
                        found += b"".join(item for item in reader.feed(data) if not isinstance(item, Entry))
                        if len(found) > max_bytes:
                            raise TooLarge(f"{path}: larger than {max_bytes} bytes")
            except DockerError as exc:
                if exc.status != 404:
                    raise
        return bytes(found)

    async def has(self, path: str) -> bool:
        """Raises `RuntimeFault` where the daemon does not answer."""
        async with asking(f"look at {path}"), self._docker.session.head(self._url(), params={"path": path}) as answer:
            if answer.status != 404:
                await _refused(answer)
            return answer.status != 404

    @asynccontextmanager
    async def _stream(self, path: str) -> AsyncIterator[aiohttp.StreamReader]:
        timeout = aiohttp.ClientTimeout()
        async with self._docker.session.get(self._url(), params={"path": path}, timeout=timeout) as answer:
            await _refused(answer)
            yield answer.content
            # What is left of it is not read: the connection is given up.
            answer.close()

    def _url(self) -> str:
        return f"{self._docker.docker_host}/{self._docker.api_version}/containers/{self._container}/archive"


@contextmanager
def _named(what: str) -> Iterator[None]:
    try:
        yield
    except RuntimeFault as exc:
        raise type(exc)(f"{what}: {exc}") from None


async def _refused(answer: aiohttp.ClientResponse) -> None:
    if answer.status >= 400:
        text = (await answer.read()).decode("utf-8", "replace")
        with suppress(ValueError, KeyError, TypeError):
            text = json.loads(text)["message"]
        raise DockerError(answer.status, text)


async def in_thread(function: Callable[..., Any], *args: Any) -> Any:
    return await asyncio.get_running_loop().run_in_executor(_files, function, *args)


async def _settled(work: Any, stop: Callable[[], None]) -> None:
    """Waits for a step in a thread, also when cancelled: nothing is closed under it."""
    step = asyncio.ensure_future(work)
    try:
        await asyncio.shield(step)
    except asyncio.CancelledError:
        stop()
        await asyncio.wait([step])
        step.exception()
        raise


def _write(handle: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(handle, view) :]


def _ours(what: str, exc: BaseException) -> RuntimeFault:
    """Of the host's own files."""
    if isinstance(exc, OSError):
        kind = DiskFull if exc.errno in {errno.ENOSPC, errno.EDQUOT} else RuntimeFault
        return kind(cannot(what, exc))
    return RuntimeFault(f"{what}: {exc}")
