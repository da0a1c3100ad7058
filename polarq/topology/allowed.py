"""What a deployment lets tasks ask of its nodes (`security`): one line for each thing that it does not, with the key.

Asked wherever a task is submitted, by the rules that its nodes have published, and again on the node, which alone can
say where a path of its own really leads. `whose` is the file that the lines name.
"""

from __future__ import annotations

import fnmatch
import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import PurePosixPath
from typing import Any

from polarq.contracts.specs import RuntimeSpec
from polarq.contracts.task import Task
from polarq.topology.models import SecuritySection

Below = Callable[[str, Sequence[str]], bool]
"""Whether a host path is one of these folders or below one."""


THIS_FILE = "the topology"


def not_allowed(task: Task, security: SecuritySection, whose: str = THIS_FILE) -> list[str]:
    """Of a whole task, where it is submitted."""
    lines = []
    if task.runtime is not None:
        lines += [f"runtime.{line}" for line in runtime_not_allowed(task.runtime, security, whose, below=seems_below)]
        lines += _module("runtime.import_path", task.runtime.import_path, security, whose)
    lines += _module("agent.import_path", task.agent.import_path, security, whose)
    if task.evaluator is not None and names_a_module(task.evaluator.strategy):
        lines += _module("evaluator.strategy", task.evaluator.strategy, security, whose)
    return lines


def runtime_not_allowed(
    spec: RuntimeSpec, security: SecuritySection, whose: str = THIS_FILE, *, below: Below
) -> list[str]:
    """Of a sandbox. What it may import is for whoever does it."""
    lines = []
    image = spec.image.strip()
    if image and not _fits(image, security.allowed_images):
        lines.append(f"image: '{image}' is not in security.allowed_images of {whose}")
    lines += [
        f"{key}: '{source}' is not below a folder of security.allowed_mounts of {whose}"
        for key, source in _mounts(spec)
        if not below(source, security.allowed_mounts)
    ]
    lines += [
        f"{key}: '{source}' is not below a folder of security.upload_roots of {whose}"
        for key, source in _uploads(spec)
        if not below(source, security.upload_roots)
    ]
    if spec.network and spec.network != "none" and not _fits(spec.network, security.allowed_networks):
        lines.append(f"network: '{spec.network}' is not in security.allowed_networks of {whose}")
    policy = spec.policy(security.default_network_policy)
    if policy is not security.default_network_policy and policy not in security.allowed_network_policies:
        asked = "network_policy" if spec.network_policy is not None else "network" if spec.network else "allow_internet"
        allowed = ", ".join(security.allowed_network_policies) or "none is"
        lines.append(f"{asked}: policy '{policy}' is not in security.allowed_network_policies of {whose} ({allowed})")
    if security.max_gpus is not None and spec.gpus > security.max_gpus:
        lines.append(f"gpus: {spec.gpus}; security.max_gpus of {whose} is {security.max_gpus}")
    return lines


def names_a_module(strategy: str) -> bool:
    """Whether an evaluator is named by its import path."""
    return ":" in strategy or "." in strategy


def seems_below(path: str, folders: Sequence[str]) -> bool:
    """By its name, or by where it leads on this machine, which need not be the node."""
    if "*" in folders:
        return True
    if not path.startswith("/"):
        return False
    places = {PurePosixPath(os.path.normpath(path)), PurePosixPath(os.path.realpath(path))}
    roots = {root for folder in folders for root in (os.path.normpath(folder), os.path.realpath(folder))}
    return any(place.is_relative_to(root) for place in places for root in roots)


def _module(key: str, path: str | None, security: SecuritySection, whose: str) -> list[str]:
    if path is None:
        return []
    module = path.partition(":")[0] if ":" in path else path.rpartition(".")[0]
    if any(module == allowed or module.startswith(f"{allowed}.") for allowed in security.allowed_modules):
        return []
    return [f"{key}: '{path}' is not in security.allowed_modules of {whose}"]


def _fits(name: str, patterns: Sequence[str]) -> bool:
    return any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)


def _mounts(spec: RuntimeSpec) -> Iterator[tuple[str, str]]:
    volumes: Any = spec.kwargs.get("volumes", [])
    # What is no list the backend refuses; whatever it makes of it, it passes here as what it is.
    for volume in volumes if isinstance(volumes, list) else [volumes]:
        yield "kwargs.volumes", str(volume).partition(":")[0]
    for volume in spec.internet_volumes:
        yield "internet_volumes", volume.partition(":")[0]


def _uploads(spec: RuntimeSpec) -> Iterator[tuple[str, str]]:
    for key, recipe in (("prepare", spec.prepare), ("eval_prepare", spec.eval_prepare or [])):
        for index, action in enumerate(recipe):
            if action.source is not None:
                yield f"{key}.{index}.source", action.source
