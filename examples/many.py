"""Many tasks: each is submitted once, a line is kept of each as it ends, and a summary is printed.

What has a line in the results file is not submitted again. What was submitted and has none yet is found again by its
task id: a run that was interrupted goes on where it was. The examples of many tasks stand on this.
"""

from __future__ import annotations

import argparse
import json
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypeVar

from polarq.client import Client
from polarq.contracts.rollout import TaskResult
from polarq.contracts.task import Task
from polarq.errors import InvalidInput, PolarqError, QueueFull

T = TypeVar("T")


@dataclass(frozen=True)
class Ended:
    """What became of one task's rollouts."""

    name: str
    task_id: str
    rewards: list[float | None]
    failures: list[dict[str, str]]
    """Boundary, reason and message of each rollout that has no reward."""

    @classmethod
    def of(cls, name: str, result: TaskResult) -> Ended:
        without = [rollout.outcome for rollout in result.results if rollout.reward is None]
        failures = [{"boundary": one.boundary.value, "reason": one.reason, "message": one.message} for one in without]
        return cls(name, result.task_id, result.rewards, failures)

    @property
    def verdict(self) -> str:
        """resolved: one of its samples has the whole reward; failed: none has any."""
        rewards = [reward for reward in self.rewards if reward is not None]
        return "failed" if not rewards else "resolved" if max(rewards) >= 1 else "unresolved"

    def line(self) -> str:
        rewards = ", ".join("none" if reward is None else f"{reward:g}" for reward in self.rewards)
        why = "".join(f"; {one['boundary']}: {one['message'] or one['reason']}" for one in self.failures[:1])
        return f"{self.verdict:10} {self.name}  reward {rewards}{why}"


def options(description: str | None, run_id: str, task_file: Path) -> argparse.ArgumentParser:
    """What all of these examples take."""
    whole = description or ""
    parser = argparse.ArgumentParser(
        description=whole, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--task", type=Path, default=task_file, help=f"what all have in common (default {task_file})")
    parser.add_argument("-n", "--num-samples", type=int, help="rollouts of each; else as the task file says")
    parser.add_argument("--ids", nargs="+", metavar="NAME", help="only these")
    parser.add_argument("--limit", type=int, metavar="N", help="only the first N (of --ids)")
    parser.add_argument("--run-id", default=run_id, help="another one is another run (default %(default)s)")
    parser.add_argument("--results", type=Path, help="a line for each that has ended (default RUN_ID.jsonl)")
    parser.add_argument("--again", action="store_true", help="also what ended without a reward, as new tasks")
    return parser


def template(asked: argparse.Namespace) -> dict[str, Any]:
    """The fields that all tasks have in common. Raises `InvalidTask`."""
    fields = Task.load(asked.task).model_dump(mode="json", exclude={"task_id"}, exclude_unset=True)
    return {**fields, "run_id": asked.run_id, "num_samples": asked.num_samples or fields.get("num_samples", 1)}


def chosen(named: Mapping[str, T], asked: argparse.Namespace) -> dict[str, T]:
    """Those of --ids and --limit. Raises `InvalidInput` for a name that there is not."""
    if unknown := [name for name in asked.ids or () if name not in named]:
        raise InvalidInput("--ids", [f"there is no '{name}' among the {len(named)} that there are" for name in unknown])
    names = list(dict.fromkeys(asked.ids)) if asked.ids else list(named)
    return {name: named[name] for name in names[: asked.limit]}


def run(asked: argparse.Namespace, fields: Mapping[str, Mapping[str, Any]]) -> int:
    """Runs these tasks (fields of each, without `task_id`) to their end; the exit code: 1 where one failed."""
    results: Path = asked.results or Path(f"{asked.run_id}.jsonl")
    before = [ended for ended in read(results) if ended.name in fields]
    tries = Counter(ended.name for ended in before)
    last = {ended.name: ended for ended in before}
    over = {name for name, ended in last.items() if not (asked.again and ended.verdict == "failed")}
    tasks = {
        name: Task.load(
            {**one, "task_id": f"{asked.run_id}-{name}" + (f"-try{tries[name] + 1}" if tries[name] else "")}
        )
        for name, one in fields.items()
        if name not in over
    }
    if over:
        without = sum(last[name].verdict == "failed" for name in over)
        hint = f"; {without} without a reward, which --again runs as new tasks" if without else ""
        print(f"{len(over)} of {len(fields)} have ended before, see {results}{hint}")
    results.parent.mkdir(parents=True, exist_ok=True)
    with Client() as client, results.open("a", encoding="utf-8") as file:
        for ended in play(client, tasks):
            print(json.dumps(asdict(ended)), file=file, flush=True)
            print(ended.line(), flush=True)
            last[ended.name] = ended
    print(summary(list(last.values())))
    return int(any(ended.verdict == "failed" for ended in last.values()))


def play(client: Client, tasks: Mapping[str, Task]) -> Iterator[Ended]:
    """Submits them, as many at once as the deployment takes, and yields each as it ends."""
    waiting = deque(tasks.items())
    while waiting:
        names: dict[str, str] = {}
        try:
            while waiting:
                name, task = waiting[0]
                names[client.submit(task).task_id] = name
                waiting.popleft()
        except QueueFull:
            if not names:
                raise
        for result in client.groups(list(names), trajectories="none"):
            yield Ended.of(names[result.task_id], result)


def read(results: Path) -> list[Ended]:
    """The lines of a results file; one that a kill cut short is taken from it. Raises `InvalidInput`."""
    if not results.exists():
        return []
    text = results.read_bytes()
    if whole := text.rpartition(b"\n")[0]:
        whole += b"\n"
    if whole != text:
        results.write_bytes(whole)
    found = []
    for number, line in enumerate(whole.splitlines(), 1):
        try:
            found.append(Ended(**json.loads(line)))
        except (ValueError, TypeError):
            raise InvalidInput(
                f"results file {results}", [f"line {number} is not one of a result's; give another --results"]
            ) from None
    return found


def summary(ended: list[Ended]) -> str:
    """'3 tasks: 1 resolved, 1 unresolved, 1 failed (runtime 1)'."""
    verdicts = Counter(one.verdict for one in ended)
    where = Counter(one.failures[0]["boundary"] for one in ended if one.verdict == "failed" and one.failures)
    failed = ", ".join(f"{boundary} {count}" for boundary, count in where.most_common())
    counts = ", ".join(f"{verdicts[kind]} {kind}" for kind in ("resolved", "unresolved", "failed"))
    return f"{len(ended)} {'task' if len(ended) == 1 else 'tasks'}: {counts}{f' ({failed})' if failed else ''}"


def told(main: Callable[[], int]) -> None:
    """Ends the program with `main`'s exit code; what polarq refuses is one line."""
    try:
        code = main()
    except PolarqError as exc:
        raise SystemExit(str(exc)) from None
    except KeyboardInterrupt:
        raise SystemExit(
            "no longer waiting; what was submitted goes on, and the same command goes on with it"
        ) from None
    raise SystemExit(code)
