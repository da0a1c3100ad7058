"""What cannot work is refused when the file is read, not when a node starts or a rollout calls."""

from __future__ import annotations

from pathlib import Path

import pytest

from polarq.topology.addresses import UNIX_PATH_BYTES, overlap
from polarq.topology.lines import Mistake, check_topology, read_topology
from polarq.topology.models import Node

REPOSITORY = Path(__file__).parents[2]
POOL = "      model_pool:\n        - {alias: pool/small, model: s, base_url: 'http://small:8000'}\n"


def checked(tmp_path: Path, of_the_node: str) -> list[Mistake]:
    """The mistakes in a file of one node; what is given begins in line 4."""
    path = tmp_path / "topology.yaml"
    path.write_text("gateway:\n  nodes:\n    - id: node0\n" + of_the_node, encoding="utf-8")
    topology, found = check_topology(path)
    assert (topology is None) == bool(found)
    assert all("\n" not in str(mistake) for mistake in found)
    return found


@pytest.mark.parametrize("treated", ["pool/smal", "small", "Train", "drop", "''"])
def test_side_traffic_goes_to_training_or_to_a_model_of_the_pool(tmp_path: Path, treated: str) -> None:
    text = f"{POOL}      proxy:\n        side_traffic:\n          title: train\n          probe: {treated}\n"
    [found] = checked(tmp_path, text)
    assert (found.line, found.path) == (9, "gateway.nodes.0.proxy")
    given = treated.strip("'")
    assert found.message == (
        f"side_traffic.probe: '{given}' is neither train nor an alias in model_pool, which has pool/small"
    )


def test_each_kind_of_side_traffic_that_goes_nowhere_has_its_line(tmp_path: Path) -> None:
    text = "      proxy:\n        side_traffic:\n          title: pool/a\n          probe: pool/b\n"
    found = checked(tmp_path, text)
    assert [mistake.line for mistake in found] == [6, 7]
    assert all(mistake.message.endswith("an alias in model_pool, which is empty") for mistake in found)


def test_side_traffic_may_be_trained_on_or_go_to_the_pool_in_any_order_of_keys(tmp_path: Path) -> None:
    proxy = "      proxy:\n        side_traffic: {title: train, probe: pool/small}\n"
    assert checked(tmp_path, proxy + POOL) == []
    assert checked(tmp_path, POOL + proxy) == []


def test_a_kind_of_side_traffic_that_nobody_tells_is_refused_with_its_line_and_the_kinds_there_are(
    tmp_path: Path,
) -> None:
    text = (
        "      proxy:\n        side_traffic:\n          title: train\n          titel: train\n          pool: train\n"
    )
    found = checked(tmp_path, text)
    assert [mistake.line for mistake in found] == [7, 8]
    assert {mistake.path for mistake in found} == {"gateway.nodes.0.proxy.side_traffic"}
    kinds = "commit_message, compaction, probe, reflection, router, title"
    assert found[0].message == f"titel: there is no such kind of side traffic; the kinds are {kinds}"


def test_a_pool_with_a_mistake_of_its_own_is_told_once(tmp_path: Path) -> None:
    [found] = checked(tmp_path, POOL.replace("http", "ftp") + "      proxy: {side_traffic: {title: pool/small}}\n")
    assert found.path == "gateway.nodes.0.model_pool.0.base_url"


def test_an_alias_stands_once_in_a_pool(tmp_path: Path) -> None:
    twice = POOL + "        - model: other\n          base_url: http://b:1\n          alias: pool/small\n"
    [found] = checked(tmp_path, twice)
    assert (found.line, found.path) == (8, "gateway.nodes.0.model_pool")
    assert found.message.startswith("1.alias: 'pool/small' is given twice in the node's model_pool")
    assert checked(tmp_path, twice.replace("alias: pool/small\n", "alias: pool/other\n")) == []


