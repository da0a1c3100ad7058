"""Two instances of our own, with repositories that are made here: rows.jsonl, and a repository below each one's id.

    python -m examples.swebench_verified.local FOLDER
    python -m examples.swebench_verified.local FOLDER --build polarq-base:local --registry polarq.local

The first row is one of SWE-bench before swebench 5, with the test command that its repository needs; the second has a
script and a parser of its own, as rows have now. `--build` also makes an image of each, on an image with git and
Python, named by the data set's rule. The solution is there as a later commit, as in a clone of a real project.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .instances import TESTBED, image_of
from .run import SEPARATOR

SOURCES = Path(__file__).with_name("our_own")
WHEN = "2026-01-01T00:00:00Z"
_WHO = {
    f"GIT_{role}_{key}": value
    for role in ("AUTHOR", "COMMITTER")
    for key, value in {"NAME": "polarq", "EMAIL": "polarq@localhost", "DATE": WHEN}.items()
}


@dataclass(frozen=True)
class Instance:
    """Its tests, by the names of unittest without their class."""

    name: str
    tests: str
    """The class with the tests, as unittest finds it."""
    fail_to_pass: tuple[str, ...]
    pass_to_pass: tuple[str, ...]
    own_script: bool

    @property
    def instance_id(self) -> str:
        return f"ours__{self.name}"

    def text(self, file: str) -> str:
        return (SOURCES / self.instance_id / file).read_text("utf-8")


INSTANCES = (
    Instance(
        "roman-4",
        "tests.test_roman.ToRoman",
        ("test_a_letter_before_a_larger_one_is_taken_from_it",),
        ("test_letters_add_up", "test_what_has_no_numeral_is_refused"),
        own_script=False,
    ),
    Instance(
        "slug-2",
        "tests.test_slug.Slug",
        ("test_signs_in_a_row_are_one_hyphen", "test_none_is_at_an_end"),
        ("test_words_are_joined", "test_digits_stay"),
        own_script=True,
    ),
)


def make_repository(instance: Instance, folder: Path) -> str:
    """The base commit, which is checked out; the solution comes after it on the main branch."""
    folder.mkdir(parents=True)
    _git(folder, "init", "--quiet", "--initial-branch", "main")
    for patch in ("base.patch", "gold.patch"):
        _git(folder, "apply", "--index", "-", text=instance.text(patch))
        _git(folder, "commit", "--quiet", "--message", patch.removesuffix(".patch"))
    _git(folder, "checkout", "--quiet", "--detach", "HEAD~1")
    return _git(folder, "rev-parse", "HEAD").strip()


def row_of(instance: Instance, base_commit: str) -> dict[str, Any]:
    """With the columns of SWE-bench Verified."""
    module = instance.tests.rpartition(".")[0]
    command = f"python3 -m unittest -v {module}"
    fail_to_pass, pass_to_pass = (
        [f"{test} ({instance.tests}.{test})" for test in tests]
        for tests in (instance.fail_to_pass, instance.pass_to_pass)
    )
    row = {
        "repo": f"ours/{instance.name.rpartition('-')[0]}",
        "instance_id": instance.instance_id,
        "base_commit": base_commit,
        "patch": instance.text("gold.patch"),
        "test_patch": instance.text("test.patch"),
        "problem_statement": instance.text("problem_statement.md"),
        "hints_text": "",
        "created_at": WHEN,
        "version": "1.0",
        "FAIL_TO_PASS": json.dumps(fail_to_pass),
        "PASS_TO_PASS": json.dumps(pass_to_pass),
        "environment_setup_commit": base_commit,
        "difficulty": "<15 min fix",
    }
    if not instance.own_script:
        return {**row, "test_command": command, "log_parser": "parse_log_django"}
    script = _SCRIPT.format(
        base=base_commit, file=f"{module.replace('.', '/')}.py", patch=row["test_patch"].rstrip(), command=command
    )
    own = {"eval_script": script, "log_parser": "parse_log_django", "eval_type": "pass_and_fail"}
    lists = {"FAIL_TO_PASS": fail_to_pass, "PASS_TO_PASS": pass_to_pass}
    return {**row, **lists, **own, "image": image_of(row, "docker.io/swebench", SEPARATOR)}


_SCRIPT = """#!/bin/bash
set -uxo pipefail
git config --global --add safe.directory "$PWD"
git checkout {base} {file}
git apply -v - <<'EOF_114329324912'
{patch}
EOF_114329324912
: '>>>>> Start Test Output'
{command}
: '>>>>> End Test Output'
git checkout {base} {file}
"""


def make(folder: Path) -> list[dict[str, Any]]:
    """Makes the repositories and rows.jsonl in a new folder; the rows."""
    rows = [row_of(instance, make_repository(instance, folder / instance.instance_id)) for instance in INSTANCES]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), "utf-8")
    return rows


def build(row: Mapping[str, Any], folder: Path, base_image: str, registry: str, separator: str = SEPARATOR) -> str:
    """An image with the instance's repository, by the data set's name for it."""
    image = image_of(row, registry, separator)
    recipe = f"FROM {base_image}\nCOPY . {TESTBED}\nWORKDIR {TESTBED}\n"
    command = ["docker", "build", "--quiet", "--tag", image, "--file", "-", str(folder / row["instance_id"])]
    subprocess.run(command, input=recipe, text=True, check=True)
    return image


def _git(folder: Path, *words: str, text: str | None = None) -> str:
    env = {**os.environ, **_WHO, "GIT_CONFIG_GLOBAL": os.devnull, "GIT_CONFIG_SYSTEM": os.devnull}
    ran = subprocess.run(
        ["git", "-C", str(folder), *words], input=text, text=True, check=True, env=env, stdout=subprocess.PIPE
    )
    return ran.stdout


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="a new one")
    parser.add_argument("--build", metavar="IMAGE", help="also images, on this one")
    parser.add_argument("--registry", default="polarq.local", help="of those images (default %(default)s)")
    asked = parser.parse_args()
    if asked.folder.exists():
        raise SystemExit(f"{asked.folder} is there already; name a new folder")
    rows = make(asked.folder)
    print(asked.folder / "rows.jsonl")
    for row in rows if asked.build else ():
        print(build(row, asked.folder, asked.build, asked.registry))


if __name__ == "__main__":
    main()
