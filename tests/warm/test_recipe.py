"""Equal hashes are equal sandboxes: what separates two recipes, and what does not."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from polarq.contracts.specs import AgentSpec, PrepareAction
from polarq.contracts.task import Task
from polarq.errors import InvalidTask
from polarq.topology import Topology
from polarq_worker.harnesses.base import Harness, HarnessContext, HarnessStep
from polarq_worker.harnesses.create import create_harness
from polarq_worker.runtimes.base import Host
from polarq_worker.warm.recipe import Recipes
from polarq_worker.warm.uploads import Uploads
from tests.warm.conftest import Rig, run


def upload(source: Path, target: str = "/polar/session/it") -> dict[str, Any]:
    return {"type": "upload_dir" if source.is_dir() else "upload_file", "source": str(source), "target": target}


async def key(rig: Rig, **fields: Any) -> str:
    return (await rig.recipe(**fields)).key


@pytest.mark.parametrize(
    "other",
    [
        {"prepare": [{"type": "exec", "command": "echo b"}]},
        {"prepare": [{"type": "exec", "command": "echo a", "cwd": "/tmp"}]},
        {"prepare": [{"type": "exec", "command": "echo a", "env": {"A": "1"}}]},
        {"prepare": [{"type": "exec", "command": "echo a"}, {"type": "exec", "command": "true"}]},
        {"env": {"A": "1"}},
        {"user": "nobody"},
        {"workdir": "/polar/session/repo"},
        {"image": "another"},
        {"memory_mb": 100},
        {"cpus": 1},
        {"max_processes": 100},
        {"gpus": 1},
        {"reuse": True},
        {"network": "none"},
        {"network_policy": "full"},
        {"allow_internet": False},
        {"kwargs": {"a": 1}},
        {"box": "SnapBox"},
    ],
    ids=str,
)
async def test_any_difference_separates(rig: Rig, other: dict[str, Any]) -> None:
    fields: dict[str, Any] = {"box": "OfflineBox", "prepare": [{"type": "exec", "command": "echo a"}]}
    assert await key(rig, **fields) == await key(rig, **fields)
    assert await key(rig, **fields) != await key(rig, **{**fields, **other})


async def test_an_image_that_its_name_stands_for_no_longer_separates(rig: Rig) -> None:
    digest = rig.home / "digest"
    digest.write_text("sha256:1")
    fields: dict[str, Any] = {"box": "ImageBox", "image": "named:latest", "env": {"DIGEST": str(digest)}}
    first = await key(rig, **fields)
    assert await key(rig, **fields) == first
    digest.write_text("sha256:2")
    assert await key(rig, **fields) != first


async def test_what_a_rollout_alone_is_concerned_with_does_not(rig: Rig) -> None:
    fields: dict[str, Any] = {"box": "OfflineBox", "prepare": [{"type": "exec", "command": "echo a"}]}
    same: list[dict[str, Any]] = [
        {},
        {"eval_prepare": [{"type": "exec", "command": "echo b"}]},
        {"network_policy": "proxy-only"},
        {"network_policy": "allowlist", "allowed_hosts": ["example.org"]},
    ]
    assert len({await key(rig, **fields, **more) for more in same}) == 1


async def test_what_is_uploaded_counts_by_its_content_and_bits_and_not_by_where_it_lies(rig: Rig) -> None:
    folder = rig.home / "folder"
    (folder / "below").mkdir(parents=True)
    file = folder / "below/file"
    file.write_text("one")
    seen = [await key(rig, prepare=[upload(folder)])]

    async def changed() -> None:
        now = await key(rig, prepare=[upload(folder)])
        assert now not in seen
        seen.append(now)

    file.write_text("two")
    await changed()
    file.chmod(0o755)
    await changed()
    file.rename(folder / "below/other")
    await changed()
    (folder / "empty").mkdir()
    await changed()
    (folder / "link").symlink_to("below")
    await changed()
    (folder / "link").unlink()
    (folder / "link").symlink_to("empty")
    await changed()
    (folder / "link").unlink()
    (folder / "link").touch()
    await changed()
    folder.rename(rig.home / "elsewhere")
    assert await key(rig, prepare=[upload(rig.home / "elsewhere")]) == seen[-1]
    assert await key(rig, prepare=[upload(rig.home / "elsewhere", "/polar/session/that")]) not in seen


async def test_a_file_that_changed_on_disk_makes_a_new_sandbox(rig: Rig) -> None:
    file = rig.home / "file"
    for text in ("one", "two", "two"):
        file.write_text(text)
        member = await rig.take(await rig.recipe(prepare=[upload(file)]))
        assert await run(member.runtime, "cat it") == text
    assert len(rig.events("snapshot")) == 2


async def test_what_has_not_changed_is_not_read_again(tmp_path: Path) -> None:
    for name in ("old", "new"):
        (tmp_path / name).write_text(name)
    # Its time of change cannot be set, so that only what the clock says of it can be.
    os.utime(tmp_path / "old", (1, 1))
    uploads = Uploads(settled_s=-1)
    digest = uploads.digest(tmp_path)
    assert uploads.files_read == 2
    assert uploads.digest(tmp_path) == digest
    assert uploads.files_read == 2
    (tmp_path / "new").write_text("ABC")
    assert uploads.digest(tmp_path) != digest
    assert uploads.files_read == 3


async def test_what_was_written_just_now_is_read_each_time(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("one")
    uploads = Uploads(settled_s=3600)
    uploads.digest(tmp_path)
    uploads.digest(tmp_path)
    assert uploads.files_read == 2


async def test_nothing_is_read_that_the_task_may_not_upload(rig: Rig) -> None:
    rig.topology.security.upload_roots[:] = [str(rig.home / "allowed")]
    with pytest.raises(InvalidTask, match=r"security\.upload_roots"):
        await rig.recipe(prepare=[upload(rig.prepared_file)])
    assert rig.warm.recipes.uploads.files_read == 0


async def test_a_missing_upload_is_what_preparing_complains_of(rig: Rig) -> None:
    missing = rig.home / "missing"
    recipe = await rig.recipe(prepare=[{"type": "upload_file", "source": str(missing), "target": "/polar/session/x"}])
    with pytest.raises(Exception, match="there is no file"):
        await rig.take(recipe)
    missing.write_text("here")
    action = {"type": "upload_file", "source": str(missing), "target": "/polar/session/x"}
    member = await rig.take(await rig.recipe(prepare=[action]))
    assert await run(member.runtime, "cat x") == "here"


class Installing(Harness):
    """Needs a file of its own, which no task may upload."""

    name = "installing"

    def recipe(self) -> list[PrepareAction]:
        source, target = self.spec.settings["source"], "/polar/session/bin/program"
        return [PrepareAction(type="upload_file", source=source, target=target)]

    def steps(self, context: HarnessContext) -> list[HarnessStep]:
        return []


async def test_what_a_harness_installs_comes_first_and_is_part_of_its_recipe_alone(rig: Rig) -> None:
    program = rig.home / "program"
    program.write_text("echo installed")
    rig.topology.security.upload_roots[:] = []
    harness = Installing(AgentSpec(import_path="x:Y", settings={"source": str(program)}))
    runtime = rig.spec("bash /polar/session/bin/program > said || bash bin/program > said")
    task = Task.load(
        {
            "task_id": "t",
            "instruction": "x",
            "agent": {"import_path": "x:Y"},
            "runtime": runtime.model_dump(mode="json"),
            "evaluator": {"strategy": "session_completed"},
        }
    )
    recipe = await rig.warm.recipes.of_agent(task, harness)
    assert await run((await rig.take(recipe)).runtime, "cat said") == "installed\n"
    assert (await rig.warm.recipes.of_evaluator(task)).key != recipe.key
    program.write_text("echo another")
    assert (await rig.warm.recipes.of_agent(task, harness)).key != recipe.key


def program(folder: Path, name: str, text: str = "#!/bin/sh\n") -> str:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / name).write_text(text)
    (folder / name).chmod(0o755)
    return str(folder)


def release(environment: Path, package: str, version: str) -> None:
    note = environment / f"lib/python3.11/site-packages/{package}-{version}.dist-info"
    note.mkdir(parents=True)
    (note / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: {version}\n")


async def local_key(harness: str, path: str, folder: Path, **settings: Any) -> str:
    spec = {"harness": harness, "settings": settings}
    runtime = {"backend": "local", "env": {"PATH": path}}
    task = Task.parse({"task_id": "t", "instruction": "x", "runtime": runtime, "agent": spec})
    recipes = Recipes(Topology(), Host("node0", "1", folder / "kept"))
    return (await recipes.of_agent(task, create_harness(task.agent, []))).key


async def test_a_program_of_the_machine_that_moved_or_is_another_one_separates(tmp_path: Path) -> None:
    # Else a sandbox would start with a link to nowhere, or with a release that nobody has looked at.
    async def key(path: str) -> str:
        return await local_key("codex", path, tmp_path)

    none, here, there = (str(tmp_path / name) for name in ("none", "here", "there"))
    keys = [await key(none)]
    keys.append(await key(program(tmp_path / "here", "codex")))
    assert await key(here) == keys[-1]
    keys.append(await key(program(tmp_path / "there", "codex")))
    keys.append(await key(program(tmp_path / "there", "codex", "#!/bin/sh\nexit 1\n")))
    assert await key(there) == keys[-1]
    assert len(set(keys)) == len(keys)


async def test_another_release_of_a_machines_library_separates_and_another_library_does_not(tmp_path: Path) -> None:
    bin_ = program(tmp_path / "venv/bin", "python")
    entry = "agent.py:solve"
    bare = await local_key("openai_agents", bin_, tmp_path, entrypoint=entry)
    release(tmp_path / "venv", "other", "1.0")
    assert await local_key("openai_agents", bin_, tmp_path, entrypoint=entry) == bare
    release(tmp_path / "venv", "openai_agents", "0.24.0")
    had = await local_key("openai_agents", bin_, tmp_path, entrypoint=entry)
    release(tmp_path / "venv", "openai_agents", "0.24.1")
    assert len({bare, had, await local_key("openai_agents", bin_, tmp_path, entrypoint=entry)}) == 3