@pytest.mark.parametrize(
    "of_the_node",
    [
        "      port: 9000\n      proxy:\n        admin_port: 9000\n",
        "      port: 9003\n      proxy:\n        admin_port: 9000\n        processes: 4\n",
        "      host: 127.0.0.1\n      port: 9000\n      proxy:\n        admin_port: 9000\n",
        "      host: 10.0.0.5\n      port: 9000\n      proxy:\n        admin_host: 0.0.0.0\n        admin_port: 9000\n",
        "      proxy:\n        admin_port: 8081\n",
    ],
)
def test_the_operators_ports_are_not_the_nodes_own(tmp_path: Path, of_the_node: str) -> None:
    [found] = checked(tmp_path, of_the_node)
    lines = of_the_node.splitlines()
    assert found.line == 4 + next(at for at, line in enumerate(lines) if "admin_port" in line)
    assert found.path == "gateway.nodes.0.proxy"
    assert found.message.startswith("admin_port: ")
    assert "the node's own port" in found.message


@pytest.mark.parametrize(
    "of_the_node",
    [
        "      port: 9004\n      proxy: {admin_port: 9000, processes: 4}\n",
        "      port: 8999\n      proxy: {admin_port: 9000, processes: 4}\n",
        "      host: 10.0.0.5\n      port: 9000\n      proxy: {admin_port: 9000}\n",
        "      port: 9000\n      proxy: {processes: 4}\n",
        "      proxy: {admin_port: 65532, processes: 4}\n",
    ],
)
def test_other_ports_or_other_hosts_do_not_collide(tmp_path: Path, of_the_node: str) -> None:
    assert checked(tmp_path, of_the_node) == []


def test_every_process_needs_a_port_that_exists(tmp_path: Path) -> None:
    [found] = checked(tmp_path, "      proxy:\n        processes: 4\n        admin_port: 65533\n")
    assert (found.line, found.path) == (6, "gateway.nodes.0.proxy")
    assert "65533 to 65536" in found.message


@pytest.mark.parametrize(
    ("host", "other", "collide"),
    [
        ("127.0.0.1", "127.0.0.1", True),
        ("0.0.0.0", "127.0.0.1", True),
        ("0.0.0.0", "gpu-a", True),
        ("::", "gpu-a", True),
        ("::", "::1", True),
        ("::1", "0:0::1", True),
        ("localhost", "127.0.0.1", True),
        ("localhost", "::1", True),
        ("GPU-a", "gpu-A.", True),
        ("::", "127.0.0.1", False),
        ("0.0.0.0", "::1", False),
        ("0.0.0.0", "::", False),
        ("127.0.0.1", "127.0.0.2", False),
        ("gpu-a", "gpu-b", False),
    ],
)
def test_hosts_collide_where_one_takes_an_address_of_the_other(host: str, other: str, collide: bool) -> None:
    assert overlap(host, other) is overlap(other, host) is collide


