"""Whole rollouts whose sandboxes reach what their policy says, and nothing else of this machine or beyond it."""

from __future__ import annotations

import contextlib
import http.server
import json
import os
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from polarq.contracts.rollout import Boundary, RolloutResult, RolloutState
from polarq.contracts.specs import NetworkPolicy
from polarq.contracts.task import Task
from polarq.testing.calculator import TASK_FILE
from polarq.testing.stack import LocalStack
from tests.runtimes.local_here import needs_bubblewrap
from tests.worker.conftest import ask, shell_task, wait_until, write_scenario

pytestmark = pytest.mark.slow

LOOK = """
echo "proxies: $(env | grep -i '_proxy=' | grep -vi '^no_proxy=' | cut -d= -f1 | sort | tr '\\n' ' ')"
echo "interfaces: $(tail -n +3 /proc/net/dev | cut -d: -f1 | tr -d ' ' | tr '\\n' ' ')"
echo "health: $(curl -sS -m 60 --noproxy '*' http://127.0.0.1:28080/health 2>/dev/null)"
echo "proxied: $(curl -sS -m 60 -o /dev/null -w '%{http_connect}' https://example.org 2>/dev/null)"
for address in HOSTS; do
  echo "direct $address: $(curl -sS -m 60 --noproxy '*' http://$address/ 2>&1 | tail -n 1)"
done
"""
"""Prints what there is around it."""


@pytest.fixture(scope="module", autouse=True)
def _isolated() -> None:
    needs_bubblewrap()


@pytest.fixture(scope="module")
def host_service() -> Iterator[int]:
    """Something that listens on every address of the machine."""

    class Says(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.end_headers()
            self.wfile.write(b"from the host")

        def log_message(self, *_: Any) -> None:
            pass

    server = http.server.ThreadingHTTPServer(("0.0.0.0", 0), Says)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield server.server_port
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalStack]:
    home = tmp_path_factory.mktemp("offline")
    with LocalStack(home, scenario=str(write_scenario(home)), nodes=NODES) as made:
        yield made


NODES: dict[str, Any] = {"node0": {"max_run_workers": 4, "runtimes": {"local": {"isolation": "bubblewrap"}}}}
RUNTIME: dict[str, Any] = {"backend": "local"}


def rollout(stack: LocalStack, task: dict[str, Any]) -> RolloutResult:
    stack.client.submit(Task.parse(task))
    (result,) = stack.client.wait(task["task_id"], 240).results
    return result


def looked(stack: LocalStack, name: str, port: int, **runtime: Any) -> tuple[RolloutResult, dict[str, str]]:
    """What a harness sees that asks the model once and looks around."""
    command = ask() + LOOK.replace("HOSTS", f"127.0.0.1:{port} localhost:{port}")
    result = rollout(stack, shell_task(name, command, runtime={**RUNTIME, **runtime}))
    assert result.outcome.state is RolloutState.COMPLETED, result.outcome
    assert result.harness is not None
    lines = result.harness.steps[0].stdout_tail.splitlines()
    assert lines[0] == "First answer."
    return result, {name: value.strip() for name, _, value in (line.partition(": ") for line in lines[1:])}


PROXIES = "ALL_PROXY HTTPS_PROXY HTTP_PROXY all_proxy http_proxy https_proxy"


def test_by_default_the_model_is_reached_and_everybody_else_is_refused_by_name(
    stack: LocalStack, host_service: int
) -> None:
    result, seen = looked(stack, "default", host_service)
    assert (seen["interfaces"], seen["proxies"], seen["proxied"]) == ("lo", PROXIES, "403")
    assert all("from the host" not in said for said in seen.values())
    assert set(json.loads(seen["health"])) == {"status", "node", "version"}, "it is not the node's own machine"
    sandbox = result.sandbox
    assert sandbox is not None
    assert sandbox.network is NetworkPolicy.PROXY_ONLY
    assert [(one.target, one.count) for one in sandbox.denied] == [("example.org:443", 1)]


def test_with_policy_none_there_is_nobody_to_ask(stack: LocalStack, host_service: int) -> None:
    own = {"HTTPS_PROXY": f"http://127.0.0.1:{host_service}", "http_proxy": f"http://127.0.0.1:{host_service}"}
    result, seen = looked(stack, "none", host_service, network_policy="none", env=own)
    assert (seen["interfaces"], seen["proxies"], seen["proxied"]) == ("lo", "", "000")
    assert all("from the host" not in said for said in seen.values())
    assert result.sandbox is not None
    assert (result.sandbox.network, result.sandbox.denied) == (NetworkPolicy.NONE, [])


def test_an_allowed_host_is_reached_and_polarqs_own_services_are_not(stack: LocalStack, host_service: int) -> None:
    engine = stack.inference_url.removeprefix("http://")
    command = f"{ask()}\nfor to in 127.0.0.1:{host_service} {engine}; do curl -s -m 60 --noproxy '' http://$to/; done"
    runtime = {**RUNTIME, "network_policy": "allowlist", "allowed_hosts": [f"127.0.0.1:{host_service}", "*.example"]}
    result = rollout(stack, shell_task("allowed", command, runtime=runtime))
    assert result.harness is not None
    said = result.harness.steps[0].stdout_tail
    assert "from the host" in said
    assert f"network policy allowlist refuses {engine}" in said
    assert result.sandbox is not None
    assert [one.target for one in result.sandbox.denied] == [engine]


