"""The parts of the apptainer runtime that need no program: wishes, users, and the layers of snapshots."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from polarq.contracts.specs import RuntimeSpec
from polarq.errors import BackendAway, ImageMissing, RuntimeFault
from polarq.topology.runtimes import RuntimesSection
from polarq_worker.runtimes.apptainer import images, wishes
from polarq_worker.runtimes.apptainer.images import bring, source_of
from polarq_worker.runtimes.apptainer.instance import name_of
from polarq_worker.runtimes.apptainer.layers import Layers
from polarq_worker.runtimes.apptainer.program import Program, complaint
from polarq_worker.runtimes.apptainer.users import look_up
from polarq_worker.runtimes.base import Host


@pytest.fixture
def host(tmp_path: Path) -> Host:
    program = tmp_path / "apptainer"
    program.write_text("#!/bin/sh\nexit 1\n")
    program.chmod(0o755)
    return Host("node0", "1", tmp_path, RuntimesSection.model_validate({"apptainer": {"program": str(program)}}))


def spec(**changes: object) -> RuntimeSpec:
    return RuntimeSpec.model_validate({"backend": "apptainer", "image": "a.sif", **changes})


def test_a_missing_program_is_the_one_problem_and_says_where_to_name_it(tmp_path: Path) -> None:
    named = RuntimesSection.model_validate({"apptainer": {"program": "/no/such/apptainer"}})
    away = Host("node0", "1", tmp_path, named)
    [problem] = wishes.problems(spec(storage_mb=1), away)
    assert "/no/such/apptainer" in problem
    assert "runtimes.apptainer.program" in problem
    with pytest.raises(BackendAway, match=r"runtimes\.apptainer\.program"):
        Program.of(away, tmp_path)


@pytest.mark.parametrize(
    ("changes", "key"),
    [
        ({"storage_mb": 5}, "storage_mb"),
        ({"network": "pasta"}, "network"),
        ({"direct_exec_init_command": "true"}, "direct_exec_init_command"),
        ({"workdir": "here"}, "workdir"),
        ({"workdir": "/a/../b"}, "workdir"),
        ({"kwargs": {"bindpath": "/"}}, "kwargs.bindpath"),
        ({"kwargs": {"volumes": "/data:/data"}}, "kwargs.volumes"),
        ({"kwargs": {"volumes": {"/:/host": 1}}}, "kwargs.volumes"),
        ({"kwargs": {"volumes": ["/data:/data,/:/host"]}}, "kwargs.volumes"),
        ({"kwargs": {"volumes": ["/data:/data:ro,/:/host"]}}, "kwargs.volumes"),
        ({"internet_volumes": ["/data,/:/host"]}, "internet_volumes"),
    ],
)
def test_what_apptainer_cannot_give_is_said_with_its_key(host: Host, changes: dict[str, object], key: str) -> None:
    [problem] = wishes.problems(spec(**changes), host)
    assert problem.startswith(f"{key}: ")
    assert wishes.problems(spec(workdir="/app", network="host", kwargs={"volumes": ["/a:/b"]}), host) == []


def test_volumes_for_the_internet_are_mounted_only_with_it(tmp_path: Path) -> None:
    wanted = spec(internet_volumes=["/run/a.sock:/a.sock"], kwargs={"volumes": ["/data:/data:ro"]}, cpus=1.5)
    online, offline = (
        wishes.options(wanted, online=online, overlay=tmp_path, layers=[Path("/l")]) for online in (True, False)
    )
    assert "/run/a.sock:/a.sock" in online and "/run/a.sock:/a.sock" not in offline
    assert "/data:/data:ro" in online and "/data:/data:ro" in offline
    assert "--net" in offline and "--net" not in online
    assert online[-4:] == ["--overlay", "/l:ro", "--overlay", str(tmp_path)]


@pytest.mark.parametrize(
    ("image", "source"),
    [
        ("docker://debian:12", "docker"),
        ("docker-archive:/a/b.tar", "docker-archive"),
        ("docker-daemon:name:tag", "docker-daemon"),
        ("/images/a.sif", ""),
        ("/images/docker:a.sif", ""),
        ("image.sif", ""),
    ],
)
def test_an_image_says_where_it_comes_from(image: str, source: str) -> None:
    assert source_of(image) == source


async def test_a_missing_image_is_named(host: Host, tmp_path: Path) -> None:
    with pytest.raises(ImageMissing, match="nothing"):
        await bring(f"{tmp_path}/nothing.sif", Program.of(host, tmp_path), 1)


@pytest.fixture
def converting(tmp_path: Path) -> Program:
    """A program that converts whatever it is given to a file of 2 MB, and says so in `built`."""
    script = tmp_path / "converting"
    script.write_text(
        f"""#!/bin/bash
        echo "${{@: -1}}" >> {tmp_path}/built
        head -c 2000000 /dev/zero | tr '\\0' x > "${{@: -2:1}}" """
    )
    script.chmod(0o755)
    return Program(str(script), tmp_path / "store")


async def test_of_converted_images_the_longest_unused_go_where_the_disk_may_hold_no_more(
    converting: Program, tmp_path: Path
) -> None:
    names = [f"docker-archive:{tmp_path}/{name}.tar" for name in "abcd"]
    for name in names:
        Path(name.partition(":")[2]).write_text(name)

    def age(path: Path, seconds: float) -> None:
        at = path.stat().st_mtime - seconds
        os.utime(path.with_name(f"{path.name}.json"), (at, at))

    a, b = [(await bring(name, converting, 5)).path for name in names[:2]]
    age(a, 7200)
    age(b, 3600)
    # Asked for again: it is not the longest unused any more.
    assert (await bring(names[0], converting, 5)).path == a
    c = (await bring(names[2], converting, 5)).path
    assert [path.exists() for path in (a, b, c)] == [True, False, True]
    # All that is left was asked for just now: an instance may be about to start from it.
    d = (await bring(names[3], converting, 5)).path
    assert [path.exists() for path in (a, c, d)] == [True, True, True]
    for number, path in enumerate((a, c, d)):
        age(path, 7200 - number)
    images.make_room(converting.store / "images", 3_000_000)
    assert sorted(path.name for path in (converting.store / "images").glob("*.sif*")) == [d.name, f"{d.name}.json"]
    assert (await bring(names[1], converting, 5)).path == b
    assert (tmp_path / "built").read_text().split() == [names[number] for number in (0, 1, 2, 3, 1)]


def test_names_of_instances_are_short_and_their_own() -> None:
    names = {name_of(node, runtime) for node in ("a", "b") for runtime in ("x" * 200, "x" * 201, "y")}
    assert len(names) == 6
    assert max(map(len, names)) < 32


def test_the_programs_complaint_is_its_last_error_without_colours() -> None:
    text = "INFO:    Starting\n\x1b[31mFATAL:   no such \x1b[0mfile\n\nINFO:    Cleaning\n"
    assert complaint(text) == "FATAL: no such file"
    assert complaint("one\ntwo\n") == "two"
    assert complaint("") == ""


class TestUsers:
    @pytest.fixture
    def root(self, tmp_path: Path) -> Iterator[int]:
        etc = tmp_path / "etc"
        etc.mkdir()
        (etc / "passwd").write_text("root:x:0:0:root:/root:/bin/sh\nbroken\nann:x:12:34:A:/home/ann:/bin/sh\n")
        (etc / "group").write_text("root:x:0:\nstaff:x:50:bob,ann\nwheel:x:10:annabel\n")
        handle = os.open(tmp_path, os.O_RDONLY | os.O_DIRECTORY)
        yield handle
        os.close(handle)

    @pytest.mark.parametrize(
        ("named", "ids", "home"),
        [
            ("ann", [12, 34, 50], "/home/ann"),
            ("12", [12, 34, 50], "/home/ann"),
            ("ann:wheel", [12, 10, 50], "/home/ann"),
            ("7:8", [7, 8], ""),
            ("7", [7, 7], ""),
            ("0", [0, 0], "/root"),
        ],
    )
    def test_a_user_is_looked_up_in_the_sandboxs_own_files(
        self, root: int, named: str, ids: list[int], home: str
    ) -> None:
        found = look_up(root, named)
        assert (found.ids, found.home) == (ids, home)

    @pytest.mark.parametrize("named", ["eve", "ann:nobody", "root\n"])
    def test_an_unknown_one_is_named(self, root: int, named: str) -> None:
        with pytest.raises(RuntimeFault, match="user"):
            look_up(root, named)

    def test_a_linked_passwd_is_not_followed(self, root: int, tmp_path: Path) -> None:
        (tmp_path / "outside").write_text("eve:x:1:1::/:/bin/sh\n")
        (tmp_path / "etc/passwd").unlink()
        (tmp_path / "etc/passwd").symlink_to(tmp_path / "outside")
        with pytest.raises(RuntimeFault, match="eve"):
            look_up(root, "eve")


class TestLayers:
    @pytest.fixture
    def upper(self, tmp_path: Path) -> Path:
        upper = tmp_path / "upper"
        (upper / "folder").mkdir(parents=True)
        (upper / "folder/file").write_text("content")
        (upper / "link").symlink_to("folder/file")
        return upper

    def test_a_snapshot_is_a_copy_and_is_found_again(self, tmp_path: Path, upper: Path) -> None:
        kept = Layers(tmp_path / "store").keep("recipe", upper, [])
        (upper / "folder/file").write_text("changed")
        again = Layers(tmp_path / "store")
        assert again.all() == [kept]
        [layer], held = again.use(kept.reference)
        assert (layer / "upper/folder/file").read_text() == "content"
        assert (layer / "upper/link").readlink() == Path("folder/file")
        for handle in held:
            os.close(handle)

    def test_a_dropped_snapshot_stays_for_who_uses_it_and_goes_with_them(self, tmp_path: Path, upper: Path) -> None:
        layers = Layers(tmp_path / "store")
        kept = layers.keep("recipe", upper, [])
        [layer], held = layers.use(kept.reference)
        layers.drop(kept.reference)
        assert layers.all() == []
        with pytest.raises(RuntimeFault, match="recipe"):
            layers.use(kept.reference)
        assert (layer / "upper/folder/file").read_text() == "content"
        for handle in held:
            os.close(handle)
        layers.sweep()
        assert not layer.exists()

    def test_a_layer_below_another_snapshot_outlives_its_own(self, tmp_path: Path, upper: Path) -> None:
        layers = Layers(tmp_path / "store")
        first = layers.keep("first", upper, [])
        below, held = layers.use(first.reference)
        second = layers.keep("second", upper, below)
        for handle in held:
            os.close(handle)
        layers.drop(first.reference)
        used, held = layers.use(second.reference)
        assert used[0] == below[0]
        assert all(layer.is_dir() for layer in used)
        for handle in held:
            os.close(handle)

    def test_what_a_killed_worker_left_half_made_is_swept(self, tmp_path: Path, upper: Path) -> None:
        layers = Layers(tmp_path / "store")
        kept = layers.keep("recipe", upper, [])
        part = tmp_path / "store/layers/.1234.part"
        (part / "upper").mkdir(parents=True)
        (part / "lock").touch()
        layers.sweep()
        assert not part.exists()
        assert layers.all() == [kept]

    @pytest.mark.parametrize("reference", ["../x", "", ".hidden", "no-such"])
    def test_a_reference_that_is_none_is_refused(self, tmp_path: Path, reference: str) -> None:
        with pytest.raises(RuntimeFault):
            Layers(tmp_path / "store").use(reference)
