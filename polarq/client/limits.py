"""What a deployment lets a task ask for. Checked in the caller, before anything is recorded."""

from __future__ import annotations

import fnmatch
from urllib.parse import urlsplit

from polarq.contracts.task import Task
from polarq.errors import InvalidTask
from polarq.topology.models import Topology


def check_task(task: Task, topology: Topology) -> None:
    """Raises `InvalidTask` with every limit the task breaks."""
    problems = []
    budgets, security = topology.budgets, topology.security
    if task.num_samples > budgets.max_samples:
        problems.append(f"num_samples: {task.num_samples}; this deployment allows {budgets.max_samples}")
    if task.timeout_seconds > budgets.max_timeout_s:
        problems.append(f"timeout_seconds: {task.timeout_seconds:g}; this deployment allows {budgets.max_timeout_s:g}")
    if task.runtime is not None and task.runtime.image:
        image = task.runtime.image
        if not any(fnmatch.fnmatchcase(image, pattern) for pattern in security.allowed_images):
            problems.append(f"runtime.image: '{image}' is not among security.allowed_images")
    if task.callback_url is not None:
        host = (urlsplit(task.callback_url).hostname or "").rstrip(".").lower()
        if host not in {h.rstrip(".").lower() for h in security.callback_hosts}:
            problems.append(f"callback_url: host '{host}' is not among security.callback_hosts")
    if problems:
        raise InvalidTask("task", problems)
