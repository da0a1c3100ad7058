"""Several attempts at each task of a file, judged by the task's own command: what fine-tuning data is made of.

    python -m examples.offline_sft.generate -n 4

A line of the file has `name`, `instruction` and `check`, a command that ends with 0 where the work is right. It is run
in the sandbox, in the folder where the agent worked.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from examples import many
from polarq.errors import InvalidInput

COLUMNS = ("name", "instruction", "check")


def read_tasks(path: Path) -> dict[str, dict[str, str]]:
    """By name. Raises `InvalidInput`."""
    what, tasks = f"tasks {path}", dict[str, dict[str, str]]()
    try:
        lines = path.read_text("utf-8").split("\n")  # texts of JSON hold what splitlines takes for an end of line
    except OSError as exc:
        raise InvalidInput(what, [f"cannot be read: {exc.strerror}"]) from None
    except UnicodeDecodeError:
        raise InvalidInput(what, ["cannot be read as text in UTF-8"]) from None
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
            task = {column: str(row[column]) for column in COLUMNS}
        except (ValueError, TypeError, KeyError):
            raise InvalidInput(what, [f"line {number} is no JSON object with {', '.join(COLUMNS)}"]) from None
        if task["name"] in tasks:
            raise InvalidInput(what, [f"line {number} has task {task['name']} a second time"])
        tasks[task["name"]] = task
    return tasks


def fields_of(task: dict[str, str], template: dict[str, Any]) -> dict[str, Any]:
    check = {"command": task["check"], "cwd": template["runtime"]["workdir"]}
    return {**template, "instruction": task["instruction"], "evaluator": {"strategy": "script", "config": check}}


def main() -> int:
    here = Path(__file__).parent
    parser = many.options(__doc__, "offline_sft", here / "task.yaml")
    parser.add_argument("tasks", type=Path, nargs="?", default=here / "tasks.jsonl", help="(default %(default)s)")
    asked = parser.parse_args()
    template = many.template(asked)
    tasks = many.chosen(read_tasks(asked.tasks), asked)
    return many.run(asked, {name: fields_of(task, template) for name, task in tasks.items()})


if __name__ == "__main__":
    many.told(main)
