"""Takes a container away, whatever state it is in."""

from __future__ import annotations

import asyncio

from aiodocker import Docker, DockerError

from polarq.errors import RuntimeFault
from polarq_worker.runtimes.docker.daemon import asking

GONE_S = 120.0
LOOK_S = 0.1


async def removed(docker: Docker, container: str) -> None:
    """Kills and removes it, with its unnamed volumes; no harm when it is gone. Raises `RuntimeFault`."""
    what = f"remove container {container}"
    try:
        async with asyncio.timeout(GONE_S):
            # Left: somebody else is removing it.
            while await _is_left(docker, what, container):  # noqa: ASYNC110
                await asyncio.sleep(LOOK_S)
    except TimeoutError:
        raise RuntimeFault(f"{what}: it is still there after {GONE_S:g} s") from None


async def _is_left(docker: Docker, what: str, container: str) -> bool:
    async with asking(what):
        try:
            await docker.containers.container(container).delete(force=True, v=True)
        except DockerError as exc:
            if exc.status not in {404, 409}:
                raise
            return exc.status == 409
    return False
