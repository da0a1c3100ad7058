"""A worker whose rollouts are judged by the evaluators of `plugins`."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from polarq.testing.redis import EmbeddedRedis
from polarq.testing.stack import LocalStack
from tests.worker.conftest import write_scenario

REPOSITORY = Path(__file__).parents[2]


def stack_of(home: Path, server: EmbeddedRedis, **gateway: Any) -> LocalStack:
    path = os.pathsep.join([str(REPOSITORY), os.environ.get("PYTHONPATH", "")])
    return LocalStack(
        home,
        scenario=str(write_scenario(home)),
        redis=server,
        sections={"gateway": gateway, "security": {"allowed_modules": ["tests.durable.plugins"]}},
        env={"PYTHONPATH": path},
    )


def evaluated_by(name: str, gate: Path) -> dict[str, Any]:
    return {"evaluator": {"strategy": f"tests.durable.plugins:{name}", "config": {"gate": str(gate)}}}
