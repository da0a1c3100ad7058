"""From a task's runtime spec to a sandbox object: finds the backend and checks what the task may ask for."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from polarq import registry
from polarq.contracts.specs import RuntimeSpec
from polarq.errors import InvalidTask, UnknownPlugin
from polarq.topology.allowed import runtime_not_allowed
from polarq.topology.models import SecuritySection
from polarq_worker.runtimes.base import Host, Runtime


def create_runtime(
    spec: RuntimeSpec, *, runtime_id: str, root: Path, security: SecuritySection, host: Host | None = None
) -> Runtime:
    """The sandbox, not started.

    Raises `UnknownPlugin` for a backend that is not there or not allowed, and `InvalidTask` for what the topology
    forbids or the backend cannot give: the task has to change, trying again does not help.
    """
    host = host or Host()
    return usable_class(spec, security, host)(spec, runtime_id=runtime_id, root=root, host=host)


def usable_class(spec: RuntimeSpec, security: SecuritySection, host: Host) -> type[Runtime]:
    """The backend that the task names, when the task may have all that it asks of it. Raises as `create_runtime`."""
    found = runtime_class(spec, security)
    problems = [*forbidden(spec, security), *found.problems(spec, host)]
    if problems:
        raise InvalidTask("runtime", problems)
    return found


def runtime_class(spec: RuntimeSpec, security: SecuritySection) -> type[Runtime]:
    """The backend that the task names. Raises `UnknownPlugin`."""
    return runtime_named(spec.import_path or spec.backend, security.allowed_modules)


def runtime_named(name: str, allowed_modules: Sequence[str]) -> type[Runtime]:
    """By the name of a plug-in, or an import path. Raises `UnknownPlugin`."""
    by_path = ":" in name or "." in name
    found = registry.imported(name, allowed_modules) if by_path else registry.plugin("runtimes", name)
    if not issubclass(found, Runtime):
        raise UnknownPlugin(f"runtime '{name}' is not a polarq runtime class")
    return found


def forbidden(spec: RuntimeSpec, security: SecuritySection) -> list[str]:
    """What the topology does not let a task do, one line each."""
    return runtime_not_allowed(spec, security, below=below)


def below(path: str, folders: Sequence[str]) -> bool:
    """Whether the host path, links resolved, is one of `folders` or below one; `*` stands for any."""
    if "*" in folders:
        return True
    real = Path(os.path.realpath(path))
    return any(real.is_relative_to(os.path.realpath(folder)) for folder in folders)
