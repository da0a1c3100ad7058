"""Images of the apptainer runtime, with the real program: all that it takes, each converted once, and what is said of
those that cannot be had."""

from __future__ import annotations

import asyncio
import base64
import hashlib
import json
import os
import subprocess
import tarfile
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest

from polarq.contracts.specs import RuntimeSpec
from polarq.errors import BackendAway, DiskFull, ImageDenied, ImageMissing, RuntimeFault
from polarq_worker.runtimes.apptainer.runtime import ApptainerRuntime
from polarq_worker.runtimes.base import Host

from .apptainer_here import PROGRAM, apptainer_host, builds, counted, needs_apptainer, small_archive
from .docker_registry import Registry

pytestmark = pytest.mark.apptainer
LONG_S = 120.0
New = Callable[..., ApptainerRuntime]


@pytest.fixture
def host(tmp_path: Path) -> Host:
    needs_apptainer()
    return apptainer_host(tmp_path / "kept", program=counted(tmp_path))


@pytest.fixture
def archive(tmp_path: Path, host: Host) -> Path:
    return small_archive(tmp_path)


@pytest.fixture
async def new(tmp_path: Path, host: Host) -> AsyncIterator[New]:
    made: list[ApptainerRuntime] = []

    def make(name: str, image: str) -> ApptainerRuntime:
        wanted = RuntimeSpec(backend="apptainer", image=image)
        made.append(ApptainerRuntime(wanted, runtime_id=name, root=tmp_path / name, host=host))
        return made[-1]

    yield make
    for runtime in made:
        await runtime.stop()


async def brought(image: object, host: Host) -> str:
    return await ApptainerRuntime.resolve_image(RuntimeSpec(backend="apptainer", image=str(image)), host)


async def test_eight_rollouts_of_an_archive_convert_it_once(new: New, archive: Path, tmp_path: Path) -> None:
    runtimes = [new(f"r{n}", f"docker-archive:{archive}") for n in range(8)]
    await asyncio.gather(*(runtime.start() for runtime in runtimes))
    assert builds(tmp_path) == 1
    assert len({runtime.image_id for runtime in runtimes}) == 1
    assert runtimes[0].image_id.startswith("sha256:")
    results = await asyncio.gather(*(runtime.exec('echo "$OF_THE_IMAGE"', timeout_s=LONG_S) for runtime in runtimes))
    assert {result.stdout for result in results} == {b"yes\n"}


async def test_a_changed_archive_is_converted_anew_and_the_old_image_goes(
    host: Host, archive: Path, tmp_path: Path
) -> None:
    spec = RuntimeSpec(backend="apptainer", image=f"docker-archive:{archive}")
    first = await ApptainerRuntime.resolve_image(spec, host)
    assert await ApptainerRuntime.resolve_image(spec, host) == first
    os.utime(archive, (1, 1))
    await ApptainerRuntime.resolve_image(spec, host)
    assert builds(tmp_path) == 2
    assert len(list((tmp_path / "kept/apptainer/images").glob("*.sif"))) == 1


