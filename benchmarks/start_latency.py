"""From submit to the harness' first act, on an idle node: how long, and how much of it is polarq's own.

    python benchmarks/start_latency.py            50 tasks, one after the other
    python benchmarks/start_latency.py --tasks 100

Each turn, on the same worker and pool: a plain Celery task that does nothing but say when it began; a task of one
rollout, whose shell prints the time as its first act; and its two processes (the sandbox's first one, the shell)
started alone, which is the part that no job system can lower. One clock for everything: this machine's. The ledger's
own moments are whole milliseconds, cut off.
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

from celery import shared_task

from polarq.contracts import RolloutState
from polarq.testing.program import Program
from polarq.testing.stack import LocalStack
from polarq.topology.models import GatewaySection
from polarq_worker.runtimes.processes import Descriptors, ProcessTree

NODE = "node0"
NO_OP = "benchmark.no_op"
SAY_WHEN = "echo $EPOCHREALTIME"
"""Bash's own clock, printed by a builtin: nothing is started for it."""
BASH = ["/bin/bash", "-o", "pipefail"]
SHELL_ENV = {"LANG": "C.UTF-8"}
MOST_S = 60.0
PAUSE_S = 0.2
"""Between two turns: what follows a rollout's end (Celery's result, events) is over by then."""
TARGET_MS = 25.0


@shared_task(name=NO_OP)
def no_op() -> float:
    """When it began, in seconds since the epoch. The worker is told of it by `-I`."""
    return time.time()


class Stack(LocalStack):
    """Its worker also knows the plain task."""

    def _program(self, name: str, command: list[str], log: str) -> Program:
        if name.startswith("worker"):
            command = [*command, "-I", Path(__file__).stem]
        return super()._program(name, command, log)


@dataclass(frozen=True)
class Turn:
    """Seconds. What is `at_` counts from the moment before the call."""

    no_op_sent_s: float
    no_op_began_s: float
    submitted_s: float
    at_recorded_s: float
    at_claimed_s: float
    at_ready_s: float
    at_running_s: float
    at_harness_s: float
    prepare_s: float
    slot_s: float
    sandbox_alone_s: float
    shell_alone_s: float
    python_alone_s: float
    bash_alone_s: float

    @property
    def processes_s(self) -> float:
        return self.sandbox_alone_s + self.shell_alone_s

    @property
    def own_s(self) -> float:
        return self.at_harness_s - self.processes_s

    @property
    def own_with_warden_s(self) -> float:
        """The process that a local sandbox begins with is polarq's too."""
        return self.own_s + self.sandbox_alone_s

    @property
    def own_with_sandbox_s(self) -> float:
        """All but what a bare shell takes."""
        return self.at_harness_s - self.bash_alone_s


def plain(stack: LocalStack) -> tuple[float, float]:
    """(until the call returned, until the task began) of one task that does nothing."""
    before = time.time()
    result = stack.client.app.send_task(NO_OP, queue=NODE)
    sent = time.time()
    return sent - before, float(result.get(MOST_S)) - before


def rollout(stack: LocalStack, number: int) -> dict[str, float]:
    """One task of one rollout, to its end: the fields of `Turn` that are about it."""
    client, task_id = stack.client, f"start-{number}"
    after = client.ledger.do(client.ledger.calls.last_event_id())
    task = {
        "task_id": task_id,
        "instruction": "Say when.",
        "agent": {"harness": "shell", "custom_shell": {"command": SAY_WHEN}},
        "runtime": {"backend": "local"},
    }
    before = time.time()
    client.submit(task)
    submitted = time.time()
    result = client.wait(task_id, MOST_S).results[0]
    if result.outcome.state is not RolloutState.COMPLETED or result.harness is None:
        raise SystemExit(f"{task_id} ended as {result.outcome}")
    seen: dict[str, float] = {}
    for event in client.follow(task_id, after, wait_s=0.1):
        what = event.type if event.type.startswith("task.") else str(event.data["status"])
        seen.setdefault(what, event.at.timestamp() - before)
        if what == "task.completed":
            break
    timing = result.timing
    assert timing.prepare_s is not None
    assert timing.ready_s is not None
    return {
        "submitted_s": submitted - before,
        "at_recorded_s": seen["task.created"],
        "at_claimed_s": seen["preparing"],
        "at_ready_s": seen["ready"],
        "at_running_s": seen["running"],
        "at_harness_s": float(result.harness.steps[0].stdout_tail) - before,
        "prepare_s": timing.prepare_s,
        "slot_s": timing.ready_s,
    }


