"""Images are pulled once, as the topology says, with progress in a log; a real daemon, a registry of the test's own."""

from __future__ import annotations

import asyncio
import base64
import json
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from polarq.errors import ImageDenied, ImageMissing, RuntimeFault
from polarq_worker.runtimes.docker.runtime import DockerRuntime

from .docker_registry import Registry
from .docker_rig import Sandboxes, daemon_is_here, host_of, small_tree

pytestmark = pytest.mark.docker


@pytest.fixture
async def sandboxes(tmp_path: Path) -> AsyncIterator[Sandboxes]:
    daemon_is_here()
    made = Sandboxes(tmp_path)
    yield made
    images = {runtime.spec.image for runtime in made.made}
    await made.stop()
    docker = made.client()
    for image in await docker.images.list():
        if images & set(image.get("RepoTags") or []):
            await docker.images.delete(image["Id"], force=True)
    await docker.close()


@pytest.fixture(scope="module")
def tree() -> bytes:
    return small_tree("/bin/dash", "/bin/sleep", "/bin/cat")


def one_line(exc: BaseException) -> str:
    assert "\n" not in str(exc)
    return str(exc)


async def test_sandboxes_that_start_together_pull_their_image_once(sandboxes: Sandboxes, tree: bytes) -> None:
    async with Registry(tree) as registry:
        made = [sandboxes.new(f"s{number}", image=registry.image()) for number in range(4)]
        await asyncio.gather(*(sandbox.start() for sandbox in made))
        assert registry.asked[registry.layer] == 1
        assert registry.asked["1"] == 1
        for sandbox in made:
            assert sandbox.image_id == registry.digest
            lines = (sandbox.host_log_dir / "image.pull").read_text().splitlines()
            assert len(lines) > 2
            assert lines[-1].endswith("done")
        assert (await made[0].exec(["cat", "/proc/self/environ"], timeout_s=120.0)).stdout.count(b"OF_IMAGE=1") == 1
        # It is here now.
        await sandboxes.new("later", image=registry.image()).start()
        assert registry.asked["1"] == 1
        assert await DockerRuntime.resolve_image(made[0].spec, sandboxes.host) == registry.digest


async def test_an_image_may_be_looked_for_anew_each_time(sandboxes: Sandboxes, tree: bytes, tmp_path: Path) -> None:
    host = host_of(tmp_path, pull="always")
    async with Registry(tree) as registry:
        for number in (1, 2):
            sandbox = sandboxes.new(f"s{number}", host, image=registry.image())
            await sandbox.start()
            assert registry.asked["1"] == number
        assert registry.asked[registry.layer] == 1


async def test_one_that_gives_up_waiting_does_not_stop_the_pull_for_the_others(
    sandboxes: Sandboxes, tree: bytes
) -> None:
    gate = asyncio.Event()
    async with Registry(tree, gate=gate) as registry:
        first, second = (sandboxes.new(name, image=registry.image()) for name in ("first", "second"))
        starting = [asyncio.ensure_future(sandbox.start()) for sandbox in (first, second)]
        while not registry.asked[registry.layer]:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        starting[0].cancel()
        with pytest.raises(asyncio.CancelledError):
            await starting[0]
        gate.set()
        await starting[1]
        assert registry.asked[registry.layer] == 1


async def test_a_pull_has_a_limit_of_its_own(sandboxes: Sandboxes, tree: bytes, tmp_path: Path) -> None:
    host = host_of(tmp_path, pull_timeout_s=2.0)
    async with Registry(tree, gate=asyncio.Event()) as registry:
        with pytest.raises(RuntimeFault, match="pull_timeout_s") as raised:
            await sandboxes.new("slow", host, image=registry.image()).start()
        one_line(raised.value)


async def test_a_registry_that_asks_for_a_login_gets_the_one_of_the_file(
    sandboxes: Sandboxes, tree: bytes, tmp_path: Path
) -> None:
    async with Registry(tree, login="me:secret-of-mine") as registry:
        with pytest.raises(ImageDenied, match="registry_auth") as raised:
            await sandboxes.new("nobody", image=registry.image()).start()
        one_line(raised.value)
        for name, login in (("wrong", "me:not-it"), ("right", "me:secret-of-mine")):
            file = tmp_path / f"{name}.json"
            file.write_text(json.dumps({"auths": {registry.host: {"auth": base64.b64encode(login.encode()).decode()}}}))
            sandbox = sandboxes.new(name, host_of(tmp_path, registry_auth=str(file)), image=registry.image())
            if name == "wrong":
                with pytest.raises(ImageDenied) as raised:
                    await sandbox.start()
                assert "not-it" not in one_line(raised.value)
            else:
                await sandbox.start()
                assert "secret" not in (sandbox.host_log_dir / "image.pull").read_text()


async def test_an_image_that_the_registry_does_not_have_is_missing(sandboxes: Sandboxes, tree: bytes) -> None:
    async with Registry(tree) as registry:
        with pytest.raises(ImageMissing) as raised:
            await sandboxes.new("none", image=registry.image("none")).start()
        assert registry.image("none") in one_line(raised.value)


async def test_a_registry_that_is_not_there_is_said(sandboxes: Sandboxes, tree: bytes) -> None:
    async with Registry(tree) as registry:
        image = registry.image()
    with pytest.raises(RuntimeFault) as raised:
        await sandboxes.new("away", image=image).start()
    assert image in one_line(raised.value)
