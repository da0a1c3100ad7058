"""What tests with a real Docker daemon share."""

from __future__ import annotations

import io
import os
import subprocess
import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from aiodocker import Docker

from polarq.contracts.specs import RuntimeSpec
from polarq.testing.runtime_contract import CONTRACT_ENV
from polarq.topology.runtimes import DockerRuntimeSection, RuntimesSection
from polarq_worker.runtimes.base import Host
from polarq_worker.runtimes.docker.daemon import address, connect
from polarq_worker.runtimes.docker.runtime import DockerRuntime

from ..needs import not_here

IMAGE = os.environ.get("POLARQ_BASE_IMAGE", "polarq-base:local")
"""Made by .ci/docker-up."""
LONG_S = 120.0


def daemon_is_here() -> None:
    """Ends the test where there is none."""
    try:
        subprocess.run(["docker", "image", "inspect", IMAGE], check=True, capture_output=True, timeout=60)
    except (OSError, subprocess.SubprocessError):
        not_here(f"no Docker daemon with an image {IMAGE} (.ci/docker-up makes both)")


def host_of(folder: Path, **settings: Any) -> Host:
    """A node whose own folder is `folder`: what it leaves on the daemon is told apart by that."""
    docker = DockerRuntimeSection.model_validate(settings)
    return Host("node0", "1", folder / "kept", RuntimesSection(docker=docker))


class Sandboxes:
    """Makes them, and stops whatever was made."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.host = host_of(folder)
        self.made: list[DockerRuntime] = []
        self.images: list[str] = []

    def new(self, runtime_id: str, host: Host | None = None, **spec: Any) -> DockerRuntime:
        whole = RuntimeSpec.model_validate({"backend": "docker", "image": IMAGE, "env": CONTRACT_ENV, **spec})
        runtime = DockerRuntime(whole, runtime_id=runtime_id, root=self.folder / runtime_id, host=host or self.host)
        self.made.append(runtime)
        return runtime

    async def started(self, runtime_id: str = "one", **spec: Any) -> DockerRuntime:
        runtime = self.new(runtime_id, **spec)
        await runtime.start()
        return runtime

    async def stop(self) -> None:
        for runtime in self.made:
            await runtime.stop()
        for snapshot in await DockerRuntime.snapshots(self.host):
            await DockerRuntime.drop_snapshot(snapshot.reference, self.host)
        if self.images:
            docker = self.client()
            for image in self.images:
                await docker.images.delete(image, force=True)
            await docker.close()

    async def import_image(self, name: str, tree: bytes, *changes: str) -> None:
        """Makes an image of a root file system. Nobody else has one of that name."""
        docker = self.client()
        await docker.version()
        repository, _, tag = name.partition(":")
        params = [("fromSrc", "-"), ("repo", repository), ("tag", tag), *(("changes", change) for change in changes)]
        url = f"{docker.docker_host}/images/create"
        async with docker.session.post(url, params=params, data=io.BytesIO(tree)) as answer:
            text = await answer.text()
            assert answer.status == 200 and "error" not in text, text
        await docker.close()
        self.images.append(name)

    def client(self) -> Docker:
        return connect(self.host)


@pytest.fixture
def daemon() -> Iterator[str]:
    daemon_is_here()
    yield address(Host())


def small_tree(*programs: str) -> bytes:
    """A root file system of a few of this machine's programs with their libraries, and sh. An archive."""
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w") as tar:
        for folder in ("tmp", "proc", "sys", "dev", "etc"):
            info = tarfile.TarInfo(folder)
            info.type, info.mode = tarfile.DIRTYPE, 0o755
            tar.addfile(info)
        for name in sorted({path for program in programs for path in (program, *_libraries(program))}):
            info = tarfile.TarInfo(name.lstrip("/"))
            data = Path(name).read_bytes()
            info.size, info.mode = len(data), 0o755
            tar.addfile(info, io.BytesIO(data))
        info = tarfile.TarInfo("bin/sh")
        info.type, info.linkname = tarfile.SYMTYPE, Path(programs[0]).name
        tar.addfile(info)
    return out.getvalue()


def _libraries(program: str) -> list[str]:
    said = subprocess.run(["ldd", program], check=True, capture_output=True, text=True, timeout=60).stdout
    return [word for line in said.splitlines() for word in line.split() if word.startswith("/")]
