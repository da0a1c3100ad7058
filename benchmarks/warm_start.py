"""A recipe with real work: what its first rollout waits for, what later ones do, and how much of that is polarq's.

    python benchmarks/warm_start.py                                     local, isolated
    python benchmarks/warm_start.py --backend docker --image debian:12  (or any image with bash, git and python3)

The recipe brings a git repository of two thousand files, clones it, makes a virtual environment and writes 100 MB. Its
first rollout has all that done. Then, one after the other on the idle node, rollouts start from what it left on disk;
at last a batch waits for one run slot, so that its sandboxes are made ahead.

From submit to harness: from the moment before the call to the first thing that the harness does (a builtin of bash that
prints the time; one clock for both). Of it, what the backend takes to start the sandbox (`sandbox_start_s`) and for its
first command (measured by a second one of the same harness, which starts a shell too) is not polarq's.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from polarq.contracts import RolloutState
from polarq.contracts.rollout import RolloutResult
from polarq.testing.stack import LocalStack
from polarq_worker.runtimes.base import Host
from polarq_worker.runtimes.docker.runtime import DockerRuntime

MOST_S = 900.0
TIMES_FASTER = 10.0
TARGET_MS = {"local": 300.0, "docker": 1500.0}
FILES, DATA_MB = 2000, 100
SAY_WHEN = "echo $EPOCHREALTIME"


@dataclass(frozen=True)
class Start:
    """One rollout's, in seconds."""

    origin: str
    prepare_s: float
    to_harness_s: float
    backend_s: float

    @property
    def own_s(self) -> float:
        return self.to_harness_s - self.backend_s


def make_repository(folder: Path) -> None:
    for number in range(FILES):
        file = folder / f"part{number % 50}/file{number}.py"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(f"# {number}\n".encode() + os.urandom(4000).hex().encode())
    git = ["git", "-c", "user.name=x", "-c", "user.email=x", "-C", str(folder)]
    for command in (["init", "-q"], ["add", "."], ["commit", "-qm", "all"]):
        subprocess.run([*git, *command], check=True)


def recipe(repository: Path) -> list[dict[str, Any]]:
    commands = [
        'git -c safe.directory="*" clone -q --no-hardlinks "$SESSION_DIR/upstream" repo',
        "python3 -m venv --without-pip venv && venv/bin/python -m compileall -q repo >/dev/null; true",
        f"head -c {DATA_MB}000000 /dev/urandom > data",
    ]
    upload = {"type": "upload_dir", "source": str(repository), "target": "/polar/session/upstream"}
    return [upload, *({"type": "exec", "command": command} for command in commands)]


class Bench:
    """A stack of one node, and tasks of one recipe on it."""

    def __init__(self, stack: LocalStack, runtime: dict[str, Any]) -> None:
        self.stack = stack
        self.runtime = runtime
        self._tasks = 0

    def run(self, samples: int = 1) -> list[Start]:
        self._tasks += 1
        task_id = f"t{self._tasks}"
        task = {
            "task_id": task_id,
            "instruction": "Nothing.",
            "num_samples": samples,
            "agent": {"harness": "shell", "custom_shell": {"command": SAY_WHEN}},
            "runtime": self.runtime,
            "timeout_seconds": MOST_S,
        }
        submitted = time.time()
        self.stack.client.submit(task)
        results = self.stack.client.wait(task_id, MOST_S).results
        return [self._start(result, submitted) for result in results]

    def _start(self, result: RolloutResult, submitted: float) -> Start:
        if result.outcome.state is not RolloutState.COMPLETED or result.harness is None or result.sandbox is None:
            raise SystemExit(f"a rollout ended otherwise: {result.outcome.model_dump_json()}")
        said = float(result.harness.steps[0].stdout_tail)
        timing = result.timing
        # A shell's start and end: no more of it lies before its first act than all of it.
        shell_s = result.harness.steps[0].duration_s
        backend_s = (timing.sandbox_start_s or 0.0) + (timing.recipe_s or 0.0) + shell_s
        return Start(result.sandbox.origin, timing.prepare_s or 0.0, said - submitted, backend_s)


async def drop_snapshots(home: Path) -> None:
    """They are the node's, and it does not come back."""
    host = Host("node0", folder=home / "state/node0/runtimes")
    for snapshot in await DockerRuntime.snapshots(host):
        await DockerRuntime.drop_snapshot(snapshot.reference, host)


def row(name: str, starts: Sequence[Start], *, waited: bool = False) -> None:
    """`waited`: for a slot, of which nothing is polarq's own."""

    def middle(values: Sequence[float]) -> str:
        return f"{statistics.median(values) * 1000:.0f}"

    origins = ", ".join(sorted({start.origin for start in starts}))
    own = "-" if waited else middle([one.own_s for one in starts])
    most = max(start.to_harness_s for start in starts) * 1000
    print(
        f"{name:24}{middle([one.prepare_s for one in starts]):>12}{middle([one.to_harness_s for one in starts]):>12}"
        f"{most:>10.0f}{own:>12}   {origins}"
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--backend", default="local", choices=["local", "docker"])
    parser.add_argument("--image", default="polarq-base:local", help="with docker")
    parser.add_argument("--rollouts", type=int, default=20)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="polarq-warm-") as home:
        repository = Path(home) / "repository"
        make_repository(repository)
        runtimes = {"local": {"isolation": "bubblewrap"}, "pool": {"max_idle": 4}}
        node = {"max_run_workers": 1, "max_init_workers": 1, "ready_buffer": 1, "runtimes": runtimes}
        image = options.image if options.backend == "docker" else ""
        runtime = {"backend": options.backend, "image": image, "prepare": recipe(repository)}
        with LocalStack(Path(home) / "stack", nodes={"node0": node}, bound=True) as stack:
            bench = Bench(stack, runtime)
            first = bench.run()
            later = [bench.run()[0] for _ in range(options.rollouts)]
            batch = bench.run(options.rollouts)
        if options.backend == "docker":
            asyncio.run(drop_snapshots(Path(home) / "stack"))
    print(f"{'milliseconds':24}{'prepare':>12}{'to harness':>12}{'at most':>10}{'polarq own':>12}   origin")
    row("first of its recipe", first)
    row(f"{len(later)} later ones", later)
    row(f"{len(batch)} waiting for a slot", batch, waited=True)
    faster = first[0].prepare_s / statistics.median(start.prepare_s for start in later)
    to_harness_ms = statistics.median(start.to_harness_s for start in later) * 1000
    target = TARGET_MS[options.backend]
    print(f"later prepares are {faster:.0f} times faster (target {TIMES_FASTER:g})")
    print(f"later rollouts: {to_harness_ms:.0f} ms from submit to harness (target {target:g})")
    return 0 if faster >= TIMES_FASTER and to_harness_ms < target else 1


if __name__ == "__main__":
    sys.exit(main())
