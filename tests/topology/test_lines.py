"""Mistakes in a topology file are named with their line."""

from __future__ import annotations

from pathlib import Path

import pytest

from polarq.errors import InvalidTopology
from polarq.settings import Settings
from polarq.topology import load_topology
from polarq.topology.lines import Mistake, check_topology, read_topology


def mistakes(tmp_path: Path, text: str) -> list[Mistake]:
    path = tmp_path / "topology.yaml"
    path.write_text(text, encoding="utf-8")
    topology, found = check_topology(path)
    assert topology is None
    assert found
    return found


def test_an_unknown_key_is_named_with_its_own_line_and_the_nearest_known_key(tmp_path: Path) -> None:
    [found] = mistakes(tmp_path, "gateway:\n  nodes:\n    - id: node0\n      port: 9000\n      max_run_wokers: 3\n")
    assert found.line == 5
    assert found.path == "gateway.nodes.0"
    assert "'max_run_wokers'" in found.message
    assert "'max_run_workers'" in found.message


def test_two_unknown_keys_of_one_mapping_have_a_line_each(tmp_path: Path) -> None:
    found = mistakes(tmp_path, "redis:\n  urll: a\n  prefix: b\n  pasword: c\n")
    assert [(m.line, m.path) for m in found] == [(2, "redis"), (4, "redis")]


def test_a_wrong_value_is_named_with_the_line_of_its_key(tmp_path: Path) -> None:
    [found] = mistakes(tmp_path, "# a comment\n\nrollout:\n  host: a\n\n  port: 99999\n")
    assert (found.line, found.path) == (6, "rollout.port")


def test_only_the_branch_that_the_file_means_is_told_of_a_union(tmp_path: Path) -> None:
    one = "gateway:\n  nodes:\n    - id: a\n      inference:\n        engine: vlm\n"
    [found] = mistakes(tmp_path, one)
    assert (found.line, found.path) == (5, "gateway.nodes.0.inference.engine")
    several = "gateway:\n  nodes:\n    - id: a\n      inference:\n        - engine: vllm\n        - base_url: ftp://x\n"
    [found] = mistakes(tmp_path, several)
    assert (found.line, found.path) == (6, "gateway.nodes.0.inference.1.base_url")


def test_a_value_that_came_in_by_an_anchor_is_named_where_it_stands(tmp_path: Path) -> None:
    text = "gateway:\n  nodes:\n    - &first\n      id: a\n      port: 0\n    - <<: *first\n      id: b\n"
    found = mistakes(tmp_path, text)
    assert [(m.line, m.path) for m in found] == [(5, "gateway.nodes.0.port"), (5, "gateway.nodes.1.port")]


def test_a_key_that_stands_twice_is_a_mistake(tmp_path: Path) -> None:
    [found] = mistakes(tmp_path, "redis:\n  prefix: a\n  prefix: b\n")
    assert (found.line, found.path) == (3, "redis.prefix")
    assert "line 2" in found.message


def test_a_rule_over_several_keys_is_named_with_the_line_of_their_mapping(tmp_path: Path) -> None:
    [found] = mistakes(tmp_path, "rollout:\n  http_max_connections: 1\n")
    assert (found.line, found.path) == (1, "rollout")


@pytest.mark.parametrize(
    ("text", "line"),
    [("a: [1\nb: 2\n", 2), ("redis:\n\turl: x\n", 2), ("- 1\n- 2\n", 1), ("just text\n", 1), ("redis: 5\n", 1)],
)
def test_what_is_no_mapping_in_yaml_has_one_clear_line(tmp_path: Path, text: str, line: int) -> None:
    [found] = mistakes(tmp_path, text)
    assert found.line == line
    assert "\n" not in str(found)


def test_every_command_names_the_line_because_loading_does(tmp_path: Path) -> None:
    path = tmp_path / "topology.yaml"
    path.write_text("budgets:\n  max_samples: 0\n", encoding="utf-8")
    with pytest.raises(InvalidTopology, match=r"line 2: budgets.max_samples: "):
        load_topology(settings=Settings.from_env({"POLARQ_TOPOLOGY": str(path)}))


@pytest.mark.parametrize(("data", "words"), [(None, "no such file"), (b"\xff\xfe", "not UTF-8")])
def test_a_file_that_cannot_be_read_is_one_clear_line(tmp_path: Path, data: bytes | None, words: str) -> None:
    path = tmp_path / "topology.yaml"
    if data is not None:
        path.write_bytes(data)
    with pytest.raises(InvalidTopology, match=words) as caught:
        read_topology(path)
    assert str(path) in str(caught.value)


def test_an_empty_file_means_the_defaults(tmp_path: Path) -> None:
    path = tmp_path / "topology.yaml"
    path.write_text("# nothing yet\n", encoding="utf-8")
    assert [node.id for node in read_topology(path).gateway.nodes] == ["node0"]
