"""What a task asks of its agent program, looked at before it is recorded, where that program's preset is installed."""

from __future__ import annotations

from polarq.contracts.specs import AgentSpec
from polarq.errors import UnknownPlugin
from polarq.registry import plugin


def check_agent(spec: AgentSpec) -> None:
    """Raises `InvalidTask` for settings, servers or skills that its preset refuses. A preset that is not installed here
    says nothing: the node's own looks at it again. A command has no preset, and nothing is loaded for it."""
    if spec.harness is None or spec.custom_shell is not None:
        return
    try:
        preset = plugin("harnesses", spec.harness)
    except UnknownPlugin:
        return
    preset(spec)
