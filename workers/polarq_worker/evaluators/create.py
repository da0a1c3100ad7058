"""From a task's evaluator spec to an evaluator object."""

from __future__ import annotations

from collections.abc import Sequence

from polarq import registry
from polarq.contracts.specs import EvaluatorSpec
from polarq.errors import UnknownPlugin
from polarq_worker.evaluators.base import Evaluator


def create_evaluator(spec: EvaluatorSpec, allowed_modules: Sequence[str]) -> Evaluator:
    """`strategy` is a name, or an import path `module:Class` of an allowed module (as Polar's tasks have it).

    Raises `UnknownPlugin` for one that is not there or not allowed, `InvalidTask` for a config it cannot use.
    """
    if ":" in spec.strategy or "." in spec.strategy:
        found = registry.imported(spec.strategy, allowed_modules)
    else:
        found = registry.plugin("evaluators", spec.strategy)
    if not issubclass(found, Evaluator):
        raise UnknownPlugin(f"evaluator '{spec.strategy}' is not a polarq evaluator class")
    return found(spec)
