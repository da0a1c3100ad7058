"""What a backend's sandboxes take, without the rest of polarq: start, a command, a snapshot, a start from it.

    python benchmarks/runtimes.py docker --image debian:12      (or any image with bash)
    python benchmarks/runtimes.py local                         (bubblewrap)
    python benchmarks/runtimes.py apptainer --image base.sif --program apptainer
    python benchmarks/runtimes.py docker --rounds 50

One sandbox at a time on an idle machine; medians and the slowest in milliseconds. Beside it, in the same rounds, what
the backend's own program takes to run `true`: nothing is brought in, recorded, limited or fetched there.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Awaitable, Sequence
from pathlib import Path
from typing import TypeVar

from polarq.contracts.specs import RuntimeSpec
from polarq.errors import PolarqError
from polarq.topology.models import SecuritySection
from polarq.topology.runtimes import RuntimesSection
from polarq_worker.runtimes.base import Host, Runtime
from polarq_worker.runtimes.create import create_runtime

PREPARE = "mkdir recipe && for i in $(seq 500); do head -c 20000 /dev/zero > recipe/$i; done; sync"
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
    result = await sandbox.exec("[ -e recipe/500 ]", timeout_s=LONG_S)
    assert result.ok, result


def alone(backend: str, image: str, program: str) -> list[str]:
    """The backend's own program, running `true` in what it makes for that."""
    if backend == "docker":
        return ["docker", "run", "--rm", "--network=none", image, "true"]
    if backend == "apptainer":
        return [program, "exec", image, "true"]
    return ["bwrap", "--unshare-all", "--ro-bind", "/", "/", "--dev", "/dev", "--proc", "/proc", "true"]


async def ran(argv: Sequence[str]) -> None:
    process = await asyncio.create_subprocess_exec(*argv, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    said, _ = await process.communicate()
    if process.returncode:
        raise SystemExit(f"{' '.join(argv)}: {said.decode(errors='replace').strip()}")


async def whole(sandbox: Runtime) -> None:
    try:
        await sandbox.start(online=False)
        assert (await sandbox.exec(["true"], timeout_s=LONG_S)).ok
    finally:
        await sandbox.stop()


async def measured(spec: RuntimeSpec, host: Host, bare: Sequence[str], folder: Path, rounds: int) -> list[Times]:
    kinds = (
        "start", "a command", "4 MB in", "4 MB out", "stop", "prepare", "snapshot", "start from it and a command",
        "start, a command, stop", f"{' '.join(bare[:2])} ... true",
    )  # fmt: skip
    start, command, put, get, stop, prepare, snapshot, again, short, own = times = [Times(title) for title in kinds]

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
        await short.of(whole(new(f"short{number}")))
        await own.of(ran(bare))
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
    backends.add_parser("local", help="bubblewrap on this machine")
    apptainer = backends.add_parser("apptainer", help="instances of Apptainer")
    apptainer.add_argument("--image", required=True, help="a SIF file, or what else names an image with bash")
    apptainer.add_argument("--program", default="apptainer")
    for each in backends.choices.values():
        each.add_argument("--rounds", type=int, default=10)
    args = parser.parse_args()
    image, program = getattr(args, "image", ""), getattr(args, "program", "")
    settings: dict[str, dict[str, str]] = {"local": {"isolation": "bubblewrap"}}
    if program:
        settings["apptainer"] = {"program": program}
    spec = RuntimeSpec(backend=args.backend, image=image)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        host = Host("benchmark", "1", folder / "kept", RuntimesSection.model_validate(settings))
        try:
            times = asyncio.run(measured(spec, host, alone(args.backend, image, program), folder, args.rounds))
        except PolarqError as exc:
            sys.exit(f"{args.backend}: {exc}")
    print(f"{args.backend}: {image or 'this machine'}, {args.rounds} rounds\n{'':<44}{'median':>9}{'max':>9}  ms")
    print(*times, sep="\n")


if __name__ == "__main__":
    main()
