"""What a backend's sandboxes take, without the rest of polarq: start, a command, a snapshot, a start from it.

    python benchmarks/runtimes.py docker --image debian:12      (or any image with bash)
    python benchmarks/runtimes.py docker --rounds 50

One sandbox at a time on an idle machine; medians and the slowest in milliseconds.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import tempfile
import time
from collections.abc import Awaitable
from pathlib import Path
from typing import TypeVar

from polarq.contracts.specs import RuntimeSpec
from polarq.topology.models import SecuritySection
from polarq_worker.runtimes.base import Host, Runtime
from polarq_worker.runtimes.create import create_runtime

PREPARE = "mkdir -p /opt/recipe && for i in $(seq 500); do head -c 20000 /dev/zero > /opt/recipe/$i; done; sync"
LONG_S = 600.0
T = TypeVar("T")


class Times:
    """Of one kind of act."""

    def __init__(self, title: str) -> None:
        self.title = title
        self.ms: list[float] = []

    async def of(self, act: Awaitable[T]) -> T:
        began = time.perf_counter()
        done = await act
        self.ms.append(1000 * (time.perf_counter() - began))
        return done

    def __str__(self) -> str:
        return f"{self.title:<44}{statistics.median(self.ms):9.1f}{max(self.ms):9.1f}"


async def ready(sandbox: Runtime, snapshot: str) -> None:
    await sandbox.start(snapshot=snapshot)
    result = await sandbox.exec("[ -e /opt/recipe/500 ]", timeout_s=LONG_S)
    assert result.ok, result


async def measured(spec: RuntimeSpec, folder: Path, rounds: int) -> list[Times]:
    host = Host("benchmark", "1", folder / "kept")
    kinds = ("start", "a command", "4 MB in", "4 MB out", "stop", "prepare", "snapshot", "start from it and a command")
    start, command, put, get, stop, prepare, snapshot, again = times = [Times(title) for title in kinds]

    def new(name: str) -> Runtime:
        return create_runtime(spec, runtime_id=name, root=folder / name, security=SecuritySection(), host=host)

    for number in range(rounds):
        sandbox = new(f"plain{number}")
        try:
            await start.of(sandbox.start())
            for _ in range(5):
                await command.of(sandbox.exec("true", timeout_s=LONG_S))
            await put.of(sandbox.put_bytes(bytes(4 << 20), "data"))
            target = folder / "got"
            await get.of(sandbox.get_file("data", target, 8 << 20))
        finally:
            await stop.of(sandbox.stop())
    first = new("first")
    try:
        await first.start()
        await prepare.of(first.exec(PREPARE, timeout_s=LONG_S))
        kept = await snapshot.of(first.snapshot("recipe"))
    finally:
        await first.stop()
    try:
        for number in range(rounds):
            copy = new(f"copy{number}")
            try:
                await again.of(ready(copy, kept.reference))
            finally:
                await copy.stop()
    finally:
        await first.drop_snapshot(kept.reference, host)
    return times


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    backends = parser.add_subparsers(dest="backend", required=True)
    docker = backends.add_parser("docker", help="containers of the Docker daemon here")
    docker.add_argument("--image", default="polarq-base:local", help="an image with bash")
    docker.add_argument("--rounds", type=int, default=10)
    args = parser.parse_args()
    spec = RuntimeSpec(backend=args.backend, image=args.image)
    with tempfile.TemporaryDirectory() as folder:
        times = asyncio.run(measured(spec, Path(folder), args.rounds))
    print(f"{args.backend}: {args.image}, {args.rounds} rounds\n{'':<44}{'median':>9}{'max':>9}  ms")
    print(*times, sep="\n")


if __name__ == "__main__":
    main()
