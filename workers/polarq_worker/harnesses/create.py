"""From a task's agent spec to a harness object."""

from __future__ import annotations

from collections.abc import Sequence

from polarq import registry
from polarq.contracts.specs import AgentSpec
from polarq.errors import UnknownPlugin
from polarq_worker.harnesses.base import Harness


def create_harness(spec: AgentSpec, allowed_modules: Sequence[str]) -> Harness:
    """Raises `UnknownPlugin` for one that is not there or not allowed, `InvalidTask` for settings it cannot use."""
    if spec.import_path is not None:
        found = registry.imported(spec.import_path, allowed_modules)
    else:
        found = registry.plugin("harnesses", spec.harness or "")
    if not issubclass(found, Harness):
        raise UnknownPlugin(f"harness '{spec.import_path or spec.harness}' is not a polarq harness class")
    return found(spec)
