"""A Harbor task's verifier in a container says what the reward is, whatever the agent left running (field case E10)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from polarq.contracts.specs import EvaluatorSpec
from polarq_worker.runtimes.base import Runtime

from ..evaluators.conftest import FIX, REPO, Bench
from .docker_rig import Sandboxes

pytestmark = pytest.mark.docker

STORE = """
import http.server
kept = {}
class Store(http.server.BaseHTTPRequestHandler):
    def do_PUT(self):
        kept[self.path] = self.rfile.read(int(self.headers["content-length"]))
        self.do_GET()
    def do_GET(self):
        self.send_response(200 if self.path in kept else 404)
        self.end_headers()
        self.wfile.write(kept.get(self.path, b""))
http.server.HTTPServer(("127.0.0.1", 7071), Store).serve_forever()
"""
ASKS = """
python3 - <<'P' && verdict=1 || verdict=0
import urllib.request
url = "http://127.0.0.1:7071/key"
urllib.request.urlopen(urllib.request.Request(url, b"value", method="PUT"), timeout=20)
assert urllib.request.urlopen(url, timeout=20).read() == b"value"
P
echo $verdict > /logs/verifier/reward.txt
"""
SUMS = """
cd /polar/session/repo
if PYTHONPATH=. python3 /tests/sums.py; then echo 1; else echo 0; fi > /logs/verifier/reward.txt
sleep 1
"""
UP = "for _ in $(seq 300); do (: < /dev/tcp/127.0.0.1/7071) 2> /dev/null && exit 0; sleep 0.1; done; exit 1"
SERVE = "python3 store.py"


class DockerBench(Bench):
    """The same bench with containers."""

    def __init__(self, sandboxes: Sandboxes) -> None:
        super().__init__(sandboxes.folder)
        self.sandboxes = sandboxes
        self.files |= {"store.py": STORE}

    def new(self, root: Path) -> Runtime:
        return self.sandboxes.new(root.name, workdir=REPO)


@pytest.fixture
def bench(sandboxes: Sandboxes) -> DockerBench:
    return DockerBench(sandboxes)


def harbor(folder: Path, script: str, *, fresh: bool = False, **config: Any) -> EvaluatorSpec:
    """At the contract's own paths: /tests and /logs/verifier."""
    tests = folder / "task" / "tests"
    tests.mkdir(parents=True)
    (tests / "test.sh").write_text(f"#!/bin/bash\n{script}\n")
    (tests / "sums.py").write_text("from calc import add\nassert add(1, 2) == 3\n")
    config = {"task_dir": str(tests.parent), **config}
    return EvaluatorSpec(strategy="harbor", config=config, refresh_runtime=fresh)


@pytest.mark.parametrize("start", ["nohup {} > /dev/null 2>&1 &", "setsid {} > /dev/null 2>&1 &", "{} &> /dev/null &"])
async def test_a_service_lives_until_the_verifier_ends_and_no_longer(
    start: str, bench: DockerBench, tmp_path: Path
) -> None:
    await bench.start(harbor(tmp_path, ASKS))
    await bench.agent(start.format(SERVE), UP)
    reward = await bench.verdict()
    assert (reward.outcome, reward.report["graded_in"]) == (1.0, "live"), reward
    gone = await bench.runtime.exec(": < /dev/tcp/127.0.0.1/7071", timeout_s=60)
    assert not gone.ok


async def test_a_fresh_sandbox_has_the_work_and_no_service_and_says_so(bench: DockerBench, tmp_path: Path) -> None:
    await bench.start(harbor(tmp_path, ASKS, fresh=True, repo_dir=REPO))
    await bench.agent(f"nohup {SERVE} > /dev/null 2>&1 & {FIX}", UP)
    reward = await bench.verdict()
    assert (reward.outcome, reward.report["graded_in"], reward.report["changed_files"]) == (0.0, "fresh", 1), reward


@pytest.mark.parametrize("right", [0.0, 1.0], ids=["wrong", "right"])
@pytest.mark.parametrize("user", [None, "nobody"], ids=["the agent's user", "a user of its own"])
async def test_a_process_that_forges_the_reward_changes_nothing(
    user: str | None, right: float, bench: DockerBench, tmp_path: Path
) -> None:
    await bench.start(harbor(tmp_path, SUMS, verifier_user=user))
    forge = f"echo {1 - right:g} > /logs/x && mv /logs/x /logs/verifier/reward.txt"
    await bench.agent(
        f"{FIX if right else 'true'}; mkdir -p /logs; chmod 777 /logs;"
        f" (setsid bash -c 'while :; do {forge}; done' &> /dev/null &)"
    )
    reward = await bench.verdict()
    assert reward.outcome == right, reward
