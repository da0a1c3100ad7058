"""worker, proxy and serve: what they become."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import httpx
import pytest
import yaml

from tests.cli.conftest import POLARQ, Cli, program

CELERY = str(Path(sys.executable).with_name("celery"))


def test_worker_is_the_celery_command_and_nothing_else(cli: Cli) -> None:
    ran = cli("worker", "--node", "node7", "--json")
    assert ran.json == {"exec": [CELERY, "-A", "polarq", "worker", "-Q", "node7"], "env": {}}


def test_worker_hands_further_arguments_to_celery(cli: Cli) -> None:
    ran = cli("worker", "--json", "--node", "node7", "--loglevel", "debug", "-n", "x@%h")
    assert ran.json["exec"][6:] == ["--loglevel", "debug", "-n", "x@%h"]


def test_worker_takes_the_only_node_and_asks_which_of_several(cli: Cli, deployment: Path, tmp_path: Path) -> None:
    deployment.write_text(yaml.safe_dump({"gateway": {"nodes": [{"id": "alone"}]}}), encoding="utf-8")
    assert cli("worker", "--json").json["exec"][-1] == "alone"
    several = tmp_path / "several.yaml"
    several.write_text(yaml.safe_dump({"gateway": {"nodes": [{"id": "a"}, {"id": "b"}]}}), encoding="utf-8")
    ran = cli("worker", "-c", str(several))
    assert ran.code == 2
    assert "a, b" in ran.err
    assert cli("worker", "-c", str(several), "--node", "b", "--json").json["env"] == {"POLARQ_TOPOLOGY": str(several)}


def test_worker_really_becomes_celery(deployment: Path) -> None:
    ran = program("worker", "--node", "node7", "--", "--help")
    assert ran.returncode == 0
    assert "Start worker instance" in ran.stdout
    assert deployment


def test_proxy_becomes_its_module(cli: Cli) -> None:
    ran = cli("proxy", "--node", "node7", "--json", "--port", "9000")
    assert ran.json["exec"] == [sys.executable, "-m", "polarq_proxy", "--node", "node7", "--port", "9000"]


def test_serve_answers_until_it_is_told_to_stop(deployment: Path) -> None:
    process = subprocess.Popen(
        [*POLARQ, "serve", "--host", "127.0.0.1", "--port", "0"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stderr is not None
    try:
        line = process.stderr.readline()
        url = line.split()[-1]
        assert url.startswith("http://127.0.0.1:")
        assert httpx.get(f"{url}/health", trust_env=False).json()["status"] == "ok"
    finally:
        process.send_signal(signal.SIGTERM)
        process.communicate(timeout=30)
    assert process.returncode == 0
    assert deployment


@pytest.mark.parametrize("command", ["serve", "proxy"])
def test_without_the_extra_the_line_says_what_to_install(tmp_path: Path, command: str, deployment: Path) -> None:
    """As in an environment that never had aiohttp: the finder does not find it."""
    (tmp_path / "sitecustomize.py").write_text(
        "import importlib.util as u\nfind = u.find_spec\n"
        "u.find_spec = lambda name, package=None: None if name == 'aiohttp' else find(name, package)\n",
        encoding="utf-8",
    )
    ran = program(command, env={**os.environ, "PYTHONPATH": str(tmp_path)})
    assert ran.returncode == 2
    assert "pip install 'polarq[" in ran.stderr
    assert len(ran.stderr.splitlines()) == 1
    assert deployment
