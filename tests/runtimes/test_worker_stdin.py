"""Field case H01: a harness that waits for the end of its standard input gets it, whatever the worker's own is."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from .apptainer_here import needs_apptainer
from .as_worker import INSTRUCTION, presets
from .docker_rig import daemon_is_here
from .local_here import needs_bubblewrap

TREE = Path(__file__).parents[2]
NEEDS = {"isolated": needs_bubblewrap, "docker": daemon_is_here, "apptainer": needs_apptainer}
BACKENDS = [
    "local",
    "isolated",
    pytest.param("docker", marks=pytest.mark.docker),
    pytest.param("apptainer", marks=pytest.mark.apptainer),
]
SCRIPT = {0, 1, 2, 10, 255}
"""Descriptors of a shell that runs a script: three, and the script, as dash and bash number it."""


@contextmanager
def standard_input(kind: str) -> Iterator[int | None]:
    """A pipe or a terminal that nothing comes from and nobody closes; None: none at all."""
    if kind == "closed":
        yield None
        return
    ours, theirs = os.openpty() if kind == "a terminal" else os.pipe()[::-1]
    try:
        yield theirs
    finally:
        os.close(ours)
        os.close(theirs)


@pytest.mark.parametrize("kind", ["an open pipe", "a terminal", "closed"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_a_harness_reads_the_end_of_its_own_stdin_and_no_descriptor_of_the_worker(
    backend: str, kind: str, tmp_path: Path
) -> None:
    NEEDS.get(backend, lambda: None)()
    said = told_by_a_worker(backend, kind, tmp_path)
    whole = len(INSTRUCTION)
    assert {name: one["why"] for name, one in said.items() if not one["ok"]} == {}
    assert said["waits for the end"]["words"] == said["closes it unread"]["words"] == ["work"]
    assert said["is fed"]["words"] == [str(whole)]
    *descriptors, leads_to = said["has descriptors"]["words"]
    assert {int(fd) for fd in descriptors} <= SCRIPT
    assert not leads_to.startswith(("/dev/pts", "/dev/tty"))
    assert set(presets()) <= set(said)
    for name in presets():
        read, *descriptors = said[name]["words"]
        assert (int(read), said[name]["fed"]) in {(whole, whole), (0, 0)}, name
        assert {int(fd) for fd in descriptors} <= SCRIPT, name


def told_by_a_worker(backend: str, kind: str, folder: Path) -> dict[str, Any]:
    program = [sys.executable, "-m", "tests.runtimes.as_worker", backend, str(folder)]
    with standard_input(kind) as stdin:
        closing = ["sh", "-c", 'exec "$0" "$@" <&-'] if stdin is None else []
        done = subprocess.run(
            [*closing, *program], stdin=stdin, cwd=TREE, capture_output=True, text=True, timeout=280, check=False
        )
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return found
