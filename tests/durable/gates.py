"""Rollouts that tell that they run and wait until they are let go, and a log of every start that nothing can undo."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

from polarq.testing.stack import LocalStack
from tests.worker.conftest import ask, shell_task, wait_until

PATIENCE_S = 120.0
"""For anything awaited: far more than it takes, also on a slow machine."""


class Gates:
    """One folder of gates; the harness of rollout `<task>.<n>` waits for the file of that name."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.log = folder / "starts.log"
        folder.mkdir(parents=True, exist_ok=True)
        self.log.touch()

    def task(self, task_id: str, samples: int = 1, *, first: str = ask(1), **more: Any) -> dict[str, Any]:
        """A task whose harnesses note their start, ask the model once, and wait for their gate."""
        command = (
            f'echo "$SESSION_ID" >> {self.log}\n{first}\n'
            f'while [ ! -e "{self.folder}/$SESSION_ID" ]; do sleep 0.05; done'
        )
        settings = {"num_samples": samples, "timeout_seconds": 600, "instruction": "Say something. [script: plain]"}
        return shell_task(task_id, command, **{**settings, **more})

    def open(self, *rollout_ids: str) -> None:
        for rollout_id in rollout_ids:
            (self.folder / rollout_id).touch()

    def starts(self) -> Counter[str]:
        """How often the harness of each rollout was started, on any node."""
        return Counter(self.log.read_text().split())

    def wait_started(self, *rollout_ids: str) -> None:
        wait_until(lambda: set(rollout_ids) <= set(self.starts()), PATIENCE_S)


def wait_for_log(stack: LocalStack, text: str, node_id: str = "node0", times: int = 1) -> None:
    """Returns when the worker has logged `text` so often."""
    log = stack.workers[node_id].log
    wait_until(lambda: log.read_text(errors="replace").count(text) >= times, PATIENCE_S)


def ids(task_id: str, samples: int) -> list[str]:
    return [f"{task_id}.{n}" for n in range(samples)]