async def test_a_converted_image_that_lost_its_end_is_converted_anew(host: Host, archive: Path, tmp_path: Path) -> None:
    spec = RuntimeSpec(backend="apptainer", image=f"docker-archive:{archive}")
    await ApptainerRuntime.resolve_image(spec, host)
    [image] = (tmp_path / "kept/apptainer/images").glob("*.sif")
    os.truncate(image, image.stat().st_size // 2)
    await ApptainerRuntime.resolve_image(spec, host)
    assert builds(tmp_path) == 2


async def test_a_full_disk_is_named_and_the_unfinished_image_removed(archive: Path, tmp_path: Path) -> None:
    needs_apptainer()
    disk = tmp_path / "kept"
    disk.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=10m", "tmpfs", str(disk)], check=True)
    try:
        host = apptainer_host(disk)
        with pytest.raises(DiskFull, match="full"):
            await ApptainerRuntime.resolve_image(
                RuntimeSpec(backend="apptainer", image=f"docker-archive:{archive}"), host
            )
        assert sum(path.stat().st_size for path in (disk / "apptainer/images").rglob("*") if path.is_file()) == 0
    finally:
        subprocess.run(["umount", str(disk)], check=True)


async def test_an_image_that_is_not_there_or_is_none_is_said(host: Host, tmp_path: Path) -> None:
    for image in (str(tmp_path / "no.sif"), f"docker-archive:{tmp_path}/no.tar"):
        with pytest.raises(ImageMissing, match="no"):
            await ApptainerRuntime.resolve_image(RuntimeSpec(backend="apptainer", image=image), host)
    (tmp_path / "tree").mkdir()
    with pytest.raises(RuntimeFault, match="--sandbox"):
        spec = RuntimeSpec(backend="apptainer", image=str(tmp_path / "tree"))
        await ApptainerRuntime.resolve_image(spec, host)


def layout_of(archive: Path, folder: Path) -> Path:
    """The image of a docker-archive as an OCI layout (image-spec, image-layout)."""
    blobs = folder / "blobs/sha256"
    blobs.mkdir(parents=True)

    def kept(data: bytes, kind: str) -> dict[str, object]:
        digest = hashlib.sha256(data).hexdigest()
        (blobs / digest).write_bytes(data)
        return {"mediaType": f"application/vnd.oci.image.{kind}", "digest": f"sha256:{digest}", "size": len(data)}

    with tarfile.open(archive) as tar:
        config, layer = (tar.extractfile(name) for name in ("config.json", "layer.tar"))
        assert config is not None and layer is not None
        parts = {
            "config": kept(config.read(), "config.v1+json"),
            "layers": [kept(layer.read(), "layer.v1.tar")],
        }
    manifest = json.dumps({"schemaVersion": 2, "mediaType": "application/vnd.oci.image.manifest.v1+json", **parts})
    (folder / "index.json").write_text(
        json.dumps({"schemaVersion": 2, "manifests": [kept(manifest.encode(), "manifest.v1+json")]})
    )
    (folder / "oci-layout").write_text('{"imageLayoutVersion": "1.0.0"}')
    return folder


@pytest.mark.parametrize("kind", ["oci", "oci-archive", "sandbox", "sif"])
async def test_an_image_may_come_as_all_that_the_program_takes(
    kind: str, new: New, host: Host, archive: Path, tmp_path: Path
) -> None:
    if kind.startswith("oci"):
        layout = layout_of(archive, tmp_path / "layout")
        image = f"oci:{layout}"
        if kind == "oci-archive":
            image = f"oci-archive:{tmp_path}/layout.tar"
            with tarfile.open(tmp_path / "layout.tar", "w") as tar:
                # The program takes no entry for the folder itself.
                for path in layout.iterdir():
                    tar.add(path, path.name)
    else:
        image = str(tmp_path / "built")
        sandbox = ["--sandbox"] if kind == "sandbox" else []
        command = [str(PROGRAM), "--silent", "build", *sandbox, image, f"docker-archive:{archive}"]
        environment = {**os.environ, "APPTAINER_CONFIGDIR": str(tmp_path / "config")}
        done = subprocess.run(command, env=environment, check=False, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
    runtime = new("r1", image)
    await runtime.start()
    assert (await runtime.exec('echo "$OF_THE_IMAGE"', timeout_s=LONG_S)).stdout == b"yes\n"
    # What is in the program's own form is run as it is.
    assert builds(tmp_path) == int(kind.startswith("oci"))


async def test_what_a_registry_refuses_and_what_it_has_not_is_said_as_such(
    host: Host, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("APPTAINER_NOHTTPS", "true")
    monkeypatch.setenv("HOME", str(tmp_path))
    with tarfile.open(tmp_path / "tree.tar", "w") as tar:
        tar.add(__file__, "file")
    async with Registry((tmp_path / "tree.tar").read_bytes(), login="ann:secret") as registry:
        image = f"docker://{registry.image()}"
        with pytest.raises(ImageDenied, match=r"docker-config\.json") as denied:
            await brought(image, host)
        assert "\n" not in str(denied.value)
        login = {"auth": base64.b64encode(b"ann:secret").decode()}
        (tmp_path / ".apptainer").mkdir()
        (tmp_path / ".apptainer/docker-config.json").write_text(json.dumps({"auths": {registry.host: login}}))
        assert (await brought(image, host)).startswith("sha256:")
        with pytest.raises(ImageMissing, match="no-such-image"):
            await brought(f"docker://{registry.host}/team/no-such-image:1", host)
    with pytest.raises(RuntimeFault, match="reached from this node"):
        await brought(f"docker://{registry.host}/team/away:1", host)


async def test_a_daemon_that_is_away_is_said(host: Host, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DOCKER_HOST", f"unix://{tmp_path}/no.sock")
    with pytest.raises(BackendAway, match=r"no\.sock"):
        await brought("docker-daemon:name:tag", host)
    assert builds(tmp_path) == 0


@pytest.mark.parametrize("image", ["https://example.test/a.sif", "http://example.test/a.sif", "dockre://a"])
async def test_an_address_that_the_program_cannot_build_from_is_no_image(host: Host, image: str) -> None:
    with pytest.raises(ImageMissing, match="docker-archive:FILE"):
        await brought(image, host)


async def test_a_broken_archive_is_said_in_one_line(host: Host, tmp_path: Path) -> None:
    (tmp_path / "broken.tar").write_bytes(b"no archive at all")
    for source in ("docker-archive", "oci-archive"):
        with pytest.raises(RuntimeFault, match="cannot be converted") as said:
            await brought(f"{source}:{tmp_path}/broken.tar", host)
        assert "\n" not in str(said.value)
    assert list((tmp_path / "kept/apptainer/images").glob("*.sif")) == []
