"""polarq turns any agent program into a reinforcement-learning environment, as a job system.

    from polarq import submit_rollout

    result = submit_rollout.delay("task.yaml").get()
    print(result.rewards)

Names are loaded when first used: `import polarq` loads neither Celery nor aiohttp.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from polarq.client import AsyncClient, Client
    from polarq.contracts import RolloutResult, Task, TaskResult
    from polarq.tasks import run_rollout, submit_rollout

__version__ = "0.1.0"

_LAZY = {
    "AsyncClient": "polarq.client",
    "Client": "polarq.client",
    "RolloutResult": "polarq.contracts",
    "Task": "polarq.contracts",
    "TaskResult": "polarq.contracts",
    "run_rollout": "polarq.tasks",
    "submit_rollout": "polarq.tasks",
}

__all__ = [
    "AsyncClient",
    "Client",
    "RolloutResult",
    "Task",
    "TaskResult",
    "__version__",
    "run_rollout",
    "submit_rollout",
]


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        return getattr(import_module(_LAZY[name]), name)
    raise AttributeError(f"module 'polarq' has no attribute '{name}'")
