"""Sandboxes that wait ready: what is made ahead, what is handed out, what goes."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Callable

import pytest

from polarq_worker.stages.prepare import PrepareFailed
from polarq_worker.warm.members import Wish
from tests.warm.conftest import Rig, run, until, wishes


async def test_what_is_made_ahead_is_handed_out_once_and_needs_no_start(rig: Rig) -> None:
    recipe = await rig.recipe("echo made > it")
    assert await rig.made_ahead(recipe, recipe) == 2
    starts = rig.events("start")
    first, second = await rig.take(recipe), await rig.take(recipe)
    assert rig.events("start") == starts
    assert first.runtime is not second.runtime
    assert [member.origin for member in (first, second)] == ["warm", "warm"]
    assert await run(first.runtime, "cat it") == "made\n"
    assert (await rig.take(recipe)).origin == "snapshot"


async def test_no_more_is_made_than_is_wanted_and_may_wait(rigs: Callable[..., Rig]) -> None:
    rig = rigs(max_idle=3)
    recipes = [await rig.recipe(f"echo {name}", box="PlainBox") for name in "abcd"]
    assert rig.pool.ahead(wishes(recipes[0])) == 1
    assert rig.pool.ahead(wishes(recipes[0])) == 0, "one is coming"
    assert rig.pool.ahead(wishes(*recipes)) == 2
    await rig.arrived()
    assert rig.pool.idle == 3
    assert rig.pool.ahead(wishes(*recipes)) == 0


async def test_snapshots_are_made_of_all_that_is_in_sight_and_sandboxes_for_what_comes_first(
    rigs: Callable[..., Rig],
) -> None:
    rig = rigs(max_idle=1, max_starting=2)
    recipes = [await rig.recipe(f"echo {name}") for name in "abc"]
    assert rig.pool.ahead(wishes(*recipes)) == 2, "as many at once as may be"
    assert rig.pool.ahead(wishes(*recipes)) == 0
    await rig.arrived()
    assert await rig.made_ahead(*recipes) == 1
    assert all(rig.warm.snapshots.has(recipe) for recipe in recipes)
    assert [(await rig.take(recipe)).origin for recipe in recipes] == ["warm", "snapshot", "snapshot"]


async def test_a_snapshot_that_is_made_ahead_is_the_one_that_a_rollout_waits_for(rig: Rig) -> None:
    recipe = await rig.recipe(f"while [ ! -e {rig.home}/go ]; do sleep 0.05; done")
    rig.pool.ahead(wishes(recipe))
    await until(lambda: rig.prepared == 1)
    taking = asyncio.create_task(rig.take(recipe))
    await asyncio.sleep(0)
    (rig.home / "go").touch()
    assert (await taking).origin == "cold"
    assert rig.prepared == 1


async def test_no_more_are_begun_at_once_than_the_topology_says(rigs: Callable[..., Rig]) -> None:
    rig = rigs(max_idle=8, max_starting=2)
    recipe = await rig.recipe("true", box="PlainBox")
    assert rig.pool.ahead(wishes(*[recipe] * 8)) == 2
    await rig.arrived()
    assert rig.pool.ahead(wishes(*[recipe] * 8)) == 2


async def test_two_recipes_never_mix(rig: Rig) -> None:
    a, b = await rig.recipe("echo a > it"), await rig.recipe("echo b > it")
    await rig.made_ahead(a, a)
    member = await rig.take(b)
    assert (member.origin, await run(member.runtime, "cat it")) == ("cold", "b\n")
    assert rig.pool.idle == 2


async def test_one_that_died_while_it_waited_is_not_handed_out(rig: Rig) -> None:
    recipe = await rig.recipe("echo made > it")
    await rig.made_ahead(recipe, recipe)
    ids = [runtime_id for runtime_id, name, _ in rig.events("start") if name == recipe.key]
    shutil.rmtree(rig.home / "rollouts" / ids[0])
    shutil.rmtree(rig.home / "rollouts" / ids[1])
    member = await rig.take(recipe)
    assert (member.origin, await run(member.runtime, "cat it")) == ("snapshot", "made\n")
    await until(lambda: set(rig.warm.maker.living) == {member.runtime.runtime_id})


async def test_who_comes_while_one_is_being_made_ahead_waits_for_that_one(rig: Rig) -> None:
    recipe = await rig.recipe(f"while [ ! -e {rig.home}/go ]; do sleep 0.05; done", box="PlainBox")
    rig.pool.ahead(wishes(recipe))
    await until(lambda: rig.prepared == 1)
    taking = asyncio.create_task(rig.take(recipe))
    gone = asyncio.create_task(rig.take(recipe))
    await until(lambda: rig.prepared == 2)
    gone.cancel()
    (rig.home / "go").touch()
    member = await taking
    assert member.origin == "warm"
    assert rig.pool.idle == 0


async def test_one_that_its_rollout_gave_up_waiting_for_is_the_next_ones(rig: Rig) -> None:
    recipe = await rig.recipe(f"while [ ! -e {rig.home}/go ]; do sleep 0.05; done", box="PlainBox")
    rig.pool.ahead(wishes(recipe))
    await until(lambda: rig.prepared == 1)
    taking = asyncio.create_task(rig.take(recipe))
    await asyncio.sleep(0)
    taking.cancel()
    await asyncio.wait([taking])
    (rig.home / "go").touch()
    await rig.arrived()
    assert (await rig.take(recipe)).origin == "warm"
    assert rig.prepared == 1


async def test_what_cannot_be_made_ahead_fails_who_waits_for_it_and_is_not_tried_ahead_again(rig: Rig) -> None:
    recipe = await rig.recipe(f"while [ ! -e {rig.home}/go ]; do sleep 0.05; done; false")
    rig.pool.ahead(wishes(recipe))
    await until(lambda: rig.prepared == 1)
    taking = asyncio.create_task(rig.take(recipe))
    await asyncio.sleep(0)
    (rig.home / "go").touch()
    with pytest.raises(PrepareFailed, match="prepare action 0"):
        await taking
    await until(lambda: not rig.warm.maker.living)
    assert rig.pool.ahead(wishes(recipe)) == 0
    with pytest.raises(PrepareFailed):
        await rig.take(recipe)
    assert rig.prepared == 2, "a rollout tries at once"


async def test_what_is_not_wanted_makes_way_the_longest_unused_recipe_first(rigs: Callable[..., Rig]) -> None:
    rig = rigs(max_idle=2)
    a, b, c = [await rig.recipe(f"echo {name} > it") for name in "abc"]
    for recipe in (b, a):
        await rig.take(recipe)
    await rig.made_ahead(a, b)
    await rig.made_ahead(c)
    assert (await rig.take(a)).origin == "warm", "b was used before it"
    assert (await rig.take(c)).origin == "warm"
    assert (await rig.take(b)).origin == "snapshot"


async def test_what_waits_has_no_more_memory_together_than_the_topology_says(rigs: Callable[..., Rig]) -> None:
    rig = rigs(idle_memory_mb=1000)
    small, large, huge = [await rig.recipe("true", box="PlainBox", memory_mb=mb) for mb in (400, 700, 2000)]
    assert await rig.made_ahead(small, small, large) == 2
    assert await rig.made_ahead(huge) == 2, "nothing makes way for what cannot wait at all"
    assert await rig.made_ahead(large) == 1


async def test_what_has_waited_for_too_long_is_given_up(rigs: Callable[..., Rig]) -> None:
    rig = rigs(idle_s=0.001)
    await rig.made_ahead(await rig.recipe("true"))
    await asyncio.sleep(0.01)
    rig.pool.tidy()
    assert rig.pool.idle == 0
    await until(lambda: not rig.warm.maker.living)


async def test_a_used_sandbox_is_used_again_as_it_was_left_where_its_task_allows_that(rig: Rig) -> None:
    recipe = await rig.recipe("echo made > it", reuse=True)
    first = await rig.take(recipe)
    await first.runtime.exec("echo used > it; echo said", timeout_s=60, log="agent/step.00")
    assert await rig.pool.give_back(first.runtime, used=True)
    rig.started.remove(first.runtime)
    second = await rig.take(recipe)
    assert (second.runtime is first.runtime, second.origin) == (True, "reused")
    assert await run(second.runtime, "cat it") == "used\n"
    assert second.runtime.exec_times.report().count == 1
    assert not (second.runtime.host_log_dir / "agent").exists()
    other = await rig.take(await rig.recipe("echo made > it"))
    assert await run(other.runtime, "cat it") == "made\n"


async def test_there_is_no_giving_back_to_a_pool_that_keeps_nothing(rigs: Callable[..., Rig]) -> None:
    rig = rigs(max_idle=0)
    member = await rig.take(await rig.recipe("true", reuse=True))
    assert not await rig.pool.give_back(member.runtime, used=True)
    assert rig.pool.ahead(wishes(member.recipe)) == 0


async def test_nothing_is_left_of_a_pool_that_is_closed(rig: Rig) -> None:
    ready, coming = await rig.recipe("true"), await rig.recipe("sleep 86398", box="PlainBox")
    keeping = await rig.recipe("sleep 86397")
    assert await rig.made_ahead(ready) == 1
    rig.pool.ahead(wishes(ready, coming, keeping))
    await until(lambda: rig.prepared == 3)
    await rig.pool.aclose()
    assert not rig.warm.maker.living
    assert list((rig.home / "rollouts").iterdir()) == []
    assert rig.pool.ahead(wishes(ready)) == 0


async def test_the_numbers_say_what_waits_and_how_sandboxes_were_come_by(rig: Rig) -> None:
    recipe = await rig.recipe("head -c 3000000 /dev/zero > it")
    await rig.take(recipe)
    await rig.take(recipe)
    await rig.made_ahead(recipe, recipe)
    await rig.take(recipe)
    assert rig.pool.metrics().model_dump() == {
        "idle": 1,
        "coming": 0,
        "snapshots": 1,
        "snapshots_mb": 3,
        "taken_warm": 1,
        "taken_from_snapshot": 1,
        "taken_cold": 1,
    }


async def test_looking_whether_one_lives_is_no_command_of_its_rollouts(rig: Rig) -> None:
    recipe = await rig.recipe("true", box="AskingBox")
    assert await rig.made_ahead(recipe) == 1
    (waiting,) = rig.warm.maker.living.values()
    before = waiting.exec_times.report()
    member = await rig.take(recipe)
    assert (member.runtime, member.origin) == (waiting, "warm")
    assert len(rig.events("asked")) == 1
    assert waiting.exec_times.report() == before


async def test_one_that_ran_out_of_another_tasks_time_is_made_anew_for_who_waits(rig: Rig) -> None:
    tried = rig.home / "tried"
    recipe = await rig.recipe(f"test -e {tried} || {{ touch {tried}; sleep 86399; }}", box="PlainBox")
    assert rig.pool.ahead([Wish(recipe, 1.0)]) == 1
    member = await rig.take(recipe)
    assert (member.origin, rig.prepared) == ("cold", 2)


async def test_the_one_that_waited_longest_is_handed_out_first(rigs: Callable[..., Rig]) -> None:
    rig = rigs(max_starting=1)
    recipe = await rig.recipe(box="PlainBox")
    assert await rig.made_ahead(recipe, recipe, recipe) == 3
    waiting = list(rig.warm.maker.living.values())
    assert [(await rig.take(recipe)).runtime for _ in range(3)] == waiting
