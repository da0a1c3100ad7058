"""The reference is made from the models, and the example files hold what they say."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from polarq.topology import Topology
from polarq.topology.lines import read_topology
from polarq.topology.reference import POLARS, example, markdown, sections

CONFIGS = Path(__file__).parents[2] / "configs"


def test_every_key_of_the_topology_has_a_sentence() -> None:
    bare = [
        f"{section.path}.{key.name}"
        for section in sections()
        if section.explained
        for key in section.keys
        if not key.meaning
    ]
    assert bare == []
    assert all(section.meaning for section in sections())


def test_the_markdown_names_every_key_with_type_and_default() -> None:
    text = markdown()
    for section in sections():
        assert f"## {section.path or 'Top level'}\n" in text
        for key in section.keys:
            assert f"| `{key.name}` | {key.type.replace('|', chr(92) + '|')} | {key.default}" in text
    assert "`POLARQ_REDIS_URL`" in text


def test_the_sections_reach_every_mapping_of_the_file() -> None:
    paths = {section.path for section in sections()}
    assert {"redis", "rollout", "gateway", "gateway.nodes[]", "gateway.nodes[].inference", "security"} <= paths
    assert {"gateway.nodes[].proxy", "gateway.nodes[].default_runtime", "gateway.completion_persistence"} <= paths


def test_the_example_file_is_the_one_that_the_command_prints() -> None:
    assert (CONFIGS / "topology.yaml").read_text(encoding="utf-8") == example(), (
        "polarq config reference --yaml > configs/topology.yaml"
    )


def test_the_example_file_holds_the_defaults_and_nothing_else() -> None:
    assert Topology.model_validate(yaml.safe_load(example())) == Topology()


def test_the_example_file_explains_each_value() -> None:
    text = example()
    for section in sections():
        # By default there is no frozen model, so that none of its keys has a line.
        absent = {"gateway.completion_persistence", "gateway.nodes[].model_pool[]"}
        if section.explained and section.path not in absent:
            keys = [key for key in section.keys if key.name != "completion_persistence"]
            assert [key for key in keys if not key.meaning.startswith(POLARS) and f"# {key.meaning}" not in text] == []


def test_a_topology_in_polars_words_loads_as_it_is() -> None:
    topology = read_topology(CONFIGS / "polar-compatible.yaml")
    assert [node.id for node in topology.gateway.nodes] == ["gpu-a", "gpu-b"]
    assert topology.gateway.nodes[0].endpoints[0].engine == "sglang"
    assert topology.rollout.url == "http://rollout.internal:8080"
    runtime = topology.gateway.nodes[0].default_runtime
    assert runtime is not None
    assert runtime.image == "python:3.12-slim"


@pytest.mark.parametrize("name", ["topology.yaml", "polar-compatible.yaml"])
def test_polars_names_stand_in_the_reference(name: str) -> None:
    """Whatever key an example uses, the reference has it."""
    known = {f"{section.path}.{key.name}".lstrip(".") for section in sections() for key in section.keys}

    def walk(data: object, path: str) -> list[str]:
        if isinstance(data, dict):
            here = [f"{path}.{key}".lstrip(".") for key in data]
            return here + [deep for key, value in data.items() for deep in walk(value, f"{path}.{key}".lstrip("."))]
        if isinstance(data, list) and data and isinstance(data[0], dict):
            return [deep for item in data for deep in walk(item, f"{path}[]")]
        return []

    used = set(walk(yaml.safe_load((CONFIGS / name).read_text(encoding="utf-8")), ""))
    free = {path for path in used if ".default_runtime." in path}
    assert used - free <= known