def test_full_is_the_machines_own_network(stack: LocalStack, host_service: int) -> None:
    result, seen = looked(stack, "full", host_service, network_policy="full")
    assert (seen["proxies"], seen[f"direct 127.0.0.1:{host_service}"]) == ("", "from the host")
    assert result.sandbox is not None
    assert result.sandbox.network is NetworkPolicy.FULL


def test_an_evaluators_fresh_sandbox_has_the_policy_and_no_way_to_the_model(
    stack: LocalStack, host_service: int
) -> None:
    look = """
[ -z "$OPENAI_BASE_URL" ] && ! curl -s -m 60 --noproxy '*' http://127.0.0.1:28080/health && echo PASSED t.py::no_model
curl -s -m 60 http://a.example/ | grep -q 'policy proxy-only refuses a.example' && echo PASSED t.py::refused
"""
    expected = {"t.py::no_model": "PASSED", "t.py::refused": "PASSED"}
    repo = {"repo_dir": "/polar/session/repo", "test_command": look, "expected_output_json": expected}
    evaluator = {"strategy": "test_on_output", "refresh_runtime": True, "config": repo}
    runtime = {**RUNTIME, "prepare": [{"type": "exec", "command": "mkdir repo && cd repo && git init -q"}]}
    harness = f"{ask()}\necho 1 > repo/solution.py\ncurl -s -m 60 --noproxy '*' http://127.0.0.1:28080/health"
    result = rollout(stack, shell_task("fresh", harness, runtime=runtime, evaluator=evaluator))
    assert result.harness is not None
    assert '"status"' in result.harness.steps[0].stdout_tail, "the agent's own sandbox finds it at that address"
    assert result.reward is not None, result.outcome
    assert result.reward.outcome == 1.0, result.reward.report


def test_when_the_relay_is_killed_the_next_rollout_has_another_one(stack: LocalStack) -> None:
    first = rollout(stack, shell_task("before", ask(), runtime=RUNTIME))
    (relay,) = relays_of(stack)
    os.kill(relay, signal.SIGKILL)
    second = rollout(stack, shell_task("after", ask(2), runtime=RUNTIME))
    assert [one.outcome.state for one in (first, second)] == [RolloutState.COMPLETED] * 2
    wait_until(lambda: relays_of(stack) not in ([], [relay]))


def relays_of(stack: LocalStack) -> list[int]:
    """Children of the worker."""
    worker, found = stack.workers["node0"].pid, []
    for command in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            parent = int((command.parent / "stat").read_text().rpartition(")")[2].split()[1])
            if parent == worker and b"polarq_worker.network" in command.read_bytes():
                found.append(int(command.parent.name))
    return found


def test_a_policy_that_a_node_cannot_enforce_is_refused_and_a_default_is_told_as_it_was(tmp_path: Path) -> None:
    nodes = {"node0": {"runtimes": {"local": {"isolation": "none"}}}}
    with LocalStack(tmp_path, scenario=str(write_scenario(tmp_path)), nodes=nodes) as made:
        refused = rollout(made, shell_task("cannot", ask(), runtime={**RUNTIME, "network_policy": "none"}))
        ran = rollout(made, shell_task("can", ask()))
    outcome = refused.outcome
    assert (outcome.state, outcome.boundary) == (RolloutState.FAILED, Boundary.TASK)
    assert "network_policy: runtime 'local' cannot cut sandboxes off the network on this node" in outcome.message
    assert ran.outcome.state is RolloutState.COMPLETED, ran.outcome
    assert ran.sandbox is not None
    assert ran.sandbox.network is NetworkPolicy.FULL


def test_a_whole_harness_works_offline(tmp_path: Path) -> None:
    """mini-swe-agent as it is installed, on the calculator task."""
    task = Task.load(TASK_FILE).model_dump(mode="json", exclude_none=True)
    task = {**task, "task_id": "mini", "num_samples": 1}
    task["runtime"] = {**task["runtime"], **RUNTIME, "network_policy": "none"}
    with LocalStack(tmp_path, nodes=NODES) as made:
        result = rollout(made, task)
    assert result.outcome.state is RolloutState.COMPLETED, result.outcome
    assert result.reward is not None
    assert result.reward.outcome == 1.0
    assert result.sandbox is not None
    assert result.sandbox.network is NetworkPolicy.NONE


def test_a_deep_state_folder_long_ids_and_several_proxy_processes_are_no_matter(tmp_path: Path) -> None:
    home = tmp_path / ("d" * (140 - len(str(tmp_path))))
    home.mkdir()
    nodes = {"node0": {**NODES["node0"], "proxy": {"processes": 2}}}
    with LocalStack(home, scenario=str(write_scenario(home)), nodes=nodes) as made:
        result = rollout(made, shell_task("t" * 62, ask(3), runtime={**RUNTIME, "network_policy": "none"}))
    assert len(result.rollout_id) == 64
    assert result.outcome.state is RolloutState.COMPLETED, result.outcome
