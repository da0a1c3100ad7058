"""Tells an agent's work from what it put around the tests.

An honest agent writes a conftest.py, a pytest.ini or tests of its own to find its way; a dishonest one does it to
change the verdict. Neither may take part in the grading, so, unless the task says `keep_agent_scaffolding`:

- what steers a test runner (conftest.py, pytest.ini and the like, a module sitecustomize, a module pytest in the root)
  is as it was before the agent, also where .gitignore hides it or it lies above the folder, and so is a setup.cfg,
  tox.ini, pyproject.toml (on the way to a named test, where tests are named) or (a plug-in's) entry_points.txt whose
  pytest section the agent changed;
- the test files that the expectation names, and what else was in their test folder, are as they were;
- an `__init__.py` that the agent put beside a named test is left out: it changes how tests are imported; so is what
  would be imported in the place of one of these test files (a package or machine code of its name);
- what was there and the task excludes from the agent's work is as it was;
- tests of the agent's own stay in the tree, but pytest is told to pass them by.

A named test file that the agent deleted makes its tests fail. One that was not there before is the agent's work.
"""

from __future__ import annotations

import configparser
import fnmatch
import re
import tomllib
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from pathlib import PurePosixPath
from typing import Any

from polarq_worker.evaluators.expectations import path_of
from polarq_worker.evaluators.snapshot import Change
from polarq_worker.evaluators.snapshot_scripts import (
    ENTRY_POINTS,
    RUNNER_FILES,
    RUNNER_MODULES,
    SHARED_CONFIGS,
    START_UP_MODULES,
)

ALWAYS_EXCLUDED = ("__pycache__", "*.pyc", "*.pyo", ".pytest_cache", ".mypy_cache", ".ruff_cache")
_RUNNERS_MODULE = re.compile(
    rf"((.*/)?({'|'.join(START_UP_MODULES)})|{'|'.join(RUNNER_MODULES)})(/__init__)?\.(pyc?|([^/]*\.)?so)", re.DOTALL
)
_PACKAGE = re.compile(r"(.+)/__init__\.(?:pyc?|(?:[^/]*\.)?so)", re.DOTALL)
_MACHINE_CODE = re.compile(r"((?:.*/)?[^/.]+)\.(?:[^/]*\.)?so", re.DOTALL)
"""Python looks for these before it looks for the source file of the same name."""
TEST_FOLDERS = frozenset({"test", "tests", "testing", "t", "spec", "specs"})


@dataclass(slots=True)
class Sorted:
    """An agent's changes by what becomes of them."""

    work: list[Change] = field(default_factory=list)
    """What is graded."""
    left_out: list[Change] = field(default_factory=list)
    """What is put back as it was (or never taken to the fresh sandbox)."""
    removed_tests: list[str] = field(default_factory=list)
    own_tests: list[str] = field(default_factory=list)
    """Test files of the agent's among its work, which pytest passes by."""


def excluded(path: str, patterns: Collection[str]) -> bool:
    """Whether a pattern fits the path, a leading part of it, or one of its components."""
    pure = PurePosixPath(path)
    candidates = [*pure.parts, path, *(str(parent) for parent in pure.parents if str(parent) != ".")]
    return any(fnmatch.fnmatchcase(candidate, pattern.rstrip("/")) for pattern in patterns for candidate in candidates)


def sort_changes(
    changes: Sequence[Change], expected: Collection[str], patterns: Collection[str], *, keep_scaffolding: bool
) -> Sorted:
    """Sorts all but the files whose contents decide (`steers_by_content`)."""
    named = {path for path in map(path_of, expected) if path is not None}
    folders = {folder for path in named if (folder := _test_folder(path))}
    beside = {str(PurePosixPath(path).parent) for path in named}
    result = Sorted()
    for change in changes:
        if excluded(change.path, [*ALWAYS_EXCLUDED, *patterns]):
            # No part of the work; but what steers the tests is put back, too, where they run in the agent's sandbox.
            steers = _is_scaffolding(change, named, folders, beside) or steers_by_content(change.path, expected)
            was_there = change.kind != "A" and excluded(change.path, patterns)
            if not keep_scaffolding and (steers or was_there):
                result.left_out.append(change)
            continue
        if keep_scaffolding:
            result.work.append(change)
        elif change.kind == "D" and change.path in named:
            result.removed_tests.append(change.path)
        elif _is_scaffolding(change, named, folders, beside):
            result.left_out.append(change)
        else:
            result.work.append(change)
            if change.kind == "A" and looks_like_tests(change.path) and change.path not in named:
                result.own_tests.append(change.path)
    return result


def shadowed(changes: Sequence[Change], expected: Collection[str]) -> dict[str, str]:
    """Added path -> the Python file that must stay as it was, if it was there, in whose place it would be imported."""
    named = {path for path in map(path_of, expected) if path is not None}
    folders = {folder for path in named if (folder := _test_folder(path))}
    found = {}
    for change in changes:
        package = _PACKAGE.fullmatch(change.path) or _MACHINE_CODE.fullmatch(change.path)
        if change.kind == "A" and package:
            target = f"{package.group(1)}.py"
            if _is_scaffolding(Change(target, "M", "", "", ""), named, folders, set()):
                found[change.path] = target
    return found


def steers_by_content(path: str, expected: Collection[str]) -> bool:
    """Whether it takes a look inside (`changes_pytest_section`) to tell if the file steers pytest."""
    folder, _, name = path.rpartition("/")
    if name in SHARED_CONFIGS:
        named = [test for test in map(path_of, expected) if test is not None]
        return not named or any(test.startswith(f"{folder}/" if folder else "") for test in named)
    return path.count("/") == 1 and any(fnmatch.fnmatchcase(path, pattern) for pattern in ENTRY_POINTS)


def changes_pytest_section(name: str, before: str, after: str) -> bool:
    """Whether a file that is not only pytest's steers pytest otherwise than before; one that cannot be read does."""
    try:
        return bool(_pytest_section(name, before) != _pytest_section(name, after))
    except (ValueError, configparser.Error):
        return True


def looks_like_tests(path: str) -> bool:
    name = PurePosixPath(path).name
    return name.endswith(".py") and (name.startswith("test_") or name.endswith("_test.py") or name == "tests.py")


def _is_scaffolding(change: Change, named: set[str], folders: set[str], beside: set[str]) -> bool:
    path = PurePosixPath(change.path)
    if path.name in RUNNER_FILES or _RUNNERS_MODULE.fullmatch(change.path):
        return True
    if change.kind == "A":
        return path.name == "__init__.py" and str(path.parent) in beside
    if change.path in named or any(str(parent) in folders for parent in path.parents):
        return True
    # Without a path in the expectation, nothing tells its tests from others: all keep their first version.
    return not named and looks_like_tests(change.path)


def _test_folder(path: str) -> str | None:
    """The outermost folder on the way to a test file that is called like a folder of tests."""
    parts = PurePosixPath(path).parts[:-1]
    for index, part in enumerate(parts):
        if part in TEST_FOLDERS:
            return "/".join(parts[: index + 1])
    return None


def _pytest_section(name: str, text: str) -> Any:
    if PurePosixPath(name).name == "pyproject.toml":
        return tomllib.loads(text).get("tool", {}).get("pytest")
    parser = configparser.RawConfigParser(strict=False)
    parser.read_string(text)
    of_pytest = ("tool:pytest", "pytest", "pytest11")
    return [(section, parser.items(section)) for section in of_pytest if parser.has_section(section)]
