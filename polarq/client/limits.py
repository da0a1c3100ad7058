"""What a deployment lets a task ask for. Checked in the caller, before anything is recorded."""

from __future__ import annotations

from polarq.callback.address import check_callback_url, own_ports
from polarq.contracts.evaluators import judges_of
from polarq.contracts.task import Task
from polarq.errors import InvalidTask
from polarq.topology.allowed import not_allowed
from polarq.topology.models import LimitsSection, Topology


def check_task(task: Task, topology: Topology) -> None:
    """Raises `InvalidTask` with every limit the task breaks."""
    problems = []
    budgets, security = topology.budgets, topology.security
    if task.num_samples > budgets.max_samples:
        problems.append(f"num_samples: {task.num_samples}; this deployment allows {budgets.max_samples}")
    if task.timeout_seconds > budgets.max_timeout_s:
        problems.append(f"timeout_seconds: {task.timeout_seconds:g}; this deployment allows {budgets.max_timeout_s:g}")
    problems += not_allowed(task, security)
    if task.callback_url is not None:
        problem = check_callback_url(task.callback_url, security.callback_hosts, own_ports(topology))
        if problem is not None:
            problems.append(f"callback_url: {problem}")
    if task.evaluator is not None:
        problems += [
            f"evaluator.config.judge_base_url: {problem}"
            for url in judges_of(task.evaluator)
            if (problem := check_callback_url(url, security.judge_hosts, setting="security.judge_hosts"))
        ]
    if problems:
        raise InvalidTask("task", problems)


def check_fits(task: Task, limits: LimitsSection) -> None:
    """Raises `InvalidTask` for a task that would not fit into an empty queue."""
    problems = [
        f"num_samples: {task.num_samples}; at most {most} rollouts may wait at once ({where})"
        for where, most in (
            ("limits.max_queued", limits.max_queued),
            (f"limits.runs.{task.run_id}.max_queued", limits.of_run(task.run_id).max_queued),
        )
        if most is not None and task.num_samples > most
    ]
    if problems:
        raise InvalidTask("task", problems)
