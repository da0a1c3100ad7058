"""What a thousand rollouts in flight cost one worker: memory, its loop's lag, processor time.

    python benchmarks/in_flight.py                              1,000 at once
    python benchmarks/in_flight.py --runtime local --rollouts 200 [--isolation bubblewrap]
    python benchmarks/in_flight.py --holders                    who holds the memory (slow: no other figure counts)

The worker, its pool, its engine, its proxy and Redis are real, and so is each rollout: a doorbell heard, a claim, a
lease that is renewed, a grant, a harness that runs, a commit. Only the sandbox is none (`Waiting`): its command is over
when a file appears, so that a thousand of them fit on any machine. With `--runtime local` it is a real one, whose
processes the machine must bear; the memory is still the worker's alone. Beside it, from the same run: the same worker
with nothing in flight, after a first round that brought in what any rollout needs; where its lag is large already, the
machine is busy with something else and no lag counts. All begin at once and all end at once: the lag then is the worst.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import os
import statistics
import sys
import tempfile
import time
import tracemalloc
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from polarq.contracts import NodeRecord, TaskState
from polarq.contracts.rollout import ExecKind
from polarq.contracts.specs import RuntimeSpec
from polarq.testing.program import Program
from polarq.testing.stack import LocalStack
from polarq.topology.runtimes import RuntimesSection
from polarq_worker.runtimes.base import SESSION_DIR, ExecResult, Host, Runtime, SandboxLayout
from polarq_worker.runtimes.fetched import Fetched
from polarq_worker.runtimes.local import LocalRuntime

NODE = "node0"
MODULE = Path(__file__).stem
MOST_S = 300.0
LOOK_S = 0.5
QUIET_SHARE = 0.15
LAG_WINDOW_S = 62.0
"""A node's lag is over its last minute: after so long it says nothing of what was before."""
FRAMES = 1
HOLDERS = 30
STARTS = 31
"""Lines of source shown of who holds memory."""
TARGET_KB = 60.0
TARGET_LAG_S = 0.05


class Waiting(Runtime):
    """No sandbox: a command is over when the file `kwargs.gate` is there. With `kwargs.snapshot` it first writes what
    the worker has allocated into that file, if it is one that keeps track."""

    _gates: ClassVar[dict[str, asyncio.Task[None]]] = {}

    @classmethod
    def problems(cls, spec: RuntimeSpec, host: Host) -> list[str]:
        return [] if isinstance(spec.kwargs.get("gate"), str) else ["kwargs.gate: name a file"]

    @property
    def layout(self) -> SandboxLayout:
        return SandboxLayout.below(SESSION_DIR)

    @property
    def host_log_dir(self) -> Path:
        return self.root / "logs"

    async def start(self, *, snapshot: str | None = None, online: bool = True) -> None:
        """Nothing to start."""

    async def _exec(
        self,
        command: str | Sequence[str],
        *,
        cwd: str | None,
        env: Mapping[str, str] | None,
        user: str | None,
        stdin: bytes | None,
        timeout_s: float,
        log: str | None,
        max_output_bytes: int,
    ) -> ExecResult:
        if "snapshot" in self.spec.kwargs:
            gc.collect()
            tracemalloc.take_snapshot().dump(self.spec.kwargs["snapshot"])
        try:
            async with asyncio.timeout(timeout_s):
                await asyncio.shield(self._opened(self.spec.kwargs["gate"]))
        except TimeoutError:
            return ExecResult(ExecKind.TIMED_OUT)
        return ExecResult(ExecKind.EXITED, exit_code=0)

    @classmethod
    def _opened(cls, gate: str) -> asyncio.Task[None]:
        """One look for all that wait."""
        if gate not in cls._gates:
            cls._gates[gate] = asyncio.create_task(_appeared(Path(gate)), name="gate")
        return cls._gates[gate]

    async def put_file(self, source: Path, target: str) -> None:
        """Goes nowhere, as all that follows."""

    async def put_dir(self, source: Path, target: str) -> None:
        pass

    async def put_bytes(self, data: bytes, target: str, mode: int = 0o644) -> None:
        pass

    async def get_file(self, source: str, target: Path, max_bytes: int) -> None:
        pass

    async def get_dir(self, source: str, target: Path, max_bytes: int, max_files: int) -> Fetched:
        return Fetched()

    async def stop(self) -> None:
        pass


