"""What a recipe left on disk: made once for all that ask, kept over restarts, gone when there is no room."""

from __future__ import annotations

import asyncio
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from polarq_worker.stages.prepare import PrepareFailed
from polarq_worker.warm.notes import Note
from polarq_worker.warm.snapshots import RecipeChanged
from tests.warm.conftest import Rig, run, until


async def test_eight_rollouts_of_a_new_recipe_prepare_once_and_all_start_from_what_that_left(rig: Rig) -> None:
    recipe = await rig.recipe("echo made > it; sleep 0.2")
    members = await asyncio.gather(*(rig.take(recipe) for _ in range(8)))
    assert rig.prepared == 1
    assert [await run(member.runtime, "cat it") for member in members] == ["made\n"] * 8
    assert [member.origin for member in members] == ["cold"] * 8
    starts = rig.events("start")
    assert [name for _, name, _ in starts] == ["nothing", *[recipe.key] * 8]
    assert len({runtime_id for runtime_id, _, _ in starts}) == 9
    later = await rig.take(recipe)
    assert (later.origin, rig.prepared) == ("snapshot", 1)


async def test_what_one_rollout_writes_another_of_its_recipe_does_not_see(rig: Rig) -> None:
    recipe = await rig.recipe("echo made > it")
    first, second = await rig.take(recipe), await rig.take(recipe)
    await run(first.runtime, "echo spoilt > it")
    assert await run(second.runtime, "cat it") == "made\n"
    assert await run((await rig.take(recipe)).runtime, "cat it") == "made\n"


async def test_a_worker_that_starts_again_finds_the_snapshots_of_the_last_one(rigs: Callable[..., Rig]) -> None:
    first = rigs()
    recipe = await first.recipe("echo made > it")
    await first.take(recipe)
    await first.aclose()
    first.started.clear()
    second = rigs()
    member = await second.take(await second.recipe("echo made > it"))
    assert (member.recipe.key, member.origin, second.prepared) == (recipe.key, "snapshot", 1)
    assert await run(member.runtime, "cat it") == "made\n"


async def test_a_prepare_that_fails_fails_all_that_waited_and_is_tried_anew_by_the_next(rig: Rig) -> None:
    recipe = await rig.recipe(f"echo why >&2; sleep 0.2; test -e {rig.home}/mended")
    failures = await asyncio.gather(*(rig.take(recipe) for _ in range(3)), return_exceptions=True)
    assert isinstance(failures[0], PrepareFailed)
    assert failures == [failures[0]] * 3
    assert "prepare action 0" in str(failures[0])
    assert rig.prepared == 1
    assert (rig.warm.snapshots.logs_of(recipe) / "prepare.00.stderr").read_text() == "why\n"
    (rig.home / "mended").touch()
    assert (await rig.take(recipe)).origin == "cold"
    assert rig.prepared == 2


async def test_who_stops_waiting_for_anothers_prepare_does_not_stop_it(rig: Rig) -> None:
    recipe = await rig.recipe(f"while [ ! -e {rig.home}/go ]; do sleep 0.05; done")
    first, second = asyncio.create_task(rig.take(recipe)), asyncio.create_task(rig.take(recipe))
    await until(lambda: rig.prepared == 1)
    first.cancel()
    await asyncio.wait([first])
    assert first.cancelled()
    (rig.home / "go").touch()
    assert (await second).origin == "cold"
    assert rig.prepared == 1


async def test_a_prepare_that_nobody_waits_for_any_more_is_stopped(rig: Rig) -> None:
    recipe = await rig.recipe("sleep 86399")
    waiting = [asyncio.create_task(rig.take(recipe)) for _ in range(2)]
    await until(lambda: rig.prepared == 1)
    for task in waiting:
        task.cancel()
    await asyncio.wait(waiting)
    await until(lambda: not rig.warm.maker.living)
    assert rig.events("snapshot") == []


