"""Every program that a preset installs, for real, through the conformance suite (`make test-harnesses`)."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from packaging.specifiers import SpecifierSet

from polarq import bubblewrap
from polarq.registry import plugin
from polarq.testing.conformance.bench import Bench, default_cache
from polarq.testing.conformance.checks import CHECKS, Suite
from polarq.testing.conformance.found import Finding
from polarq.testing.conformance.scenario import CheckName, load, shipped
from polarq.testing.conformance.table import told, write
from polarq_worker.harnesses.programs.program import Program, PythonProgram

from ..needs import not_here

NEWER = os.environ.get("POLARQ_NEWER_IMAGE", "polarq-newer:local")
IMAGES = {"3.11": os.environ.get("POLARQ_BASE_IMAGE", "polarq-base:local"), "3.13": NEWER}
"""Images that `.ci/docker-up newer` makes, by the Python that is in them."""

Case = tuple[str, str, str]


def image_for(program: Program) -> str | None:
    """The first that has what the program is installed with."""
    if not isinstance(program, PythonProgram):
        return next(iter(IMAGES.values()))
    fitting = SpecifierSet(f">={program.python}" + (f",<{program.python_below}" if program.python_below else ""))
    return next((image for python, image in IMAGES.items() if fitting.contains(python)), None)


def cases() -> Iterator[Any]:
    for name in shipped():
        scenario = load(name, plugin("harnesses", name).conformance)
        if scenario.not_run:
            continue
        preset = plugin("harnesses", name)
        image = image_for(preset.program)
        for number, dialect in enumerate(preset.dialects):
            for backend in ("local",) if number or image is None else ("local", "docker"):
                marks = [pytest.mark.harness]
                if backend == "docker":
                    marks += [pytest.mark.docker, *([pytest.mark.newer_image] if image == NEWER else [])]
                case = (name, dialect, backend)
                for check in CHECKS:
                    yield pytest.param(case, check, id="-".join([*case, check]), marks=marks)


@pytest.fixture(scope="module")
def suite(request: pytest.FixtureRequest) -> Iterator[tuple[Case, Suite]]:
    name, dialect, backend = request.param
    runtime: dict[str, Any] = {"backend": backend}
    if backend == "docker":
        runtime["image"] = image = image_for(plugin("harnesses", name).program)
        try:
            subprocess.run(["docker", "image", "inspect", str(image)], check=True, capture_output=True, timeout=60)
        except (OSError, subprocess.SubprocessError):
            not_here(f"no Docker daemon with an image {image} (.ci/docker-up newer makes both)")
    elif why := bubblewrap.why_not():
        not_here(why)
    cache = Path(os.environ.get("HARNESS_CACHE") or default_cache())
    with Bench(load(name, plugin("harnesses", name).conformance), dialect, runtime, cache=cache) as bench:
        yield (name, dialect, backend), Suite(bench)


@pytest.mark.timeout(1800)
@pytest.mark.parametrize(("suite", "check"), list(cases()), indirect=["suite"], scope="module")
def test_the_program(suite: tuple[Case, Suite], check: CheckName) -> None:
    case, checks = suite
    finding = checks.one(check)
    _keep(case, finding)
    assert finding.ok, finding.detail


def _keep(case: Case, finding: Finding) -> None:
    if folder := os.environ.get("HARNESS_RESULTS"):
        harness, dialect, backend = case
        write(Path(folder), [told(finding, harness=harness, dialect=dialect, backend=backend)])
