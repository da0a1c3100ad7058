"""`python -m tests.durable.chaos --seed N --seconds S`: exit code 0 when every promise held."""

from __future__ import annotations

import argparse
import secrets
import shutil
import sys
import tempfile
from pathlib import Path

from tests.durable.chaos.run import chaos


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tests.durable.chaos", description="Hurts a small fleet, and proves."
    )
    parser.add_argument("--seed", type=int, help="of what is done and when; a new one each time if not given")
    parser.add_argument("--seconds", type=float, default=300.0, help="how long trouble is made")
    parser.add_argument("--keep", action="store_true", help="leave the folder with all logs also when all held")
    options = parser.parse_args()
    seed = secrets.randbelow(1_000_000) if options.seed is None else options.seed
    home = Path(tempfile.mkdtemp(prefix="polarq-chaos-"))
    report = chaos(home, seed=seed, seconds=options.seconds)
    print("\nwhat was done")
    for what, times in sorted(report.troubles.items()):
        print(f"  {times:4d} x {what}")
    print("what came of it")
    for what, figure in report.figures.items():
        print(f"  {what}: {figure}")
    if report.broken:
        print(f"\nBROKEN: {len(report.broken)} (seed {seed}; all logs are in {home})")
        for line in report.broken:
            print(f"  {line}")
        return 1
    print(f"\nEvery promise held (seed {seed}).")
    if options.keep:
        print(f"All logs are in {home}.")
    else:
        shutil.rmtree(home, ignore_errors=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
