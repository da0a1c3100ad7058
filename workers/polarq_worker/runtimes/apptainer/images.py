"""Images as the program runs them: SIF files and unpacked folders as they are, all others converted once a node.

    images/<name>-<state>.sif        `name` is of the image's name, `state` of the file or the daemon's image behind it
    images/<name>-<state>.sif.json   what makes it whole: its size and digest
    images/<name>.lock               held by who converts: one at a time, of all workers

A conversion is written under another name and renamed when it is whole; what does not have the size that was noted is
converted anew. When was an image last asked for? Its note's time of change says so.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import hashlib
import http.client
import json
import os
import re
import secrets
import socket
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import quote

from polarq.errors import BackendAway, DiskFull, ImageDenied, ImageMissing, RuntimeFault
from polarq_worker.runtimes.apptainer.program import Program
from polarq_worker.runtimes.folder import in_thread, remove_tree
from polarq_worker.runtimes.texts import cannot

ARCHIVES = ("docker-archive", "oci-archive", "oci")
REMOTE = ("docker", "oras", "library", "shub")
SOURCES = (*ARCHIVES, "docker-daemon", *REMOTE)
POLL_S = 0.05
FRESH_S = 600.0
DAEMON_SOCKET = "/var/run/docker.sock"
ROOM_BYTES = 64 << 20
"""A disk with less room than this, or than an archive unpacked and packed again, was full if a conversion failed on it;
what the program had written by then it may have removed."""
_CODE = re.compile(r": (manifest[_ ]unknown|name[_ ]unknown|unauthorized|denied): ", re.IGNORECASE)
SIF_UUID = slice(48, 64)
"""Where a SIF file has its identity: behind the launcher (32 bytes), the magic (10), a version and an architecture."""


@dataclass(frozen=True, slots=True)
class Image:
    """What an instance is started from."""

    path: Path
    digest: str
    """Empty for an unpacked folder."""


def source_of(image: str) -> str:
    """The kind of place that an image comes from, `docker` in `docker://...`; empty for a path."""
    scheme, colon, _ = image.partition(":")
    return scheme if colon and scheme in SOURCES else ""


async def bring(image: str, program: Program, most_mb: int) -> Image:
    """The image, converted when that has not been done; of those converted, the longest unused go where all together
    take more than `most_mb`. Raises `RuntimeFault`."""
    image = image.strip()
    source = source_of(image)
    if not source:
        return await asyncio.to_thread(_as_it_is, Path(image))
    state = await in_thread(_state, source, image)
    stem = hashlib.sha256(image.encode()).hexdigest()[:16]
    folder = program.store / "images"
    target = folder / f"{stem}-{hashlib.sha256(state.encode()).hexdigest()[:16]}.sif"
    try:
        if (found := await asyncio.to_thread(_whole, target)) is not None:
            return found
        folder.mkdir(parents=True, exist_ok=True)
        async with _only_one(folder / f"{stem}.lock"):
            if (found := await asyncio.to_thread(_whole, target)) is not None:
                return found
            converted = await _convert(image, target, program)
        await in_thread(make_room, folder, most_mb * 1_000_000)
        return converted
    except OSError as exc:
        raise RuntimeFault(cannot(f"image '{image}' cannot be kept in {folder}", exc)) from exc


async def _convert(image: str, target: Path, program: Program) -> Image:
    work = target.with_name(f".{target.name}.part")
    # Of a worker that was killed half-way; nobody else is at it, for the lock is ours.
    await in_thread(remove_tree, work)
    try:
        work.mkdir()
        part = work / "image.sif"
        options = ["--disable-cache", "--no-cleanup", *_login()]
        said = await program.call("build", *options, str(part), image, run_dir=work / "run")
        if said.code != 0 or not part.is_file():
            disk = os.statvfs(work)
            left = disk.f_bavail * disk.f_frsize
            if left < max(ROOM_BYTES, 2 * _source_bytes(image)):
                raise DiskFull(
                    f"image '{image}' cannot be converted: {said.why}; {left >> 20} MB are left for {target.parent}, "
                    "free some space, or set POLARQ_STATE_DIR to a larger disk"
                )
            raise _meant(image, said.why)
        whole: Image = await in_thread(_finish, part, target)
        return whole
    finally:
        await in_thread(remove_tree, work)


def _meant(image: str, why: str) -> RuntimeFault:
    """By the error code of the registry (distribution-spec, error codes), which the program passes on as it prints."""
    text = f"image '{image}' cannot be converted: {why}"
    code = _CODE.search(why)
    if code is None:
        advice = "; see that its registry can be reached from this node" if source_of(image) in REMOTE else ""
        return RuntimeFault(f"{text}{advice}")
    if "unknown" in code[1].lower():
        return ImageMissing(text)
    return ImageDenied(f"{text}; log in as the worker's user, into ~/.apptainer/docker-config.json")


def _finish(part: Path, target: Path) -> Image:
    with part.open("rb") as file:
        digest = f"sha256:{hashlib.file_digest(file, 'sha256').hexdigest()}"
        os.fsync(file.fileno())
    note = target.with_name(f"{target.name}.json")
    written = note.with_name(f".{note.name}.{secrets.token_hex(4)}")
    written.write_text(json.dumps({"size": part.stat().st_size, "digest": digest}))
    part.rename(target)
    written.rename(note)
    # Earlier states of the same image; instances that run them hold them open.
    for path in target.parent.glob(f"{target.name.partition('-')[0]}-*"):
        if path not in {target, note}:
            path.unlink(missing_ok=True)
    return Image(target, digest)


def make_room(folder: Path, most_bytes: int) -> None:
    """Removes the longest unused until the others take no more than `most_bytes` (blocks). Instances that run one hold
    it open; one that was asked for just now stays, for an instance may be about to start from it."""
    images = []
    for path in folder.glob("*.sif"):
        with contextlib.suppress(FileNotFoundError):
            note = path.with_name(f"{path.name}.json")
            images.append((note.stat().st_mtime, path.stat().st_blocks * 512, path, note))
    taken = sum(size for _, size, _, _ in images)
    for used, size, path, note in sorted(images):
        if taken <= most_bytes or time.time() - used < FRESH_S:
            return
        # Without its note it is none, should this end half-way.
        note.unlink(missing_ok=True)
        path.unlink(missing_ok=True)
        taken -= size


def _whole(target: Path) -> Image | None:
    try:
        note = json.loads(target.with_name(f"{target.name}.json").read_text())
        if target.stat().st_size != note["size"]:
            return None
        os.utime(target.with_name(f"{target.name}.json"))
        return Image(target, str(note["digest"]))
    except (OSError, ValueError, KeyError):
        return None


def _as_it_is(path: Path) -> Image:
    if path.is_dir():
        if not (path / ".singularity.d").is_dir():
            raise RuntimeFault(
                f"image '{path}' is a folder, but not as the program unpacks one: apptainer build --sandbox NEW {path}"
            )
        return Image(path, "")
    try:
        with path.open("rb") as file:
            header = file.read(SIF_UUID.stop)
    except FileNotFoundError:
        raise ImageMissing(
            f"there is no image '{path}' on this node: give a SIF file, an unpacked folder, docker-archive:FILE, "
            "docker-daemon:NAME or docker://NAME"
        ) from None
    except OSError as exc:
        raise RuntimeFault(cannot(f"image '{path}' cannot be read", exc)) from exc
    known = b"SIF_MAGIC" in header
    return Image(path, f"sif:{header[SIF_UUID].hex()}" if known else "")


def _state(source: str, image: str) -> str:
    """What changes when the image behind a name does; empty where only its registry knows."""
    if source in ARCHIVES:
        path = Path(image.partition(":")[2].removeprefix("//"))
        if not path.exists():
            # docker-archive:FILE:NAME
            path = Path(str(path).partition(":")[0])
        try:
            found = path.stat()
        except OSError as exc:
            raise ImageMissing(cannot(f"image '{image}' cannot be read", exc)) from exc
        return f"{found.st_size} {found.st_mtime_ns} {found.st_ino}"
    return _daemon_id(image.partition(":")[2].removeprefix("//")) if source == "docker-daemon" else ""


def _source_bytes(image: str) -> int:
    path = Path(image.partition(":")[2].removeprefix("//"))
    return path.stat().st_size if source_of(image) in ARCHIVES and path.is_file() else 0


def _daemon_id(name: str) -> str:
    """The identity of a Docker daemon's image; empty when the daemon is not to be asked here (the program may know).
    Raises `BackendAway`, `ImageMissing`."""
    address = os.environ.get("DOCKER_HOST", f"unix://{DAEMON_SOCKET}")
    if not address.startswith("unix://"):
        return ""
    asked = http.client.HTTPConnection("docker", timeout=10)
    try:
        asked.sock = socket.socket(socket.AF_UNIX)
        asked.sock.settimeout(10)
        asked.sock.connect(address.removeprefix("unix://"))
        asked.request("GET", f"/images/{quote(name, safe='')}/json")
        answer = asked.getresponse()
        body = answer.read(1 << 20)
        if answer.status == http.client.NOT_FOUND:
            raise ImageMissing(f"the Docker daemon of this node has no image '{name}'")
        return str(json.loads(body).get("Id", "")) if answer.status == http.client.OK else ""
    except OSError as exc:
        advice = "start it, or give docker-archive:FILE"
        raise BackendAway(f"no Docker daemon answers at {address} ({exc.strerror or exc}): {advice}") from exc
    except (ValueError, http.client.HTTPException):
        return ""
    finally:
        asked.close()


def _login() -> list[str]:
    """The worker's own user's logins, which the program would look for in the folder that we give it instead."""
    path = Path.home() / ".apptainer" / "docker-config.json"
    return ["--authfile", str(path)] if path.is_file() else []


@contextlib.asynccontextmanager
async def _only_one(path: Path) -> AsyncIterator[None]:
    """Holds the file for this one caller of all workers on the machine; it ends with the worker that holds it."""
    with path.open("w") as file:
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                await asyncio.sleep(POLL_S)
        yield
