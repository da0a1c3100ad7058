"""config: check names the line, show names the source, reference is the models'."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from polarq.topology.reference import example, markdown
from tests.cli.conftest import Cli

ROOT = Path(__file__).parents[2]


def test_a_good_file_is_ok_and_its_nodes_are_named(cli: Cli) -> None:
    ran = cli("config", "check", str(ROOT / "configs" / "polar-compatible.yaml"))
    assert (ran.code, ran.err) == (0, "")
    assert "2 nodes: gpu-a, gpu-b" in ran.out


def test_each_mistake_is_a_line_on_stderr_with_file_and_line(cli: Cli, tmp_path: Path) -> None:
    path = tmp_path / "bad.yaml"
    path.write_text("redis:\n  prefix: 'a b'\nbudgets:\n  max_sampels: 3\n", encoding="utf-8")
    ran = cli("config", "check", str(path))
    assert (ran.code, ran.out) == (2, "")
    first, second = ran.err.splitlines()
    assert first.startswith(f"polarq: {path}:2: redis.prefix: ")
    assert second.startswith(f"polarq: {path}:4: budgets: unknown key 'max_sampels', did you mean 'max_samples'?")
    told = cli("config", "check", str(path), "--json")
    assert told.code == 2
    assert [(m["line"], m["path"]) for m in told.json["mistakes"]] == [(2, "redis.prefix"), (4, "budgets")]


def test_without_a_file_it_checks_the_one_that_every_command_reads(cli: Cli, deployment: Path) -> None:
    assert str(deployment) in cli("config", "check").out
    deployment.write_text("nonsense: 1\n", encoding="utf-8")
    assert cli("config", "check").code == 2


def test_show_names_where_each_value_came_from(cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "some.yaml"
    inference = {"engine": "vllm", "base_url": "http://user:hunter2@h:8000"}
    runtime = {"backend": "local", "env": {"HF_TOKEN": "hunter3", "LANG": "C"}}
    node = {"id": "n", "port": 9000, "inference": inference, "default_runtime": runtime}
    path.write_text(yaml.safe_dump({"gateway": {"nodes": [node]}}), encoding="utf-8")
    monkeypatch.setenv("POLARQ_REDIS_URL", "redis://:hunter2@h:6379/0")
    ran = cli("config", "show", "-c", str(path), "--json")
    values = {value["key"]: (value["value"], value["from"]) for value in ran.json["values"]}
    assert values["redis.url"] == ("redis://:***@h:6379/0", "env")
    assert values["redis.prefix"] == ("polarq", "default")
    assert values["gateway.nodes.0.port"] == (9000, "file")
    assert values["gateway.nodes.0.host"] == ("0.0.0.0", "default")
    assert values["gateway.nodes.0.inference.base_url"] == ("http://user:***@h:8000", "file")
    assert values["gateway.nodes.0.default_runtime.env"] == ({"HF_TOKEN": "***", "LANG": "C"}, "file")
    text = cli("config", "show", "-c", str(path)).out
    assert "gateway.nodes.0.port: 9000  # file" in text
    assert "hunter" not in text + ran.out


@pytest.mark.parametrize("url", ["redis://h/0?password=hunter2", "redis://:hunter2@h:port/0"])
def test_a_password_is_masked_wherever_it_hides(
    cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, url: str
) -> None:
    monkeypatch.delenv("POLARQ_REDIS_URL")
    path = tmp_path / "some.yaml"
    path.write_text(yaml.safe_dump({"redis": {"url": url}}), encoding="utf-8")
    ran = cli("config", "show", "-c", str(path))
    assert ran.code == 0
    assert "hunter" not in ran.out + ran.err


def test_reference_prints_what_the_models_say(cli: Cli) -> None:
    assert cli("config", "reference").out == markdown()
    assert cli("config", "reference", "--yaml").out == example()
    assert any(section["path"] == "gateway.nodes[]" for section in cli("config", "reference", "--json").json)
