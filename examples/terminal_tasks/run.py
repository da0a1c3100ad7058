"""Task directories of Harbor (instruction.md, task.toml, environment/, tests/) as tasks.

python -m examples.terminal_tasks.run                        three of our own
python -m examples.terminal_tasks.run FOLDER                 a folder of them, as Terminal-Bench 2 is
"""

from __future__ import annotations

import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from examples import many
from polarq.contracts.harbor import HarborToml, task_fields
from polarq.errors import InvalidInput

TASKS = Path(__file__).with_name("tasks")
LOCAL_APP = "/polar/session/app"
LOCAL = {"tests_target": "/polar/session/tests", "verifier_dir": "/polar/session/verifier"}
"""A local sandbox writes below its session folder; the verifier finds them by TEST_DIR and VERIFIER_DIR."""


def directories(folder: Path) -> dict[str, Path]:
    """Task directories by name. Raises `InvalidInput`."""
    found = {file.parent.name: file.parent for file in sorted(folder.glob("*/instruction.md"))}
    if not found:
        raise InvalidInput(f"folder {folder}", ["there is no task directory in it (with an instruction.md)"])
    return found


def image_for(task: Path, base: str | None) -> str:
    """Builds the directory's environment; the image's name."""
    image = f"polarq-task-{task.name.lower()}:latest"
    argument = ["--build-arg", f"BASE={base}"] if base else []
    command = ["docker", "build", "--quiet", *argument, "--tag", image, str(task / "environment")]
    if subprocess.run(command, check=False, stdout=subprocess.DEVNULL).returncode:
        raise InvalidInput(f"Harbor task {task}", ["its environment cannot be built, see above"])
    return image


def in_container(task: Path, base: str | None) -> dict[str, Any]:
    """The directory's fields of a task, with its `docker_image` or with what its environment is built to."""
    named = HarborToml.load(task).environment.docker_image
    return task_fields(task, backend="docker", image=None if named else image_for(task, base))


def in_local_sandbox(task: Path) -> dict[str, Any]:
    """The same without an image: what its environment would copy to /app is brought into the sandbox."""
    fields = task_fields(task, backend="local")
    app = task / "environment" / "app"
    bring = (
        {"type": "upload_dir", "source": str(app.resolve()), "target": LOCAL_APP}
        if app.is_dir()
        else {"type": "exec", "command": f"mkdir -p {LOCAL_APP}", "cwd": "/polar/session"}
    )
    evaluator = {**fields["evaluator"], "config": {**fields["evaluator"]["config"], **LOCAL}}
    return {
        **fields,
        "runtime": {"backend": "local", "workdir": LOCAL_APP, "prepare": [bring]},
        "evaluator": evaluator,
    }


def with_template(fields: Mapping[str, Any], template: Mapping[str, Any]) -> dict[str, Any]:
    """What the directory does not say is the template's."""
    runtime = {**template.get("runtime", {}), **fields["runtime"]}
    if runtime["backend"] == "local":
        runtime = dict(fields["runtime"])
    timeouts = {**fields["timeouts"], **template.get("timeouts", {})}
    return {**template, **fields, "runtime": runtime, "timeouts": timeouts}


def main() -> int:
    parser = many.options(__doc__, "terminal_tasks", Path(__file__).with_name("task.yaml"))
    parser.add_argument("folder", type=Path, nargs="?", default=TASKS, help="of task directories (default: our own)")
    parser.add_argument("--base", metavar="IMAGE", help="what environments that have a BASE argument are built on")
    parser.add_argument("--local", action="store_true", help="no images: local sandboxes, with environment/app")
    asked = parser.parse_args()
    template = many.template(asked)
    tasks = many.chosen(directories(asked.folder), asked)
    fields = {
        name: with_template(in_local_sandbox(task) if asked.local else in_container(task, asked.base), template)
        for name, task in tasks.items()
    }
    return many.run(asked, fields)


if __name__ == "__main__":
    many.told(main)
