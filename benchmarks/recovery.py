"""How long a rollout of a killed worker stands still, with default settings.

    python benchmarks/recovery.py            ten kills, two nodes
    python benchmarks/recovery.py --kills 20

Each time a worker is killed (SIGKILL) at a random moment while it runs a rollout; the time until that rollout's harness
starts on the other node is what counts. Both moments are read off one clock: the kill's by this program, the start's by
the harness itself. Then the worker is started again.
"""

from __future__ import annotations

import argparse
import os
import random
import statistics
import tempfile
import time
from pathlib import Path

from polarq.contracts import RolloutState
from polarq.testing.stack import LocalStack
from polarq.topology.models import GatewaySection

NODES = ("node0", "node1")
MOST_S = 300.0


def started(folder: Path, attempts: int) -> float:
    """When the harness started for the last time (seconds since the epoch), once it has started so many times."""
    deadline = time.monotonic() + MOST_S
    while True:
        starts = sorted(float(path.name) for path in folder.iterdir())
        if len(starts) >= attempts:
            return starts[-1]
        if time.monotonic() > deadline:
            raise SystemExit(f"attempt {attempts} did not start within {MOST_S:g} s")
        time.sleep(0.05)


def one(stack: LocalStack, folder: Path, number: int) -> float:
    """Seconds from the kill to the harness' start elsewhere."""
    starts, gate = folder / "starts", folder / "gate"
    starts.mkdir(parents=True)
    command = f"touch {starts}/$(date +%s.%N); while [ ! -e {gate} ]; do sleep 0.1; done"
    task_id = f"recovery-{number}"
    stack.client.submit(
        {
            "task_id": task_id,
            "instruction": "Wait.",
            "agent": {"harness": "shell", "custom_shell": {"command": command}},
            "runtime": {"backend": "local"},
            "timeout_seconds": 600,
        }
    )
    started(starts, 1)
    # At any moment between two renewals.
    time.sleep(random.uniform(0, stack.topology.gateway.lease_s / 2))
    owner = stack.client.record(task_id).rollouts[0].owner
    assert owner is not None
    killed_at = time.time()
    stack.workers[owner].kill()
    stood_s = started(starts, 2) - killed_at
    gate.touch()
    result = stack.client.wait(task_id, MOST_S).results[0]
    if (result.outcome.state, result.attempt) != (RolloutState.COMPLETED, 2):
        raise SystemExit(f"{task_id} ended as {result.outcome} in attempt {result.attempt}")
    stack.start_worker(owner)
    return stood_s


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--kills", type=int, default=10)
    kills = parser.parse_args().kills
    defaults = GatewaySection()
    # The local stack beats faster than a deployment does; here everything is as it comes.
    gateway = {"heartbeat_interval_seconds": defaults.heartbeat_interval_seconds}
    with tempfile.TemporaryDirectory(prefix="polarq-recovery-") as home:
        stack = LocalStack(Path(home), nodes={n: {} for n in NODES}, sections={"gateway": gateway}, bound=True)
        with stack:
            # A Redis that has just come up gives everybody the time of a lease.
            time.sleep(defaults.lease_s)
            times = []
            for number in range(kills):
                times.append(one(stack, Path(home) / f"work-{number}", number))
                print(f"kill {number + 1:3}: started elsewhere after {times[-1]:5.1f} s", flush=True)
    print(
        f"\n{kills} kills on {os.cpu_count()} cores, lease {defaults.lease_s:g} s, a look every "
        f"{defaults.reap_interval_s:g} s: median {statistics.median(times):.1f} s, worst {max(times):.1f} s; "
        f"{statistics.median(times) / defaults.lease_s:.2f} and {max(times) / defaults.lease_s:.2f} of a lease"
    )


if __name__ == "__main__":
    main()
