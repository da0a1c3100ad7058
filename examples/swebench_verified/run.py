"""SWE-bench Verified as tasks: an agent's work on each instance, graded by the package swebench.

python -m examples.swebench_verified.run verified.jsonl --limit 10
"""

from __future__ import annotations

from pathlib import Path

from examples import many

from .instances import fields_of, image_of, read_rows
from .known import of_swebench

REGISTRY = "docker.io/swebench"
SEPARATOR = "_1776_"


def main() -> int:
    parser = many.options(__doc__, "swebench_verified", Path(__file__).with_name("task.yaml"))
    parser.add_argument("rows", type=Path, help="the data set as JSON lines")
    parser.add_argument("--registry", help=f"where the images are; else the row's own, else {REGISTRY}")
    parser.add_argument("--local", type=Path, metavar="FOLDER", help="no images: repositories of this folder")
    asked = parser.parse_args()
    template = many.template(asked)
    rows = many.chosen(read_rows(asked.rows), asked)
    fields = {}
    for name, row in rows.items():
        own = "" if asked.registry else row.get("image")
        image = own or image_of(row, asked.registry or REGISTRY, SEPARATOR)
        fields[name] = fields_of(row, template, image, of_swebench, asked.local)
    return many.run(asked, fields)


if __name__ == "__main__":
    many.told(main)