@pytest.mark.parametrize("letter", ["s", "ü"])
def test_a_unix_sockets_path_is_as_long_as_a_kernel_takes(tmp_path: Path, letter: str) -> None:
    size = len(letter.encode())
    fits = "/" + letter * ((UNIX_PATH_BYTES - 2) // size)
    assert checked(tmp_path, f"      proxy:\n        unix_socket: {fits}\n") == []
    [found] = checked(tmp_path, f"      proxy:\n        unix_socket: {fits}{letter * 2}\n")
    assert (found.line, found.path) == (5, "gateway.nodes.0.proxy.unix_socket")
    assert f"{UNIX_PATH_BYTES}" in found.message


def test_a_home_folder_counts_in_the_length_of_a_unix_sockets_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    short = "      proxy: {unix_socket: ~/proxy.sock}\n"
    monkeypatch.setenv("HOME", "/home/a")
    assert checked(tmp_path, short) == []
    monkeypatch.setenv("HOME", "/" + "a" * UNIX_PATH_BYTES)
    assert len(checked(tmp_path, short)) == 1
    assert checked(tmp_path, "      proxy: {unix_socket: ~a-user-of-the-node/proxy.sock}\n") == []


ALIKE = "port: 9000, proxy: {admin_port: 9001, unix_socket: /run/polarq.sock}"


@pytest.mark.parametrize(
    "nodes",
    [
        [f"{{id: a, host: 0.0.0.0, {ALIKE}}}", f"{{id: b, host: 0.0.0.0, {ALIKE}}}"],
        [f"{{id: a, {ALIKE}}}", f"{{id: b, {ALIKE}}}"],
        [f"{{id: a, host: 10.0.0.1, {ALIKE}}}", f"{{id: b, host: 10.0.0.2, {ALIKE}}}"],
        [f"{{id: a, host: gpu-a, {ALIKE}}}", f"{{id: b, host: gpu-b, {ALIKE}}}", f"{{id: c, host: '::', {ALIKE}}}"],
        ["{id: a, host: gpu-a, port: 9000}", "{id: b, host: gpu-a, port: 9001, proxy: {admin_port: 9000}}"],
    ],
)
def test_nodes_of_several_machines_may_share_what_they_listen_on(tmp_path: Path, nodes: list[str]) -> None:
    path = tmp_path / "topology.yaml"
    path.write_text("gateway:\n  nodes:\n" + "".join(f"    - {node}\n" for node in nodes), encoding="utf-8")
    assert [node.id for node in read_topology(path).gateway.nodes] == list("abc")[: len(nodes)]


@pytest.mark.parametrize(
    ("first", "second", "key"),
    [
        ("{id: a, host: gpu-a}", "host: GPU-A.", ""),
        ("{id: a, host: gpu-a, port: 9000}", "host: gpu-a\n      port: 9000", "port"),
        ("{id: a, host: 127.0.0.1, port: 9000}", "host: localhost\n      port: 9000", "port"),
        (
            "{id: a, host: gpu-a, port: 1, proxy: {admin_port: 9001, processes: 4}}",
            "host: gpu-a\n      port: 2\n      proxy:\n        admin_port: 9004",
            "proxy.admin_port",
        ),
        (
            "{id: a, host: gpu-a, port: 9002}",
            "host: gpu-a\n      port: 1\n      proxy:\n        admin_host: gpu-a\n        admin_port: 9002",
            "proxy.admin_port",
        ),
        (
            "{id: a, host: gpu-a, port: 1, proxy: {unix_socket: /run/p.sock}}",
            "host: gpu-a\n      port: 2\n      proxy:\n        unix_socket: /run/p.sock",
            "proxy.unix_socket",
        ),
    ],
)
def test_nodes_of_one_machine_do_not_listen_on_the_same(tmp_path: Path, first: str, second: str, key: str) -> None:
    path = tmp_path / "topology.yaml"
    text = f"gateway:\n  nodes:\n    - {first}\n    - id: b\n      {second}\n"
    path.write_text(text, encoding="utf-8")
    [found] = check_topology(path)[1]
    word = key.rpartition(".")[2] or "id"
    assert found.line == max(at for at, line in enumerate(text.splitlines(), 1) if f" {word}:" in line)
    assert found.path == "gateway.nodes"
    assert found.message.startswith(f"1.{key or 'port'}: node 'a' ")
    assert "for one of them" in found.message


@pytest.mark.parametrize("path", ["configs/topology.yaml", "configs/polar-compatible.yaml", "docker/topology.yaml"])
def test_the_files_that_come_with_polarq_are_without_mistakes(path: str) -> None:
    assert check_topology(REPOSITORY / path)[1] == []


def test_the_operators_ports_are_one_per_process() -> None:
    node = Node.model_validate({"id": "a", "proxy": {"admin_port": 9100, "processes": 3}})
    assert list(node.proxy.admin_ports) == [9100, 9101, 9102]
