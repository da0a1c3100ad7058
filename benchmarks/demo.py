"""How long the demo takes, installed, and where the time goes.

    python benchmarks/demo.py            three runs, medians
    python benchmarks/demo.py --runs 5

Beside it, in the same run, how long this Python takes to import what the demo's agent imports:
each sample pays that once, so it is the floor that polarq cannot lower.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from typing import Any

PARTS = {
    "redis_s": "private Redis",
    "inference_s": "scripted inference (beside the worker)",
    "worker_s": "worker and proxy",
    "rollouts_s": "four rollouts",
    "results_s": "results written",
    "stop_s": "everything stopped",
    "total_s": "all of it",
}


def run_demo() -> tuple[float, dict[str, Any]]:
    """(wall seconds of the command, its JSON). Raises when not every rollout committed."""
    with tempfile.TemporaryDirectory(prefix="polarq-demo-") as state:
        began = time.monotonic()
        done = subprocess.run(
            [sys.executable, "-m", "polarq.cli", "demo", "--json", "--state-dir", state],
            stdout=subprocess.PIPE,
            check=True,
        )
        return time.monotonic() - began, json.loads(done.stdout)


def import_s() -> float:
    """Seconds to import the agent's model library, alone on this machine."""
    began = time.monotonic()
    env = {**os.environ, "LITELLM_LOCAL_MODEL_COST_MAP": "True"}
    subprocess.run([sys.executable, "-c", "import litellm"], check=True, env=env)
    return time.monotonic() - began


def report(runs: Sequence[tuple[float, dict[str, Any]]], imported: float) -> None:
    def line(name: str, values: Sequence[float]) -> None:
        print(f"{name:42} {statistics.median(values):7.2f}   {min(values):7.2f} .. {max(values):7.2f}")

    print(f"{len(runs)} runs on {os.cpu_count()} cores; seconds, median, smallest .. largest\n")
    line("wall time of `polarq demo`", [wall for wall, _ in runs])
    for key, name in PARTS.items():
        line(f"  {name}", [document["seconds"][key] for _, document in runs])
    stages: dict[str, list[float]] = {}
    for _, document in runs:
        for row in document["task"]["rollouts"]:
            for stage, value in row["timing"].items():
                if value is not None:
                    stages.setdefault(stage, []).append(value)
    print("\nper rollout")
    for stage, values in stages.items():
        line(f"  {stage.removesuffix('_s')}", values)
    agent = statistics.median(stages["agent_s"])
    print(
        f"\nimporting the agent's model library alone takes {imported:.2f}: {imported / agent:.0%} of an agent's time"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--runs", type=int, default=3)
    wanted = parser.parse_args().runs
    import_s()  # the first one reads from disk
    report([run_demo() for _ in range(wanted)], import_s())


if __name__ == "__main__":
    main()