async def processes(folder: Path) -> tuple[float, float]:
    """Seconds until a sandbox's first process is there, and from then on until a shell in it says when."""
    script = folder / "when.sh"
    script.write_text(SAY_WHEN)
    tree = ProcessTree(folder / "warden.stderr")
    before = time.time()
    await tree.start()
    there = time.time()
    null = os.open(os.devnull, os.O_RDWR)
    out, out_w = os.pipe()
    await tree.run([*BASH, str(script)], str(folder), SHELL_ENV, Descriptors(null, out_w, os.dup(null)))
    with os.fdopen(out) as said:
        began = float(await asyncio.to_thread(said.read))
    await tree.stop()
    return there - before, began - there


def bare(folder: Path) -> tuple[float, float]:
    """Seconds that a Python that does nothing takes, and until a shell says when, both as this program's children."""
    began = time.time()
    subprocess.run([sys.executable, "-E", "-s", "-S", "-P", "-c", ""], check=True)
    ended = time.time()
    said = subprocess.run([*BASH, str(folder / "when.sh")], check=True, stdout=subprocess.PIPE, env=SHELL_ENV).stdout
    return ended - began, float(said) - ended


def turn(stack: LocalStack, number: int, folder: Path) -> Turn:
    sent, began = plain(stack)
    time.sleep(PAUSE_S)
    parts = rollout(stack, number)
    time.sleep(PAUSE_S)
    sandbox, shell = asyncio.run(processes(folder))
    python, bash = bare(folder)
    return Turn(
        no_op_sent_s=sent,
        no_op_began_s=began,
        sandbox_alone_s=sandbox,
        shell_alone_s=shell,
        python_alone_s=python,
        bash_alone_s=bash,
        **parts,
    )


def report(turns: Sequence[Turn]) -> None:
    def line(name: str, values: Sequence[float], note: str = "") -> float:
        inner = sorted(value * 1000 for value in values)
        median = statistics.median(inner)
        print(f"{name:58} {median:7.1f} {inner[int(0.9 * (len(inner) - 1))]:7.1f}   {note}".rstrip())
        return median

    print(f"{len(turns)} turns on {os.cpu_count()} cores; milliseconds" + " " * 24 + "median     p90\n")
    print("a plain Celery task on the same worker")
    line("  send_task returns", [t.no_op_sent_s for t in turns])
    base = line("  it begins", [t.no_op_began_s for t in turns])
    print("\na rollout, from the call of submit")
    line("  submit returns", [t.submitted_s for t in turns])
    whole = line("  the harness' first act", [t.at_harness_s for t in turns])
    print("\n  of it, one after the other")
    line("  checked, placed, recorded in the ledger", [t.at_recorded_s for t in turns])
    line("  its doorbell: published, heard, claimed", [t.at_claimed_s - t.at_recorded_s for t in turns])
    line("  prepare", [t.at_ready_s - t.at_claimed_s for t in turns])
    line("  ready: a run slot", [t.at_running_s - t.at_ready_s for t in turns])
    line("  run: grant, instruction, script, and the shell", [t.at_harness_s - t.at_running_s for t in turns])
    print("\n  as its own timing says (within the above)")
    line("  prepare_s", [t.prepare_s for t in turns])
    line("  ready_s", [t.slot_s for t in turns])
    print("\nits processes, started alone")
    line("  the sandbox's first one", [t.sandbox_alone_s for t in turns])
    line("  the shell in it", [t.shell_alone_s for t in turns])
    line("  (a bare Python, start to end)", [t.python_alone_s for t in turns])
    line("  (a bare shell)", [t.bash_alone_s for t in turns])
    print()
    own = line("polarq's own: a rollout less its processes", [t.own_s for t in turns])
    added = line("  and less the plain task's time", [t.own_s - t.no_op_began_s for t in turns])
    strict = line("  or with the sandbox's first process", [t.own_with_warden_s for t in turns])
    line("  or with all that its sandbox is, less a bare shell", [t.own_with_sandbox_s for t in turns])
    print(
        f"\npolarq's own is {own / TARGET_MS:.2f} of {TARGET_MS:g} ms, {own / base:.1f} times a plain task "
        f"({added:+.1f} ms), and {own / whole:.0%} of the way to the harness;"
        f"\nwith the sandbox's first process it is {strict / TARGET_MS:.2f} of {TARGET_MS:g} ms"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--tasks", type=int, default=50)
    parser.add_argument("--warm-up", type=int, default=5, help="turns before those that count")
    options = parser.parse_args()
    # The local stack beats faster than a deployment does; here everything is as it comes.
    gateway = {"heartbeat_interval_seconds": GatewaySection().heartbeat_interval_seconds}
    env = {"PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), *filter(None, [os.environ.get("PYTHONPATH")])])}
    with tempfile.TemporaryDirectory(prefix="polarq-start-") as home:
        folder = Path(home)
        with Stack(folder, nodes={NODE: {}}, sections={"gateway": gateway}, env=env, bound=True) as stack:
            turns = [turn(stack, number, folder) for number in range(options.warm_up + options.tasks)]
    report(turns[options.warm_up :])


if __name__ == "__main__":
    main()