async def test_a_budget_that_was_too_short_for_it_is_nobody_elses(rig: Rig) -> None:
    recipe = await rig.recipe(f"test -e {rig.home}/tried || {{ touch {rig.home}/tried; sleep 86399; }}")
    short = asyncio.create_task(rig.take(recipe, budget_s=1.0))
    await until(lambda: rig.prepared == 1)
    long = await rig.take(recipe)
    with pytest.raises(PrepareFailed) as failure:
        await short
    assert failure.value.timed_out
    assert (long.origin, rig.prepared) == ("cold", 2)


async def test_the_longest_unused_snapshot_goes_when_there_is_no_room_and_none_that_is_used(
    rigs: Callable[..., Rig],
) -> None:
    rig = rigs(snapshots_mb=2)
    made = [await rig.recipe(f"head -c 1200000 /dev/zero > {name}") for name in "abc"]
    used = await rig.take(made[0])
    await rig.pool.stop((await rig.take(made[1])).runtime)
    # Together they are too large, and the older one is in use.
    await until(lambda: not rig.warm.snapshots.has(made[1]))
    assert rig.warm.snapshots.has(made[0])
    await rig.take(made[2])
    assert rig.warm.snapshots.has(made[0]), "both are in use"
    await rig.pool.stop(used.runtime)
    await until(lambda: not rig.warm.snapshots.has(made[0]))
    assert [path.name for path in (rig.home / "runtimes/SnapBox").iterdir()] == [made[2].key]
    assert [path.name for path in (rig.home / "runtimes/recipes").iterdir()] == [f"{made[2].key}.json"]
    assert (await rig.take(made[0])).origin == "cold"


async def test_where_none_are_kept_one_is_there_for_as_long_as_it_is_used(rigs: Callable[..., Rig]) -> None:
    rig = rigs(snapshots_mb=0)
    recipe = await rig.recipe("echo made > it")
    members = await asyncio.gather(*(rig.take(recipe) for _ in range(3)))
    assert rig.prepared == 1
    for member in members:
        await rig.pool.stop(member.runtime)
    await until(lambda: not rig.warm.snapshots.kept)
    await rig.take(recipe)
    assert rig.prepared == 2


async def test_a_snapshot_that_somebody_removed_is_made_again(rig: Rig) -> None:
    recipe = await rig.recipe("echo made > it")
    await rig.take(recipe)
    shutil.rmtree(rig.home / "runtimes/SnapBox" / recipe.key)
    member = await rig.take(recipe)
    assert (member.origin, rig.prepared) == ("cold", 2)
    assert await run(member.runtime, "cat it") == "made\n"


async def test_without_room_for_a_snapshot_rollouts_go_on_and_it_is_said_once(
    rig: Rig, caplog: pytest.LogCaptureFixture
) -> None:
    recipe = await rig.recipe("echo made > it", box="FullBox")
    members = await asyncio.gather(*(rig.take(recipe) for _ in range(3)))
    assert [await run(member.runtime, "cat it") for member in members] == ["made\n"] * 3
    assert [member.origin for member in members] == ["cold"] * 3
    assert await rig.made_ahead(recipe, recipe) == 2
    assert (await rig.take(recipe)).origin == "warm"
    assert len(rig.events("full")) == 1
    tried = rig.events("full")[0][0]
    assert rig.prepared == 1 + len(members) + 2
    lines = (rig.home / "events").read_text().splitlines()
    assert lines.index(f"stop {tried}") < min(lines.index(f"start r{n} nothing online") for n in (1, 2, 3))
    assert len([record for record in caplog.records if "prepared for each rollout" in record.getMessage()]) == 1
    assert list((rig.home / "runtimes/recipes").iterdir()) == []


async def test_notes_of_what_a_killed_worker_never_made_go_and_others_stay(rigs: Callable[..., Rig]) -> None:
    first = rigs()
    recipe = await first.recipe("echo made > it")
    await first.take(recipe)
    await first.aclose()
    first.started.clear()
    folder = first.home / "runtimes/recipes"
    of_nothing = Note(runtime="tests.warm.boxes:SnapBox")
    (folder / "1234.json").write_text(of_nothing.model_dump_json())
    (folder / "5678.part").write_text("{")
    (folder / "of-another.json").write_text(Note(runtime="tests.no_such.box:Box").model_dump_json())
    second = rigs()
    await second.warm.snapshots.settle()
    assert sorted(path.name for path in folder.iterdir()) == sorted([f"{recipe.key}.json", "of-another.json"])
    assert (await second.take(recipe)).origin == "snapshot"


