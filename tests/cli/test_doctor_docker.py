"""What `polarq doctor` says of a Docker daemon, told by one that the test itself is."""

from __future__ import annotations

import http.server
import json
import socketserver
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from polarq.cli.checks.base import Deployment, Finding, Verdict
from polarq.cli.checks.host import check_runtimes
from polarq.settings import Settings
from polarq.topology.models import Topology

INFO: dict[str, Any] = {"Driver": "overlay2", "DriverStatus": [["Backing Filesystem", "xfs"]]}


class Daemon:
    def __init__(self, path: Path) -> None:
        self.path = path
        self.answers: dict[str, Any] = {"/version": {"Version": "29.1"}, "/info": INFO}
        daemon = self

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                found = json.dumps(daemon.answers[self.path]).encode()
                self.send_response(200)
                self.send_header("content-length", str(len(found)))
                self.end_headers()
                self.wfile.write(found)

            def log_message(self, *_: Any) -> None:
                pass

        self.server = socketserver.ThreadingUnixStreamServer(str(path), Handler)


@pytest.fixture
def daemon() -> Iterator[Daemon]:
    with tempfile.TemporaryDirectory() as folder:
        made = Daemon(Path(folder, "d.sock"))
        thread = threading.Thread(target=made.server.serve_forever)
        thread.start()
        yield made
        made.server.shutdown()
        thread.join()
        made.server.server_close()


def found(url: str, *, asked: bool = False) -> Finding:
    node: dict[str, Any] = {"id": "node0", "runtimes": {"docker": {"url": url}}}
    if asked:
        node["default_runtime"] = {"backend": "docker", "image": "i"}
    topology = Topology.model_validate({"gateway": {"nodes": [node]}})
    (finding,) = [
        one for one in check_runtimes(Deployment(topology, Settings.from_env({}))) if one.part == "runtime docker"
    ]
    return finding


def test_a_daemon_is_named_with_its_version_and_address(daemon: Daemon) -> None:
    finding = found(f"unix://{daemon.path}")
    assert (finding.verdict, finding.fact) == (Verdict.OK, f"works; Docker 29.1 at unix://{daemon.path}")


def test_what_it_cannot_give_is_said_with_the_tasks_key(daemon: Daemon) -> None:
    daemon.answers["/version"]["Components"] = [{"Name": "Podman Engine"}]
    daemon.answers["/info"] = {
        "Driver": "overlay",
        "DriverStatus": [["Backing Filesystem", "extfs"]],
        "MemoryLimit": False,
    }
    fact = found(f"unix://{daemon.path}").fact
    assert fact.startswith("works; Podman 29.1 at")
    assert all(key in fact for key in ("memory_mb:", "storage_mb:"))
    assert "max_processes" not in fact


def test_one_that_does_not_answer_fails_where_a_node_wants_it(daemon: Daemon, tmp_path: Path) -> None:
    gone = found(f"unix://{tmp_path}/none.sock", asked=True)
    assert gone.verdict is Verdict.FAIL
    assert "none.sock does not answer" in gone.fact
    assert "runtimes.docker.url" in gone.advice


def test_without_any_it_is_no_matter_where_no_node_needs_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("DOCKER_HOST", raising=False)
    monkeypatch.setattr("polarq.docker_daemon.usual_sockets", lambda: [])
    assert found("").verdict is Verdict.OK
    assert found("", asked=True).verdict is Verdict.FAIL
