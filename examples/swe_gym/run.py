"""SWE-Gym as tasks to train on: a group of attempts at each instance, graded by the package swebench.

    python -m examples.swe_gym.run swe_gym.jsonl --limit 10 -n 8

The rows are those of SWE-bench before swebench 5: no script, no parser, and versions that the package never knew. Their
images are installed to follow their sources, and all but one repository's tests are files of pytest.
"""

from __future__ import annotations

import re
import shlex
from pathlib import Path

from examples import many
from examples.swebench_verified.instances import Row, fields_of, image_of, read_rows
from examples.swebench_verified.known import ACTIVATE, Known, touched

REGISTRY = "docker.io/xingyaoww"
SEPARATOR = "_s_"
# As in the data set's own specifications (SWE-Gym/SWE-Bench-Package, MIT).
IN_ONE_PROCESS = frozenset(
    {"bokeh/bokeh", "conan-io/conan", "dask/dask", "getmoto/moto", "modin-project/modin", "python/mypy"}
)
"""Whose pytest is set up to spread tests over processes."""
SPOKEN = "pytest -rA -vv -o console_output_style=classic --no-header"
"""For pydantic, where a plug-in takes the place of pytest's summary."""
_CASE = re.compile(r"\[case ([^\]]+)\]")


def known(row: Row) -> Known:
    """The row's own `test_cmd` where it has one (as SWE-rebench), else what its repository takes."""
    repo, patch = row["repo"], row["test_patch"]
    command = "pytest -rA"
    if repo in IN_ONE_PROCESS:
        command = "pytest -n0 -rA --color=no"
    elif repo == "pydantic/pydantic":
        command = SPOKEN
    command = row.get("test_cmd") or command
    wanted = shlex.join(touched(patch))
    if repo == "python/mypy" and (cases := _CASE.findall(patch)):  # cases in data files, chosen by name
        wanted = f"-k {shlex.quote(' or '.join(cases))}"
    before = [ACTIVATE, *(['export PYTHONPATH="${PYTHONPATH:-}:$PWD"'] if repo == "conan-io/conan" else [])]
    parser = "parse_log_pytest_v2" if repo == "pydantic/pydantic" else "parse_log_pytest"
    return Known("\n".join([*before, f"{command} {wanted}"]), parser)


def main() -> int:
    parser = many.options(__doc__, "swe_gym", Path(__file__).with_name("task.yaml"))
    parser.add_argument("rows", type=Path, help="the data set as JSON lines")
    parser.add_argument("--registry", default=REGISTRY, help="where the images are (default %(default)s)")
    parser.add_argument("--local", type=Path, metavar="FOLDER", help="no images: repositories of this folder")
    asked = parser.parse_args()
    template = many.template(asked)
    fields = {
        name: fields_of(row, template, image_of(row, asked.registry, SEPARATOR), known, asked.local)
        for name, row in many.chosen(read_rows(asked.rows), asked).items()
    }
    return many.run(asked, fields)


if __name__ == "__main__":
    many.told(main)
