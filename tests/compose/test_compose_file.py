"""What compose.yaml promises, read from the file itself; .ci/compose runs it for real."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from polarq.topology import load_topology

ROOT = Path(__file__).parents[2]
SERVICES: dict[str, dict[str, Any]] = yaml.safe_load((ROOT / "compose.yaml").read_text())["services"]


@pytest.mark.parametrize("name", SERVICES)
def test_every_published_port_listens_on_loopback_only(name: str) -> None:
    assert all(str(port).startswith("127.0.0.1:") for port in SERVICES[name].get("ports", []))


@pytest.mark.parametrize("name", SERVICES)
def test_every_service_is_watched_restarted_and_given_time_to_stop(name: str) -> None:
    service = SERVICES[name]
    assert service["restart"] == "unless-stopped"
    assert {"test", "interval", "timeout", "retries"} <= service["healthcheck"].keys()
    assert service["stop_grace_period"]


def test_the_worker_is_started_by_the_plain_celery_command() -> None:
    assert SERVICES["node0"]["command"] == ["celery", "-A", "polarq", "worker", "-Q", "node0"]


def test_redis_appends_to_disk_and_never_evicts() -> None:
    command = SERVICES["redis"]["command"]
    options = dict(zip(command[::2], command[1::2], strict=True))
    assert options["--appendonly"] == "yes"
    assert options["--appendfsync"] == "everysec"
    assert options["--maxmemory-policy"] == "noeviction"


def test_each_part_reaches_redis_as_a_user_of_its_own_and_none_as_its_administrator() -> None:
    found = {
        name: sorted(
            address[1]
            for value in service.get("environment", {}).values()
            if (address := re.match(r"redis://([\w-]*):", str(value)))
        )
        for name, service in SERVICES.items()
    }
    assert found == {
        "redis": [],
        "node0": ["polarq-proxy", "polarq-worker"],
        "shim": ["polarq-trainer"],
        "flower": ["polarq-flower"],
        "inference": [],
    }
    assert [n for n, s in SERVICES.items() if "POLARQ_REDIS_PASSWORD" in str(s)] == ["redis"]


def test_the_users_of_redis_are_those_of_the_shipped_file() -> None:
    script = SERVICES["redis"]["entrypoint"][2]
    shipped = re.findall(r"^user (\S+) on ", (ROOT / "configs" / "redis-acl.conf").read_text(), re.MULTILINE)
    assert re.findall(r"\^user (\S+) on/", script) == shipped
    assert "./configs/redis-acl.conf:/etc/polarq/redis-acl.conf:ro" in SERVICES["redis"]["volumes"]


def test_only_the_inference_server_belongs_to_the_demo() -> None:
    assert [name for name, service in SERVICES.items() if "profiles" in service] == ["inference"]
    assert SERVICES["inference"]["profiles"] == ["demo"]


def test_the_topology_names_the_node_of_the_worker_and_the_demos_inference_server() -> None:
    topology = load_topology(ROOT / "docker" / "topology.yaml")
    node = topology.node("node0")
    assert node is not None
    command = SERVICES["inference"]["command"]
    port = next(part.removeprefix("--port=") for part in command if part.startswith("--port="))
    assert [endpoint.base_url for endpoint in node.endpoints] == [f"http://inference:{port}"]


def test_health_checks_ask_the_ports_that_the_services_listen_on() -> None:
    topology = load_topology(ROOT / "docker" / "topology.yaml")
    node = topology.node("node0")
    assert node is not None
    asked = {
        name: int(found[1])
        for name, service in SERVICES.items()
        if (found := re.search(r"http://127\.0\.0\.1:(\d+)/", service["healthcheck"]["test"][-1]))
    }
    assert asked == {"node0": node.port, "shim": topology.rollout.port, "flower": 5555, "inference": 8000}


def test_every_variable_has_a_default_and_is_explained_at_the_top() -> None:
    text = (ROOT / "compose.yaml").read_text()
    explained = "\n".join(line for line in text.splitlines() if line.startswith("#"))
    variables = re.findall(r"\$\{(\w+)(:-[^}]+)?\}", text)
    assert variables
    assert [name for name, default in variables if not default] == []
    assert [name for name, _ in variables if name not in explained] == []
