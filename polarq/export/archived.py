"""An archive as a source of exports."""

from __future__ import annotations

from collections.abc import Collection

from polarq.contracts.rollout import RolloutResult
from polarq.errors import InvalidInput
from polarq.export.base import Group, Rollout, Verdict
from polarq.store.archive import Archive


def archived_tasks(archive: Archive, run_id: str | None) -> list[str]:
    """The tasks of a run, or all there are. Raises `InvalidInput` where there is none, `ArchiveFailed`, and
    `PayloadCorrupt` for a task's request."""
    found = [one for one in archive.task_ids() if run_id is None or _run_of(archive, one) == run_id]
    if not found:
        what = "rollouts" if run_id is None else f"rollouts of run '{run_id}'"
        raise InvalidInput(f"archive {archive.root}", [f"there are no {what} in it"])
    return found


def archived_group(archive: Archive, task_id: str, named: Collection[int] | None = None) -> Group:
    """A task, or those of its rollouts that are named. Raises `InvalidInput` for what is not there, `ArchiveFailed`."""
    indices = archive.indices(task_id)
    missing = [task_id] if named is None and not indices else [f"{task_id}.{i}" for i in {*(named or ())} - {*indices}]
    if missing:
        raise InvalidInput(min(missing), [f"is no task and no rollout of the archive {archive.root}"])
    return Group(task_id, [_rollout(archive, task_id, index) for index in indices if named is None or index in named])


def _run_of(archive: Archive, task_id: str) -> str:
    told = archive.run_of(task_id)
    return told if told is not None else archive.result(task_id, archive.indices(task_id)[0]).run_id


def _rollout(archive: Archive, task_id: str, index: int) -> Rollout:
    def load() -> RolloutResult:
        return archive.result(task_id, index)

    def verdict() -> Verdict:
        result = load()
        return Verdict(result.outcome, None if result.reward is None else result.reward.outcome)

    return Rollout(f"{task_id}.{index}", verdict, load)
