"""From a task's runtime spec to a sandbox object: finds the backend and checks what the task may ask for."""

from __future__ import annotations

import fnmatch
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from polarq import registry
from polarq.contracts.specs import RuntimeSpec
from polarq.errors import InvalidTask, UnknownPlugin
from polarq.topology.models import SecuritySection
from polarq_worker.runtimes.base import Runtime


def create_runtime(spec: RuntimeSpec, *, runtime_id: str, root: Path, security: SecuritySection) -> Runtime:
    """The sandbox, not started.

    Raises `UnknownPlugin` for a backend that is not there or not allowed, and `InvalidTask` for what the topology
    forbids or the backend cannot give: the task has to change, trying again does not help.
    """
    if spec.import_path is not None:
        found = registry.imported(spec.import_path, security.allowed_modules)
    else:
        found = registry.plugin("runtimes", spec.backend)
    if not issubclass(found, Runtime):
        raise UnknownPlugin(f"runtime '{spec.import_path or spec.backend}' is not a polarq runtime class")
    problems = [*forbidden(spec, security), *found.problems(spec)]
    if problems:
        raise InvalidTask("runtime", problems)
    return found(spec, runtime_id=runtime_id, root=root)


def forbidden(spec: RuntimeSpec, security: SecuritySection) -> list[str]:
    """What the topology does not let a task do, one line each."""
    lines = []
    image = spec.image.strip()
    if image and not any(fnmatch.fnmatchcase(image, pattern) for pattern in security.allowed_images):
        lines.append(f"image '{image}' is not in security.allowed_images of the topology")
    lines += [
        f"{key}: '{source}' is not below a folder of security.allowed_mounts of the topology"
        for key, source in _mounts(spec)
        if not below(source, security.allowed_mounts)
    ]
    actions = [("prepare", spec.prepare), ("eval_prepare", spec.eval_prepare or [])]
    lines += [
        f"{key}.{index}.source: '{action.source}' is not below a folder of security.upload_roots of the topology"
        for key, recipe in actions
        for index, action in enumerate(recipe)
        if action.source is not None and not below(action.source, security.upload_roots)
    ]
    return lines


def below(path: str, folders: Sequence[str]) -> bool:
    """Whether the host path, links resolved, is one of `folders` or below one; `*` stands for any."""
    if "*" in folders:
        return True
    real = Path(os.path.realpath(path))
    return any(real.is_relative_to(os.path.realpath(folder)) for folder in folders)


def _mounts(spec: RuntimeSpec) -> list[tuple[str, str]]:
    volumes: Any = spec.kwargs.get("volumes", [])
    named = [("kwargs.volumes", volume) for volume in volumes] if isinstance(volumes, list) else []
    named += [("internet_volumes", volume) for volume in spec.internet_volumes]
    return [(key, str(volume).partition(":")[0]) for key, volume in named]
