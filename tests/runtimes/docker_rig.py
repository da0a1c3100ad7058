"""What tests with a real Docker daemon share."""

from __future__ import annotations

import os
import subprocess
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

    def client(self) -> Docker:
        return connect(self.host)


@pytest.fixture
def daemon() -> Iterator[str]:
    daemon_is_here()
    yield address(Host())
