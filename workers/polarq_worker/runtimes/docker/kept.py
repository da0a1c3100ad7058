"""Snapshots: images that are committed from prepared containers, known by their labels."""

from __future__ import annotations

import hashlib
import re
from typing import Any

from aiodocker import Docker, DockerError

from polarq.errors import CannotBeKept, RuntimeFault
from polarq_worker.runtimes.base import Host, Snapshot
from polarq_worker.runtimes.docker import config
from polarq_worker.runtimes.docker.daemon import asking, connected

REPOSITORY = "polarq-snapshot"
COMMIT_S = 3600.0
PLAIN = re.compile(r"[A-Za-z0-9_.-]+$")
_committing: set[str] = set()
"""Containers of this process whose image may exist and have no name yet."""


async def take(docker: Docker, host: Host, container: str, name: str, *, user: str, image_id: str) -> Snapshot:
    """Raises `CannotBeKept` for an image with volumes, of which no image keeps what is in them; `RuntimeFault`."""
    what = f"snapshot {name}"
    if not PLAIN.match(name):
        raise RuntimeFault(f"{what}: a name of letters, digits, '.', '_' and '-' is needed")
    async with asking(what, COMMIT_S):
        described = await docker.containers.container(container).show()
        volumes = sorted((described["Config"].get("Volumes") or {}).keys())
        if volumes:
            raise CannotBeKept(f"{what}: its image declares volumes ({', '.join(volumes)}), which no snapshot keeps")
        labels = {**config.own(host), config.SNAPSHOT: name, config.IMAGE: image_id}
        labels |= {config.RUNTIME: "", config.ROLLOUT: "", config.INCARNATION: host.incarnation}
        _committing.add(container)
        try:
            made = await docker.containers.container(container).commit(
                config={"Labels": labels},
                # Of these Podman reads only the changes.
                changes=[f"LABEL {config.SNAPSHOT}={name}", f"USER {user or '0:0'}"],
            )
            # Named by us: what the daemon still commits for a worker that is dead never gets a name, and is swept.
            await docker.images.tag(made["Id"], REPOSITORY, tag=_tag(host, name))
        finally:
            _committing.discard(container)
    reference = f"{REPOSITORY}:{_tag(host, name)}"
    return Snapshot(name, reference, await _size(docker, reference))


async def all_of(host: Host) -> list[Snapshot]:
    found = []
    async with connected(host) as docker:
        async with asking("list snapshots"):
            images = await docker.images.list(filters=_ours(host))
        for image in images:
            tags = _names(image)
            name = (image.get("Labels") or {}).get(config.SNAPSHOT)
            if tags and name and config.is_own(image.get("Labels"), host):
                found.append(Snapshot(name, tags[0], await _size(docker, tags[0])))
    return sorted(found, key=lambda snapshot: snapshot.name)


async def drop(host: Host, reference: str) -> None:
    """Whoever runs from it keeps it, without a name, until `clean`."""
    async with connected(host) as docker:
        if await _is_podman(docker):
            # It would remove whoever runs from it too.
            await _untagged(docker, reference)
        else:
            await _removed(docker, reference, force=True)
        await clean(docker, host)


async def clean(docker: Docker, host: Host, *, alone: bool = False) -> None:
    """Removes what has lost its name, or never got one, and is not in use: what this worker made, and where it is
    `alone` on its node, all of it. Raises `RuntimeFault`."""
    if _committing:
        return
    async with asking("list snapshots"):
        images = await docker.images.list(filters=_ours(host, dangling=["true"]))
    for image in images:
        labels = image.get("Labels") or {}
        if not config.is_own(labels, host) or config.SNAPSHOT not in labels or _names(image):
            continue
        if alone or labels.get(config.INCARNATION) == host.incarnation:
            await _removed(docker, image["Id"], force=False)


def _names(image: dict[str, Any]) -> list[str]:
    """Its tags of ours. Podman puts a registry's name before each."""
    tags = [tag.rpartition("/")[2] for tag in image.get("RepoTags") or []]
    return [tag for tag in tags if tag.startswith(f"{REPOSITORY}:")]


async def _is_podman(docker: Docker) -> bool:
    async with asking("look at the daemon"):
        parts = (await docker.version()).get("Components") or []
    return any("Podman" in part.get("Name", "") for part in parts)


async def _untagged(docker: Docker, reference: str) -> None:
    url = f"{docker.docker_host}/v4.0.0/libpod/images/{reference}/untag"
    async with asking(f"remove {reference}"), docker.session.post(url) as answer:
        if answer.status not in {201, 404}:
            raise DockerError(answer.status, await answer.text())


async def _removed(docker: Docker, reference: str, *, force: bool) -> None:
    async with asking(f"remove {reference}"):
        try:
            await docker.images.delete(reference, force=force)
        except DockerError as exc:
            # Gone already; in use.
            if exc.status not in {404, 409}:
                raise


async def _size(docker: Docker, reference: str) -> int:
    """What it takes on disk beyond the image below it: its own layer."""
    async with asking(f"look at {reference}"):
        layers: Any = await docker.images.history(reference)
    return max(int(layers[0]["Size"]), 1) if layers else 1


def _ours(host: Host, **more: list[str]) -> dict[str, list[str]]:
    # One label: of several, Podman understands something else. `is_own` looks at all.
    return {"label": [f"{config.PLACE}={config.place(host)}"], **more}


def _tag(host: Host, name: str) -> str:
    plain = re.sub(r"[^A-Za-z0-9_.-]", "-", name)[:60]
    whole = "\0".join((host.node_id, config.place(host), name))
    return f"{hashlib.sha256(whole.encode()).hexdigest()[:16]}-{plain}"
