"""What the rollouts of a group have in common is in a worker's memory once, and none can change it for another."""

from __future__ import annotations

import gc
import tracemalloc
from collections.abc import Iterator

import pytest

from polarq.contracts import Task
from polarq.ledger import Calls, Claim, Keys, Ledger

MEGABYTE = 1 << 20
SAMPLES = 8


@pytest.fixture
def ledger(redis_url: str, keys: Keys) -> Iterator[Ledger]:
    with Ledger(redis_url, Calls(keys)) as made:
        yield made


def claimed(ledger: Ledger, fields: dict[str, object]) -> list[Claim]:
    task = Task.load(
        {
            "task_id": "t",
            "num_samples": SAMPLES,
            "agent": {"harness": "mini_swe_agent"},
            "runtime": {"backend": "local"},
            **fields,
        }
    )
    ledger.do(ledger.calls.submit(task, "t"))
    claims = [ledger.do(ledger.calls.claim(f"t.{index}", "node0", 60, f"job-{index}")) for index in range(SAMPLES)]
    found = [claim for claim in claims if isinstance(claim, Claim)]
    assert len(found) == SAMPLES
    return found


def test_a_long_instruction_is_held_once_for_a_whole_group(ledger: Ledger) -> None:
    gc.collect()
    tracemalloc.start()
    try:
        claims = claimed(ledger, {"instruction": "long" * (MEGABYTE // 4)})
        gc.collect()
        held, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert {len(claim.task.instruction) for claim in claims} == {MEGABYTE}
    assert held < 3 * MEGABYTE


def test_what_one_rollout_does_to_its_task_no_other_of_its_group_sees(ledger: Ledger) -> None:
    long = "x" * 10_000
    fields: dict[str, object] = {
        "instruction": "do it",
        "metadata": {"long": long, "list": [long], "of": {"deep": {"long": long}}},
        "runtime": {"backend": "local", "env": {"A": long}, "prepare": [{"type": "exec", "command": long}]},
    }
    first, second, *_ = claimed(ledger, fields)
    before = second.task.canonical_json()
    first.task.metadata["long"] = "changed"
    first.task.metadata["list"].append("changed")
    first.task.metadata["of"]["deep"]["long"] = "changed"
    assert first.task.runtime is not None
    first.task.runtime.env["A"] = "changed"
    first.task.runtime.prepare.clear()
    assert second.task.canonical_json() == before
    assert second.task.metadata["long"] == second.task.metadata["of"]["deep"]["long"] == long
