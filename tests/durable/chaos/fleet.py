"""Three nodes, a Redis that writes each change to disk, a scripted engine: real processes, and how to hurt them."""

from __future__ import annotations

import os
import shutil
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from polarq.errors import PolarqError
from polarq.testing.redis import EmbeddedRedis
from polarq.testing.stack import LocalStack
from tests.durable.chaos.receiver import SECRET
from tests.durable.clocks import WrongClock

NODES = ("node0", "node1", "node2")
ZONES = ("America/St_Johns", "Pacific/Apia", "Europe/Berlin")
LEASE_S = 4.0
DRAIN_GRACE_S = 3.0

SCENARIO = """
name: chaos
scripts:
  - name: chaos
    turns:
      - content: First answer.
      - content: Second answer.
      - content: Third answer.
"""


class Fleet:
    """Started and stopped by `running`. All its processes have `home` in their environment."""

    def __init__(self, home: Path) -> None:
        self.home = home.resolve()
        self.redis = EmbeddedRedis(data_dir=self.home / "redis", appendonly=True)
        scenario = self.home / "scenario.yaml"
        scenario.write_text(SCENARIO, encoding="utf-8")
        # A clock that can be set needs a compiler.
        named = NODES if shutil.which("cc") else ()
        self.clocks = {node: WrongClock(self.home, node, zone=zone) for node, zone in zip(named, ZONES, strict=False)}
        self.stack = LocalStack(
            self.home,
            scenario=str(scenario),
            nodes={node: {"max_run_workers": 3} for node in NODES},
            sections={
                "gateway": {
                    "heartbeat_interval_seconds": 1.0,
                    "lease_s": LEASE_S,
                    "drain_grace_s": DRAIN_GRACE_S,
                    "reap_interval_s": 0.5,
                    "ring_again_s": 2.0,
                    "max_attempts": 100,
                }
            },
            redis=self.redis,
            env={"POLARQ_CALLBACK_SECRET": SECRET},
            bound=True,
            before={node: clock.before for node, clock in self.clocks.items()},
        )

    @contextmanager
    def running(self) -> Iterator[None]:
        with self.redis:
            try:
                self.stack.start()
                yield
            finally:
                self.stack.stop()

    def stop_programs(self) -> None:
        """All but Redis, of which the ledger can still be asked."""
        for worker in self.stack.workers.values():
            worker.stop()
        if self.stack.inference is not None:
            self.stack.inference.stop()

    # --- hurting it

    def kill_worker(self, node: str) -> None:
        """SIGKILL: nothing is said to anybody."""
        self.stack.workers[node].kill()

    def signal_worker(self, node: str, number: signal.Signals) -> None:
        self.stack.workers[node].signal(number)

    def start_worker(self, node: str) -> None:
        self.stack.start_worker(node, wait=False)

    def worker_ended(self, node: str) -> bool:
        return self.stack.workers[node].exit_code is not None

    def is_up(self, node: str) -> bool:
        """Whether its worker, as it is now, has announced itself."""
        try:
            known = self.stack.client.ledger.nodes()
        except PolarqError:
            return False
        return any(found.node_id == node and found.pid == self.stack.workers[node].pid for found in known)

    def kill_proxy(self, node: str) -> int:
        """How many processes were killed."""
        worker = self.stack.workers[node]
        found = [pid for pid in children_of(worker.pid) if b"polarq_proxy" in command_of(pid)]
        for pid in found:
            os.kill(pid, signal.SIGKILL)
        return len(found)

    def kill_redis(self, away_s: float) -> None:
        self.redis.kill()
        time.sleep(away_s)
        self.redis.start()

    # --- what is left of it

    @property
    def sandboxes(self) -> list[str]:
        """Folders of sandboxes, by node."""
        return sorted(str(path) for path in self.home.glob("state/*/rollouts/*"))

    @property
    def processes(self) -> list[str]:
        """Every process that belongs to this fleet, beside Redis: workers, proxies, sandboxes, engines."""
        found = []
        marker = os.fsencode(f"POLARQ_TOPOLOGY={self.stack.topology_path}")
        for folder in Path("/proc").glob("[0-9]*"):
            try:
                ours = marker in (folder / "environ").read_bytes()
            except OSError:
                continue  # gone meanwhile, or another user's
            if ours or os.fsencode(self.home / "state") in command_of(int(folder.name)):
                found.append(f"{folder.name} {command_of(int(folder.name)).decode('utf-8', 'replace')[:200]}")
        return found


def children_of(pid: int) -> list[int]:
    found = []
    for folder in Path(f"/proc/{pid}/task").glob("*/children"):
        try:
            found += [int(child) for child in folder.read_text().split()]
        except OSError:
            continue  # a thread that ended meanwhile
    return found


def command_of(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ")
    except OSError:
        return b""
