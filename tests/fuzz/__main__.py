"""Looks for what breaks the proxy, for a while: `python -m tests.fuzz --seconds 60`.

Two thirds of the time each target of `tests.fuzz.targets` is driven by atheris, which sees what code its inputs reach
(without it, by plain mutation); the rest goes to the whole proxy. Ends with status 1 and the input that did it."""

from __future__ import annotations

import argparse
import asyncio
import importlib.util
import json
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from polarq.testing.redis import EmbeddedRedis

from .blackbox import attacked
from .mutation import captured, spoilt
from .targets import PATHS, TARGETS
from .test_fuzz import ANSWERS, STREAM


def corpus(name: str) -> list[bytes]:
    """What to begin with."""
    match name:
        case "request":
            return [
                bytes([at]) + json.dumps(real.body).encode()
                for real in captured()
                for at, path in enumerate(PATHS)
                if real.path.endswith(path)
            ]
        case "head":
            return [real.raw("secret").partition(b"\r\n\r\n")[0] + b"\r\n\r\n" for real in captured()]
        case "sse":
            return [b"\1\2" + STREAM]
        case "answer":
            return [b"\1\2" + data for data in ANSWERS]
        case _:
            return [bytes([0, at]) + b"\x1f\x8b\x08\0\0\0\0\0\0\3" for at in range(10)]


def by_atheris(name: str, seconds: int) -> bool:
    """In a process of its own, because it ends the process that it runs in. Whether nothing was found."""
    with tempfile.TemporaryDirectory() as folder:
        for at, data in enumerate(corpus(name)):
            (Path(folder) / f"{at:03}").write_bytes(data)
        command = [sys.executable, "-m", "tests.fuzz.guided", name, folder, f"-max_total_time={seconds}"]
        limits = ["-max_len=20000", "-timeout=20", "-rss_limit_mb=2048", "-print_final_stats=1"]
        done = subprocess.run([*command, *limits, f"-artifact_prefix={folder}/found-"], check=False, text=True,
                              capture_output=True)  # fmt: skip
        if done.returncode:
            sys.stderr.write(done.stdout[-3000:] + done.stderr[-6000:])
            for file in Path(folder).glob("found-*"):
                sys.stderr.write(f"\n{name}: {file.read_bytes()!r}\n")
            return False
        stats = dict(line.removeprefix("stat::").split(":", 1) for line in done.stderr.splitlines() if "stat::" in line)
        print(f"{name}: {stats.get('number_of_executed_units', '?').strip()} inputs in {seconds} s, guided")
        return True


def by_mutation(name: str, seconds: float, seed: int) -> bool:
    dice, until, tried, start = random.Random(seed), time.monotonic() + seconds, 0, corpus(name)
    while time.monotonic() < until:
        data = spoilt(dice.choice(start), dice)
        try:
            TARGETS[name](data)
        except BaseException:
            sys.stderr.write(f"{name}: {data!r}\n")
            raise
        tried += 1
    print(f"{name}: {tried} inputs in {seconds:.0f} s, by mutation with seed {seed}")
    return True


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__.split("\n")[0])
    parser.add_argument("--seconds", type=int, default=60)
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(2**32))
    given = parser.parse_args()
    each = max(1, given.seconds * 2 // 3 // len(TARGETS))
    guided = importlib.util.find_spec("atheris") is not None
    good = [by_atheris(name, each) if guided else by_mutation(name, each, given.seed) for name in TARGETS]
    with EmbeddedRedis() as redis:
        rest = max(1, given.seconds - each * len(TARGETS))
        outcome = asyncio.run(attacked(redis.url, given.seed, sys.maxsize, rest))
    print(
        f"proxy: {outcome.sent} spoilt requests with seed {given.seed}, answers {dict(outcome.statuses)}, "
        f"faults {dict(outcome.errors)}, grown by {outcome.grown_mib:.0f} MiB"
    )
    return 0 if all(good) else 1


if __name__ == "__main__":
    raise SystemExit(main())
