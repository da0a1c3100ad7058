"""One task over several harnesses, side by side.

    python examples/over_harnesses.py examples/calculator/task.yaml mini_swe_agent codex claude_code -n 4

Submits the task once for each, all at the same time, and prints what their rollouts were rewarded.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from polarq.client import Client
from polarq.contracts.rollout import TaskResult
from polarq.contracts.task import Task
from polarq.errors import PolarqError


def over(
    client: Client, task: Task, harnesses: Sequence[str], settings: Mapping[str, Mapping[str, Any]] | None = None
) -> dict[str, TaskResult]:
    """The task's results by harness; `settings` are more of `agent.settings` for some of them."""
    plain = task.model_dump(mode="json", exclude={"task_id"})
    submitted: dict[str, str] = {}
    try:
        for harness in dict.fromkeys(harnesses):
            agent = {"harness": harness, "settings": dict((settings or {}).get(harness, {}))}
            submitted[harness] = client.submit({**plain, "agent": agent}).task_id
    except PolarqError:  # nobody would wait for the others
        for task_id in submitted.values():
            client.cancel(task_id)
        raise
    return {harness: client.wait(task_id) for harness, task_id in submitted.items()}


def row(harness: str, result: TaskResult) -> str:
    told = []
    for rollout in result.results:
        reward = "no reward" if rollout.reward is None else f"{rollout.reward.outcome:g}"
        told.append(f"{reward} ({rollout.outcome.reason})")
    return f"{harness:16} {', '.join(told)}"


def troubles(result: TaskResult) -> list[str]:
    """Why there is no reward, of each rollout that has none."""
    return [f"  {one.rollout_id}: {one.outcome.message}" for one in result.results if one.reward is None]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("task_file", type=Path)
    parser.add_argument("harnesses", nargs="+")
    parser.add_argument("-n", "--num-samples", type=int, default=1)
    asked = parser.parse_args()
    try:
        task = Task.load({**Task.load(asked.task_file).model_dump(mode="json"), "num_samples": asked.num_samples})
        with Client() as client:
            for harness, result in over(client, task, asked.harnesses).items():
                print("\n".join([row(harness, result), *troubles(result)]))
    except PolarqError as exc:
        sys.exit(f"over_harnesses: {exc}")


if __name__ == "__main__":
    main()
