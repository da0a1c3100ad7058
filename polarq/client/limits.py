"""What a deployment lets a task ask for. Checked in the caller, before anything is recorded."""

from __future__ import annotations

from collections.abc import Mapping

from polarq.callback.address import check_callback_url, own_ports
from polarq.contracts.evaluators import servers_of
from polarq.contracts.task import Task
from polarq.errors import InvalidTask
from polarq.topology.allowed import THIS_FILE, not_allowed
from polarq.topology.models import LimitsSection, Topology
from polarq.topology.rules import Rules


class Judge:
    """Judges one task by each node's rules, and by what the caller's own file says on top: the stricter holds. Of a
    node that has said nothing, the caller's file is all that is known."""

    def __init__(self, task: Task, topology: Topology, said: Mapping[str, Rules]) -> None:
        self._task = task
        self._topology = topology
        self._said = said
        self._judged: dict[int, list[str]] = {}

    def problems(self, node_id: str) -> list[str]:
        """Every rule of a node that the task breaks, one line each."""
        theirs = self._said.get(node_id)
        if id(theirs) not in self._judged:
            self._judged[id(theirs)] = self._broken_of(node_id, theirs)
        return self._judged[id(theirs)]

    def _broken_of(self, node_id: str, theirs: Rules | None) -> list[str]:
        own = Rules.of(self._topology)
        if theirs is None or theirs == own:
            return self._broken(own, THIS_FILE)
        broken = self._broken(theirs, f"{node_id}'s topology")
        return broken or self._broken(theirs.with_what_is_said(own), THIS_FILE)

    def _broken(self, rules: Rules, whose: str) -> list[str]:
        task, budgets = self._task, rules.budgets
        lines = []
        if task.num_samples > budgets.max_samples:
            lines.append(f"num_samples: {task.num_samples}; this deployment allows {budgets.max_samples}")
        if task.timeout_seconds > budgets.max_timeout_s:
            lines.append(f"timeout_seconds: {task.timeout_seconds:g}; this deployment allows {budgets.max_timeout_s:g}")
        lines += not_allowed(task, rules.security, whose)
        if task.callback_url is not None:
            hosts = rules.security.callback_hosts
            problem = check_callback_url(task.callback_url, hosts, own_ports(self._topology))
            if problem is not None:
                lines.append(f"callback_url: {problem}")
        for key, url in servers_of(task.evaluator) if task.evaluator is not None else []:
            hosts, setting = rules.security.judge_hosts, "security.judge_hosts"
            if problem := check_callback_url(url, hosts, setting=setting):
                lines.append(f"evaluator.config.{key}: {problem}")
        return lines


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
