"""A node looks at what waits for it, and makes what that will ask for."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import pytest

from polarq.contracts import Task
from polarq.contracts.node import NodeRecord
from polarq.contracts.sandbox import Reach, SandboxRecord
from polarq.ledger import AsyncLedger, Calls, Claim, Keys
from polarq.ledger.admission import Place
from polarq.ledger.sandboxes import note_sandbox, sandboxes_of
from polarq_worker.orphans import Orphans
from polarq_worker.patience import Patience
from polarq_worker.runtimes.local import LocalRuntime
from polarq_worker.warm.ahead import LookAhead
from polarq_worker.warm.parts import Warm
from polarq_worker.warm.sweeping import Sweeper
from polarq_worker.work import place_of
from tests.durable import boxes
from tests.warm.conftest import BUDGET_S, Rig
from tests.worker.conftest import shell_task


class Node(Rig):
    """With a ledger, and an eye on what waits there."""

    def __init__(self, home: Path, ledger: AsyncLedger, **pool: Any) -> None:
        super().__init__(home, **pool)
        self.ledger = ledger
        node = self.topology.resolve("node0")
        self.warm = Warm.of(self.topology, node, "0123456789", ledger, Patience(), home)
        self.pool = self.warm.pool
        self.takes_work = self.is_full = True
        self.claimed: list[Task] = []
        self.place: Place = replace(place_of(node, self.topology), incarnation="0123456789")
        self.look_ahead = LookAhead(
            ledger,
            self.topology,
            node,
            self.place,
            self.warm.recipes,
            self.pool,
            takes_work=lambda: self.takes_work,
            is_full=lambda: self.is_full,
            claimed=lambda: self.claimed,
        )

    async def look(self) -> None:
        """Until a look has nothing begun."""
        while True:
            await self.look_ahead.step()
            if not self.pool.making:
                await self.warm.maker.ended()
                return
            await self.arrived()

    def task(self, task_id: str, command: str, samples: int = 1, **fields: Any) -> Task:
        runtime = self.spec(command, **fields).model_dump(mode="json")
        return Task.load(shell_task(task_id, "true", runtime=runtime, num_samples=samples))

    async def submit(self, *args: Any, **fields: Any) -> Task:
        task = self.task(*args, **fields)
        await self.ledger.do(self.ledger.calls.submit(task, task.task_id))
        return task

    async def recipe_of(self, task: Task) -> Any:
        assert task.runtime is not None
        return await self.warm.recipes.of(task.runtime, task.runtime.prepare)


@pytest.fixture
async def node(redis_url: str, keys: Keys, tmp_path: Path) -> AsyncIterator[Node]:
    async with AsyncLedger(redis_url, Calls(keys)) as ledger:
        made = Node(tmp_path / "node", ledger, max_idle=3)
        yield made
        await made.aclose()


async def test_what_waits_first_is_made_ahead_as_far_as_there_are_places(node: Node) -> None:
    first = await node.submit("first", "echo first > it", 2)
    second = await node.submit("second", "echo second > it", 2)
    await node.look()
    origins = [(await node.take(await node.recipe_of(task))).origin for task in (first, first, second, second)]
    assert origins == ["warm", "warm", "warm", "snapshot"]


async def test_what_the_node_has_claimed_and_not_prepared_comes_before_what_waits(node: Node) -> None:
    waiting = await node.submit("waiting", "echo waiting", 3)
    claimed = node.task("claimed", "echo claimed")
    node.claimed = [claimed, claimed]
    await node.look()
    origins = [(await node.take(await node.recipe_of(task))).origin for task in (claimed, claimed, waiting, waiting)]
    assert origins == ["warm", "warm", "warm", "snapshot"]


async def test_nothing_is_made_while_the_node_takes_no_work(node: Node) -> None:
    await node.submit("t", "echo it")
    node.takes_work = False
    await node.look_ahead.step()
    assert (node.pool.making, node.pool.idle, node.events("start")) == (0, 0, [])
    node.takes_work = True
    await node.look()
    assert node.pool.idle == 1


async def test_a_node_that_is_paused_while_it_looks_begins_nothing(node: Node) -> None:
    await node.submit("t", "echo it")

    class Pausing(list[Task]):
        def __getitem__(self, key: Any) -> Any:
            node.takes_work = False
            return super().__getitem__(key)

    node.claimed = Pausing()
    await node.look_ahead.step()
    assert not node.takes_work, "or this test shows nothing"
    assert (node.pool.making, node.pool.idle) == (0, 0)


async def test_uploads_that_changed_are_what_is_made_after_a_while(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    source = node.home / "source"
    source.write_text("before")
    upload = {"type": "upload_file", "source": str(source), "target": "/polar/session/it"}
    task = Task.load(shell_task("t", "true", runtime=node.spec(prepare=[upload]).model_dump(mode="json")))
    node.claimed = [task]
    await node.look()
    before = await node.recipe_of(task)
    source.write_text("after")
    await node.look()
    changed = await node.recipe_of(task)
    assert not node.warm.snapshots.has(changed), "it is looked through now and then only"
    monkeypatch.setattr("polarq_worker.warm.ahead._WISH_S", 0.0)
    node.look_ahead._wishes.clear()
    await node.look()
    source.write_text("at last")
    await node.look()
    assert [(await node.take(one)).origin for one in (before, changed, await node.recipe_of(task))] == ["warm"] * 3


async def test_nothing_is_made_for_what_waits_while_there_are_places_for_it(node: Node) -> None:
    await node.submit("t", "echo it")
    node.is_full = False
    await node.look()
    assert (node.pool.making, node.pool.idle) == (0, 0)
    node.claimed = [node.task("claimed", "echo claimed")]
    await node.look()
    assert node.pool.idle == 1


async def test_what_cannot_be_run_here_is_passed_over(node: Node) -> None:
    await node.ledger.do(
        node.ledger.calls.submit(Task.load(shell_task("bad", "true", runtime={"import_path": "nowhere:Box"})), "bad")
    )
    await node.submit("good", "echo it")
    await node.look()
    assert node.pool.idle == 1


async def test_a_sandbox_that_waits_has_a_record_of_the_worker_alone_until_it_finds_its_rollout(node: Node) -> None:
    task = await node.submit("t", "true", box="LastingBox")
    keys = node.ledger.calls.keys

    async def records() -> dict[str, SandboxRecord]:
        found = await node.ledger.do(sandboxes_of(keys, ["node0"]))
        return {record.runtime_id: record for record in found}

    await node.look()
    (waiting,) = (record for record in (await records()).values() if record.runtime_id in node.warm.maker.living)
    assert (waiting.rollout_id, waiting.incarnation) == ("", "0123456789")
    claim = await node.ledger.do(node.ledger.calls.claim("t.0", "node0", 600, "job"))
    assert isinstance(claim, Claim)
    member = await node.pool.take(await node.recipe_of(task), "t.0", claim, BUDGET_S, node.started.append)
    assert member.runtime.runtime_id == waiting.runtime_id
    found = (await records())[waiting.runtime_id]
    assert (found.rollout_id, found.attempt, found.token) == ("t.0", 1, claim.token)
    await node.pool.stop(node.started.pop())
    await node.warm.maker.ended()
    assert await records() == {}


class Labelled(LocalRuntime):
    """Finds a sandbox that no record tells of, and one that is begun while it looks."""

    found: tuple[str, ...] = ()
    while_looking: Any = None
    swept: ClassVar[list[str]] = []

    @classmethod
    async def sweep(cls, host: Any, keep: Any) -> list[str]:
        listed = [*cls.found]
        cls.while_looking()
        cls.swept = [runtime_id for runtime_id in listed if runtime_id not in keep]
        return cls.swept


async def test_what_nobody_knows_of_is_swept_and_nothing_that_lives(node: Node) -> None:
    member = await node.take(await node.recipe("true", box="PlainBox"))
    living = member.runtime.runtime_id
    Labelled.found = (living, "begun", "lost")
    Labelled.while_looking = lambda: node.warm.maker.living.setdefault("begun", member.runtime)
    node.warm.maker.used.add(Labelled)
    keys = node.ledger.calls.keys
    lost = SandboxRecord(
        runtime="x", runtime_id="lost", handle="h", reach=Reach.NODE, node_id="node0", incarnation="i", hostname="h"
    )
    await node.ledger.do(note_sandbox(keys, lost))
    alone = False
    sweeper = Sweeper(node.warm.maker, node.ledger, alone=lambda: alone)
    await sweeper.step()
    assert await node.ledger.do(sandboxes_of(keys, ["node0"])) == [lost], "another worker of the node lives"
    alone = True
    await sweeper.step()
    assert await node.ledger.do(sandboxes_of(keys, ["node0"])) == []
    assert Labelled.swept == ["lost"]
    del node.warm.maker.living["begun"]


async def test_what_waited_in_another_workers_pool_is_stopped_when_that_has_lost_the_nodes_place(node: Node) -> None:
    await node.submit("t", "true", box="LastingBox")
    await node.look()
    handle = next(Path(runtime.handle) for runtime in node.warm.maker.living.values())
    orphans = Orphans(node.ledger, node.topology)
    calls = node.ledger.calls
    await node.ledger.do(calls.announce(NodeRecord(node_id="node0"), 600, "0123456789"))
    assert await orphans.stop_own("node0", "another") == []
    await node.ledger.do(calls.depart("node0", "0123456789"))
    await node.ledger.do(calls.announce(NodeRecord(node_id="node0"), 600, "another"))
    stopped = await orphans.stop_own("node0", "another")
    assert len(stopped) == 1
    assert not boxes.alive(handle)