async def test_a_worker_that_starts_makes_room_at_once(rigs: Callable[..., Rig]) -> None:
    first = rigs()
    recipe = await first.recipe("head -c 3000000 /dev/zero > it")
    await first.take(recipe)
    await first.aclose()
    first.started.clear()
    second = rigs(snapshots_mb=1)
    await second.warm.snapshots.settle()
    await until(lambda: list((second.home / "runtimes/recipes").iterdir()) == [])
    assert list((second.home / "runtimes/SnapBox").iterdir()) == []


async def test_files_that_change_while_they_are_uploaded_make_no_snapshot(rig: Rig) -> None:
    source = rig.home / "source"
    source.write_text("before")
    upload = {"type": "upload_file", "source": str(source), "target": "/polar/session/it"}
    change = {"type": "exec", "command": f"echo after > {source}"}
    recipe = await rig.recipe(prepare=[upload, change])
    with pytest.raises(RecipeChanged):
        await rig.take(recipe)
    assert rig.events("snapshot") == []
    assert not rig.warm.snapshots.has(recipe)


async def test_preparing_has_the_network_and_the_rollout_what_its_policy_says(rig: Rig) -> None:
    for name, fields, prepared, ran in (
        ("default", {}, "online", "offline"),
        ("full", {"network_policy": "full"}, "online", "online"),
        ("none", {"network_policy": "none"}, "online", "offline"),
        ("never", {"allow_internet": False}, "offline", "offline"),
    ):
        before = len(rig.events("start"))
        await rig.take(await rig.recipe(f"echo {name}", box="OfflineBox", **fields))
        assert [how for _, _, how in rig.events("start")[before:]] == [prepared, ran], name


async def test_without_snapshots_each_rollout_is_prepared_in_its_own_sandbox(rig: Rig) -> None:
    recipe = await rig.recipe("echo made > it", box="PlainBox")
    members = [await rig.take(recipe) for _ in range(2)]
    assert rig.prepared == 2
    assert [member.origin for member in members] == ["cold", "cold"]
    assert [await run(member.runtime, "cat it") for member in members] == ["made\n"] * 2


async def test_what_cannot_be_kept_is_found_out_once_and_prepared_for_each_rollout(rig: Rig) -> None:
    recipe = await rig.recipe("echo made > it", box="UnkeptBox")
    members = await asyncio.gather(*(rig.take(recipe) for _ in range(3)))
    assert [await run(member.runtime, "cat it") for member in members] == ["made\n"] * 3
    assert (len(rig.events("unkept")), rig.prepared) == (1, 4)
    assert await rig.made_ahead(recipe) == 1
    assert (await rig.take(recipe)).origin == "warm"
    assert (len(rig.events("unkept")), rig.prepared) == (1, 5)


async def test_a_recipe_of_nothing_is_only_started(rig: Rig) -> None:
    await rig.take(await rig.recipe())
    assert [name for _, name, _ in rig.events("start")] == ["nothing"]
    assert rig.events("snapshot") == []


async def test_what_a_snapshot_was_last_used_for_outlives_the_worker(rigs: Callable[..., Rig]) -> None:
    first = rigs()
    old, new = [await first.recipe(f"head -c 1200000 /dev/zero > {name}") for name in "ab"]
    for recipe in (new, old):
        await first.take(recipe)
    note = Path(first.home / f"runtimes/recipes/{old.key}.json")
    os.utime(note, (1, 1))
    await first.aclose()
    first.started.clear()
    second = rigs(snapshots_mb=2)
    await second.pool.stop((await second.take(await second.recipe("true"))).runtime)
    await until(lambda: not second.warm.snapshots.has(old))
    assert second.warm.snapshots.has(new)
