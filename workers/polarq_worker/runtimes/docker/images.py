"""Images: looked up, and pulled once however many sandboxes wait for one."""

from __future__ import annotations

import asyncio
import base64
import json
import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import aiohttp
from aiodocker import Docker, DockerError
from aiodocker.jsonstream import json_stream_stream

from polarq.errors import BackendAway, DiskFull, ImageDenied, ImageMissing, RuntimeFault
from polarq_worker.runtimes.base import Host
from polarq_worker.runtimes.docker.daemon import address, asking, connected
from polarq_worker.runtimes.docker.logins import login, registry_of
from polarq_worker.runtimes.processes import uninterrupted

log = logging.getLogger("polarq.worker.docker")
Line = Callable[[str], None]
"""Where progress goes."""


@dataclass(slots=True)
class _Pull:
    """One that is going on, and who waits for it."""

    task: asyncio.Task[None]
    lines: list[Line] = field(default_factory=list)


_Key = tuple[asyncio.AbstractEventLoop, str, str]
_pulls: dict[_Key, _Pull] = {}


async def found(docker: Docker, image: str) -> dict[str, Any] | None:
    """The daemon's description of an image that it has."""
    async with asking(f"image {image}"):
        try:
            described: dict[str, Any] = await docker.images.inspect(image)
        except DockerError as exc:
            if exc.status != 404:
                raise
            return None
    return described


def digest(described: dict[str, Any]) -> str:
    """By which a registry knows it; an image that was made here has only its own id."""
    for name in described.get("RepoDigests") or []:
        return str(name).rpartition("@")[2]
    return str(described["Id"])


async def brought(docker: Docker, host: Host, image: str, line: Line) -> dict[str, Any]:
    """The image as it is here, after a pull where `pull` of the topology says so. Raises `ImageMissing`, `ImageDenied`,
    `BackendAway`, another `RuntimeFault`."""
    policy = host.settings.docker.pull
    if policy != "always" and (here := await found(docker, image)) is not None:
        return here
    if policy == "never":
        raise ImageMissing(f"image {image} is not on this node, and runtimes.docker.pull is never")
    await _pulled(host, image, line)
    here = await found(docker, image)
    if here is None:
        raise ImageMissing(f"image {image} was pulled, and is not there")
    return here


async def _pulled(host: Host, image: str, line: Line) -> None:
    """Joins the pull of this image that is going on, or begins one. It goes on for as long as somebody waits."""
    key = (asyncio.get_running_loop(), address(host), image)
    pull = _pulls.get(key)
    if pull is None:
        lines: list[Line] = []
        task = asyncio.ensure_future(_pull(host, image, lambda text: [each(text) for each in list(lines)]))
        pull = _pulls[key] = _Pull(task, lines)
        task.add_done_callback(lambda _: _forget(key, task))
    pull.lines.append(line)
    try:
        await asyncio.shield(pull.task)
    except asyncio.CancelledError:
        if len(pull.lines) == 1:
            # Nobody joins what is being given up: its end would be theirs.
            _forget(key, pull.task)
            pull.task.cancel()
            await uninterrupted(_over(pull.task))
        raise
    finally:
        pull.lines.remove(line)


def _forget(key: _Key, task: asyncio.Task[None]) -> None:
    if key in _pulls and _pulls[key].task is task:
        del _pulls[key]


async def _over(task: asyncio.Task[None]) -> None:
    await asyncio.wait([task])


async def _pull(host: Host, image: str, line: Callable[[str], object]) -> None:
    auth = login(image, host.settings.docker.registry_auth)
    limit_s = host.settings.docker.pull_timeout_s
    what = f"pull {image}"
    progress = _Progress(image, line)
    line(f"{what} from {registry_of(image)}")
    log.info("%s", what)
    try:
        async with asyncio.timeout(limit_s), connected(host) as docker, asking(what, None):
            await docker.version()
            async for message in _messages(docker, image, auth):
                progress.take(message)
    except TimeoutError:
        raise RuntimeFault(f"{what}: not done within {limit_s:g} s (runtimes.docker.pull_timeout_s)") from None
    except RuntimeFault as exc:
        raise _meant(exc) from None
    line(f"{what}: done")


async def _messages(docker: Docker, image: str, auth: dict[str, str] | None) -> Any:
    """The daemon's own stream. (aiodocker takes no login for an image of the hub.)"""
    name, at, hashed = image.partition("@")
    tag = hashed if at else name.rpartition("/")[2].partition(":")[2] or "latest"
    repository = name if at or not name.rpartition("/")[2].partition(":")[1] else name.rpartition(":")[0]
    headers = {}
    if auth is not None:
        headers["X-Registry-Auth"] = base64.urlsafe_b64encode(json.dumps(auth).encode()).decode()
    url = f"{docker.docker_host}/{docker.api_version}/images/create"
    params = {"fromImage": repository, "tag": tag}
    timeout = aiohttp.ClientTimeout()
    async with docker.session.post(url, params=params, headers=headers, timeout=timeout) as answer:
        if answer.status >= 400:
            text = (await answer.read()).decode("utf-8", "replace")
            raise DockerError(answer.status, _message(text))
        async for message in json_stream_stream(answer):
            yield message


def _message(text: str) -> str:
    try:
        return str(json.loads(text)["message"])
    except (ValueError, KeyError, TypeError):
        return text


def _meant(exc: RuntimeFault) -> RuntimeFault:
    """The registry's answer comes as the daemon's words only: a number does not tell denied from missing."""
    if isinstance(exc, BackendAway | DiskFull | ImageDenied | ImageMissing):
        return exc
    text = str(exc)
    if any(word in text for word in ("denied", "unauthorized", "authentication required", "no basic auth", "403")):
        return ImageDenied(f"{text}; see runtimes.docker.registry_auth of the node")
    if any(word in text for word in ("not found", "manifest unknown", "no such image")):
        return ImageMissing(text)
    return exc


class _Progress:
    """A line for each layer's stage, and one for each tenth of its bytes."""

    def __init__(self, image: str, line: Callable[[str], object]) -> None:
        self._image = image
        self._line = line
        self._told: dict[str, tuple[str, int]] = {}

    def take(self, message: dict[str, Any]) -> None:
        layer, status = str(message.get("id", "")), str(message.get("status", ""))
        detail = message.get("progressDetail") or {}
        total = detail.get("total") or 0
        tenth = 10 * detail.get("current", 0) // total if total else 0
        if self._told.get(layer) != (status, tenth):
            self._told[layer] = (status, tenth)
            share = f" {10 * tenth} % of {total / 1e6:.1f} MB" if total else ""
            self._line(f"{layer}{': ' if layer else ''}{status}{share}")
