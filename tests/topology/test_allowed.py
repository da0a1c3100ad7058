"""What a topology lets tasks ask of its nodes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from polarq.contracts.task import Task
from polarq.topology.allowed import not_allowed
from polarq.topology.models import SecuritySection

TIGHT = {
    "allowed_images": ["good/*"],
    "allowed_mounts": ["/data"],
    "upload_roots": ["/uploads"],
    "allowed_modules": ["mine"],
    "allowed_network_policies": ["none", "proxy-only"],
    "allowed_networks": ["rollouts-*"],
    "max_gpus": 1,
}


def task_of(runtime: dict[str, Any], **more: Any) -> Task:
    agent = {"harness": "shell", "custom_shell": {"command": "true"}}
    return Task.parse({"instruction": "x", "agent": agent, "runtime": {"image": "good/one", **runtime}, **more})


UPLOAD = {"type": "upload_file", "source": "/etc/passwd", "target": "/x"}


@pytest.mark.parametrize(
    ("runtime", "says"),
    [
        ({"image": "bad"}, "runtime.image: 'bad' is not in security.allowed_images"),
        ({"kwargs": {"volumes": ["/etc:/x"]}}, "runtime.kwargs.volumes: '/etc' is not below"),
        ({"kwargs": {"volumes": ["/data/../etc:/x"]}}, "runtime.kwargs.volumes: '/data/../etc' is not below"),
        ({"kwargs": {"volumes": ["/database:/x"]}}, "'/database' is not below a folder of security.allowed_mounts"),
        ({"kwargs": {"volumes": ["data:/x"]}}, "runtime.kwargs.volumes: 'data' is not below"),
        ({"kwargs": {"volumes": "/etc:/x"}}, "runtime.kwargs.volumes: '/etc' is not below"),
        ({"kwargs": {"volumes": {"/etc:/x": ""}}}, "is not below a folder of security.allowed_mounts"),
        ({"internet_volumes": ["/run/docker.sock"]}, "runtime.internet_volumes: '/run/docker.sock' is not below"),
        (
            {"prepare": [UPLOAD]},
            "runtime.prepare.0.source: '/etc/passwd' is not below a folder of security.upload_roots",
        ),
        ({"eval_prepare": [UPLOAD]}, "runtime.eval_prepare.0.source: '/etc/passwd' is not below"),
        ({"import_path": "os:system"}, "runtime.import_path: 'os:system' is not in security.allowed_modules"),
        ({"network_policy": "full"}, "runtime.network_policy: policy 'full' is not in"),
        ({"network": "host"}, "runtime.network: 'host' is not in security.allowed_networks"),
        ({"gpus": 2}, "runtime.gpus: 2; security.max_gpus of the topology is 1"),
    ],
)
def test_what_is_not_allowed_is_named_with_its_key(runtime: dict[str, Any], says: str) -> None:
    problems = not_allowed(task_of(runtime), SecuritySection.model_validate(TIGHT))
    assert any(says in line for line in problems), problems


def test_agents_and_evaluators_are_imported_from_allowed_modules_only() -> None:
    task = task_of({}, evaluator={"strategy": "subprocess:Popen"}).model_copy(
        update={"agent": Task.parse({"instruction": "x", "agent": {"import_path": "mineral.a:B"}}).agent}
    )
    assert not_allowed(task, SecuritySection.model_validate(TIGHT)) == [
        "agent.import_path: 'mineral.a:B' is not in security.allowed_modules of the topology",
        "evaluator.strategy: 'subprocess:Popen' is not in security.allowed_modules of the topology",
    ]
    assert (
        not_allowed(
            task_of({"import_path": "mine.sandboxes:Box"}, evaluator={"strategy": "session_completed"}),
            SecuritySection.model_validate(TIGHT),
        )
        == []
    )


def test_a_folder_that_is_reached_by_another_name_is_allowed(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to("real")
    (tmp_path / "real" / "out").symlink_to("/etc")
    security = SecuritySection(allowed_mounts=[str(tmp_path / "real")])
    assert not_allowed(task_of({"kwargs": {"volumes": [f"{tmp_path}/link:/x"]}}), security) == []


def test_the_defaults_allow_what_an_ordinary_task_asks() -> None:
    runtime = {"prepare": [UPLOAD], "network_policy": "allowlist", "allowed_hosts": ["example.org"], "gpus": 8}
    assert not_allowed(task_of(runtime), SecuritySection()) == []
    assert not_allowed(task_of({"allow_internet": False}), SecuritySection()) == []