async def _appeared(path: Path) -> None:
    while not path.exists():  # noqa: ASYNC110 - a file is all that another process can show
        await asyncio.sleep(LOOK_S)


@dataclass(frozen=True)
class Look:
    """A worker over some time: at its end (memory, threads, lag), or all the while (processor time)."""

    what: str
    in_flight: int
    rss_bytes: int
    threads: int
    lag_s: float
    cpu_share: float
    seconds: float

    def row(self) -> str:
        return (
            f"{self.what:34} {self.in_flight:9} {self.rss_bytes / 1e6:9.1f} {self.threads:8} "
            f"{self.lag_s * 1000:9.1f} {self.cpu_share:9.3f} {self.seconds:8.1f}"
        )


class Watched:
    """The stack's worker, seen from outside."""

    def __init__(self, stack: LocalStack) -> None:
        self._stack = stack
        self._worker: Program = stack.workers[NODE]
        self.again()

    def again(self) -> None:
        """What `look` tells of processor time begins now."""
        self._began, self._cpu_s = time.monotonic(), self._used_s()

    def look(self, what: str) -> Look:
        """What there was since the last look; the lag is from the next heartbeat, and is over the last minute."""
        seconds, used_s = time.monotonic() - self._began, self._used_s() - self._cpu_s
        node = self._next_record()
        kib = self._status("VmRSS")
        return Look(
            what, node.metrics.run_inflight, kib * 1024, self._status("Threads"), node.loop_lag_s or 0.0,
            used_s / seconds, seconds,
        )  # fmt: skip

    def until(self, in_flight: int) -> None:
        deadline = time.monotonic() + MOST_S
        while self.record().metrics.run_inflight != in_flight:
            if time.monotonic() > deadline:
                raise SystemExit(f"there were not {in_flight} in flight within {MOST_S:g} s")
            time.sleep(LOOK_S)

    def settle(self) -> None:
        """Returns when the worker has nothing more to do: what follows a rollout's end goes on after its commit."""
        used_s = self._used_s() - LOOK_S
        while (now_s := self._used_s()) - used_s > QUIET_SHARE * LOOK_S:
            used_s = now_s
            time.sleep(LOOK_S)

    def record(self) -> NodeRecord:
        self._stack.check_worker(NODE)
        return next(node for node in self._stack.client.nodes() if node.node_id == NODE)

    def _next_record(self) -> NodeRecord:
        before = self.record().last_seen_at
        while (record := self.record()).last_seen_at == before:
            time.sleep(0.1)
        return record

    def _status(self, key: str) -> int:
        lines = Path(f"/proc/{self._worker.pid}/status").read_text(encoding="ascii", errors="replace").splitlines()
        return next(int(line.split()[1]) for line in lines if line.startswith(f"{key}:"))

    def _used_s(self) -> float:
        fields = Path(f"/proc/{self._worker.pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def submit(stack: LocalStack, name: str, rollouts: int, group: int, runtime: str, gate: Path) -> list[str]:
    """Tasks of at most `group` rollouts each, that all wait for the gate."""
    waiting = f"while [ ! -e {gate} ]; do sleep {LOOK_S:g}; done"
    sandbox = {"import_path": f"{MODULE}:Waiting", "kwargs": {"gate": str(gate)}}
    task_ids = []
    for first in range(0, rollouts, group):
        task = {
            "task_id": f"{name}-{first}",
            "instruction": "Wait. " * 50,
            "num_samples": min(group, rollouts - first),
            "agent": {"harness": "shell", "custom_shell": {"command": waiting}},
            "runtime": sandbox if runtime == "none" else {"backend": runtime},
            "timeout_seconds": 3600,
        }
        task_ids.append(stack.client.submit(task).task_id)
    return task_ids


def end(stack: LocalStack, task_ids: Sequence[str], gate: Path) -> None:
    gate.touch()
    for task_id in task_ids:
        done = stack.client.wait(task_id, MOST_S, "refs")
        if done.state is not TaskState.COMPLETED or done.counts.completed != done.counts.total:
            raise SystemExit(f"{task_id} ended as {done.counts}: {done.results[0].outcome}")


def measure(stack: LocalStack, rollouts: int, group: int, runtime: str, quiet_s: float) -> list[Look]:
    home, looks = stack.home, []
    worker = Watched(stack)
    end(stack, submit(stack, "first", 8, group, runtime, home / "first"), home / "first")
    worker.settle()
    worker.again()
    time.sleep(quiet_s)
    looks.append(worker.look("nothing in flight"))
    worker.again()
    task_ids = submit(stack, "many", rollouts, group, runtime, home / "many")
    worker.until(rollouts)
    looks.append(worker.look("while they begin"))
    worker.again()
    time.sleep(quiet_s)
    looks.append(worker.look("in flight"))
    worker.again()
    end(stack, task_ids, home / "many")
    worker.until(0)
    worker.settle()
    looks.append(worker.look("while they end"))
    worker.again()
    time.sleep(quiet_s)
    looks.append(worker.look("nothing in flight, afterwards"))
    return looks


async def starts(isolation: str) -> None:
    """Prints what one local sandbox takes, alone, one after the other."""
    settings = RuntimesSection.parse({"local": {"isolation": isolation}})
    taken: list[tuple[float, float, float]] = []
    with tempfile.TemporaryDirectory(prefix="polarq-starts-") as home:
        for number in range(STARTS):
            host = Host(folder=Path(home) / "kept", settings=settings, private=(Path(home),))
            runtime = LocalRuntime(
                RuntimeSpec(backend="local"), runtime_id=str(number), root=Path(home) / str(number), host=host
            )
            times = [time.perf_counter()]
            for step in (runtime.start(online=isolation == "none"), runtime.exec(["true"], timeout_s=MOST_S)):
                await step
                times.append(time.perf_counter())
            await runtime.stop()
            times.append(time.perf_counter())
            taken.append((times[1] - times[0], times[2] - times[1], times[3] - times[2]))
    words = ("start", "first command", "stop")
    medians = [statistics.median(column) * 1000 for column in zip(*taken[1:], strict=True)]
    shown = ", ".join(f"{what} {median:.1f} ms" for what, median in zip(words, medians, strict=True))
    print(f"one local sandbox, isolation {isolation}, median of {STARTS - 1}: {shown}")


def snapshot(stack: LocalStack, name: str) -> tracemalloc.Snapshot:
    """What the worker has allocated, as one more rollout finds it."""
    path = stack.home / f"{name}.snapshot"
    task = {
        "task_id": name,
        "instruction": "Look.",
        "agent": {"harness": "shell", "custom_shell": {"command": "true"}},
        "runtime": {
            "import_path": f"{MODULE}:Waiting",
            "kwargs": {"gate": str(stack.topology_path), "snapshot": str(path)},
        },
    }
    stack.client.submit(task)
    stack.client.wait(name, MOST_S, "refs")
    return tracemalloc.Snapshot.load(str(path))


def holders(stack: LocalStack, rollouts: int, group: int) -> None:
    """Prints the lines of source whose allocations the rollouts in flight hold."""
    worker = Watched(stack)
    end(stack, submit(stack, "first", 8, group, "none", stack.home / "first"), stack.home / "first")
    worker.settle()
    before = snapshot(stack, "before")
    task_ids = submit(stack, "many", rollouts, group, "none", stack.home / "many")
    worker.until(rollouts)
    with_them = snapshot(stack, "with-them")
    end(stack, task_ids, stack.home / "many")
    worker.settle()
    after = snapshot(stack, "after")
    for name, then in (("in flight", with_them), ("ended", after)):
        whole = sum(statistic.size_diff for statistic in then.compare_to(before, "filename"))
        print(f"\n{rollouts} {name}: {whole / rollouts / 1000:.1f} kB each in Python's own objects; kB and blocks each")
        for statistic in then.compare_to(before, "lineno")[:HOLDERS]:
            frame = statistic.traceback[0]
            each = f"{statistic.size_diff / rollouts / 1000:7.2f} {statistic.count_diff / rollouts:7.1f}"
            print(f"{each}   {frame.filename.removeprefix(sys.prefix)}:{frame.lineno}")


def report(looks: Sequence[Look], rollouts: int, group: int, runtime: str) -> None:
    columns = f"{'in flight':>9} {'RSS in MB':>9} {'threads':>8} {'lag p99':>9} {'CPU s/s':>9} {'seconds':>8}"
    setting = f"{rollouts} rollouts in groups of {group}, sandbox: {runtime}, {os.cpu_count()} cores"
    print(f"\n{setting}; lag in ms over a node's last minute\n")
    print(f"{'':34} {columns}")
    for look in looks:
        print(look.row())
    idle, _, full, *_ = looks
    kb = (full.rss_bytes - idle.rss_bytes) / rollouts / 1000
    worst_s = max(look.lag_s for look in looks[1:])
    target_ms, lag_ms = TARGET_LAG_S * 1000, full.lag_s * 1000
    lag_ratio, cpu_ratio = full.lag_s / max(idle.lag_s, 1e-4), full.cpu_share / max(idle.cpu_share, 1e-3)
    each_us = (full.cpu_share - idle.cpu_share) / rollouts * 1e6
    print(
        f"\nper rollout {kb:.1f} kB of the worker's memory, {kb / TARGET_KB:.2f} of {TARGET_KB:g} kB"
        f"\nlag in flight {lag_ms:.1f} ms: {lag_ms / target_ms:.2f} of {target_ms:g} ms, {lag_ratio:.1f} times that of "
        f"the idle worker; {worst_s * 1000:.1f} ms at worst"
        f"\nprocessor time in flight {full.cpu_share:.3f} s/s: {cpu_ratio:.1f} times that of the idle worker, "
        f"{each_us:.0f} us/s more per rollout"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--rollouts", type=int, default=1000)
    parser.add_argument("--group", type=int, default=8, help="rollouts per task")
    parser.add_argument("--runtime", default="none", help="none, or the name of an installed one")
    parser.add_argument("--isolation", default="none", choices=["none", "bubblewrap"], help="of local sandboxes")
    parser.add_argument("--quiet-s", type=float, default=LAG_WINDOW_S, help="how long it is watched in each state")
    parser.add_argument("--holders", action="store_true", help="print who holds the memory, and nothing else")
    options = parser.parse_args()
    env = {"PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), *filter(None, [os.environ.get("PYTHONPATH")])])}
    if options.holders:
        env["PYTHONTRACEMALLOC"] = str(FRAMES)
    node: dict[str, Any] = {"max_run_workers": options.rollouts + 1, "ready_buffer": 0}
    # As in a deployment, where the local stack beats faster.
    sections = {"security": {"allowed_modules": [MODULE]}, "gateway": {"heartbeat_interval_seconds": 5.0}}
    if options.runtime == "local":
        asyncio.run(starts(options.isolation))
    with tempfile.TemporaryDirectory(prefix="polarq-in-flight-") as home:
        # The gate is looked at by whoever a sandbox runs as.
        Path(home).chmod(0o755)
        node["runtimes"] = {"local": {"isolation": options.isolation, "visible": [home]}}
        with LocalStack(Path(home), nodes={NODE: node}, sections=sections, env=env, bound=True) as stack:
            if options.holders:
                holders(stack, options.rollouts, options.group)
                return
            looks = measure(stack, options.rollouts, options.group, options.runtime, options.quiet_s)
    report(looks, options.rollouts, options.group, options.runtime)


if __name__ == "__main__":
    main()
